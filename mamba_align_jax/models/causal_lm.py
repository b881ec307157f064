"""The causal language model over pools that all architectures share: an embedding, layers, a norm and a head."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_align_jax.align.config import GroupSpec
from mamba_align_jax.align.pool import StatePool
from mamba_align_jax.align.ring import Ring
from mamba_align_jax.kv import KVPages, KVSpec
from mamba_align_jax.layers.chain import Chain, Inputs, settled
from mamba_align_jax.layers.exchange import Exchange, Outputs
from mamba_align_jax.layers.linear import Linear
from mamba_align_jax.layers.mixer import ATTENTION, AttentionMixer, Mixer
from mamba_align_jax.layers.moe import MixtureOfExperts
from mamba_align_jax.layers.norm import RMSNorm
from mamba_align_jax.layers.residual import Residual
from mamba_align_jax.layers.split import Cut, SplitEmbed
from mamba_align_jax.metadata.step_inputs import StepInputs
from mamba_align_jax.models.config import ModelConfig
from mamba_align_jax.sharding import AXIS
from pallas_kernels import Implementation, Run, linear

_MAX_EXACT = 2**24  # Float32 holds every whole number up to it.


@dataclass(frozen=True, kw_only=True)
class Carry:
    """What one layer of a model passes to the next one within a step.

    Attributes:
        pool: The states.
        kv: The pages of keys and values.
        kinds: The kind of each group of `pool`, in order.
        implementation: Implementation of the ops; None chooses by platform.
        embedded: The embeddings of the step's tokens, as the first layer takes them. [tokens, hidden]
        passed: The kinds of the mixers that have run in this step. The index of the next mixer in its group follows
            from it.
    """

    pool: StatePool
    kv: KVPages
    kinds: tuple[str, ...]
    implementation: Implementation | None = None
    embedded: jax.Array | None = None
    passed: tuple[str, ...] = ()

    def mix(self, mixer: Mixer, x: Inputs, step: StepInputs) -> tuple[Outputs, "Carry"]:
        """Runs the next mixer of its kind on packed tokens [tokens, hidden], or on the chain that computes them.

        Returns:
            The mixer's outputs, as `Residual.add` takes them, and the carry for the next mixer.
        """
        inputs = self._inputs_for(mixer, x)
        number, passed = self.passed.count(mixer.kind), (*self.passed, mixer.kind)
        if mixer.kind == ATTENTION:
            at = step.layer(number, implementation=self.implementation)
            out, keys, values = mixer(inputs, at, self.kv.keys, self.kv.values)
            return out, replace(self, kv=KVPages(keys=keys, values=values), passed=passed)
        group = self.kinds.index(mixer.kind)
        at = step.layer(number, group=group, implementation=self.implementation)
        out, *states = mixer(inputs, at, *self.pool.states[group], *self.pool.ring(group))
        return out, replace(self, pool=self.pool.with_group(group, states), passed=passed)

    def _inputs_for(self, layer: Any, x: Inputs) -> Any:
        """Returns inputs as a layer takes them: a chain only where `takes_chains` says so."""
        if isinstance(x, Chain):
            x.implementation = self.implementation
        return x if getattr(layer, "takes_chains", False) else settled(x)

    def feed_forward(self, layer: Any, x: Inputs, step: StepInputs) -> Outputs:
        """Runs a feed-forward layer on packed tokens [tokens, hidden]. Padding tokens choose no experts."""
        inputs = self._inputs_for(layer, x)
        if isinstance(layer, MixtureOfExperts):
            return layer(inputs, step.valid, Run(implementation=self.implementation))
        return layer(inputs)


class Layer(Protocol):
    """A layer of a model: its mixers, and other parts such as a feed-forward layer."""

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The layer's mixers, in the order in which it runs them; () if it has none."""

    def __call__(self, x: Residual, step: StepInputs, carry: Carry) -> tuple[Residual, Carry]:
        """Runs a step's packed tokens, decode and verify rows first. It runs each of its mixers by `carry.mix`.

        Returns:
            The new residual stream, and the carry after the layer's last mixer.
        """


