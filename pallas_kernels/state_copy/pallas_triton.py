"""state_copy as Pallas kernels. A few programs divide the tiles of a batch row's state, in all layers, among them."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels._pallas_triton import Refs
from pallas_kernels.blocks import NULL_BLOCK, WindowLayout
from pallas_kernels.dispatch import Run
from pallas_kernels.state_copy.config import default_config


def _for_each_tile(
    program: jax.Array,
    num_programs: jax.Array | int,
    layers: int,
    tiles: int,
    body: Callable[[jax.Array, jax.Array], None],
) -> None:
    """Run body(layer, tile) for this program's tiles, of all layers, in a grid-stride loop."""
    count = (layers * tiles - program + num_programs - 1) // num_programs

    def run(i, _):
        index = program + i * num_programs
        body(index // tiles, index % tiles)

    jax.lax.fori_loop(0, count, run, None)


def _copy_kernel(refs: Refs, *, tile_rows: int, tile_cols: int) -> None:
    """Copy one program's tiles of a row's state. Reads `source` and `destination`, updates `pool`."""
    layers, _, rows, cols = refs.pool.shape
    program, num_programs, batch_row = pt.program_id(0), pt.num_programs(0), pt.program_id(1)
    source, destination = refs.source[batch_row], refs.destination[batch_row]

    def copy(layer, tile):
        row, row_inside = pt.lanes(tile, tile_rows, rows)
        col, col_inside = pt.lanes(0, tile_cols, cols)
        inside = row_inside[:, None] & col_inside[None, :]

        def at(block):
            return refs.pool.at[layer, block, row[:, None], col[None, :]]

        state = pt.load(at(source), mask=inside & (source != NULL_BLOCK), other=0.0)
        pt.store(at(destination), state, mask=inside)

    @pt.when((destination != NULL_BLOCK) & (source != destination))
    def _():
        _for_each_tile(program, num_programs, layers, -(-rows // tile_rows), copy)


def _shift_kernel(refs: Refs, *, tile_cols: int, layout: WindowLayout) -> None:
    """Shift one program's tiles of a row's windows. Reads `source`, `destination`, `window_row`, updates `pool`."""
    layers, _, *state = refs.pool.shape
    window, channels = state if layout == "SD" else reversed(state)
    program, num_programs, batch_row = pt.program_id(0), pt.num_programs(0), pt.program_id(1)
    source, destination, offset = (ref[batch_row] for ref in (refs.source, refs.destination, refs.window_row))

    def shift(layer, tile):
        channel, inside = pt.lanes(tile, tile_cols, channels)

        def at(block, row):
            index = (row, channel) if layout == "SD" else (channel, row)
            return refs.pool.at[(layer, block, *index)]

        # One thread handles all rows of a channel and reads them all before it writes any. The shift may therefore be
        # within one block.
        moved = [
            pt.load(
                at(source, jnp.minimum(row + offset, window - 1)),
                mask=inside & (row + offset < window) & (source != NULL_BLOCK),
                other=0.0,
            )
            for row in range(window)
        ]
        for row, value in enumerate(moved):
            pt.store(at(destination, jnp.int32(row)), value, mask=inside & (row + offset < window))

    @pt.when((destination != NULL_BLOCK) & ((source != destination) | (offset > 0)))
    def _():
        _for_each_tile(program, num_programs, layers, -(-channels // tile_cols), shift)


def state_copy(
    pool: jax.Array,
    source: jax.Array,
    destination: jax.Array,
    window_row: jax.Array | None,
    *,
    layout: WindowLayout,
    run: Run,
) -> jax.Array:
    """Launch the copy kernel or, with `window_row`, the shift kernel. See api.py."""
    layers, blocks, *state, cols = pool.shape
    rows = 1
    for extent in state:
        rows *= extent
    # Merging a state's leading axes is a bitcast. Layers and blocks stay separate axes, so that offsets into large
    # pools are computed in 64 bits.
    view = pool.reshape(layers, blocks, rows, cols)
    config = run.config or default_config(pool.dtype.itemsize)
    tile_cols = pt.power_of_two(cols)
    if window_row is None:
        tile_rows = min(max(config.tile // tile_cols, 1), pt.power_of_two(rows))
        kernel = functools.partial(_copy_kernel, tile_rows=tile_rows, tile_cols=tile_cols)
        tiles, name = -(-rows // tile_rows), "state_copy"
    else:
        window, channels = (rows, cols) if layout == "SD" else (cols, rows)
        tile_cols = min(max(config.tile // pt.power_of_two(window), 128), pt.power_of_two(channels))
        kernel = functools.partial(_shift_kernel, tile_cols=tile_cols, layout=layout)
        tiles, name = -(-channels // tile_cols), "state_copy_shift"
    batch_rows = source.shape[0]
    results = pt.call(
        kernel,
        name=name,
        grid=(max(min(config.programs // batch_rows, layers * tiles), 1), batch_rows),
        inputs=dict(source=source, destination=destination, window_row=window_row),
        updates=dict(pool=view),
        num_warps=config.num_warps,
        interpret=run.interpret,
    )
    return results["pool"].reshape(pool.shape)
