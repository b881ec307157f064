"""Bamba: a Mamba-2 or attention mixer, then an MLP.

Source: IBM, Princeton, CMU and UIUC, "Bamba: Inference-Efficient Hybrid Mamba2 Model" (2024).
"""

from dataclasses import dataclass
from typing import Any

from flax import nnx

from mamba_align_jax.layers.mlp import GatedMLP
from mamba_align_jax.layers.norm import RMSNorm
from mamba_align_jax.models.config import agree, layer_kinds, require, rotation, wrong
from mamba_align_jax.models.hybrid import HybridModel, Mamba2Config, PreNormLayer, attention, mamba2
from mamba_align_jax.models.sources import Source, in_model, named

LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class Config(Mamba2Config):
    """The fields of config.json that shape the model, under their published names."""

    attn_layer_indices: tuple[int, ...]
    partial_rotary_factor: float = 0.5
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 262144
    model_type: str = "bamba"

    @classmethod
    def derive(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Computes layer kinds, and sizes that follow from others: see `ModelConfig.derive`."""
        require(config, hidden_act=("silu",), mlp_bias=(False,))
        layers = config.get("num_hidden_layers", 1)
        attention = tuple(config.get("attn_layer_indices") or ())
        if any(number >= layers for number in attention):
            raise wrong("attn_layer_indices", f"below num_hidden_layers = {layers}", attention)
        layer_kinds({"num_hidden_layers": layers, "layer_types": _kinds(attention, layers)}, LINEAR, FULL)
        agree(config, layer_types=_kinds(attention, layers), layers_block_type=_kinds(attention, layers))
        return super().derive(config) | {
            "attn_layer_indices": attention,
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
        c = config
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.pre_ff_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        if number in c.attn_layer_indices:
            rotary_dim = int(c.head_dim * c.partial_rotary_factor)
            self.self_attn = attention(c, rngs, rotary_dim=rotary_dim, bias=c.attention_bias)
        else:
            self.mamba = mamba2(c, rngs)
        self.feed_forward = GatedMLP(c.hidden_size, c.intermediate_size, c.dtype, rngs)


class Model(HybridModel):
    """The causal language model of this family: see `CausalLM`."""

    layer_class = Layer


def sources(place: str, config: Config) -> list[Source]:
    """Lists the ways to make the parameter at `place` from tensors: see `read_weights`."""
    return [named(in_model(place, {"norm.weight": "final_layernorm.weight"}))]
