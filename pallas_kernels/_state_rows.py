"""What kernels that advance states token by token share: one program per (block of a state's rows, head, batch row).

The programs of a batch row own disjoint rows of its state, so each may overwrite what it has read.
"""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels.blocks import NULL_BLOCK

Lanes = tuple[jax.Array, jax.Array]  # indices, and which of them exist


class Recurrence(NamedTuple):
    """What a kernel does with one head: all in terms of the tiles of its program."""

    take: Callable[[jax.Array], Any]  # token -> its inputs
    parameters: Callable[[], Any]  # what is the same for all tokens
    # parameters, inputs, states -> per tile, one after another: outputs and the new state
    advance: Callable[[Any, Any, list[jax.Array]], Iterable[tuple[jax.Array, jax.Array]]]


def grid(out: jax.ShapeDtypeStruct, batch_rows: int, block: int) -> tuple[int, int, int]:
    """Of `advance_rows`, for outputs [tokens, heads, state rows]."""
    tokens, heads, state_rows = out.shape
    # The programs of a batch row side by side. Tokens behind the last row get programs too, to zero them.
    return -(-state_rows // block), heads, max(tokens, batch_rows)


def advance_rows(
    refs: SimpleNamespace,
    block: int,
    tile: int,
    segment: int,
    recurrence: Callable[[jax.Array, list[Lanes], Lanes], Recurrence],
) -> None:
    """The body of a kernel over `pool`, `out`, `layer`, `query_start_loc`, `read_block` and `write_blocks`.

    Args:
        refs: Those, and whatever else `recurrence` reads.
        block: State rows of a program.
        tile: State rows of each of its tiles [segments, tile, segment].
        segment: Elements of a state row that lie side by side in a tile.
        recurrence: Takes the head, the state rows of each tile, and the columns, folded.
    """
    tokens, batch_rows, window = refs.out.shape[0], refs.read_block.shape[0], refs.write_blocks.shape[1]
    _, _, _, state_rows, state_columns = refs.pool.shape
    state_block, head, program = pt.program_id(0), pt.program_id(1), pt.program_id(2)
    # All that addresses depend on is loaded here, ahead of any branch: one trip to memory instead of one after another.
    row = jnp.minimum(program, batch_rows - 1)
    start, end, total = refs.query_start_loc[row], refs.query_start_loc[row + 1], refs.query_start_loc[batch_rows]
    layer, read, first_write = refs.layer[...], refs.read_block[row], refs.write_blocks[row, 0]

    column, column_inside = pt.segments(state_columns, min(segment, pt.power_of_two(state_columns)))
    num_tiles = block // tile
    tiles = [pt.lanes(state_block * num_tiles + i, tile, state_rows) for i in range(num_tiles)]
    take, load_parameters, advance = recurrence(head, tiles, (column, column_inside))

    def places(block):
        for state_row, inside in tiles:
            at = refs.pool.at[layer, block, head, state_row[None, :, None], column[:, None, :]]
            yield at, column_inside[:, None, :] & inside[None, :, None] & (block != NULL_BLOCK)

    @pt.when((program < batch_rows) & (end > start))
    def _():
        initial = [pt.load(at, mask=mask, other=0.0).astype(jnp.float32) for at, mask in places(read)]
        inputs = take(start)
        parameters = load_parameters()

        def finish(token, write, inputs, states):
            after = []
            results = zip(tiles, places(write), advance(parameters, inputs, states), strict=True)
            for (state_row, inside), (at, mask), (out, state) in results:
                pt.store(at, state.astype(refs.pool.dtype), mask=mask)
                pt.store(refs.out.at[token, head, state_row], out.astype(refs.out.dtype), mask=inside)
                after.append(state)
            return after

        if window == 1:
            finish(start, first_write, inputs, initial)
            return

        def step(token, carry):
            # The next token's inputs are on their way while this one's are used.
            following = jnp.minimum(token + 1, end - 1)
            upcoming = (refs.write_blocks[row, following - start], take(following))
            return *upcoming, finish(token, *carry)

        jax.lax.fori_loop(start, end, step, (first_write, inputs, initial))

    @pt.when((program < tokens) & (program >= total))
    def _():
        for state_row, inside in tiles:
            pt.store(refs.out.at[program, head, state_row], jnp.zeros(state_row.shape, refs.out.dtype), mask=inside)
