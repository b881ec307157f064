"""The shared body of the kernels that advance states token by token.

There is one program per block of a state's rows, head, and row of the batch. The programs of one batch row own disjoint
tiles of its state, so each of them may overwrite the block that it has read.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels._pallas_triton import Lanes, Refs
from pallas_kernels.blocks import NULL_BLOCK, StateLayout, state_dims


class Recurrence(NamedTuple):
    """The recurrence of one head, restricted to the tiles of a program.

    Attributes:
        take: Loads the inputs of one token, given its index.
        parameters: Loads the values that are the same for all tokens.
        advance: Advances the states, one per tile, by one token: (parameters, inputs, states) -> for each tile its
            outputs [tile] and its new state [segments, tile, segment].
    """

    take: Callable[[jax.Array], Any]
    parameters: Callable[[], Any]
    advance: Callable[[Any, Any, list[jax.Array]], Iterable[tuple[jax.Array, jax.Array]]]


def grid(out: jax.ShapeDtypeStruct, batch_rows: int, block: int) -> tuple[int, int, int]:
    """Return the grid of a kernel over `advance_rows` whose outputs are [tokens, heads, state rows]."""
    tokens, heads, state_rows = out.shape
    # Programs of one batch row are neighbours in the grid. Padding tokens after the last row also get programs, which write
    # zeros.
    return -(-state_rows // block), heads, max(tokens, batch_rows)


def advance_rows(
    refs: Refs,
    block: int,
    tile: int,
    segment: int,
    recurrence: Callable[[jax.Array, list[Lanes], Lanes], Recurrence],
    layout: StateLayout = "VK",
) -> None:
    """Run the recurrence over all tokens of this program's row, and store outputs and states.

    Args:
        refs: `pool`, `out`, `layer`, `query_start_loc`, `read_block`, `write_blocks`, and the inputs of `recurrence`.
        block: The number of state rows that a program owns.
        tile: The number of state rows in each of the program's tiles [segments, tile, segment].
        segment: The number of neighbouring elements of a state row that form a tile's last axis.
        recurrence: Returns the head's recurrence, given the head, the state rows of each tile, and the state's columns
            folded to [segments, segment].
        layout: "VK" if a state lies in the pool as [rows, columns], "KV" if it lies there as [columns, rows].
    """
    tokens, batch_rows, window = refs.out.shape[0], refs.read_block.shape[0], refs.write_blocks.shape[1]
    _, state_rows, state_columns = state_dims(refs.pool, layout)
    state_block, head, program = pt.program_id(0), pt.program_id(1), pt.program_id(2)
    # All operands of addresses are loaded here, before any branch, so that the latencies of the loads overlap.
    row = jnp.minimum(program, batch_rows - 1)
    start, end, total = refs.query_start_loc[row], refs.query_start_loc[row + 1], refs.query_start_loc[batch_rows]
    layer, read, first_write = refs.layer[...], refs.read_block[row], refs.write_blocks[row, 0]

    column, column_inside = pt.segments(state_columns, min(segment, pt.power_of_two(state_columns)))
    num_tiles = block // tile
    tiles = [pt.lanes(state_block * num_tiles + i, tile, state_rows) for i in range(num_tiles)]
    take, load_parameters, advance = recurrence(head, tiles, (column, column_inside))

    def addresses(block):
        for state_row, inside in tiles:
            index = state_row[None, :, None], column[:, None, :]
            at = refs.pool.at[(layer, block, head, *(index if layout == "VK" else index[::-1]))]
            yield at, column_inside[:, None, :] & inside[None, :, None] & (block != NULL_BLOCK)

    @pt.when((program < batch_rows) & (end > start))
    def _():
        initial = [pt.load(at, mask=mask, other=0.0).astype(jnp.float32) for at, mask in addresses(read)]
        inputs = take(start)
        parameters = load_parameters()

        def finish(token, write, inputs, states):
            after = []
            results = zip(tiles, addresses(write), advance(parameters, inputs, states), strict=True)
            for (state_row, inside), (at, mask), (out, state) in results:
                pt.store(at, state.astype(refs.pool.dtype), mask=mask)
                pt.store(refs.out.at[token, head, state_row], out.astype(refs.out.dtype), mask=inside)
                after.append(state)
            return after

        if window == 1:
            finish(start, first_write, inputs, initial)
            return

        def step(token, carry):
            # The next token's inputs are loaded while this one's are used.
            following = jnp.minimum(token + 1, end - 1)
            upcoming = (refs.write_blocks[row, following - start], take(following))
            return *upcoming, finish(token, *carry)

        jax.lax.fori_loop(start, end, step, (first_write, inputs, initial))

    @pt.when((program < tokens) & (program >= total))
    def _():
        for state_row, inside in tiles:
            pt.store(refs.out.at[program, head, state_row], jnp.zeros(state_row.shape, refs.out.dtype), mask=inside)
