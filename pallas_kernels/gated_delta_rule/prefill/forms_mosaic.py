"""In which form states are carried on Hopper GPUs: by programs of 64 value dims, or of 128.

Programs of 64 value dims take less time for a row, and there are twice as many of them. They carry the states where they
leave cores idle, or where all rows' work, spread over the cores, takes no longer than the longest row. A launch for several
rows has the code of both forms, and each program finds out from the rows' lengths which one is meant. Both have the same
bits.
"""

import functools
import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta_rule.prefill import heads_mosaic, states_mosaic
from pallas_kernels.gated_delta_rule.prefill.work_mosaic import Work
from pallas_kernels.hopper.prefill_rows import TILE

CORES = 132  # of a Hopper GPU. With another number launches are slower, and their results are the same.
# Of a launch with both forms. In the second form half the programs of the first one find nothing to do, and still take time.
_MOST_ROWS = 8


def _parts_of(form: ModuleType, value_dim: int) -> int:
    """Returns how many parts each head of a row has, each of which one program carries."""
    return value_dim // TILE // (heads_mosaic.PARTS if form is heads_mosaic else 1)


def work_of(form: ModuleType, rows: int, value_heads: int, value_dim: int) -> Work:
    """Returns what is carried in a form."""
    return Work(rows, value_heads, _parts_of(form, value_dim))


def programs_of(form: ModuleType, work: Work) -> int:
    """Returns the number of programs that carry states in a form. In the second one, each takes more than one part."""
    return min(work.total, CORES) if form is heads_mosaic else work.total


def forms(rows: int, value_heads: int, value_dim: int) -> tuple[ModuleType, ...]:
    """Returns the modules that a launch for so many rows and heads has: one, or those of both forms."""
    parts = _parts_of(states_mosaic, value_dim)
    if rows * value_heads * parts <= CORES or parts % heads_mosaic.PARTS:
        return (states_mosaic,)
    return (states_mosaic, heads_mosaic) if rows <= _MOST_ROWS else (heads_mosaic,)


def carry_states(
    form: ModuleType,
    refs: Any,
    memory: Any,
    work: Work,
    program: Any,
    taken: Any,
    *,
    begin: Callable[[], None] = lambda: None,
    **options: Any,
) -> None:
    """Runs a program that carries states in a form.

    Args:
        form: The form.
        refs: See states_mosaic.py.
        memory: See states_mosaic.py.
        work: All that is carried in this form.
        program: The number of the program among those that carry states. In the first form it has this part of a head.
        taken: The counter from which programs of the second form take parts, see heads_mosaic.py.
        begin: See states_mosaic.py. In the second form no program makes products before it carries states.
        **options: The other arguments, which are those of both forms.
    """
    if form is heads_mosaic:
        heads_mosaic.carry_states(refs, memory, work, taken, **options)
    else:
        states_mosaic.carry_states(refs, memory, work.place_of(program), begin=begin, **options)


def takes_first(query_start_loc: Any, rows: int, programs: int) -> jax.Array:
    """Returns whether the first of two forms is meant, in a kernel.

    Args:
        query_start_loc: Index of each row's first token, in the GPU's memory.
        rows: The number of rows.
        programs: The number of programs that carry a row's states in the first form.
    """
    starts = [query_start_loc[row] for row in range(rows + 1)]
    longest = functools.reduce(jnp.maximum, [stop - start for start, stop in itertools.pairwise(starts)])
    return (starts[-1] - starts[0]) * programs <= CORES * longest


def is_meant(form: ModuleType, chosen: tuple[ModuleType, ...], is_first: Any) -> Any:
    """Returns whether a form is meant in a launch that has those of `chosen`, of which the first one may be."""
    if len(chosen) == 1:
        return True
    return is_first if form is chosen[0] else ~is_first


def views(
    chosen: tuple[ModuleType, ...], key_dim: int, pieces: int, dtype: Any, pool_dtype: Any, *, per_channel: bool
) -> list[list[Any]]:
    """Returns, for each form, the views that its programs have of their shared memory. All are views of one memory."""
    return [form.memory(key_dim, pieces, dtype, pool_dtype, per_channel=per_channel) for form in chosen]


def cut(memory: Any, described: list[list[Any]]) -> list[list[Any]]:
    """Cuts the views of several forms' memory, which follow each other, into each one's."""
    found, rest = [], list(memory)
    for each in described:
        found.append(rest[: len(each)])
        rest = rest[len(each) :]
    return found