class CausalLM(nnx.Module):
    """A causal language model over pools. Every call is one step of a batch.

    Computes logits(norm(layers(embedding(tokens)))). Its states are those of its mixers. `state_groups` and `kv_spec`
    describe the pools that it needs.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[Layer],
        norm: RMSNorm,
        rngs: nnx.Rngs,
        *,
        embedding_scale: float = 1.0,
        logits_scale: float = 1.0,
        residual_dtype: str | None = None,
        mtp: Any = None,
    ) -> None:
        """Puts the layers, in order, and the norm of the last one's outputs together with random embeddings and a head.

        Embeddings and logits are scaled. `residual_dtype` is the dtype of the residual stream, which layers take and
        return; None is the model's dtype. `mtp` is a draft head (`MTPHead`), or None.
        """
        self.config = config
        self.embed_tokens: Any = nnx.Embed(
            config.vocab_size, config.hidden_size, dtype=config.dtype, param_dtype=config.dtype, rngs=rngs
        )
        self.layers = nnx.List(layers)
        self.norm = norm
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Linear(config.hidden_size, config.vocab_size, config.dtype, rngs)
        self.embedding_scale, self.logits_scale = embedding_scale, logits_scale
        self.residual_dtype = residual_dtype or config.dtype
        self.mtp = mtp
        # The mesh axis over which embeddings and head are split; None if they are not split.
        self.vocab_axis: str | None = None
        # Adds up what the devices of a split model have; None leaves that to XLA. `exchange_by` sets it.
        self.exchange: Exchange | None = None

    @property
    def dtype(self) -> str:
        """The dtype of weights, activations, convolution windows, keys and values."""
        return self.config.dtype

    def mixers(self) -> dict[str, list[Mixer]]:
        """Returns the mixers of all layers by kind, in the order of the layers."""
        found: dict[str, list[Mixer]] = {}
        for layer in self.layers:
            for mixer in layer.mixers:
                found.setdefault(mixer.kind, []).append(mixer)
        return found

    def state_groups(self, state_dtype: str = "float32") -> tuple[GroupSpec, ...]:
        """Describes the groups for `AlignConfig`: one for each kind of mixer that keeps states.

        Args:
            state_dtype: Dtype of recurrent states. Convolution windows have the model's dtype.
        """
        return tuple(
            GroupSpec(kind, len(mixers), mixers[0].states(self.dtype, state_dtype), self._ring(mixers[0]))
            for kind, mixers in self.mixers().items()
            if kind != ATTENTION
        )

    def _ring(self, mixer: Any) -> Ring | None:
        """Returns what a mixer keeps for each slot under policy "deferred"; None if it does not serve that policy."""
        return mixer.ring(self.dtype) if hasattr(mixer, "ring") else None

    def without_interior(self) -> list[str]:
        """Returns the classes of the mixers that keep no boundaries inside prefill rows, as mode "all" needs it."""
        every = {kind: mixers for kind, mixers in self.mixers().items() if kind != ATTENTION}
        return [
            type(mixers[0]).__name__ for mixers in every.values() if not getattr(mixers[0], "keeps_interior", False)
        ]

    def kv_spec(self, *, draft: bool = False) -> KVSpec:
        """Describes keys and values for `KVPages`. With `draft`, one more layer, the last, is for the draft head."""
        layers: list[Any] = self.mixers().get(ATTENTION, [])
        attention: AttentionMixer | None = layers[0] if layers else None
        heads, key_dim, value_dim = attention.kv_dims if attention else (1, 1, 0)
        return KVSpec(len(layers) + draft, heads, key_dim, value_dim, self.dtype)

    def split(self, cut: Cut) -> None:
        """Keeps one device's share of the vocabulary. A vocabulary that does not divide stays whole.

        It does not split the layers: `shard_model` splits them one by one.
        """
        if self.config.vocab_size % cut.size:
            return
        cut.put(self.embed_tokens.embedding, 0)
        self.embed_tokens = SplitEmbed(self.embed_tokens)
        if self.lm_head is not None:
            cut.put(self.lm_head.weight, 0)
        self.vocab_axis = AXIS

    def __call__(
        self,
        tokens: jax.Array,
        step: StepInputs,
        pool: StatePool,
        kv: KVPages,
        *,
        implementation: Implementation | None = None,
    ) -> tuple[jax.Array, StatePool, KVPages]:
        """Runs a step's packed tokens through all layers.

        Args:
            tokens: Token ids, decode and verify rows first. int32 [tokens]
            step: The step's inputs.
            pool: The states. `pool` is donated.
            kv: The pages of keys and values. `kv` is donated.
            implementation: Implementation of the ops; None chooses by platform.

        Returns:
            Hidden states [tokens, hidden] for `logits`, and the updated pools.
        """
        x = self._embed(tokens).astype(self.residual_dtype)
        kinds = tuple(kind for kind in self.mixers() if kind != ATTENTION)
        carry = Carry(pool=pool, kv=kv, kinds=kinds, implementation=implementation, embedded=x)
        stream = Residual(x, exchange=self.exchange)
        for layer in self.layers:
            stream, carry = layer(stream, step, carry)
        normed, _ = stream.normed(self.norm, self.dtype)
        return normed, carry.pool, carry.kv

    def draft(
        self, hidden: jax.Array, next_tokens: jax.Array, step: StepInputs, kv: KVPages
    ) -> tuple[jax.Array, KVPages]:
        """Runs the draft head over a step's tokens: see `MTPHead`.

        Args:
            hidden: Hidden state of each token: the result of `__call__`, or for further drafts the result of this
                method for the token before. [tokens, hidden]
            next_tokens: The token that follows each token. int32 [tokens]
            step: The step's inputs.
            kv: Pages of keys and values of `kv_spec(draft=True)`. `kv` is donated.

        Returns:
            Hidden states [tokens, hidden], whose `logits` predict the token after the next one, and the updated pages.

        Raises:
            ValueError: the model has no draft head.
        """
        if self.mtp is None:
            raise ValueError("draft: the model must have an MTP head, got a model without mtp.* tensors")
        passed = (ATTENTION,) * self.kv_spec().num_layers
        carry = Carry(pool=StatePool(states=()), kv=kv, kinds=(), passed=passed)
        out, carry = self.mtp(self._embed(next_tokens), hidden, step, carry, self.exchange)
        return out, carry.kv

    def _embed(self, tokens: jax.Array) -> jax.Array:
        more = (self.exchange,) if self.vocab_axis is not None else ()
        return self.embed_tokens(tokens, *more) * self.embedding_scale

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Computes logits, float32 [n, vocab], from hidden states [n, hidden].

        They are not rounded to the model's dtype, because in bfloat16 the logits of different tokens would become
        equal.
        """
        own = self._own_logits(hidden)
        return own if self.vocab_axis is None else jax.lax.all_gather(own, self.vocab_axis, axis=1, tiled=True)

    def most_likely(self, hidden: jax.Array) -> jax.Array:
        """Returns the most likely token, int32 [n], after hidden states [n, hidden]: the first of several.

        Of a vocabulary that is split over devices, each device sends only its own most likely token.
        """
        own = self._own_logits(hidden)
        token = jnp.argmax(own, axis=-1).astype(jnp.int32)
        if self.vocab_axis is None:
            return token
        largest = jnp.take_along_axis(own, token[:, None], axis=1)[:, 0]
        token = token + jax.lax.axis_index(self.vocab_axis).astype(jnp.int32) * own.shape[1]
        if self.exchange is not None and self.config.vocab_size <= _MAX_EXACT:
            both = self.exchange.gather(jnp.stack([largest, token.astype(jnp.float32)], axis=1))
            largest, token = both[..., 0], both[..., 1].astype(jnp.int32)
        else:
            largest, token = (jax.lax.all_gather(x, self.vocab_axis) for x in (largest, token))
        device = jnp.argmax(largest, axis=0).astype(jnp.int32)
        return jnp.take_along_axis(token, device[None], axis=0)[0]

    def _own_logits(self, hidden: jax.Array) -> jax.Array:
        """Computes the logits of this device's share of the vocabulary: see `logits`."""
        weight = self.embed_tokens.embedding[...] if self.lm_head is None else self.lm_head.weight[...]
        (product,) = linear(hidden.astype(weight.dtype), weight, out_dtype="float32")
        return product * self.logits_scale
