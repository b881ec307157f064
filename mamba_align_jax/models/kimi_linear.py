"""Kimi Linear: Kimi delta attention, with multi-head latent attention every few layers, and a mixture of experts.

Source: Kimi Team, "Kimi Linear" (2025).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from flax import nnx

from mamba_align_jax.layers.kimi_delta_attention import KimiDeltaAttention
from mamba_align_jax.layers.mla import MultiHeadLatentAttention
from mamba_align_jax.layers.mlp import GatedMLP
from mamba_align_jax.layers.moe import Experts, SharedExpertsMoE, SigmoidGate
from mamba_align_jax.layers.norm import RMSNorm
from mamba_align_jax.models.config import ModelConfig, agree, layer_kinds, require, wrong
from mamba_align_jax.models.hybrid import HybridModel, PreNormLayer
from mamba_align_jax.models.sources import Source, experts, in_model, joined, mapped, named, parts, taps, tensor

LINEAR, FULL = "linear_attention", "full_attention"
DENSE, SPARSE = "dense", "sparse"
# Other names of fields in some configurations, and the names of `Config`.
_ALIASES = {
    "model_max_length": "max_position_embeddings",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """The fields of config.json that shape the model, under the names with which transformers saves them.

    With `rope_theta` None the positional dims of attention are not rotated. With `kda_lower_bound` None the decay has
    the softplus gate.
    """

    layer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]
    rms_norm_eps: float = 1e-5
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    linear_num_heads: int
    linear_head_dim: int
    q_lora_rank: int | None = None
    linear_conv_kernel_dim: int = 4
    kda_lower_bound: float | None = None
    rope_theta: float | None = None
    num_experts: int = 0
    num_experts_per_token: int = 0
    moe_intermediate_size: int = 0
    num_shared_experts: int = 1
    num_expert_group: int = 1
    topk_group: int = 1
    moe_renormalize: bool = True
    routed_scaling_factor: float = 2.446
    model_type: str = "kimi_linear"

    def __post_init__(self) -> None:
        """Checks every field and how they fit together. A ValueError names the field."""
        super().__post_init__()
        if self.kda_lower_bound is not None and self.kda_lower_bound >= 0:
            raise ValueError(f"config.json: the lower bound of log decays must be below 0, got {self.kda_lower_bound}")

    # Whether the projections of the decay and of the output gate have the head's size as an inner size.
    low_rank_gates: ClassVar[bool] = True
    # Whether attention's output has a gate.
    gated_attention: ClassVar[bool] = False

    @classmethod
    def derive(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Computes layer kinds and head sizes, for published files and those of transformers."""
        require(config, mla_use_nope=(True,), num_nextn_predict_layers=(0,))
        require(config, mla_use_output_gate=(False,), attn_res_block_size=(0,))
        layers, linear = config.get("num_hidden_layers", 0), config.get("linear_attn_config") or {}
        require(linear, use_full_rank_gate=(False,))
        bound = linear.get("gate_lower_bound")
        kinds = config.get("layer_types")
        if not kinds and "full_attn_layers" in linear:
            # These fields count layers from 1.
            by_kind = {LINEAR: linear.get("kda_layers", ()), FULL: linear["full_attn_layers"]}
            by_number = {number: kind for kind, numbers in by_kind.items() for number in numbers}
            kinds = [by_number.get(n + 1) for n in range(layers)]
        kinds = kinds or [FULL if n and n % 4 == 0 else LINEAR for n in range(layers)]
        return cls.shared(config | {"layer_types": kinds}, first_dense=1) | {
            "linear_num_heads": linear.get("num_heads", config.get("linear_num_heads")),
            "linear_head_dim": linear.get("head_dim", config.get("linear_head_dim")),
            "linear_conv_kernel_dim": linear.get("short_conv_kernel_size", config.get("linear_conv_kernel_dim")),
            "rope_theta": None,
            "kda_lower_bound": config.get("kda_lower_bound") if bound is None else bound,
        }

    @classmethod
    def shared(cls, config: dict[str, Any], first_dense: int) -> dict[str, Any]:
        """Computes the fields that Kimi Linear and Ling have in common.

        If config.json does not say which layers have experts, the first `first_dense` layers have none.

        Raises:
            ValueError: a field is missing or has a value that is not supported. The field is named.
        """
        require(config, hidden_act=("silu",), attention_bias=(False,), moe_layer_freq=(1,))
        require(config, moe_router_activation_func=("sigmoid",), scoring_func=("sigmoid",), score_function=("sigmoid",))
        # Every head has a key and a value of its own, made from the latents.
        agree(config, num_key_value_heads=config.get("num_attention_heads"))
        agree(config, qk_head_dim=config.get("qk_nope_head_dim", 0) + config.get("qk_rope_head_dim", 0))
        fields = {ours: config[theirs] for theirs, ours in _ALIASES.items() if config.get(theirs) is not None}
        kinds = layer_kinds(config, LINEAR, FULL)
        first_dense = config.get("first_k_dense_replace", first_dense)
        feeds = config.get("mlp_layer_types") or [DENSE if n < first_dense else SPARSE for n in range(len(kinds))]
        number = config.get("num_experts") or fields.get("num_experts") or 0
        feeds = feeds if number else [DENSE] * len(kinds)
        if len(feeds) != len(kinds) or not set(feeds) <= {DENSE, SPARSE}:
            wanted = f"name {len(kinds)} layers, each {DENSE!r} or {SPARSE!r}"
            raise wrong("mlp_layer_types", wanted, feeds, must="must")
        groups = config.get("num_expert_group") or fields.get("num_expert_group") or cls.num_expert_group
        if number and groups > 1:
            require(config, use_grouped_topk=(True,))
        for name in ("num_experts_per_token", "moe_intermediate_size"):
            if number and not (config.get(name) or fields.get(name)):
                raise ValueError(f"config.json must have {name!r}")
        return {**fields, "layer_types": kinds, "mlp_layer_types": tuple(feeds), "model_type": cls.model_type}


