"""Zamba2: Mamba-2 layers, some of which also hear one of a few shared blocks of attention and MLP.

A shared block has the same weights wherever it is used, except for adapters: products of low rank that are added to
some of its projections. It reads the layer's inputs beside the embeddings.

Source: Glorioso et al., "The Zamba2 Suite" (2024).
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
from flax import nnx

from mamba_align_jax.layers.attention import Attention
from mamba_align_jax.layers.linear import Linear
from mamba_align_jax.layers.mamba2 import Mamba2Mixer
from mamba_align_jax.layers.mixer import Mixer
from mamba_align_jax.layers.mlp import GatedMLP
from mamba_align_jax.layers.norm import RMSNorm
from mamba_align_jax.layers.residual import Residual
from mamba_align_jax.layers.shared_block import AdaptedAttention, AdaptedMLP
from mamba_align_jax.metadata.step_inputs import StepInputs
from mamba_align_jax.models.causal_lm import Carry, CausalLM
from mamba_align_jax.models.config import ModelConfig, agree, layer_kinds, require, rotation
from mamba_align_jax.models.sources import Source, equal_parts, named, tensor

MAMBA, HYBRID = "mamba", "hybrid"
# Epsilon of Mamba-2's output norm. It does not depend on rms_norm_eps.
_EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """The fields of config.json that shape the model, under their published names."""

    layers_block_type: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    rope_theta: float = 1e4
    rope_scaling: dict | None = field(default=None, hash=False)
    rms_norm_eps: float = 1e-5
    n_mamba_heads: int = 8
    mamba_headdim: int
    mamba_d_state: int = 64
    mamba_ngroups: int = 1
    mamba_d_conv: int = 4
    add_bias_linear: bool = False
    num_mem_blocks: int = 1
    shares_blocks: bool = True
    use_shared_attention_adapter: bool = False
    adapter_rank: int = 128
    use_mem_rope: bool = False
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = True
    model_type: str = "zamba2"

    @classmethod
    def derive(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Computes layer kinds, and sizes that follow from others: see `ModelConfig.derive`."""
        require(config, hidden_act=("gelu",), use_long_context=(False,), use_conv_bias=(True,))
        names = {"linear_attention": MAMBA, "m": MAMBA, "g": HYBRID}
        given = config.get("layers_block_type") or config.get("layer_types") or ()
        if not given:
            raise ValueError("config.json must have 'layers_block_type'")
        kinds = [names.get(kind, kind) for kind in given]
        hidden, mamba_heads = config.get("hidden_size", 1), config.get("n_mamba_heads") or cls.n_mamba_heads
        # Every layer has a Mamba-2 mixer.
        layer_kinds(config | {"layer_types": [MAMBA if kind == HYBRID else kind for kind in kinds]}, MAMBA, HYBRID)
        heads = config.get("num_attention_heads", 1)
        if (2 * hidden) % heads:
            raise ValueError(
                f"config.json: 2 * hidden_size must be a multiple of num_attention_heads = {heads}, got {hidden}"
            )
        agree(
            config,
            attention_hidden_size=2 * hidden,
            attention_head_dim=2 * hidden // heads,
            head_dim=2 * hidden // heads,
        )
        agree(config, hybrid_layer_ids=[number for number, kind in enumerate(kinds) if kind == HYBRID])
        mamba_dim = int((config.get("mamba_expand") or 2) * hidden) // mamba_heads
        agree(config, mamba_headdim=mamba_dim)
        return {
            "layers_block_type": tuple(kinds),
            "num_key_value_heads": config.get("num_key_value_heads") or heads,
            "intermediate_size": config.get("intermediate_size") or config.get("ffn_hidden_size") or 4 * hidden,
            "mamba_headdim": mamba_dim,
            **rotation(config, rope_theta=cls.rope_theta),
        }

    @property
    def head_dim(self) -> int:
        """The dims of a query, a key and a value."""
        return 2 * self.hidden_size // self.num_attention_heads

    @property
    def hybrid_layers(self) -> list[int]:
        """The layers that hear a shared block, in order. They take turns with the blocks."""
        return [number for number, kind in enumerate(self.layers_block_type) if kind == HYBRID]

    @property
    def num_blocks(self) -> int:
        """The number of blocks whose weights differ: each layer that hears one has its own if they are not shared."""
        hybrid = len(self.hybrid_layers)
        return min(self.num_mem_blocks, hybrid) if self.shares_blocks else hybrid


