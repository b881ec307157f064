"""Mamba: a Mamba-1 mixer per layer, and nothing else."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from mamba_align_jax.layers.mamba1 import Mamba1Mixer
from mamba_align_jax.layers.mixer import Mixer
from mamba_align_jax.layers.norm import RMSNorm
from mamba_align_jax.layers.registry import MIXERS
from mamba_align_jax.metadata.step_inputs import StepInputs
from mamba_align_jax.models.causal_lm import Carry, CausalLM
from mamba_align_jax.models.config import ModelConfig, require
from mamba_align_jax.models.weights import Source, named

# Of tensors, as published and as transformers has them in memory.
PREFIXES = ("backbone", "model")


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """The fields of config.json that shape the model, by their published names."""

    state_size: int = 16
    conv_kernel: int = 4
    time_step_rank: int
    layer_norm_epsilon: float = 1e-5
    use_conv_bias: bool = True
    use_bias: bool = False
    residual_in_fp32: bool = True
    tie_word_embeddings: bool = True
    model_type: str = "mamba"

    @classmethod
    def derive(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Sizes that follow from others."""
        require(config, hidden_act=("silu",))
        hidden, rank = config.get("hidden_size", 0), config.get("time_step_rank", "auto")
        return {
            "intermediate_size": config.get("intermediate_size") or int(config.get("expand", 2) * hidden),
            "time_step_rank": math.ceil(hidden / 16) if rank == "auto" else rank,
        }


class Layer(nnx.Module):
    """One mixer, of any kind or none, on a normed copy of the residual stream."""

    def __init__(self, config: Any, mixer: nnx.Module) -> None:
        self.norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mixer = mixer
        self.dtype = config.dtype

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The mixer; none where a feed-forward layer stands in its place."""
        return (self.mixer,) if isinstance(self.mixer, MIXERS) else ()

    def __call__(self, x: jax.Array, step: StepInputs, carry: Carry) -> tuple[jax.Array, Carry]:
        """Runs packed tokens [tokens, hidden]."""
        normed = self.norm(x).astype(self.dtype)
        if self.mixers:
            out, carry = carry.mix(self.mixers[0], normed, step)
        else:
            out = self.mixer(normed)
        return x + out.astype(x.dtype), carry


class Backbone(CausalLM):
    """A mixer per layer, and a residual stream in float32 where the configuration says so."""

    def __init__(self, config: Any, mixers: Sequence[nnx.Module], rngs: nnx.Rngs) -> None:
        layers, norm = (
            [Layer(config, mixer) for mixer in mixers],
            RMSNorm(config.hidden_size, config.layer_norm_epsilon),
        )
        super().__init__(config, layers, norm, rngs, residual_dtype="float32" if config.residual_in_fp32 else None)


class Model(Backbone):
    """The causal language model."""

    def __init__(self, config: Config, rngs: nnx.Rngs, norm: Callable[[int], nnx.Module] | None = None) -> None:
        """Random weights; `norm` is the mixers'."""
        c = config
        mixers = [
            Mamba1Mixer(
                c.hidden_size, c.intermediate_size, c.state_size, c.time_step_rank, c.conv_kernel, c.dtype, rngs,
                conv_bias=c.use_conv_bias, proj_bias=c.use_bias, norm=norm,
            )
            for _ in range(c.num_hidden_layers)
        ]  # fmt: skip
        super().__init__(c, mixers, rngs)


def sources(place: str, config: ModelConfig) -> list[Source]:
    """Where a checkpoint holds the parameter at `place` in the module tree."""
    del config
    if place.startswith("lm_head"):
        return [named(place)]
    if place == "norm.weight":
        place = "norm_f.weight"
    place = place.replace("embed_tokens", "embeddings").replace("dt_proj_bias", "dt_proj.bias")
    return [named(f"{prefix}.{place}") for prefix in PREFIXES]
