"""Bamba: a Mamba-2 or attention mixer, then an MLP.

Source: IBM, Princeton, CMU and UIUC, "Bamba: Inference-Efficient Hybrid Mamba2 Model" (2024).
"""

from dataclasses import dataclass, field
from typing import Any

from flax import nnx

from mamba_align_jax.layers.mlp import GatedMLP
from mamba_align_jax.layers.norm import RMSNorm
from mamba_align_jax.models.causal_lm import CausalLM
from mamba_align_jax.models.config import ModelConfig, agree, layer_kinds, mamba_head_dim, require, rotation, wrong
from mamba_align_jax.models.hybrid import PreNormLayer, attention, mamba2
from mamba_align_jax.models.sources import Source, named

LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """The fields of config.json that shape the model, under their published names."""

    attn_layer_indices: tuple[int, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    attention_bias: bool = False
    rope_theta: float = 1e4
    partial_rotary_factor: float = 0.5
    rope_scaling: dict | None = field(default=None, hash=False)
    rms_norm_eps: float = 1e-5
    mamba_n_heads: int = 128
    mamba_d_head: int
    mamba_d_state: int = 256
    mamba_n_groups: int = 1
    mamba_d_conv: int = 4
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    max_position_embeddings: int = 262144
    model_type: str = "bamba"

    @classmethod
    def derive(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Computes layer kinds, and sizes that follow from others: see `ModelConfig.derive`."""
        require(config, hidden_act=("silu",), mlp_bias=(False,))
        layers, hidden, heads = (
            config.get(name, 1) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
        )
        attention = tuple(config.get("attn_layer_indices") or ())
        if any(number >= layers for number in attention):
            raise wrong("attn_layer_indices", f"below num_hidden_layers = {layers}", attention)
        layer_kinds({"num_hidden_layers": layers, "layer_types": _kinds(attention, layers)}, LINEAR, FULL)
        agree(config, layer_types=_kinds(attention, layers), layers_block_type=_kinds(attention, layers))
        mamba_heads = config.get("mamba_n_heads") or cls.mamba_n_heads
        inner = int((config.get("mamba_expand") or 2) * hidden)
        return {
            "attn_layer_indices": attention,
            "num_key_value_heads": config.get("num_key_value_heads") or heads,
            "head_dim": config.get("head_dim") or hidden // heads,
            "mamba_d_head": mamba_head_dim(config, mamba_heads, inner, "mamba_expand"),
            # Only the fields of the rotation may name the share of a head's dims that is rotated.
            **rotation(
                {name: value for name, value in config.items() if name != "partial_rotary_factor"},
                rope_theta=cls.rope_theta,
                partial_rotary_factor=cls.partial_rotary_factor,
            ),
        }


def _kinds(attention: tuple[int, ...], layers: int) -> list[str]:
    return [FULL if number in attention else LINEAR for number in range(layers)]


class Layer(PreNormLayer):
    """Computes x = x + mixer(norm(x)), then x = x + feed_forward(norm(x))."""

    norm_names = "input_layernorm", "pre_ff_layernorm"
    mixer_names = "mamba", "self_attn"
    feed_forward_name = "feed_forward"

    def __init__(self, config: Config, number: int, rngs: nnx.Rngs) -> None:
        """Makes layer `number` with random weights."""
        c = config
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.pre_ff_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        if number in c.attn_layer_indices:
            rotary_dim = int(c.head_dim * c.partial_rotary_factor)
            self.self_attn = attention(c, rngs, rotary_dim=rotary_dim, bias=c.attention_bias)
        else:
            self.mamba = mamba2(c, rngs)
        self.feed_forward = GatedMLP(c.hidden_size, c.intermediate_size, c.dtype, rngs)


class Model(CausalLM):
    """The causal language model of this family: see `CausalLM`."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        """Makes a model with random weights."""
        layers = [Layer(config, number, rngs) for number in range(config.num_hidden_layers)]
        super().__init__(config, layers, RMSNorm(config.hidden_size, config.rms_norm_eps), rngs)


def sources(place: str, config: Config) -> list[Source]:
    """Lists the ways to make the parameter at `place` from tensors: see `read_weights`."""
    del config
    if place.startswith("lm_head"):
        return [named(place)]
    return [named(f"model.{'final_layernorm.weight' if place == 'norm.weight' else place}")]
