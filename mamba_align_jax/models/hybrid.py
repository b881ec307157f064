"""The layer that most hybrid families have, and mixers made from configuration fields that families name alike."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from flax import nnx

from mamba_align_jax.layers.attention import Attention
from mamba_align_jax.layers.gated_delta_net import GatedDeltaNet
from mamba_align_jax.layers.mamba2 import Mamba2Mixer
from mamba_align_jax.layers.mixer import Mixer
from mamba_align_jax.layers.norm import RMSNorm
from mamba_align_jax.layers.residual import Residual
from mamba_align_jax.metadata.step_inputs import StepInputs
from mamba_align_jax.models.causal_lm import Carry, CausalLM
from mamba_align_jax.models.config import ModelConfig
from mamba_align_jax.models.fields import wrong


@dataclass(frozen=True, kw_only=True)
class HeadsConfig(ModelConfig):
    """The fields of a model whose attention heads have the same sizes in all layers."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int

    @classmethod
    def derive(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Computes the sizes of heads that config.json may leave out: see `ModelConfig.derive`."""
        heads = config.get("num_attention_heads", 1)
        return {
            "num_key_value_heads": config.get("num_key_value_heads") or heads,
            "head_dim": config.get("head_dim") or config.get("hidden_size", 0) // heads,
        }


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(HeadsConfig):
    """The fields of attention with a rotation, as `attention` reads them."""

    rope_theta: float = 1e4
    rope_scaling: dict | None = field(default=None, hash=False)


@dataclass(frozen=True, kw_only=True)
class DeltaNetConfig(AttentionConfig):
    """The fields of attention and of gated delta nets, as `attention` and `gated_delta_net` read them."""

    layer_types: tuple[str, ...]
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int = 4


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(AttentionConfig):
    """The fields of attention and of Mamba-2, as `attention` and `mamba2` read them."""

    attention_bias: bool = False
    mamba_n_heads: int = 128
    mamba_d_head: int
    mamba_d_state: int = 256
    mamba_n_groups: int = 1
    mamba_d_conv: int = 4
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False

    @classmethod
    def mamba_channels(cls, config: dict[str, Any]) -> tuple[int, str]:
        """Returns the inner channels of Mamba-2, and the field that says how many there are."""
        return int((config.get("mamba_expand") or 2) * config.get("hidden_size", 0)), "mamba_expand"

    @classmethod
    def derive(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Computes the sizes of heads that config.json may leave out: see `ModelConfig.derive`."""
        heads, given = config.get("mamba_n_heads") or cls.mamba_n_heads, config.get("mamba_d_head")
        inner, source = cls.mamba_channels(config)
        dim = inner // heads if given in (None, "auto") else given
        if config.get(source) is not None and heads * dim != inner:
            wanted = f"give mamba_n_heads * mamba_d_head = {heads * dim} inner channels"
            raise wrong(source, wanted, inner, must="must")
        return super().derive(config) | {"mamba_d_head": dim}


class PreNormLayer(nnx.Module):
    """Computes x = x + mixer(norm(x)), then x = x + feed_forward(norm(x)).

    A family's layer sets the two norms, one mixer and the feed-forward layer under their published names, and says here
    which names these are.

    Attributes:
        norm_names: The norm before the mixer and the norm before the feed-forward layer.
        mixer_names: The possible names of the mixer. A layer has one of them.
        feed_forward_name: The feed-forward layer or mixture of experts.
        takes_chains: Whether the norms join products in one launch, for steps of few tokens: see `Residual.chained`.
    """

    norm_names: ClassVar[tuple[str, str]] = "input_layernorm", "post_attention_layernorm"
    mixer_names: ClassVar[tuple[str, ...]] = "linear_attn", "self_attn"
    feed_forward_name: ClassVar[str] = "mlp"
    takes_chains: ClassVar[bool] = False

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The layer's one mixer."""
        return (next(getattr(self, name) for name in self.mixer_names if hasattr(self, name)),)

    def __call__(self, x: Residual, step: StepInputs, carry: Carry) -> tuple[Residual, Carry]:
        """Runs a step's packed tokens: see `causal_lm.Layer`."""
        (mixer,) = self.mixers
        before_mixer, before_feed_forward = (getattr(self, name) for name in self.norm_names)
        norm = Residual.chained if self.takes_chains else Residual.normed
        normed, x = norm(x, before_mixer)
        out, carry = carry.mix(mixer, normed, step)
        normed, x = norm(x.add(out), before_feed_forward)
        return x.add(carry.feed_forward(getattr(self, self.feed_forward_name), normed, step)), carry


class HybridModel(CausalLM):
    """A causal language model whose layers are all of one class.

    Attributes:
        layer_class: Makes a layer from the configuration, the layer's number and random numbers.
        epsilon_field: The field of the configuration that has the epsilon of the last norm.
    """

    layer_class: ClassVar[Any]
    epsilon_field: ClassVar[str] = "rms_norm_eps"

    def __init__(self, config: Any, rngs: nnx.Rngs, **options: Any) -> None:
        """Makes a model with random weights. `options` are those of `CausalLM`."""
        layers = [self.layer_class(config, number, rngs) for number in range(config.num_hidden_layers)]
        norm = RMSNorm(config.hidden_size, getattr(config, self.epsilon_field))
        super().__init__(config, layers, norm, rngs, **options)


# `c` is a family's `Config`, read by the names of its fields. `changes` are further arguments of the mixer.


def attention(c: Any, rngs: nnx.Rngs, **changes: Any) -> Attention:
    """Makes attention over all of `c.head_dim` with the rotation that `c` describes, unless `changes` say otherwise."""
    rotation: dict[str, Any] = dict(rotary_dim=c.head_dim, rope_theta=c.rope_theta, rope_scaling=c.rope_scaling)
    heads = c.num_attention_heads, c.num_key_value_heads, c.head_dim
    return Attention(c.hidden_size, *heads, c.dtype, rngs, **rotation | changes)


def mamba2(c: Any, rngs: nnx.Rngs, **changes: Any) -> Mamba2Mixer:
    """Makes a Mamba-2 mixer from the fields `mamba_n_heads`, `mamba_d_head` and so on."""
    sizes: dict[str, Any] = dict(
        heads=c.mamba_n_heads, head_dim=c.mamba_d_head, state_dim=c.mamba_d_state, groups=c.mamba_n_groups
    )
    biases: dict[str, Any] = dict(conv_bias=c.mamba_conv_bias, in_bias=c.mamba_proj_bias, out_bias=c.mamba_proj_bias)
    fields: dict[str, Any] = dict(width=c.mamba_d_conv, dtype=c.dtype, rngs=rngs, epsilon=c.rms_norm_eps)
    return Mamba2Mixer(c.hidden_size, **sizes | biases | fields | changes)


def gated_delta_net(c: Any, rngs: nnx.Rngs, **changes: Any) -> GatedDeltaNet:
    """Makes a gated delta net from the fields `linear_num_key_heads`, `linear_key_head_dim` and so on."""
    fields: dict[str, Any] = dict(
        key_heads=c.linear_num_key_heads,
        value_heads=c.linear_num_value_heads,
        key_dim=c.linear_key_head_dim,
        value_dim=c.linear_value_head_dim,
        width=c.linear_conv_kernel_dim,
        epsilon=c.rms_norm_eps,
        dtype=c.dtype,
        rngs=rngs,
    )
    return GatedDeltaNet(c.hidden_size, **fields | changes)