class SharedBlock(nnx.Module):
    """The weights that layers share. Layers run them through `AdaptedAttention` and `AdaptedMLP`."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        c = config
        # Attention reads the residual stream and the embeddings.
        self.input_layernorm = RMSNorm(2 * c.hidden_size, c.rms_norm_eps)
        self.pre_ff_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(
            2 * c.hidden_size,
            heads=c.num_attention_heads,
            kv_heads=c.num_key_value_heads,
            head_dim=c.head_dim,
            dtype=c.dtype,
            rngs=rngs,
            rotary_dim=c.head_dim if c.use_mem_rope else 0,
            rope_theta=c.rope_theta,
            rope_scaling=c.rope_scaling,
            scale=(c.head_dim / 2) ** -0.5,
            out_size=c.hidden_size,
        )
        self.feed_forward = GatedMLP(c.hidden_size, c.intermediate_size, c.dtype, rngs, bias=c.add_bias_linear)


class Layer(nnx.Module):
    """Computes x = x + mamba(norm(x + y)), where y = linear(block(x)) if the layer hears a shared block, else 0."""

    def __init__(self, config: Config, block: SharedBlock | None, rngs: nnx.Rngs) -> None:
        """Makes a layer with random weights around a shared block."""
        c = config
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mamba = Mamba2Mixer(
            c.hidden_size,
            heads=c.n_mamba_heads,
            head_dim=c.mamba_headdim,
            state_dim=c.mamba_d_state,
            groups=c.mamba_ngroups,
            width=c.mamba_d_conv,
            dtype=c.dtype,
            rngs=rngs,
            epsilon=_EPSILON,
            in_bias=c.add_bias_linear,
            out_bias=c.add_bias_linear,
        )
        if block is not None:
            rank = c.adapter_rank if c.use_shared_attention_adapter else None
            self.self_attn = AdaptedAttention(block.self_attn, rank, c.dtype, rngs)
            self.feed_forward = AdaptedMLP(block.feed_forward, c.adapter_rank, c.dtype, rngs)
            self.linear = Linear(c.hidden_size, c.hidden_size, c.dtype, rngs)
            self.block_norm, self.pre_ff_layernorm = block.input_layernorm, block.pre_ff_layernorm

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The attention of the shared block, if there is one, and the Mamba-2 mixer."""
        return (self.self_attn, self.mamba) if hasattr(self, "self_attn") else (self.mamba,)

    def __call__(self, x: Residual, step: StepInputs, carry: Carry) -> tuple[Residual, Carry]:
        """Runs a step's packed tokens: see `causal_lm.Layer`."""
        if not hasattr(self, "self_attn"):
            normed, x = x.normed(self.input_layernorm)
            out, carry = carry.mix(self.mamba, normed, step)
            return x.add(out), carry
        value = x.settled()
        assert carry.embedded is not None, "a step starts with embeddings"
        both = self.block_norm(jnp.concatenate([value, carry.embedded], axis=1))
        out, carry = carry.mix(self.self_attn, both, step)
        heard = self.feed_forward(self.pre_ff_layernorm(x.total(out, value.dtype)))
        heard = self.linear(x.total(heard, value.dtype))
        out, carry = carry.mix(self.mamba, self.input_layernorm(value + heard), step)
        return x.after(value, out), carry


class Model(CausalLM):
    """The causal language model of this family: see `CausalLM`."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        c, hybrid = config, config.hybrid_layers
        blocks = [SharedBlock(c, rngs) for _ in range(c.num_blocks)]
        # The name comes before `layers`, so that the blocks' parameters have their places here and not in a layer.
        self.blocks = nnx.List(blocks)
        turns = {number: blocks[turn % c.num_blocks] for turn, number in enumerate(hybrid)}
        layers = [Layer(c, turns.get(number), rngs) for number in range(c.num_hidden_layers)]
        super().__init__(c, layers, RMSNorm(c.hidden_size, c.rms_norm_eps), rngs)


def adapted(config: Config, names: Collection[str]) -> Config:
    """Returns the configuration with `shares_blocks` false if `names` has tensors of a block for each layer.

    Copies of a block may differ from it: transformers shares neither the blocks of models whose embeddings are not tied
    nor parameters that files hold twice with different values.
    """
    copies = tuple(f"{_block(number)}." for number in config.hybrid_layers[config.num_blocks :])
    return replace(config, shares_blocks=not any(name.startswith(copies) for name in names))


def ignored(config: Config) -> tuple[str, ...]:
    """Returns the prefixes of tensors that are not loaded: copies of a block hold the adapters of other layers too."""
    hybrid = () if config.shares_blocks else config.hybrid_layers
    return tuple(
        f"{_block(number)}.{projection}_adapter_list.{turn}."
        for own, number in enumerate(hybrid)
        for turn in range(len(hybrid))
        for projection in ("feed_forward.gate_up_proj", *(f"self_attn.linear_{x}" for x in "qkv"))
        if turn != own
    )


def _block(number: int) -> str:
    """Returns the prefix of the tensors of the block that layer `number` has in the files."""
    return f"model.layers.{number}.shared_transformer"


def sources(place: str, config: Config) -> list[Source]:
    """Lists the ways to make the parameter at `place` from tensors: see `read_weights`."""
    if not place.startswith(("blocks.", "layers.")):
        return [
            named({"norm.weight": "model.final_layernorm.weight", "lm_head.weight": place}.get(place, f"model.{place}"))
        ]
    kind, index, name = place.split(".", 2)
    number, hybrid = int(index), config.hybrid_layers
    if kind == "blocks":
        prefix = _block(hybrid[number])
        # The gates and their factors are one tensor in the files as well.
        return [(tensor if "gate_up_proj" in name else named)(f"{prefix}.{name}")]
    layer = f"model.layers.{number}"
    if number not in hybrid:
        return [named(f"{layer}.{name}")]
    if name.startswith(("mamba.", "input_layernorm.")):
        return [named(f"{layer}.mamba_decoder.{name}")]
    if name.startswith("linear."):
        return [named(f"{layer}.{name}")]
    # Adapters are listed in the block, in the order of the layers that hear a block.
    turn = hybrid.index(number)
    prefix = _block(hybrid[turn % config.num_blocks])

    def adapter(projection: str, half: int) -> str:
        return f"{prefix}.{projection}_adapter_list.{turn}.{half}.weight"

    part, module, _ = name.split(".")
    if part == "feed_forward":
        return [tensor(adapter("feed_forward.gate_up_proj", 0 if module == "down" else 1))]
    if module == "down":
        return [equal_parts([adapter(f"self_attn.linear_{x}", 0) for x in "qkv"])]
    return [tensor(adapter(f"self_attn.linear_{module[0]}", 1))]
