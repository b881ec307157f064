"""The causal language model over pools that all architectures share: embedding, layers of any kinds, norm, head."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_align_jax.align.config import GroupSpec
from mamba_align_jax.align.pool import StatePool
from mamba_align_jax.kv import KVPages, KVSpec
from mamba_align_jax.layers.linear import linear, precision
from mamba_align_jax.metadata.attention import StepInputs
from mamba_align_jax.models.config import ModelConfig
from pallas_kernels import Implementation

ATTENTION = "attention"


@dataclass(frozen=True, kw_only=True)
class Carry:
    """What layers hand on within one step.

    A mixer has a `kind`. Those of kind "attention" have `kv_dims` and are called as
    `mixer(x, step, keys, values, layer) -> (out, keys, values)`. Those of any other keep states, which are alike within
    the kind: they have `states(conv_dtype, state_dtype)` and are called as `mixer(x, split, chunks, *states, layer, group=,
    num_decode_tokens=, implementation=) -> (out, *states)`.

    Attributes:
        pool: States.
        kv: Keys and values.
        kinds: Of the pool's groups, in order.
        implementation: Of the ops.
        passed: Kinds of the mixers that ran, from which a mixer's place in its pool follows.
    """

    pool: StatePool
    kv: KVPages
    kinds: tuple[str, ...]
    implementation: Implementation | None = None
    passed: tuple[str, ...] = ()

    def mix(self, mixer: Any, x: jax.Array, step: StepInputs) -> tuple[jax.Array, "Carry"]:
        """Runs the next mixer of its kind on packed tokens [tokens, hidden]; returns as many, and what to carry on."""
        layer = jnp.int32(self.passed.count(mixer.kind))
        passed = (*self.passed, mixer.kind)
        if mixer.kind == ATTENTION:
            out, keys, values = mixer(x, step, self.kv.keys, self.kv.values, layer)
            return out, replace(self, kv=KVPages(keys=keys, values=values), passed=passed)
        group = self.kinds.index(mixer.kind)
        out, *states = mixer(
            x,
            step.split,
            step.chunks,
            *self.pool.states[group],
            layer,
            group=group,
            num_decode_tokens=step.num_decode_tokens,
            implementation=self.implementation,
        )
        return out, replace(self, pool=self.pool.with_group(group, states), passed=passed)


class CausalLM(nnx.Module):
    """A model over pools: every call is one step of a batch.

    A layer is called as `layer(x, step, carry) -> (x, carry)` and runs its mixers, which are its attributes, by `carry.mix`.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[Any],
        norm: nnx.Module,
        rngs: nnx.Rngs,
        *,
        embedding_scale: float = 1.0,
        logits_scale: float = 1.0,
        residual_dtype: str | None = None,
        mtp: Any = None,
    ) -> None:
        """Puts the parts together.

        Args:
            config: Of the architecture.
            layers: In order.
            norm: Of the last layer's outputs.
            rngs: For the initial weights.
            embedding_scale: Multiplies embeddings.
            logits_scale: Multiplies logits.
            residual_dtype: Of what layers take and return; the model's if None.
            mtp: A draft head: see `MTPHead`.
        """
        self.config = config
        self.embed_tokens: Any = nnx.Embed(
            config.vocab_size, config.hidden_size, dtype=config.dtype, param_dtype=config.dtype, rngs=rngs
        )
        self.layers = nnx.List(layers)
        self.norm = norm
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else linear(config.hidden_size, config.vocab_size, config.dtype, rngs)
        self.embedding_scale, self.logits_scale = embedding_scale, logits_scale
        self.residual_dtype = residual_dtype or config.dtype
        self.mtp = mtp
        # The mesh axis over which embeddings and head are split, if they are.
        self.vocab_axis: str | None = None

    @property
    def dtype(self) -> str:
        """Of weights, activations, windows, keys and values."""
        return self.config.dtype

    def mixers(self) -> dict[str, list[Any]]:
        """The layers' mixers by kind, kinds in the order of their first."""
        found: dict[str, list[Any]] = {}
        for layer in self.layers:
            for module in vars(layer).values():
                if isinstance(module, nnx.Module) and hasattr(module, "kind"):
                    found.setdefault(module.kind, []).append(module)
        return found

    def state_groups(self, state_dtype: str = "float32") -> tuple[GroupSpec, ...]:
        """What `AlignConfig` needs: a group for each kind of mixer that keeps states."""
        return tuple(
            GroupSpec(kind, len(mixers), mixers[0].states(self.dtype, state_dtype))
            for kind, mixers in self.mixers().items()
            if kind != ATTENTION
        )

    def kv_spec(self, *, draft: bool = False) -> KVSpec:
        """What `KVPages` needs; with one layer more, the last, if the draft head is to run."""
        layers = self.mixers().get(ATTENTION, [])
        heads, key_dim, value_dim = layers[0].kv_dims if layers else (1, 1, 0)
        return KVSpec(len(layers) + draft, heads, key_dim, value_dim, self.dtype)

    def __call__(
        self,
        tokens: jax.Array,
        step: StepInputs,
        pool: StatePool,
        kv: KVPages,
        *,
        implementation: Implementation | None = None,
    ) -> tuple[jax.Array, StatePool, KVPages]:
        """Runs packed tokens [tokens] through all layers.

        Args:
            tokens: int32, decode and verify rows first.
            step: The step's inputs.
            pool: States. Donate it.
            kv: Keys and values. Donate them.
            implementation: Of the ops.

        Returns:
            Hidden states [tokens, hidden] for `logits`, and the pools.
        """
        x = (self.embed_tokens(tokens) * self.embedding_scale).astype(self.residual_dtype)
        kinds = tuple(kind for kind in self.mixers() if kind != ATTENTION)
        carry = Carry(pool=pool, kv=kv, kinds=kinds, implementation=implementation)
        for layer in self.layers:
            x, carry = layer(x, step, carry)
        return self.norm(x).astype(self.dtype), carry.pool, carry.kv

    def draft(
        self, hidden: jax.Array, next_tokens: jax.Array, step: StepInputs, kv: KVPages
    ) -> tuple[jax.Array, KVPages]:
        """Runs the draft head over a step's tokens: see `MTPHead`.

        Args:
            hidden: Of each token, as `__call__` gives it, or as this gave it for the token before. [tokens, hidden]
            next_tokens: The token behind each. int32 [tokens].
            step: The step's inputs.
            kv: Keys and values of `kv_spec(draft=True)`. Donate them.

        Returns:
            Hidden states [tokens, hidden], whose `logits` foretell the token behind the next one, and the pages.

        Raises:
            ValueError: the model has no head.
        """
        if self.mtp is None:
            raise ValueError("draft: the model must have an MTP head, got one without mtp.* tensors")
        passed = (ATTENTION,) * self.kv_spec().num_layers
        carry = Carry(pool=StatePool(states=()), kv=kv, kinds=(), passed=passed)
        embedded = self.embed_tokens(next_tokens) * self.embedding_scale
        out, carry = self.mtp(embedded, hidden, step, carry)
        return out, carry.kv

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32 [n, vocab] of hidden states [n, hidden]: rounded to bfloat16, distinct logits would be ties."""
        weight = self.embed_tokens.embedding[...].T if self.lm_head is None else self.lm_head.kernel[...]
        product = jnp.matmul(hidden, weight, precision=precision(self.dtype), preferred_element_type=jnp.float32)
        if self.vocab_axis is not None:
            product = jax.lax.all_gather(product, self.vocab_axis, axis=1, tiled=True)
        return product * self.logits_scale
