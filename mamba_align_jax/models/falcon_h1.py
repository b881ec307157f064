"""Falcon-H1: Mamba-2 and attention side by side in every layer, with factors on the inputs and outputs of all parts."""

from dataclasses import dataclass, field
from typing import Any

import jax
from flax import nnx

from mamba_align_jax.layers.exchange import Outputs
from mamba_align_jax.layers.mixer import Mixer
from mamba_align_jax.layers.mlp import GatedMLP
from mamba_align_jax.layers.norm import RMSNorm
from mamba_align_jax.layers.residual import Residual
from mamba_align_jax.metadata.step_inputs import StepInputs
from mamba_align_jax.models.causal_lm import Carry, CausalLM
from mamba_align_jax.models.config import ModelConfig, agree, mamba_head_dim, require, rotation
from mamba_align_jax.models.hybrid import attention, mamba2
from mamba_align_jax.models.sources import Source, named


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """The fields of config.json that shape the model, under their published names."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    mamba_n_heads: int
    mamba_d_head: int
    mamba_d_state: int = 256
    mamba_n_groups: int = 1
    mamba_d_conv: int = 4
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    mamba_rms_norm: bool = False
    mamba_norm_before_gate: bool = True
    projectors_bias: bool = False
    attention_bias: bool = False
    rope_theta: float = 1e4
    rope_scaling: dict | None = field(default=None, hash=False)
    rms_norm_eps: float = 1e-5
    embedding_multiplier: float = 1.0
    lm_head_multiplier: float = 1.0
    key_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: float = 1.0
    ssm_multipliers: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    mlp_multipliers: tuple[float, float] = (1.0, 1.0)
    model_type: str = "falcon_h1"

    @classmethod
    def derive(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Computes sizes that follow from others: see `ModelConfig.derive`."""
        require(config, hidden_act=("silu",), mlp_bias=(False,), mamba_use_mlp=(True,))
        kinds = ["hybrid"] * config.get("num_hidden_layers", 0)
        agree(config, layer_types=kinds, layers_block_type=kinds)
        hidden, heads = config.get("hidden_size", 0), config.get("num_attention_heads", 1)
        inner, source = config.get("mamba_d_ssm", 1024), "mamba_d_ssm"
        if inner is None:
            inner, source = int((config.get("mamba_expand") or 2) * hidden), "mamba_expand"
        mamba_heads = config.get("mamba_n_heads") or 128
        return {
            "num_key_value_heads": config.get("num_key_value_heads") or heads,
            "head_dim": config.get("head_dim") or hidden // heads,
            "mamba_n_heads": mamba_heads,
            "mamba_d_head": mamba_head_dim(config, mamba_heads, inner, source),
            **rotation(config, rope_theta=cls.rope_theta),
            "ssm_multipliers": tuple(config.get("ssm_multipliers") or cls.ssm_multipliers),
            "mlp_multipliers": tuple(config.get("mlp_multipliers") or cls.mlp_multipliers),
        }


class FeedForward(GatedMLP):
    """Computes down(silu(a * gate(x)) * up(x)). The layer multiplies it by b; [a, b] are `mlp_multipliers`."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        """Makes a layer with random weights."""
        super().__init__(config.hidden_size, config.intermediate_size, config.dtype, rngs)
        self.gate_multiplier, self.down_multiplier = config.mlp_multipliers

    def __call__(self, x: jax.Array) -> Outputs:
        """Takes [tokens, hidden] to float32 sums [splits, tokens, hidden], without the factor b: see `Linear.sums`."""
        gate, up = self.gate_up_proj(x)
        return self.down_proj.sums(jax.nn.silu(gate * self.gate_multiplier) * up)


class Layer(nnx.Module):
    """Computes x = x + mamba(y) + attention(y) with y = norm(x), then x = x + feed_forward(norm(x))."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        """Makes a layer with random weights."""
        c = self.config = config
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.pre_ff_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        options = dict(norm=c.mamba_rms_norm, norm_before_gate=c.mamba_norm_before_gate, multipliers=c.ssm_multipliers)
        self.mamba = mamba2(c, rngs, out_bias=c.projectors_bias, **options)
        # The factor of the keys has the same effect as a factor of the scores.
        self.self_attn = attention(c, rngs, bias=c.attention_bias, scale=c.key_multiplier * c.head_dim**-0.5)
        self.feed_forward = FeedForward(c, rngs)

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The layer's two mixers, in the order in which they run."""
        return (self.mamba, self.self_attn)

    def __call__(self, x: Residual, step: StepInputs, carry: Carry) -> tuple[Residual, Carry]:
        """Runs a step's packed tokens: see `causal_lm.Layer`."""
        c = self.config
        normed, x = x.normed(self.input_layernorm)
        mamba, carry = carry.mix(self.mamba, normed * c.ssm_in_multiplier, step)
        attended, carry = carry.mix(self.self_attn, normed * c.attention_in_multiplier, step)
        x = x.add(mamba, c.ssm_out_multiplier).add(attended, c.attention_out_multiplier)
        normed, x = x.normed(self.pre_ff_layernorm)
        return x.add(self.feed_forward(normed), self.feed_forward.down_multiplier), carry


class Model(CausalLM):
    """The causal language model of this family: see `CausalLM`."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        """Makes a model with random weights."""
        layers = [Layer(config, rngs) for _ in range(config.num_hidden_layers)]
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        scales = dict(embedding_scale=config.embedding_multiplier, logits_scale=config.lm_head_multiplier)
        super().__init__(config, layers, norm, rngs, **scales)


def sources(place: str, config: Config) -> list[Source]:
    """Lists the ways to make the parameter at `place` from tensors: see `read_weights`."""
    del config
    if place.startswith("lm_head"):
        return [named(place)]
    return [named(f"model.{'final_layernorm.weight' if place == 'norm.weight' else place}")]
