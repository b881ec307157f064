"""Nemotron-H: every layer is a norm and one of Mamba-2, attention without positions, an MLP or a mixture of MLPs.

Source: NVIDIA, "Nemotron-H" (2025).
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_align_jax.layers.attention import Attention
from mamba_align_jax.layers.exchange import Outputs
from mamba_align_jax.layers.linear import Linear
from mamba_align_jax.layers.moe import Experts, MixtureOfExperts, SigmoidGate
from mamba_align_jax.layers.residual import total
from mamba_align_jax.layers.split import Cut
from mamba_align_jax.models import mamba, mamba2
from mamba_align_jax.models.config import require, wrong
from mamba_align_jax.models.sources import Source, experts
from mamba_align_jax.sharding import Part
from pallas_kernels import Run

MAMBA, ATTENTION, MLP_, MOE = "linear_attention", "full_attention", "mlp", "moe"
_KINDS = {"M": MAMBA, "*": ATTENTION, "-": MLP_, "E": MOE, "mamba": MAMBA, "attention": ATTENTION}


@dataclass(frozen=True, kw_only=True)
class Config(mamba.BackboneConfig):
    """The fields of config.json that shape the model, under their published names."""

    layers_block_type: tuple[str, ...]
    mamba_num_heads: int
    mamba_head_dim: int
    ssm_state_size: int
    n_groups: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    n_routed_experts: int = 0
    num_experts_per_tok: int = 1
    moe_intermediate_size: int = 0
    moe_shared_expert_intermediate_size: int = 0
    moe_latent_size: int | None = None
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    mlp_bias: bool = False
    attention_bias: bool = False
    residual_in_fp32: bool = False
    model_type: str = "nemotron_h"

    # The first is transformers', the others are those of older configurations.
    other_names: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "num_local_experts": "n_routed_experts",
            "mamba_conv_bias": "use_conv_bias",
            "mamba_d_conv": "conv_kernel",
            "mamba_n_groups": "n_groups",
        }
    )

    @classmethod
    def derive(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Reads layer kinds, which are published as a pattern of letters or as names: see `ModelConfig.derive`."""
        require(config, mlp_hidden_act=("relu2",), mamba_hidden_act=("silu",), mamba_proj_bias=(False,))
        require(config, n_shared_experts=(1,))
        if config.get("n_routed_experts") and config.get("num_experts_per_tok") is None:
            raise ValueError("config.json must have 'num_experts_per_tok'")
        given = (
            config.get("layers_block_type") or config.get("layer_types") or config.get("hybrid_override_pattern", "")
        )
        kinds = tuple(_KINDS.get(kind, kind) for kind in given)
        if MAMBA not in kinds or not set(kinds) <= set(_KINDS.values()):
            wanted = f"name layers of {sorted(set(_KINDS.values()))}, at least one of them {MAMBA!r}"
            raise wrong("layers_block_type", wanted, repr(given), must="must")
        return {
            "layers_block_type": kinds,
            "num_hidden_layers": len(kinds),
            "head_dim": config.get("head_dim") or config.get("attention_head_dim") or 128,
        }


class MLP(nnx.Module):
    """Computes down(relu(up(x)) ** 2) of each token."""

    def __init__(self, hidden_size: int, size: int, bias: bool, dtype: str, rngs: nnx.Rngs) -> None:
        """Makes a layer with random weights and `size` intermediate channels. With `bias` its products have biases."""
        self.up_proj = Linear(hidden_size, size, dtype, rngs, bias=bias)
        self.down_proj = Linear(size, hidden_size, dtype, rngs, bias=bias)

    def __call__(self, x: jax.Array) -> Outputs:
        """Takes [tokens, hidden] to float32 sums [splits, tokens, hidden]: see `Linear.sums`."""
        return self.down_proj.sums(relu2(self.up_proj(x)))

    def split(self, cut: Cut) -> None:
        """Keeps one device's share of the intermediate channels: see `SplitMixer.split`."""
        width = Part(self.down_proj.weight.shape[1], 1)
        cut.out(self.up_proj, width)
        cut.into(self.down_proj, width)


def relu2(x: jax.Array) -> jax.Array:
    """Computes relu(x) ** 2."""
    return jnp.square(jax.nn.relu(x))


class MoE(MixtureOfExperts):
    """Computes the weighted sum of the routed experts plus shared_experts(x).

    With `moe_latent_size`, routed experts run on a smaller projection of x, and their sum is projected back.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        c, latent = config, config.moe_latent_size
        self.gate = SigmoidGate(
            c.hidden_size,
            c.n_routed_experts,
            c.num_experts_per_tok,
            rngs,
            groups=c.n_group,
            top_groups=c.topk_group,
            renormalise=c.norm_topk_prob,
            scale=c.routed_scaling_factor,
        )
        sizes = c.n_routed_experts, latent or c.hidden_size, c.moe_intermediate_size
        self.experts = Experts(*sizes, c.dtype, rngs, activation="relu2")
        self.shared_experts = MLP(c.hidden_size, c.moe_shared_expert_intermediate_size, c.mlp_bias, c.dtype, rngs)
        if latent is not None:
            self.fc1_latent_proj = Linear(c.hidden_size, latent, c.dtype, rngs, bias=c.mlp_bias)
            self.fc2_latent_proj = Linear(latent, c.hidden_size, c.dtype, rngs, bias=c.mlp_bias)

    def __call__(self, x: jax.Array, valid: jax.Array | None = None, run: Run = Run()) -> jax.Array:
        """Runs packed tokens: see `MixtureOfExperts`."""
        routing = *self.gate(x, valid, run), run
        if hasattr(self, "fc1_latent_proj"):
            routed = self.fc2_latent_proj(self.experts(self.fc1_latent_proj(x), *routing))
        else:
            routed = self.experts(x, *routing)
        return routed.astype(jnp.float32) + total(self.shared_experts(x), jnp.float32)


def mixer(config: Config, kind: str, rngs: nnx.Rngs) -> nnx.Module:
    """Makes the mixer or the feed-forward layer of a layer, whose entry in `layers_block_type` is `kind`."""
    c = config
    if kind == MAMBA:
        return mamba2.mixer(c, c.mamba_num_heads, c.mamba_head_dim, c.ssm_state_size, rngs)
    if kind == ATTENTION:
        heads = c.num_attention_heads, c.num_key_value_heads
        return Attention(c.hidden_size, *heads, c.head_dim, c.dtype, rngs, bias=c.attention_bias)
    return MoE(c, rngs) if kind == MOE else MLP(c.hidden_size, c.intermediate_size, c.mlp_bias, c.dtype, rngs)


class Model(mamba.Backbone):
    """The causal language model of this family: see `CausalLM`."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        super().__init__(config, [mixer(config, kind, rngs) for kind in config.layers_block_type], rngs)


def sources(place: str, config: Config) -> list[Source]:
    """Lists the ways to make the parameter at `place` from tensors: see `read_weights`."""
    if ".experts." not in place:
        return mamba.sources(place, config)
    ways = (experts(f"{prefix}.{place}", config.n_routed_experts, up=("up_proj",)) for prefix in mamba.PREFIXES)
    return [*itertools.chain(*ways)]
