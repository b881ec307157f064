"""The variant of the recurrence that a launch on Hopper GPUs runs: CTAs of 64 value dims, or of 128.

CTAs of 64 value dims take less time for a row, and there are twice as many of them. They run where they leave SMs idle, or
where the total work, spread over the SMs, takes no longer than the longest row. A launch for several rows has the code of
both variants, and each CTA selects one by the rows' lengths. Both have the same bits.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta_rule.prefill import chunk_states_64_sm90, chunk_states_128_sm90
from pallas_kernels.gated_delta_rule.prefill.work_queue_sm90 import Work
from pallas_kernels.hopper.prefill_rows import TILE

SMS = 132  # SMs of a Hopper GPU. With more or fewer, launches are slower, and their results are the same.
# The most rows of a launch with both variants. It has CTAs for the first one, half of which idle in the second one.
_MOST_ROWS = 8


class Variant(NamedTuple):
    """A variant of the recurrence in a launch.

    Attributes:
        module: Its module, chunk_states_64_sm90 or chunk_states_128_sm90.
        work: Its work queue.
    """

    module: ModuleType
    work: Work

    @classmethod
    def of(cls, module: ModuleType, rows: int, value_heads: int, value_dim: int) -> "Variant":
        """Return a variant for a number of rows, value heads and value dims."""
        tiles = chunk_states_128_sm90.TILES if module is chunk_states_128_sm90 else 1
        return cls(module, Work(rows, value_heads, value_dim // TILE // tiles))

    @property
    def ctas(self) -> int:
        """The number of CTAs that run it. In the second variant, each takes several entries."""
        return min(self.work.total, SMS) if self.module is chunk_states_128_sm90 else self.work.total

    def chunk_states(
        self, refs: Any, memory: Any, cta: Any, queue: Any, *, begin: Callable[[], None] = lambda: None, **options: Any
    ) -> None:
        """Run a CTA, which is the CTA `cta` of those that run the recurrence.

        In the first variant it runs the entry `cta` of the work queue, and calls `begin` first. In the second variant, in
        which no CTA computes products before the recurrence, it takes entries from `queue`.
        """
        if self.module is chunk_states_128_sm90:
            chunk_states_128_sm90.chunk_states(refs, memory, self.work, queue, **options)
        else:
            chunk_states_64_sm90.chunk_states(refs, memory, self.work.indices_of(cta), begin=begin, **options)


def variants(rows: int, value_heads: int, value_dim: int) -> tuple[Variant, ...]:
    """Return the variants in a launch for some rows and heads: one, or both."""
    modules = chunk_states_64_sm90, chunk_states_128_sm90
    first, second = (Variant.of(module, rows, value_heads, value_dim) for module in modules)
    if first.work.total <= SMS or first.work.splits % chunk_states_128_sm90.TILES:
        return (first,)
    return (first, second) if rows <= _MOST_ROWS else (second,)


def selects_first(query_start_loc: Any, rows: int, ctas: int) -> jax.Array:
    """Return whether a launch with both variants runs the first one, with `ctas` CTAs for each of `rows` rows."""
    starts = [query_start_loc[row] for row in range(rows + 1)]
    longest = functools.reduce(jnp.maximum, [stop - start for start, stop in itertools.pairwise(starts)])
    return (starts[-1] - starts[0]) * ctas <= SMS * longest


def runs_first(chosen: Sequence[Variant], query_start_loc: Any) -> Any:
    """Return whether a launch with the variants `chosen` runs the first of them, given where its rows start."""
    work = chosen[0].work
    return len(chosen) == 1 or selects_first(query_start_loc, work.rows, work.of_row)


def is_selected(variant: Variant, chosen: Sequence[Variant], is_first: Any) -> Any:
    """Return whether a launch with the variants `chosen` runs `variant`, given whether it runs the first one."""
    return is_first if variant is chosen[0] else ~is_first


def split_by_variant(memory: Any, described: list[list[Any]]) -> list[list[Any]]:
    """Split a flat list of SMEM references into one list per variant, in the order of `described`."""
    found, rest = [], list(memory)
    for each in described:
        found.append(rest[: len(each)])
        rest = rest[len(each) :]
    return found
