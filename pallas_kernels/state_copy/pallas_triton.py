"""state_copy as Pallas kernels: one program per (row, tile of the state), looping over the layers inside."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels._pool import NULL_BLOCK
from pallas_kernels.state_copy.config import Config, default_config


def _copy_kernel(source_ref, destination_ref, _, pool_ref, *, tile_rows, tile_cols):
    layers, _, rows, cols = pool_ref.shape
    batch_row, tile = pt.program_id(0), pt.program_id(1)
    source, destination = source_ref[batch_row], destination_ref[batch_row]

    @pt.when((destination != NULL_BLOCK) & (source != destination))
    def _():
        row, row_inside = pt.lanes(tile, tile_rows, rows)
        col, col_inside = pt.lanes(0, tile_cols, cols)
        inside = row_inside[:, None] & col_inside[None, :]

        def copy_layer(layer, _):
            at = lambda block: pool_ref.at[layer, block, row[:, None], col[None, :]]
            state = pt.load(at(source), mask=inside & (source != NULL_BLOCK), other=0.0)
            pt.store(at(destination), state, mask=inside)

        jax.lax.fori_loop(0, layers, copy_layer, None)


def _shift_kernel(source_ref, destination_ref, offset_ref, _, pool_ref, *, tile_cols):
    layers, _, window, channels = pool_ref.shape
    batch_row, tile = pt.program_id(0), pt.program_id(1)
    source, destination, offset = source_ref[batch_row], destination_ref[batch_row], offset_ref[batch_row]

    @pt.when((destination != NULL_BLOCK) & ((source != destination) | (offset > 0)))
    def _():
        channel, inside = pt.lanes(tile, tile_cols, channels)

        # Row by row and one channel to one thread: within a block, a later row is read before it is overwritten.
        def shift_layer(layer, _):
            def shift_row(i, _):
                moves = inside & (i + offset < window)
                value = pt.load(
                    pool_ref.at[layer, source, jnp.minimum(i + offset, window - 1), channel],
                    mask=moves & (source != NULL_BLOCK),
                    other=0.0,
                )
                pt.store(pool_ref.at[layer, destination, i, channel], value, mask=moves)

            jax.lax.fori_loop(0, window, shift_row, None)

        jax.lax.fori_loop(0, layers, shift_layer, None)


def state_copy(
    pool: jax.Array,
    source: jax.Array,
    destination: jax.Array,
    row_offset: jax.Array | None = None,
    *,
    config: Config | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See api.py."""
    layers, blocks, *state, cols = pool.shape
    rows = 1
    for extent in state:
        rows *= extent
    # Merging a state's leading axes is a bitcast; layers and blocks stay axes of their own (64-bit offsets).
    view = pool.reshape(layers, blocks, rows, cols)
    config = config or default_config(source.shape[0], rows * cols, pool.dtype.itemsize)
    tile_cols = pt.power_of_two(cols)
    if row_offset is None:
        tile_rows = min(max(config.tile // tile_cols, 1), pt.power_of_two(rows))
        kernel = functools.partial(_copy_kernel, tile_rows=tile_rows, tile_cols=tile_cols)
        indices, tiles, name = (source, destination), -(-rows // tile_rows), "state_copy"
    else:
        tile_cols = min(config.tile, tile_cols)
        kernel = functools.partial(_shift_kernel, tile_cols=tile_cols)
        indices, tiles, name = (source, destination, row_offset), -(-cols // tile_cols), "state_copy_shift"
    (view,) = pt.call(
        kernel,
        (*indices, view),
        name=name,
        grid=(source.shape[0], tiles),
        out_shape=[jax.ShapeDtypeStruct(view.shape, view.dtype)],
        aliases={len(indices): 0},
        num_warps=config.num_warps,
        interpret=interpret,
    )
    return view.reshape(pool.shape)
