"""Qwen3.5, text only: gated delta nets and some layers of gated attention, with MLPs or experts, and a draft head."""

import functools
from dataclasses import dataclass, replace
from typing import Any

from flax import nnx

from mamba_align_jax.layers.mlp import GatedMLP
from mamba_align_jax.layers.moe import SharedExpertMoE
from mamba_align_jax.layers.norm import RMSNorm
from mamba_align_jax.models.causal_lm import CausalLM
from mamba_align_jax.models.config import layer_kinds, require, rotation
from mamba_align_jax.models.hybrid import DeltaNetConfig, PreNormLayer, attention, gated_delta_net
from mamba_align_jax.models.mtp import MTPHead
from mamba_align_jax.models.sources import Source, experts, joined, named, tensor

LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class Config(DeltaNetConfig):
    """The fields of config.json that shape the model, under their published names."""

    partial_rotary_factor: float = 0.25
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    norm_topk_prob: bool = True
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    mtp_num_hidden_layers: int = 0
    model_type: str = "qwen3_5_text"

    @classmethod
    def derive(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Computes layer kinds, the rotation and which layers have experts: see `ModelConfig.derive`."""
        kinds = layer_kinds(config, LINEAR, FULL)
        require(config, hidden_act=("silu",), attention_bias=(False,), attn_output_gate=(True,))
        require(config, mtp_num_hidden_layers=(0, 1), mtp_use_dedicated_embeddings=(False,))
        # The gate of the delta nets' output norm. "swish" is another name of "silu".
        require(config, output_gate_type=("silu", "swish"))
        experts = config.get("num_experts") or 0
        sizes = ("num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
        missing = next((name for name in sizes if experts and not config.get(name)), None)
        if missing:
            raise ValueError(f"config.json must have {missing!r}")
        return {
            "layer_types": kinds,
            "intermediate_size": config.get("intermediate_size") or config.get("moe_intermediate_size"),
            "mlp_only_layers": tuple(config.get("mlp_only_layers") or ()),
            "model_type": "qwen3_5_moe_text" if experts else cls.model_type,
            **rotation(config, rope_theta=cls.rope_theta, partial_rotary_factor=cls.partial_rotary_factor),
        }

    def is_sparse(self, layer: int) -> bool:
        """Returns whether layer `layer` has a mixture of experts instead of an MLP."""
        return (
            self.num_experts > 0 and layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as config.json holds them."""
        fields = super().to_dict()
        rope = {name: fields.pop(name) for name in ("rope_theta", "partial_rotary_factor")}
        rope |= fields.pop("rope_scaling") or {"rope_type": "default"}
        return {"architectures": ["Qwen3_5ForCausalLM"], **fields, "hidden_act": "silu", "rope_parameters": rope}


class Layer(PreNormLayer):
    """Computes x = x + mixer(norm(x)), then x = x + feed_forward(norm(x))."""

    takes_chains = True

    def __init__(self, config: Config, kind: str, is_sparse: bool, rngs: nnx.Rngs) -> None:
        """Makes a layer with random weights. `kind` is its entry in `layer_types`. With `is_sparse` it has experts."""
        c, norm = config, functools.partial(RMSNorm, epsilon=config.rms_norm_eps, offset=1.0)
        self.input_layernorm = norm(c.hidden_size)
        self.post_attention_layernorm = norm(c.hidden_size)
        if is_sparse:
            self.mlp = SharedExpertMoE(
                c.hidden_size,
                experts=c.num_experts,
                top_k=c.num_experts_per_tok,
                size=c.moe_intermediate_size,
                shared_size=c.shared_expert_intermediate_size,
                dtype=c.dtype,
                rngs=rngs,
                renormalise=c.norm_topk_prob,
            )
        else:
            self.mlp = GatedMLP(c.hidden_size, c.intermediate_size, c.dtype, rngs)
        if kind == LINEAR:
            self.linear_attn = gated_delta_net(c, rngs)
        else:
            rotary_dim = int(c.head_dim * c.partial_rotary_factor)
            self.self_attn = attention(c, rngs, rotary_dim=rotary_dim, gated=True, norm=norm)


class Model(CausalLM):
    """The causal language model of this family: see `CausalLM`."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        layers = [Layer(config, kind, config.is_sparse(n), rngs) for n, kind in enumerate(config.layer_types)]
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=1.0)
        super().__init__(config, layers, norm, rngs, mtp=draft_head(config, rngs))


def draft_head(config: Config, rngs: nnx.Rngs) -> MTPHead | None:
    """Makes the draft head with random weights; None if the configuration has no head."""
    if not config.mtp_num_hidden_layers:
        return None
    layer = Layer(config, FULL, config.is_sparse(config.num_hidden_layers), rngs)
    return MTPHead(layer, config, lambda: RMSNorm(config.hidden_size, config.rms_norm_eps, offset=1.0), rngs)


def sources(place: str, config: Config) -> list[Source]:
    """Lists the ways to make the parameter at `place` from tensors: see `read_weights`."""
    name = place if place.startswith(("lm_head", "mtp")) else f"model.{place}"
    if ".experts." in place:
        size = config.shared_expert_intermediate_size
        return experts(name, config.num_experts, shared="shared_expert", shared_size=size)
    if place.endswith(".mlp.gate.weight"):  # The gate of the shared expert is its last output.
        both = joined([tensor(name), tensor(name.replace(".gate.", ".shared_expert_gate."))], axis=0)
        return [replace(both, split=lambda array, _: [array[:-1], array[-1:]])]
    return [named(name)]
