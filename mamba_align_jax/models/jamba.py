"""Jamba: mostly Mamba-1 layers with normed projections, some attention without positions, and experts in some layers.

Source: Lieber et al., "Jamba: A Hybrid Transformer-Mamba Language Model" (2024).
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from flax import nnx

from mamba_align_jax.layers.attention import Attention
from mamba_align_jax.layers.mamba1 import Mamba1Mixer
from mamba_align_jax.layers.mlp import GatedMLP
from mamba_align_jax.layers.moe import SoftmaxMoE
from mamba_align_jax.layers.norm import RMSNorm
from mamba_align_jax.models.config import layer_kinds, require
from mamba_align_jax.models.hybrid import HeadsConfig, HybridModel, PreNormLayer
from mamba_align_jax.models.sources import Source, experts, in_model, named

MAMBA, ATTENTION = "mamba", "attention"
_KINDS = {"linear_attention": MAMBA, "full_attention": ATTENTION}


@dataclass(frozen=True, kw_only=True)
class Config(HeadsConfig):
    """The fields of config.json that shape the model, under their published names."""

    layers_block_type: tuple[str, ...]
    expert_layer_period: int = 2
    expert_layer_offset: int = 1
    num_experts: int = 16
    num_experts_per_tok: int = 2
    mamba_d_state: int = 16
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_dt_rank: int
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    model_type: str = "jamba"

    other_names: ClassVar[Mapping[str, str]] = MappingProxyType({"num_local_experts": "num_experts"})

    @classmethod
    def derive(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Computes layer kinds, and sizes that follow from others: see `ModelConfig.derive`."""
        require(config, hidden_act=("silu",), mamba_inner_layernorms=(True,))
        layers = config.get("num_hidden_layers", 0)
        period, offset = config.get("attn_layer_period", 8), config.get("attn_layer_offset", 4)
        given = config.get("layers_block_type") or config.get("layer_types")
        given = given or [MAMBA if n % period != offset else ATTENTION for n in range(layers)]
        kinds = {"layer_types": [_KINDS.get(kind, kind) for kind in given]}
        hidden, rank = config.get("hidden_size", 0), config.get("mamba_dt_rank", "auto")
        return super().derive(config) | {
            "layers_block_type": layer_kinds(config | kinds, MAMBA, ATTENTION),
            "mamba_dt_rank": math.ceil(hidden / 16) if rank == "auto" else rank,
        }

    def has_experts(self, layer: int) -> bool:
        """Returns whether layer `layer` has a mixture of experts instead of an MLP."""
        return self.num_experts > 1 and layer % self.expert_layer_period == self.expert_layer_offset


class Layer(PreNormLayer):
    """Computes x = x + mixer(norm(x)), then x = x + feed_forward(norm(x))."""

    norm_names = "input_layernorm", "pre_ff_layernorm"
    mixer_names = "mamba", "self_attn"
    feed_forward_name = "feed_forward"

    def __init__(self, config: Config, number: int, rngs: nnx.Rngs) -> None:
        c, norm = config, functools.partial(RMSNorm, epsilon=config.rms_norm_eps)
        self.input_layernorm = norm(c.hidden_size)
        self.pre_ff_layernorm = norm(c.hidden_size)
        if c.layers_block_type[number] == ATTENTION:
            self.self_attn = Attention(
                c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.dtype, rngs
            )
        else:
            self.mamba = Mamba1Mixer(
                c.hidden_size,
                inner_size=c.mamba_expand * c.hidden_size,
                state_dim=c.mamba_d_state,
                dt_rank=c.mamba_dt_rank,
                width=c.mamba_d_conv,
                dtype=c.dtype,
                rngs=rngs,
                conv_bias=c.mamba_conv_bias,
                proj_bias=c.mamba_proj_bias,
                norm=norm,
            )
        if c.has_experts(number):
            sizes = c.hidden_size, c.num_experts, c.num_experts_per_tok, c.intermediate_size
            self.feed_forward = SoftmaxMoE(*sizes, c.dtype, rngs, renormalise=False)
        else:
            self.feed_forward = GatedMLP(c.hidden_size, c.intermediate_size, c.dtype, rngs)


class Model(HybridModel):
    """The causal language model of this family: see `CausalLM`."""

    layer_class = Layer


def sources(place: str, config: Config) -> list[Source]:
    """Lists the ways to make the parameter at `place` from tensors: see `read_weights`."""
    if ".experts." in place:
        return experts(f"model.{place}", config.num_experts)
    place = in_model(place, {"norm.weight": "final_layernorm.weight"})
    return [named(place.replace("dt_proj_bias", "dt_proj.bias"))]
