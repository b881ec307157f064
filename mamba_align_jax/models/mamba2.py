"""Mamba-2: every layer is a norm and a Mamba-2 mixer.

Source: Dao, Gu, "Transformers are SSMs" (2024).
"""

from dataclasses import dataclass
from typing import Any

from flax import nnx

from mamba_align_jax.layers.mamba2 import Mamba2Mixer
from mamba_align_jax.models.config import agree, require, wrong
from mamba_align_jax.models.mamba import Backbone, BackboneConfig
from mamba_align_jax.models.mamba import sources as sources


@dataclass(frozen=True, kw_only=True)
class Config(BackboneConfig):
    """The fields of config.json that shape the model, under their published names."""

    num_heads: int = 128
    head_dim: int = 64
    state_size: int = 128
    n_groups: int = 8
    model_type: str = "mamba2"

    @classmethod
    def derive(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Computes the inner size from the heads: see `ModelConfig.derive`."""
        require(config, hidden_act=("silu",), rms_norm=(True,))
        heads, dim = (config.get(name) or getattr(cls, name) for name in ("num_heads", "head_dim"))
        inner, expand = heads * dim, config.get("expand")
        if expand is not None and expand * config.get("hidden_size", 0) != inner:
            wanted = f"give num_heads * head_dim = {inner} inner channels"
            raise wrong("expand", wanted, f"{expand} * hidden_size", must="must")
        agree(config, layer_types=["linear_attention"] * config.get("num_hidden_layers", 0))
        return {"intermediate_size": inner}


def mixer(c: Any, heads: int, head_dim: int, state_dim: int, rngs: nnx.Rngs) -> Mamba2Mixer:
    """Makes a mixer from the fields of a configuration that Mamba-2 and Nemotron-H name alike, and its sizes."""
    sizes: dict[str, Any] = dict(heads=heads, head_dim=head_dim, state_dim=state_dim, groups=c.n_groups)
    biases: dict[str, Any] = dict(conv_bias=c.use_conv_bias, in_bias=c.use_bias, out_bias=c.use_bias)
    fields: dict[str, Any] = dict(width=c.conv_kernel, dtype=c.dtype, rngs=rngs, epsilon=c.layer_norm_epsilon)
    return Mamba2Mixer(c.hidden_size, **sizes | biases | fields)


class Model(Backbone):
    """The causal language model of this family: see `CausalLM`."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        c = config
        sizes = c.num_heads, c.head_dim, c.state_size
        super().__init__(c, [mixer(c, *sizes, rngs) for _ in range(c.num_hidden_layers)], rngs)
