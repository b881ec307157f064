"""Qwen3.5 text, dense: gated-delta-net layers with gated full attention at every fourth."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from mamba_align_jax.layers.attention import Attention
from mamba_align_jax.layers.gated_delta_net import GatedDeltaNet
from mamba_align_jax.layers.mlp import GatedMLP
from mamba_align_jax.layers.norm import RMSNorm
from mamba_align_jax.metadata.attention import StepInputs
from mamba_align_jax.models.causal_lm import Carry, CausalLM
from mamba_align_jax.models.checkpoint import Source, named
from mamba_align_jax.models.config import ModelConfig, require

LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """The fields of config.json that shape the model, by their published names."""

    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int = 4
    rope_theta: float = 1e7
    partial_rotary_factor: float = 0.25
    model_type: str = "qwen3_5_text"

    @classmethod
    def derive(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Layer kinds and rotation."""
        layers = config.get("num_hidden_layers", 0)
        every = config.get("full_attention_interval", 4)
        kinds = tuple(config.get("layer_types") or [LINEAR if (n + 1) % every else FULL for n in range(layers)])
        rope = config.get("rope_parameters") or config
        require(config, hidden_act=("silu",), attention_bias=(False,), num_experts=(0,))
        require(rope, rope_type=("default",))
        if len(kinds) != layers or not set(kinds) <= {LINEAR, FULL}:
            raise ValueError(f"config.json: layer_types must name {layers} layers, each {LINEAR!r} or {FULL!r}")
        if LINEAR not in kinds:
            raise ValueError(
                f"config.json: layer_types must have a {LINEAR!r} layer: there is no state to keep otherwise"
            )
        rotation = {name: rope.get(name, getattr(cls, name)) for name in ("rope_theta", "partial_rotary_factor")}
        return {"layer_types": kinds, "model_type": cls.model_type, **rotation}

    def to_dict(self) -> dict[str, Any]:
        """As config.json."""
        fields = super().to_dict()
        rope = {name: fields.pop(name) for name in ("rope_theta", "partial_rotary_factor")}
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            **fields,
            "hidden_act": "silu",
            "rope_parameters": {"rope_type": "default", **rope},
        }


class Layer(nnx.Module):
    """Mixer and feed-forward, each on a normed copy of the residual stream."""

    def __init__(self, config: Config, kind: str, rngs: nnx.Rngs) -> None:
        c, norm = config, functools.partial(RMSNorm, epsilon=config.rms_norm_eps, offset=1.0)
        self.input_layernorm = norm(c.hidden_size)
        self.post_attention_layernorm = norm(c.hidden_size)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size, c.dtype, rngs)
        if kind == LINEAR:
            self.linear_attn = GatedDeltaNet(
                c.hidden_size, c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim,
                c.linear_value_head_dim, c.linear_conv_kernel_dim, c.rms_norm_eps, c.dtype, rngs,
            )  # fmt: skip
        else:
            self.self_attn = Attention(
                c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.dtype, rngs, gated=True,
                rotary_dim=int(c.head_dim * c.partial_rotary_factor), rope_theta=c.rope_theta, norm=norm,
            )  # fmt: skip

    def __call__(self, x: jax.Array, step: StepInputs, carry: Carry) -> tuple[jax.Array, Carry]:
        """Runs packed tokens [tokens, hidden]."""
        mixer = self.linear_attn if hasattr(self, "linear_attn") else self.self_attn
        out, carry = carry.mix(mixer, self.input_layernorm(x), step)
        x = x + out
        return x + self.mlp(self.post_attention_layernorm(x)), carry


class Model(CausalLM):
    """The causal language model."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        layers = [Layer(config, kind, rngs) for kind in config.layer_types]
        super().__init__(config, layers, RMSNorm(config.hidden_size, config.rms_norm_eps, offset=1.0), rngs)


def sources(place: str, config: Config) -> list[Source]:
    """Where a checkpoint holds the parameter at `place` in the module tree."""
    del config
    return [named(place if place.startswith("lm_head") else f"model.{place}")]
