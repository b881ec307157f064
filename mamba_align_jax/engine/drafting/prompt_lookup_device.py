"""Drafts that are guessed on the device, where the last token is known before the host has read it."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from mamba_align_jax.align.batch import StepBatch
from mamba_align_jax.engine.pending import Sampled
from mamba_align_jax.kv import KVPages
from mamba_align_jax.metadata.attention import StepInputs


class SampledStep(NamedTuple):
    """A step that has sampled. `hidden` [tokens, hidden] is of its tokens; `history` [slots, length] holds the new ones."""

    model: Any
    hidden: jax.Array
    inputs: StepInputs
    kv: KVPages
    batch: StepBatch
    history: jax.Array
    sampled: Sampled


class DeviceDrafter(Hashable, Protocol):
    """Proposes tokens inside a step, by what `Drafter` says. It is static: a program knows its own."""

    def draft(self, step: SampledStep, most: int) -> tuple[jax.Array, jax.Array, KVPages]:
        """Drafts [rows, most] behind what each row sampled, how many of them count [rows], and the pages."""
        ...


class HistoryDrafter:
    """A `DeviceDrafter` that needs the tokens alone."""

    def propose(self, history: jax.Array, length: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
        """Drafts [rows, most] behind the first `length` [rows] tokens of `history` [rows, places], and how many count."""
        raise NotImplementedError

    def draft(self, step: SampledStep, most: int) -> tuple[jax.Array, jax.Array, KVPages]:
        """See `DeviceDrafter`."""
        slot = jnp.minimum(step.sampled.slot, step.history.shape[0] - 1)
        return *self.propose(step.history[slot], step.sampled.known + step.sampled.counts, most), step.kv


@dataclass(frozen=True)
class DevicePromptLookup(HistoryDrafter):
    """Prompt lookup over token histories: the very drafts of `PromptLookupDrafter`."""

    longest: int
    shortest: int

    def propose(self, history: jax.Array, length: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
        """What may follow.

        Args:
            history: int32 [rows, places].
            length: How many tokens each row has; what stands behind them is not looked at. int32 [rows].
            most: Drafts per row (static).

        Returns:
            Drafts [rows, most], zeros where there are none, and their number [rows]: `most` or 0. int32.
        """
        place = jnp.arange(history.shape[1], dtype=jnp.int32)
        end = jnp.zeros_like(length)
        same = place < length[:, None] - 1
        for n in range(1, self.longest + 1):
            # Places whose last n tokens are the row's last n: another token has to match, n - 1 places before.
            tail = jnp.take_along_axis(history, jnp.maximum(length - n, 0)[:, None], axis=1)
            same &= (jnp.roll(history, n - 1, axis=1) == tail) & (place >= n - 1)
            if n >= self.shortest:
                last = jnp.max(jnp.where(same, place + 1, 0), axis=1)
                end = jnp.where(last > 0, last, end)
        period = jnp.maximum(length - end, 1)
        source = end[:, None] + jnp.arange(most, dtype=jnp.int32) % period[:, None]
        drafts = jnp.take_along_axis(history, jnp.minimum(source, history.shape[1] - 1), axis=1)
        found = end > 0
        return jnp.where(found[:, None], drafts, 0), jnp.where(found, most, 0).astype(jnp.int32)
