"""Prompt lookup inside the jitted step."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mamba_align_jax.engine.drafting.protocols import SampledStep
from mamba_align_jax.kv import KVPages


class HistoryDrafter:
    """A base class for a `DeviceDrafter` that needs only the tokens of each request. Subclasses define `propose`."""

    @property
    def num_kv_layers(self) -> int:
        """0, because the drafter keeps no keys and values."""
        return 0

    @property
    def max_places(self) -> int | None:
        """The number of places of the `history` that `propose` gets; None for all, which takes longer in long contexts."""
        return None

    def propose(self, history: jax.Array, length: jax.Array, max_drafts: int) -> tuple[jax.Array, jax.Array]:
        """Proposes tokens that may follow each row's tokens.

        Args:
            history: `history[r, :length[r]]` are the last tokens of row r, or all if it has no more than `max_places`.
                int32 [rows, places].
            length: int32 [rows].
            max_drafts: The number of drafts per row (static).

        Returns:
            The drafts, int32 [rows, max_drafts], and how many of each row's drafts are valid, int32 [rows].
        """
        raise NotImplementedError

    def draft(self, step: SampledStep, max_drafts: int) -> tuple[jax.Array, jax.Array, KVPages]:
        """Proposes tokens after a step: see `DeviceDrafter`."""
        slot = jnp.minimum(step.sampled.slot, step.history.shape[0] - 1)
        length = step.sampled.known + step.sampled.counts
        places = min(self.max_places or step.history.shape[1], step.history.shape[1])
        first = jnp.maximum(length - places, 0)
        last_tokens = lambda *begin: jax.lax.dynamic_slice(step.history, begin, (1, places))[0]
        drafts, count = self.propose(jax.vmap(last_tokens)(slot, first), length - first, max_drafts)
        return drafts, count, step.kv


@dataclass(frozen=True)
class DevicePromptLookup(HistoryDrafter):
    """Prompt lookup over token histories. It proposes the drafts that `PromptLookupDrafter` proposes for the same tokens.

    Attributes:
        longest: Number of tokens of the longest n-gram that is looked up.
        shortest: Number of tokens of the shortest one.
        reach: Number of a request's last tokens in which they are looked up. A step's time grows with it.
    """

    longest: int
    shortest: int
    reach: int = 16384

    @property
    def max_places(self) -> int:
        """`reach`: see `HistoryDrafter`."""
        return self.reach

    def propose(self, history: jax.Array, length: jax.Array, max_drafts: int) -> tuple[jax.Array, jax.Array]:
        """Proposes tokens: see `HistoryDrafter`.

        Tokens of `history` after the first `length` are not read. A row has either `max_drafts` valid drafts or none;
        invalid drafts are 0.
        """
        place = jnp.arange(history.shape[1], dtype=jnp.int32)[None]
        end = jnp.zeros_like(length)
        same = place < length[:, None] - 1
        for n in range(1, self.longest + 1):
            # `same` marks the places where an occurrence of the row's last n tokens ends. Each turn compares one token
            # more, n - 1 places before.
            tail = jnp.take_along_axis(history, jnp.maximum(length - n, 0)[:, None], axis=1)
            same &= (jnp.roll(history, n - 1, axis=1) == tail) & (place >= n - 1)
            if n >= self.shortest:
                last = jnp.max(jnp.where(same, place + 1, 0), axis=1)
                end = jnp.where(last > 0, last, end)
        period = jnp.maximum(length - end, 1)
        source = end[:, None] + jnp.arange(max_drafts, dtype=jnp.int32)[None] % period[:, None]
        drafts = jnp.take_along_axis(history, jnp.minimum(source, history.shape[1] - 1), axis=1)
        found = end > 0
        return jnp.where(found[:, None], drafts, 0), jnp.where(found, max_drafts, 0).astype(jnp.int32)
