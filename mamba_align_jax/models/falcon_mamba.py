"""Falcon-Mamba: Mamba with norms of the step sizes, B and C. The norms have no weights."""

from dataclasses import dataclass

from flax import nnx

from mamba_align_jax.layers.norm import UnitRMSNorm
from mamba_align_jax.models import mamba
from mamba_align_jax.models.mamba import sources as sources


@dataclass(frozen=True, kw_only=True)
class Config(mamba.Config):
    """The fields of config.json that shape the model, under their published names."""

    mixer_rms_eps: float = 1e-6
    model_type: str = "falcon_mamba"


class Model(mamba.Model):
    """The causal language model of this family: see `CausalLM`."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs, norm=lambda size: UnitRMSNorm(config.mixer_rms_eps))
