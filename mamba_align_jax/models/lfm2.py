"""LFM2: gated short convolutions and some layers of attention, with MLPs or experts.

Source: Liquid AI, "LFM2 Technical Report" (2025).
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mamba_align_jax.layers.exchange import Outputs
from mamba_align_jax.layers.mlp import GatedMLP
from mamba_align_jax.layers.moe import Experts, MixtureOfExperts, SigmoidGate
from mamba_align_jax.layers.norm import RMSNorm
from mamba_align_jax.layers.short_conv import ShortConv
from mamba_align_jax.models.config import agree, layer_kinds, require, rotation
from mamba_align_jax.models.hybrid import AttentionConfig, HybridModel, PreNormLayer, attention
from mamba_align_jax.models.sources import Source, experts, in_model, named, parts, taps, tensor
from pallas_kernels import Run

CONV, FULL = "conv", "full_attention"


@dataclass(frozen=True, kw_only=True)
class Config(AttentionConfig):
    """The fields of config.json that shape the model, under their published names.

    `intermediate_size` is the size that MLPs have, after the adjustment that published configurations ask for.
    """

    layer_types: tuple[str, ...]
    norm_eps: float = 1e-5
    rope_theta: float = 1e6
    conv_bias: bool = False
    conv_L_cache: int = 3
    block_auto_adjust_ff_dim: bool = False
    num_dense_layers: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    use_expert_bias: bool = True
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    max_position_embeddings: int = 128_000
    tie_word_embeddings: bool = True
    model_type: str = "lfm2"

    @classmethod
    def derive(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Computes layer kinds, the size of MLPs and the rotation: see `ModelConfig.derive`."""
        layers, hidden = config.get("num_hidden_layers", 1), config.get("hidden_size", 1)
        require(config, block_use_swiglu=(True,), hidden_act=("silu",), use_pos_enc=(True,))
        agree(config, block_norm_eps=config.get("norm_eps") or cls.norm_eps, conv_dim=hidden, conv_dim_out=hidden)
        attention = config.get("full_attn_idxs")
        kinds = config.get("layer_types") or [
            FULL if attention is None or n in attention else CONV for n in range(layers)
        ]
        sparse, tied = config.get("model_type") == "lfm2_moe", config.get("tie_embedding")
        size = config.get("block_ff_dim") or config.get("intermediate_size")
        if size and not sparse and config.get("block_auto_adjust_ff_dim", True):
            size = int(2 * size / 3)
            multiplier = config.get("block_ffn_dim_multiplier", 1.0)
            if multiplier is not None:
                multiple = config.get("block_multiple_of", 256)
                size = math.ceil(int(multiplier * size) / multiple) * multiple
        return super().derive(config) | {
            "layer_types": layer_kinds(config | {"layer_types": kinds}, CONV, FULL),
            "intermediate_size": size,
            "block_auto_adjust_ff_dim": False,
            "num_dense_layers": config.get("num_dense_layers", 2) if sparse else layers,
            "num_experts": config.get("num_experts", 32) if sparse else 0,
            "num_experts_per_tok": config.get("num_experts_per_tok", 4) if sparse else 0,
            "tie_word_embeddings": config.get("tie_word_embeddings") if tied is None else tied,
            "model_type": "lfm2_moe" if sparse else cls.model_type,
            **rotation(config, rope_theta=config.get("theta") or cls.rope_theta),
        }


class MoE(MixtureOfExperts):
    """Computes the sum of the chosen experts, weighted by their sigmoids."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        c = config
        self.renormalise, self.scale = c.norm_topk_prob, c.routed_scaling_factor
        self.gate = SigmoidGate(c.hidden_size, c.num_experts, c.num_experts_per_tok, rngs, renormalise=False)
        self.experts = Experts(c.num_experts, c.hidden_size, c.moe_intermediate_size, c.dtype, rngs)

    def __call__(self, x: jax.Array, valid: jax.Array | None = None, run: Run = Run()) -> Outputs:
        """Runs packed tokens: see `MixtureOfExperts`."""
        chosen, weights = self.gate(x, valid, run)
        if self.renormalise:
            # Other models add nothing that matters to the sum.
            weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + 1e-6)
        return self.experts.sums(x, chosen, weights * self.scale, run)


class Layer(PreNormLayer):
    """Computes x = x + mixer(norm(x)), then x = x + feed_forward(norm(x))."""

    norm_names = "operator_norm", "ffn_norm"
    mixer_names = "conv", "self_attn"
    feed_forward_name = "feed_forward"

    def __init__(self, config: Config, number: int, rngs: nnx.Rngs) -> None:
        c, norm = config, functools.partial(RMSNorm, epsilon=config.norm_eps)
        self.operator_norm = norm(c.hidden_size)
        self.ffn_norm = norm(c.hidden_size)
        if c.layer_types[number] == CONV:
            self.conv = ShortConv(c.hidden_size, c.conv_L_cache, c.dtype, rngs, bias=c.conv_bias)
        else:
            self.self_attn = attention(c, rngs, norm=norm)
        if number < c.num_dense_layers:
            self.feed_forward = GatedMLP(c.hidden_size, c.intermediate_size, c.dtype, rngs)
        else:
            self.feed_forward = MoE(c, rngs)


class Model(HybridModel):
    """The causal language model of this family: see `CausalLM`."""

    layer_class = Layer
    epsilon_field = "norm_eps"


_NAMES = {"q_norm": "q_layernorm", "k_norm": "k_layernorm", "o_proj": "out_proj", "down_proj": "w2"}


def sources(place: str, config: Config) -> list[Source]:
    """Lists the ways to make the parameter at `place` from tensors: see `read_weights`."""
    place = in_model(place, {"norm.weight": "embedding_norm.weight"})
    if ".experts." in place:
        return experts(place, config.num_experts, up=("w1", "w3"), down=("w2",))
    *path, module, leaf = place.split(".")
    if module == "gate_up_proj":
        return [parts([".".join([*path, part, leaf]) for part in ("w1", "w3")])]
    if place.endswith("conv.conv.weight"):
        return [taps(place)]
    if leaf == "e_score_correction_bias":
        if not config.use_expert_bias:
            return [Source((), lambda _: np.zeros(config.num_experts, np.float32))]
        return [tensor(".".join([*path, "expert_bias"]))]
    return [named(".".join([*path, _NAMES.get(module, module), leaf]))]