class Layer(PreNormLayer):
    """Computes x = x + mixer(norm(x)), then x = x + feed_forward(norm(x))."""

    takes_chains = True

    def __init__(self, config: Config, number: int, rngs: nnx.Rngs) -> None:
        c = config
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        if c.layer_types[number] == LINEAR:
            rank = c.linear_head_dim if c.low_rank_gates else None
            self.self_attn = KimiDeltaAttention(
                c.hidden_size,
                heads=c.linear_num_heads,
                head_dim=c.linear_head_dim,
                width=c.linear_conv_kernel_dim,
                epsilon=c.rms_norm_eps,
                dtype=c.dtype,
                rngs=rngs,
                f_rank=rank,
                g_rank=rank,
                lower_bound=c.kda_lower_bound,
            )
        else:
            self.self_attn = MultiHeadLatentAttention(
                c.hidden_size,
                heads=c.num_attention_heads,
                nope_dim=c.qk_nope_head_dim,
                rope_dim=c.qk_rope_head_dim,
                value_dim=c.v_head_dim,
                kv_lora_rank=c.kv_lora_rank,
                dtype=c.dtype,
                rngs=rngs,
                q_lora_rank=c.q_lora_rank,
                rope_theta=c.rope_theta,
                gated=c.gated_attention,
            )
        if c.mlp_layer_types[number] == DENSE:
            self.mlp = GatedMLP(c.hidden_size, c.intermediate_size, c.dtype, rngs)
            return
        gate = SigmoidGate(
            c.hidden_size,
            c.num_experts,
            c.num_experts_per_token,
            rngs,
            groups=c.num_expert_group,
            top_groups=c.topk_group,
            renormalise=c.moe_renormalize,
            scale=c.routed_scaling_factor,
            shared=c.num_shared_experts,
        )
        number = c.num_experts + c.num_shared_experts
        self.mlp = SharedExpertsMoE(gate, Experts(number, c.hidden_size, c.moe_intermediate_size, c.dtype, rngs))


class Model(HybridModel):
    """The causal language model of this family: see `CausalLM`."""

    layer_class = Layer


_EXPERT = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
# Published files have these names instead of those of transformers' modules.
_RENAMES = (
    lambda name: name.replace(".mlp.", ".block_sparse_moe."),
    lambda name: re.sub(r"(?<=experts\.)(\d+)\.(\w+)", lambda found: f"{found[1]}.{_EXPERT[found[2]]}", name),
)


def transformers_sources(place: str, config: Config) -> list[Source]:
    """Lists the ways to make the parameter at `place` from tensors with the names of transformers' modules."""
    place = in_model(place)
    mixer = place.rpartition(".self_attn.")[0] + ".self_attn"
    if ".experts." in place:
        size = config.moe_intermediate_size * config.num_shared_experts
        return experts(place, config.num_experts, shared="shared_experts", shared_size=size)
    if place.endswith(".in_proj_qkvbfg.weight"):
        rank = "_a" if config.low_rank_gates else ""
        names = ("q", "k", "v", "b", f"f{rank}", f"g{rank}")
        own_sizes = lambda sizes: (*(sizes[0] // 3,) * 3, *sizes[1:])  # queries, keys and values are one part
        return [parts([f"{mixer}.{name}_proj.weight" for name in names], own_sizes)]
    if place.endswith(".conv1d.weight"):
        return [joined([taps(f"{mixer}.{part}_conv1d.weight") for part in "qkv"])]
    if place.endswith(".A_log"):  # Its shape is [heads] or [1, 1, heads, 1].
        return [mapped(tensor(place), lambda array: array.reshape(-1))]
    return [named(place)]


def renamed(ways: Sequence[Source], renames: Sequence[Callable[[str], str]]) -> list[Source]:
    """Adds to `ways` the same ways with renamed tensors, for every subset of `renames`.

    Those with the most renames come first, because published files have all of them.
    """
    ways = list(ways)
    for rename in renames:
        changed = [(way, tuple(map(rename, way.names))) for way in ways]
        ways = [Source(names, way.make, way.split) for way, names in changed if names != way.names] + ways
    return ways


def sources(place: str, config: Config) -> list[Source]:
    """Lists the ways to make the parameter at `place` from tensors: see `read_weights`."""
    return renamed(transformers_sources(place, config), _RENAMES)
