"""The inputs of one step for a single layer: rows of all kinds, with their blocks and pages."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from mamba_align_jax.align.batch import StepBatch
from mamba_align_jax.align.step import StepIndices
from mamba_align_jax.metadata.step_inputs import step_inputs

PAGE_SIZE, PAGES, BLOCKS, WINDOW = 16, 32, 32, 3


class Row(NamedTuple):
    """A row of `length` tokens after `computed` ones.

    The state is read from block `read`, where the window starts at row `window_row`.
    """

    computed: int
    length: int
    read: int
    window_row: int
    write: tuple[int, ...]
    pages: tuple[int, ...]


# A verify row after a verify row with two accepted tokens, a decode row, and a row without tokens, which is skipped.
DECODE = (
    Row(20, 3, 3, 1, (3, 9, 5), (1, 2)),
    Row(33, 1, 4, 0, (6, 0, 0), (3, 4, 5)),
    Row(0, 0, 0, 0, (0, 0, 0), ()),
)
# A new prompt, and a chunk after a verify row.
PREFILL = (Row(0, 70, 0, 0, (7, 0, 0), (6, 7, 8, 9, 10)), Row(61, 9, 8, 1, (10, 0, 0), (11, 12, 13, 14, 15)))
ROWS = DECODE + PREFILL


def make():
    """The StepInputs of the rows, the number of packed tokens, and the first token of each row."""
    rows, num_decode_tokens = ROWS, len(DECODE) * WINDOW
    loc = np.cumsum([0, *(row.length for row in rows)]).astype(np.int32)
    num_tokens = num_decode_tokens + sum(row.length for row in PREFILL)
    ints = lambda values: jnp.asarray(values, jnp.int32)
    batch = StepBatch(
        idx_mapping=ints([row if rows[row].length else -1 for row in range(len(rows))]),
        query_start_loc=ints(loc),
        num_drafts=ints([row.length - 1 if row in DECODE else -1 for row in rows]),
    )
    indices = StepIndices(
        recurrent_read=ints([[row.read for row in rows]]),
        conv_read=ints([[row.read for row in rows]]),
        window_row=ints([row.window_row for row in rows]),
        write=ints([[row.write for row in rows]]),
        num_computed_tokens=ints([row.computed for row in rows]),
        has_initial_state=jnp.asarray([row.computed > 0 for row in rows]),
        running_column=ints([0] * len(rows)),
        migration=None,
    )
    tables = np.zeros((len(rows), 5), np.int32)
    for slot, row in enumerate(rows):
        tables[slot, : len(row.pages)] = row.pages
    step = step_inputs(
        batch,
        indices,
        num_decode_rows=len(DECODE),
        page_tables=jnp.asarray(tables),
        num_tokens=num_tokens,
        page_size=PAGE_SIZE,
        num_pages=PAGES,
    )
    return step, num_tokens, loc
