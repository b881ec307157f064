"""Granite-4 hybrid: a Mamba-2 or attention mixer, then a shared MLP and optional experts, with factors on outputs."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_align_jax.layers.exchange import Outputs
from mamba_align_jax.layers.linear import Linear
from mamba_align_jax.layers.mixer import Mixer
from mamba_align_jax.layers.mlp import GatedMLP
from mamba_align_jax.layers.moe import Experts, MixtureOfExperts
from mamba_align_jax.layers.norm import RMSNorm
from mamba_align_jax.layers.residual import Residual
from mamba_align_jax.metadata.step_inputs import StepInputs
from mamba_align_jax.models.causal_lm import Carry, CausalLM
from mamba_align_jax.models.config import ModelConfig, layer_kinds, mamba_head_dim, require, rotation
from mamba_align_jax.models.hybrid import attention, mamba2
from mamba_align_jax.models.sources import Source, named, tensor
from pallas_kernels import Routing, Run

MAMBA, ATTENTION = "mamba", "attention"
_KINDS = {"linear_attention": MAMBA, "full_attention": ATTENTION}


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """The fields of config.json that shape the model, under their published names."""

    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    attention_bias: bool = False
    position_embedding_type: str = "nope"
    rope_theta: float = 1e4
    rope_scaling: dict | None = field(default=None, hash=False)
    mamba_n_heads: int = 128
    mamba_d_head: int
    mamba_d_state: int = 256
    mamba_n_groups: int = 1
    mamba_d_conv: int = 4
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    shared_intermediate_size: int = 1024
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    model_type: str = "granitemoehybrid"

    @classmethod
    def derive(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Computes layer kinds, and sizes that follow from others: see `ModelConfig.derive`."""
        layers, hidden = config.get("num_hidden_layers", 0), config.get("hidden_size", 0)
        given = config.get("layer_types") or config.get("layers_block_type") or [MAMBA] * layers
        kinds = {"layer_types": [_KINDS.get(kind, kind) for kind in given]}
        require(config, hidden_act=("silu",), normalization_function=("rmsnorm",))
        require(config, position_embedding_type=("rope", "nope"))
        heads, mamba_heads = config.get("num_attention_heads", 1), config.get("mamba_n_heads") or cls.mamba_n_heads
        inner = int((config.get("mamba_expand") or 2) * hidden)
        return {
            "layer_types": layer_kinds(config | kinds, MAMBA, ATTENTION),
            "num_key_value_heads": config.get("num_key_value_heads") or heads,
            "head_dim": config.get("head_dim") or hidden // heads,
            "mamba_d_head": mamba_head_dim(config, mamba_heads, inner, "mamba_expand"),
            **rotation(config, rope_theta=cls.rope_theta),
        }


class MoE(MixtureOfExperts):
    """Computes the sum of the chosen experts, weighted by a softmax over their logits."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        """Makes a layer with random weights."""
        c = config
        self.routing = Routing(top_k=c.num_experts_per_tok, logits_dtype=c.dtype)
        self.router = Linear(c.hidden_size, c.num_local_experts, c.dtype, rngs)
        self.experts = Experts(c.num_local_experts, c.hidden_size, c.intermediate_size, c.dtype, rngs)

    def __call__(self, x: jax.Array, valid: jax.Array | None = None, run: Run = Run()) -> Outputs:
        """Runs packed tokens: see `MixtureOfExperts`."""
        return self.experts.routed_sums(x, self.router.partial_sums(x, run), self.routing, valid=valid, run=run)


class Layer(nnx.Module):
    """Computes x = x + m * mixer(norm(x)), then x = x + m * (mlp(y) + experts(y)) with y = norm(x)."""

    def __init__(self, config: Config, kind: str, rngs: nnx.Rngs) -> None:
        """Makes a layer with random weights. `kind` is its entry in `layer_types`."""
        c = config
        self.residual_multiplier = c.residual_multiplier
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        if kind == MAMBA:
            self.mamba = mamba2(c, rngs)
        else:
            rotary_dim = c.head_dim if c.position_embedding_type == "rope" else 0
            options = dict(bias=c.attention_bias, scale=c.attention_multiplier)
            self.self_attn = attention(c, rngs, rotary_dim=rotary_dim, **options)
        self.shared_mlp = GatedMLP(c.hidden_size, c.shared_intermediate_size, c.dtype, rngs)
        self.block_sparse_moe = MoE(c, rngs) if c.num_local_experts else None

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The layer's one mixer."""
        return (self.mamba if hasattr(self, "mamba") else self.self_attn,)

    def __call__(self, x: Residual, step: StepInputs, carry: Carry) -> tuple[Residual, Carry]:
        """Runs a step's packed tokens: see `causal_lm.Layer`."""
        (mixer,) = self.mixers
        normed, x = x.normed(self.input_layernorm)
        out, carry = carry.mix(mixer, normed, step)
        normed, x = x.add(out, self.residual_multiplier).normed(self.post_attention_layernorm)
        out = self.shared_mlp(normed)
        if self.block_sparse_moe is not None:
            of_experts = carry.feed_forward(self.block_sparse_moe, normed, step)
            out = x.total(out, jnp.float32) + x.total(of_experts, jnp.float32)
        return x.add(out, self.residual_multiplier), carry


class Model(CausalLM):
    """The causal language model of this family: see `CausalLM`."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        """Makes a model with random weights."""
        layers = [Layer(config, kind, rngs) for kind in config.layer_types]
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        scales = dict(embedding_scale=config.embedding_multiplier, logits_scale=1 / config.logits_scaling)
        super().__init__(config, layers, norm, rngs, **scales)


def sources(place: str, config: Config) -> list[Source]:
    """Lists the ways to make the parameter at `place` from tensors: see `read_weights`."""
    if not place.startswith("layers."):
        return [named(place if place.startswith("lm_head") else f"model.{place}")]
    _, number, name = place.split(".", 2)
    layer = f"model.layers.{number}"

    published = {
        "shared_mlp.gate_up_proj.weight": tensor(f"{layer}.shared_mlp.input_linear.weight"),
        "shared_mlp.down_proj.weight": tensor(f"{layer}.shared_mlp.output_linear.weight"),
        "block_sparse_moe.router.weight": tensor(f"{layer}.block_sparse_moe.router.layer.weight"),
        "block_sparse_moe.experts.up": tensor(f"{layer}.block_sparse_moe.input_linear.weight"),
        "block_sparse_moe.experts.down": tensor(f"{layer}.block_sparse_moe.output_linear.weight"),
    }
    return [published.get(name) or named(f"{layer}.{name}")]
