"""The variant of the recurrence that a launch on Hopper GPUs runs: CTAs of 64 value dims, or of 128.

CTAs of 64 value dims take less time for a row, and there are twice as many of them. They run where they leave SMs idle, or
where the total work, spread over the SMs, takes no longer than the longest row. A launch for several rows has the code of
both variants, and each CTA selects one by the rows' lengths. Both have the same bits.
"""

import functools
import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta_rule.prefill import chunk_states_64_sm90, chunk_states_128_sm90
from pallas_kernels.gated_delta_rule.prefill.work_queue_sm90 import Work
from pallas_kernels.hopper.prefill_rows import TILE

SMS = 132  # SMs of a Hopper GPU. With more or fewer, launches are slower, and their results are the same.
# The most rows of a launch with both variants. It has CTAs for the first one, half of which idle in the second one.
_MOST_ROWS = 8


def _splits_of(variant: ModuleType, value_dim: int) -> int:
    """Return the number of CTAs over which a variant splits the value dims of a head."""
    return value_dim // TILE // (chunk_states_128_sm90.TILES if variant is chunk_states_128_sm90 else 1)


def work_of(variant: ModuleType, rows: int, value_heads: int, value_dim: int) -> Work:
    """Return the work queue of a variant."""
    return Work(rows, value_heads, _splits_of(variant, value_dim))


def ctas_of(variant: ModuleType, work: Work) -> int:
    """Return the number of CTAs that run a variant. In the second one, each takes several entries."""
    return min(work.total, SMS) if variant is chunk_states_128_sm90 else work.total


def variants(rows: int, value_heads: int, value_dim: int) -> tuple[ModuleType, ...]:
    """Return the modules of the variants in a launch for some rows and heads: one, or both."""
    splits = _splits_of(chunk_states_64_sm90, value_dim)
    if rows * value_heads * splits <= SMS or splits % chunk_states_128_sm90.TILES:
        return (chunk_states_64_sm90,)
    return (chunk_states_64_sm90, chunk_states_128_sm90) if rows <= _MOST_ROWS else (chunk_states_128_sm90,)


def chunk_states(
    variant: ModuleType,
    refs: Any,
    memory: Any,
    work: Work,
    cta: Any,
    queue: Any,
    *,
    begin: Callable[[], None] = lambda: None,
    **options: Any,
) -> None:
    """Run a CTA of a variant, which is the CTA `cta` of those that run the recurrence.

    In the first variant it runs the entry `cta` of `work`, and calls `begin` first. In the second variant, in which no CTA
    computes products before the recurrence, it takes entries from `queue`.
    """
    if variant is chunk_states_128_sm90:
        chunk_states_128_sm90.chunk_states(refs, memory, work, queue, **options)
    else:
        chunk_states_64_sm90.chunk_states(refs, memory, work.indices_of(cta), begin=begin, **options)


def selects_first(query_start_loc: Any, rows: int, ctas: int) -> jax.Array:
    """Return whether a launch with both variants runs the first one, with `ctas` CTAs for each of `rows` rows."""
    starts = [query_start_loc[row] for row in range(rows + 1)]
    longest = functools.reduce(jnp.maximum, [stop - start for start, stop in itertools.pairwise(starts)])
    return (starts[-1] - starts[0]) * ctas <= SMS * longest


def is_selected(variant: ModuleType, chosen: tuple[ModuleType, ...], is_first: Any) -> Any:
    """Return whether a launch with the variants `chosen` runs `variant`, given whether it runs the first one."""
    if len(chosen) == 1:
        return True
    return is_first if variant is chosen[0] else ~is_first


def views(
    chosen: tuple[ModuleType, ...], key_dim: int, terms: int, dtype: Any, pool_dtype: Any, *, per_channel: bool
) -> list[list[Any]]:
    """Return each variant's views of SMEM. All are views of the same bytes."""
    return [variant.memory(key_dim, terms, dtype, pool_dtype, per_channel=per_channel) for variant in chosen]


def split_by_variant(memory: Any, described: list[list[Any]]) -> list[list[Any]]:
    """Split a flat list of SMEM references into one list per variant, in the order of `described`."""
    found, rest = [], list(memory)
    for each in described:
        found.append(rest[: len(each)])
        rest = rest[len(each) :]
    return found
