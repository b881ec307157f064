"""OLMo-Hybrid: gated delta nets whose inputs are normed, and full attention whose outputs are normed instead."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flax import nnx

from mamba_align_jax.layers.mlp import GatedMLP
from mamba_align_jax.layers.norm import RMSNorm
from mamba_align_jax.layers.residual import Residual
from mamba_align_jax.metadata.step_inputs import StepInputs
from mamba_align_jax.models.causal_lm import Carry
from mamba_align_jax.models.config import layer_kinds, require, rotation
from mamba_align_jax.models.hybrid import DeltaNetConfig, HybridModel, PreNormLayer, attention, gated_delta_net
from mamba_align_jax.models.sources import Source, in_model, joined, named, parts, taps

LINEAR, FULL = "linear_attention", "full_attention"
# Epsilon of the delta nets' output norm. It does not depend on rms_norm_eps.
_OUTPUT_NORM_EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class Config(DeltaNetConfig):
    """The fields of config.json that shape the model, under their published names."""

    linear_allow_neg_eigval: bool = True
    rope_theta: float = 0.0
    model_type: str = "olmo_hybrid"

    @classmethod
    def derive(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Computes layer kinds, head sizes and the rotation: see `ModelConfig.derive`.

        There is no rotation if `rope_theta` is null, as in the released model.
        """
        kinds = layer_kinds(config, LINEAR, FULL)
        require(config, hidden_act=("silu",), attention_bias=(False,), linear_use_gate=(True,))
        hidden, heads = config.get("hidden_size", 0), config.get("num_attention_heads", 1)
        key_heads = config.get("linear_num_key_heads") or heads
        key_dim = config.get("linear_key_head_dim") or int(0.75 * hidden / key_heads)
        return super().derive(config) | {
            "layer_types": kinds,
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": config.get("linear_num_value_heads") or heads,
            "linear_key_head_dim": key_dim,
            "linear_value_head_dim": config.get("linear_value_head_dim") or 2 * key_dim,
            "model_type": cls.model_type,
            **rotation(config, rope_theta=1e4),
        }


class Layer(PreNormLayer):
    """Computes x = x + mixer(norm(x)), then x = x + mlp(norm(x)), with a gated delta net as the mixer.

    With attention it computes x = x + norm(attention(x)), then x = x + norm(mlp(x)).
    """

    def __init__(self, config: Config, number: int, rngs: nnx.Rngs) -> None:
        c, norm = config, functools.partial(RMSNorm, epsilon=config.rms_norm_eps)
        self.post_attention_layernorm = norm(c.hidden_size)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size, c.dtype, rngs)
        if c.layer_types[number] == LINEAR:
            self.input_layernorm = norm(c.hidden_size)
            options = dict(epsilon=_OUTPUT_NORM_EPS, allow_neg_eigval=c.linear_allow_neg_eigval)
            self.linear_attn = gated_delta_net(c, rngs, **options)
        else:
            self.post_feedforward_layernorm = norm(c.hidden_size)
            rotary_dim = c.head_dim if c.rope_theta else 0
            self.self_attn = attention(c, rngs, rotary_dim=rotary_dim, norm=norm, norm_whole=True)

    def __call__(self, x: Residual, step: StepInputs, carry: Carry) -> tuple[Residual, Carry]:
        """Runs a step's packed tokens: see `causal_lm.Layer`."""
        if hasattr(self, "linear_attn"):
            return super().__call__(x, step, carry)
        value = x.settled()
        out, carry = carry.mix(self.self_attn, value, step)
        value = value + self.post_attention_layernorm(x.total(out, value.dtype))
        out = x.total(self.mlp(value), value.dtype)
        return x.after(value, self.post_feedforward_layernorm(out)), carry


class Model(HybridModel):
    """The causal language model of this family: see `CausalLM`."""

    layer_class = Layer


_RENAMED = {"norm": "o_norm", "out_proj": "o_proj"}
# Names in the released model's files. The module tree has the names of transformers.
_RELEASED = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}


def _own_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns the sizes of q, k, v, g, b and a from those of `GatedDeltaNet`'s parts: q, k and v are one; g has v's size."""
    keys_and_values, values, *heads = sizes
    keys = (keys_and_values - values) // 2
    return keys, keys, values, values, *heads


def sources(place: str, config: Config) -> list[Source]:
    """Lists the ways to make the parameter at `place` from tensors: see `read_weights`."""
    place = in_model(place)
    mixer, _, leaf = place.partition(".linear_attn.")
    if leaf == "conv1d.weight":
        return [joined([taps(f"{mixer}.linear_attn.{part}_conv1d.weight") for part in "qkv"]), named(place)]
    if leaf == "in_proj_qkvzba.weight":
        return [parts([f"{mixer}.linear_attn.{part}_proj.weight" for part in "qkvgba"], _own_sizes)]
    *path, module, last = place.split(".")
    if leaf:
        return [named(".".join([*path, _RENAMED.get(module, module), last]))]
    return [named(place), named(".".join([*path, _RELEASED.get(module, module), last]))]
