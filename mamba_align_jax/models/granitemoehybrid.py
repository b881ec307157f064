"""Granite-4 hybrid: a Mamba-2 or attention mixer, then a shared MLP and optional experts, with factors on outputs."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx

from mamba_align_jax.layers.mixer import Mixer
from mamba_align_jax.layers.mlp import GatedMLP
from mamba_align_jax.layers.moe import SoftmaxMoE
from mamba_align_jax.layers.norm import RMSNorm
from mamba_align_jax.layers.residual import Residual
from mamba_align_jax.metadata.step_inputs import StepInputs
from mamba_align_jax.models.causal_lm import Carry
from mamba_align_jax.models.config import layer_kinds, require, rotation
from mamba_align_jax.models.hybrid import HybridModel, Mamba2Config, attention, mamba2
from mamba_align_jax.models.sources import Source, in_model, named, tensor

MAMBA, ATTENTION = "mamba", "attention"
_KINDS = {"linear_attention": MAMBA, "full_attention": ATTENTION}


@dataclass(frozen=True, kw_only=True)
class Config(Mamba2Config):
    """The fields of config.json that shape the model, under their published names."""

    layer_types: tuple[str, ...]
    position_embedding_type: str = "nope"
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
        layers = config.get("num_hidden_layers", 0)
        given = config.get("layer_types") or config.get("layers_block_type") or [MAMBA] * layers
        kinds = {"layer_types": [_KINDS.get(kind, kind) for kind in given]}
        require(config, hidden_act=("silu",), normalization_function=("rmsnorm",))
        require(config, position_embedding_type=("rope", "nope"))
        return super().derive(config) | {
            "layer_types": layer_kinds(config | kinds, MAMBA, ATTENTION),
            **rotation(config, rope_theta=cls.rope_theta),
        }


class Layer(nnx.Module):
    """Computes x = x + m * mixer(norm(x)), then x = x + m * (mlp(y) + experts(y)) with y = norm(x)."""

    def __init__(self, config: Config, number: int, rngs: nnx.Rngs) -> None:
        c = config
        self.residual_multiplier = c.residual_multiplier
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        if c.layer_types[number] == MAMBA:
            self.mamba = mamba2(c, rngs)
        else:
            rotary_dim = c.head_dim if c.position_embedding_type == "rope" else 0
            options = dict(bias=c.attention_bias, scale=c.attention_multiplier)
            self.self_attn = attention(c, rngs, rotary_dim=rotary_dim, **options)
        self.shared_mlp = GatedMLP(c.hidden_size, c.shared_intermediate_size, c.dtype, rngs)
        sizes = c.hidden_size, c.num_local_experts, c.num_experts_per_tok, c.intermediate_size
        self.block_sparse_moe = SoftmaxMoE(*sizes, c.dtype, rngs) if c.num_local_experts else None

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


class Model(HybridModel):
    """The causal language model of this family: see `CausalLM`."""

    layer_class = Layer

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        scales = dict(embedding_scale=config.embedding_multiplier, logits_scale=1 / config.logits_scaling)
        super().__init__(config, rngs, **scales)


def sources(place: str, config: Config) -> list[Source]:
    """Lists the ways to make the parameter at `place` from tensors: see `read_weights`."""
    if not place.startswith("layers."):
        return [named(in_model(place))]
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
