"""Mamba: every layer is a norm and a Mamba-1 mixer. Other models with one mixer per layer share its classes.

Source: Gu, Dao, "Mamba" (2023).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flax import nnx

from mamba_align_jax.layers.mamba1 import Mamba1Mixer
from mamba_align_jax.layers.mixer import Mixer
from mamba_align_jax.layers.norm import RMSNorm
from mamba_align_jax.layers.residual import Residual
from mamba_align_jax.metadata.step_inputs import StepInputs
from mamba_align_jax.models.causal_lm import Carry, CausalLM
from mamba_align_jax.models.config import ModelConfig, agree, require
from mamba_align_jax.models.sources import Source, named

# Prefixes of tensors: in published files, and in those of transformers' current modules.
PREFIXES = ("backbone", "model")


@dataclass(frozen=True, kw_only=True)
class BackboneConfig(ModelConfig):
    """The fields of a `Backbone` and of its Mamba mixers, under their published names."""

    conv_kernel: int = 4
    layer_norm_epsilon: float = 1e-5
    use_conv_bias: bool = True
    use_bias: bool = False
    residual_in_fp32: bool = True


@dataclass(frozen=True, kw_only=True)
class Config(BackboneConfig):
    """The fields of config.json that shape the model, under their published names."""

    state_size: int = 16
    time_step_rank: int
    tie_word_embeddings: bool = True
    model_type: str = "mamba"

    @classmethod
    def derive(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Computes sizes that follow from others: see `ModelConfig.derive`."""
        require(config, hidden_act=("silu",))
        agree(config, layer_types=["linear_attention"] * config.get("num_hidden_layers", 0))
        hidden, rank = config.get("hidden_size", 0), config.get("time_step_rank", "auto")
        return {
            "intermediate_size": config.get("intermediate_size") or int(config.get("expand", 2) * hidden),
            "time_step_rank": math.ceil(hidden / 16) if rank == "auto" else rank,
        }


class Layer(nnx.Module):
    """Computes x + mixer(norm(x)), where a feed-forward layer may stand in for the mixer."""

    def __init__(self, config: BackboneConfig, mixer: nnx.Module) -> None:
        """Makes a layer around a mixer or a feed-forward layer."""
        self.norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mixer = mixer
        self.dtype = config.dtype

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The layer's one mixer; () if it has a feed-forward layer instead."""
        return (self.mixer,) if isinstance(self.mixer, Mixer) else ()

    def __call__(self, x: Residual, step: StepInputs, carry: Carry) -> tuple[Residual, Carry]:
        """Runs a step's packed tokens: see `causal_lm.Layer`."""
        normed, x = x.normed(self.norm, self.dtype)
        if self.mixers:
            out, carry = carry.mix(self.mixers[0], normed, step)
        else:
            out = carry.feed_forward(self.mixer, normed, step)
        return x.add(out), carry


class Backbone(CausalLM):
    """A causal language model with one mixer per layer. Its residual stream is float32 if `residual_in_fp32`."""

    def __init__(self, config: BackboneConfig, mixers: Sequence[nnx.Module], rngs: nnx.Rngs) -> None:
        """Makes a model around `mixers`, of which there is one for each layer, in order."""
        layers = [Layer(config, mixer) for mixer in mixers]
        norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        super().__init__(config, layers, norm, rngs, residual_dtype="float32" if config.residual_in_fp32 else None)


class Model(Backbone):
    """The causal language model of this family: see `CausalLM`."""

    def __init__(self, config: Config, rngs: nnx.Rngs, norm: Callable[[int], nnx.Module] | None = None) -> None:
        """Makes a model with random weights. `norm` is that of `Mamba1Mixer`."""
        c = config
        mixers = [
            Mamba1Mixer(
                c.hidden_size,
                inner_size=c.intermediate_size,
                state_dim=c.state_size,
                dt_rank=c.time_step_rank,
                width=c.conv_kernel,
                dtype=c.dtype,
                rngs=rngs,
                conv_bias=c.use_conv_bias,
                proj_bias=c.use_bias,
                norm=norm,
            )
            for _ in range(c.num_hidden_layers)
        ]
        super().__init__(c, mixers, rngs)


def sources(place: str, config: ModelConfig) -> list[Source]:
    """Lists the ways to make the parameter at `place` from tensors: see `read_weights`."""
    if place.startswith("lm_head"):
        return [named(place)]
    if place == "norm.weight":
        place = "norm_f.weight"
    place = place.replace("embed_tokens", "embeddings").replace("dt_proj_bias", "dt_proj.bias")
    return [named(f"{prefix}.{place}") for prefix in PREFIXES]
