"""Falcon-H1: Mamba-2 and attention side by side in every layer, with factors on the inputs and outputs of all parts."""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from mamba_align_jax.layers.exchange import Outputs
from mamba_align_jax.layers.mixer import Mixer
from mamba_align_jax.layers.mlp import GatedMLP
from mamba_align_jax.layers.norm import RMSNorm
from mamba_align_jax.layers.residual import Residual
from mamba_align_jax.metadata.step_inputs import StepInputs
from mamba_align_jax.models.bamba import sources as sources
from mamba_align_jax.models.causal_lm import Carry
from mamba_align_jax.models.config import agree, require, rotation
from mamba_align_jax.models.hybrid import HybridModel, Mamba2Config, attention, mamba2


@dataclass(frozen=True, kw_only=True)
class Config(Mamba2Config):
    """The fields of config.json that shape the model, under their published names."""

    mamba_rms_norm: bool = False
    mamba_norm_before_gate: bool = True
    projectors_bias: bool = False
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
        return super().derive(config) | {
            **rotation(config, rope_theta=cls.rope_theta),
            "ssm_multipliers": tuple(config.get("ssm_multipliers") or cls.ssm_multipliers),
            "mlp_multipliers": tuple(config.get("mlp_multipliers") or cls.mlp_multipliers),
        }

    @classmethod
    def mamba_channels(cls, config: dict[str, Any]) -> tuple[int, str]:
        """Returns the inner channels of Mamba-2, and the field that says how many there are."""
        inner = config.get("mamba_d_ssm", 1024)
        return super().mamba_channels(config) if inner is None else (inner, "mamba_d_ssm")


class FeedForward(GatedMLP):
    """Computes down(silu(a * gate(x)) * up(x)). The layer multiplies it by b; [a, b] are `mlp_multipliers`."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        super().__init__(config.hidden_size, config.intermediate_size, config.dtype, rngs)
        self.gate_multiplier, self.down_multiplier = config.mlp_multipliers

    def __call__(self, x: jax.Array) -> Outputs:
        """Takes [tokens, hidden] to float32 sums [splits, tokens, hidden], without the factor b: see `Linear.sums`."""
        gate, up = self.gate_up_proj(x)
        return self.down_proj.sums(jax.nn.silu(gate * self.gate_multiplier) * up)


class Layer(nnx.Module):
    """Computes x = x + mamba(y) + attention(y) with y = norm(x), then x = x + feed_forward(norm(x))."""

    def __init__(self, config: Config, number: int, rngs: nnx.Rngs) -> None:
        """Makes layer `number`, which is like all others, with random weights."""
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


class Model(HybridModel):
    """The causal language model of this family: see `CausalLM`."""

    layer_class = Layer

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        scales = dict(embedding_scale=config.embedding_multiplier, logits_scale=config.lm_head_multiplier)
        super().__init__(config, rngs, **scales)
