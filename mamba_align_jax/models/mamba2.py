"""Mamba-2: a Mamba-2 mixer per layer, and nothing else."""

from dataclasses import dataclass
from typing import Any

from flax import nnx

from mamba_align_jax.layers.mamba2 import Mamba2Mixer
from mamba_align_jax.models.config import ModelConfig, require
from mamba_align_jax.models.mamba import Backbone
from mamba_align_jax.models.mamba import sources as sources


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """The fields of config.json that shape the model, by their published names."""

    num_heads: int = 128
    head_dim: int = 64
    state_size: int = 128
    n_groups: int = 8
    conv_kernel: int = 4
    layer_norm_epsilon: float = 1e-5
    use_conv_bias: bool = True
    use_bias: bool = False
    residual_in_fp32: bool = True
    model_type: str = "mamba2"

    @classmethod
    def derive(cls, config: dict[str, Any]) -> dict[str, Any]:
        """The inner size, which follows from the heads."""
        require(config, hidden_act=("silu",))
        heads, dim = (config.get(name, getattr(cls, name)) for name in ("num_heads", "head_dim"))
        return {"intermediate_size": heads * dim}


class Model(Backbone):
    """The causal language model."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        c = config
        mixers = [
            Mamba2Mixer(
                c.hidden_size, c.num_heads, c.head_dim, c.state_size, c.n_groups, c.conv_kernel, c.dtype, rngs,
                epsilon=c.layer_norm_epsilon, conv_bias=c.use_conv_bias, in_bias=c.use_bias, out_bias=c.use_bias,
            )
            for _ in range(c.num_hidden_layers)
        ]  # fmt: skip
        super().__init__(c, mixers, rngs)
