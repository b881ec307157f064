"""causal_conv1d as Pallas kernels.

The update kernel has one program per tile of channels and row of the batch. The prefill kernel has one program per tile
of channels and row, which alone touches the row's blocks, and one per tile of channels and block of tokens.

Windows are read and written one window row at a time. In layout "DS" the channels of a window row lie `window` elements
apart, but all rows of a channel share a sector of the cache, so only the first access to it goes to memory.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels._math import silu
from pallas_kernels._pallas_triton import Refs
from pallas_kernels.blocks import NULL_BLOCK, WindowLayout
from pallas_kernels.causal_conv1d.config import Options, default_config, default_prefill_config
from pallas_kernels.dispatch import Run
from pallas_kernels.rows import Rows

_WORD = 16  # the number of tokens whose row starts fit into one int32, with the row starts of the width-2 tokens before


def _load(at, inside: jax.Array) -> jax.Array:
    return pt.load(at, mask=inside, other=0.0)


def _window_row_at(refs: Refs, layout: WindowLayout, layer, block, window_row, channel: jax.Array):
    """Return the reference to the program's channels of one window row in the pool."""
    indices = (window_row, channel) if layout == "SD" else (channel, window_row)
    return refs.pool.at[(layer, block, *indices)]


def _parameters(refs: Refs, channel: jax.Array, inside: jax.Array) -> tuple[list[jax.Array], jax.Array | None]:
    """Load the taps, and the bias if there is one, for the program's channels."""
    taps = [
        _load(refs.weight.at[jnp.int32(j), channel], inside).astype(jnp.float32) for j in range(refs.weight.shape[0])
    ]
    return taps, None if refs.bias is None else _load(refs.bias.at[channel], inside).astype(jnp.float32)


def _output(
    window: list[jax.Array],
    taps: list[jax.Array],
    bias: jax.Array | None,
    activate: Callable[[jax.Array], jax.Array] | None,
) -> jax.Array:
    """Return the output of one token, the last of the `width` inputs in `window`."""
    y = jnp.zeros(window[0].shape, jnp.float32) if bias is None else bias
    for tap, value in zip(taps, window, strict=True):
        y = y + tap * value.astype(jnp.float32)
    return activate(y) if activate else y


def _update_kernel(refs: Refs, *, tile: int, options: Options) -> None:
    """Run one row and tile of channels.

    Reads all inputs of `call` below, updates `pool` and writes the outputs `part0`, `part1`, ..
    """
    tokens, channels = refs.x.shape
    rows, width = refs.read_block.shape[0], refs.weight.shape[0]
    parts, layout, longest = options.parts, options.layout, refs.pool.shape[options.axis] - (width - 2)
    channel, inside = pt.lanes(pt.program_id(0), tile, channels)
    program = pt.program_id(1)
    # Everything that addresses depend on is loaded here, before any branch, so that the loads share one trip to memory.
    row = jnp.minimum(program, rows - 1)
    start, end, total = refs.query_start_loc[row], refs.query_start_loc[row + 1], refs.query_start_loc[rows]
    layer, read, window_row, write = refs.layer[...], refs.read_block[row], refs.window_row[row], refs.write_block[row]
    boundary_row = boundary = None
    if refs.boundary_block is not None:
        boundary_row, boundary = refs.boundary_row[row], refs.boundary_block[row]

    def store(token, y, mask):
        for ref, index, inside_part in pt.parts(refs, parts, channel):
            part_mask = mask if len(parts) == 1 else mask & inside_part
            pt.store(ref.at[token, index], y.astype(ref.dtype), mask=part_mask)

    taps, bias = _parameters(refs, channel, inside)
    is_row, has_tokens = program < rows, end > start
    runs, live, keeps = has_tokens, inside, inside
    if boundary is not None:
        # A row without tokens may keep a boundary's window, but loads and stores nothing else.
        live, keeps = inside & has_tokens, inside & (boundary != NULL_BLOCK)
        runs |= boundary != NULL_BLOCK

    @pt.when(is_row & runs)
    def _():
        # Everything is read before anything is written, and one thread handles all rows of a channel. The read block
        # may therefore be the write block or the boundary's block.
        def old(first, j):
            return _window_row_at(refs, layout, layer, read, first + j, channel)

        history = [_load(old(window_row, j), live & (read != NULL_BLOCK)) for j in range(width - 1)]
        kept = []
        if boundary is not None:
            kept = [_load(old(boundary_row, j), keeps & (read != NULL_BLOCK)) for j in range(width - 1)]
        new = [_load(refs.x.at[jnp.minimum(start + t, end - 1), channel], live) for t in range(longest)]
        inputs = history + new
        for j, value in enumerate(kept):
            pt.store(_window_row_at(refs, layout, layer, boundary, jnp.int32(j), channel), value, mask=keeps)
        for j, value in enumerate(inputs[1:]):
            keep = live & (write != NULL_BLOCK) & (j < width - 2 + end - start)
            pt.store(_window_row_at(refs, layout, layer, write, jnp.int32(j), channel), value, mask=keep)
        for t in range(longest):
            y = _output(inputs[t : t + width], taps, bias, silu if options.activation == "silu" else None)
            store(start + t, y, inside & (start + t < end))

    # The tokens after the last row belong to no row. The program with the token's index writes zeros.
    @pt.when((program < tokens) & (program >= total))
    def _():
        store(program, jnp.zeros((tile,), refs.x.dtype), inside)


def causal_conv1d_update(
    x: jax.Array, pool: jax.Array, weight: jax.Array, bias: jax.Array | None, rows: Rows, *, options: Options, run: Run
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Launch the update kernel. See api.py."""
    config = run.config or default_config(options.layout)
    results = pt.call(
        functools.partial(_update_kernel, tile=config.tile, options=options),
        name="causal_conv1d_update",
        grid=(-(-x.shape[1] // config.tile), max(x.shape[0], rows.num_rows)),
        inputs=dict(x=x, layer=rows.layer, weight=weight, bias=bias)
        | rows.window_inputs
        | dict(
            boundary_row=None if rows.boundary is None else rows.boundary.row,
            boundary_block=None if rows.boundary is None else rows.boundary.block,
        ),
        outputs=pt.part_shapes(x.shape[0], options.parts, x.dtype),
        updates=dict(pool=pool),
        num_warps=config.num_warps,
        interpret=run.interpret,
    )
    pool = results.pop("pool")
    return tuple(results.values()), pool


def _prefill_kernel(refs: Refs, *, tile: int, block: int, options: Options, interpret: bool) -> None:
    """Run one row's beginning, or one block of tokens, for a tile of channels.

    Updates `pool` and writes the outputs `part0`, `part1`, ..
    """
    tokens, rows, (width, channels) = refs.x.shape[0], refs.read_block.shape[0], refs.weight.shape
    activate = functools.partial(pt.silu, interpret=interpret) if options.activation == "silu" else None
    channel, inside = pt.lanes(pt.program_id(0), tile, channels)
    # The first programs have a row each. They do everything that needs the row's initial window: they run the row's
    # first width-1 tokens and keep its windows. The other programs have a block of packed tokens each. They load
    # only the rows' starts.
    program = pt.program_id(1)
    is_row, row = program < rows, jnp.minimum(program, rows - 1)
    start, end, total = refs.query_start_loc[row], refs.query_start_loc[row + 1], refs.query_start_loc[rows]
    layer, read, window_row, write = refs.layer[...], refs.read_block[row], refs.window_row[row], refs.write_block[row]
    first = jnp.where(is_row, start, (program - rows) * block)

    def is_past_first():
        """Yield for each token of the block whether it comes after the first width-1 tokens of its row."""
        row, exists = pt.lanes(0, pt.power_of_two(rows), rows)
        start, end = (pt.load(refs.query_start_loc.at[r], mask=exists, other=0) for r in (row, row + 1))
        for t in range(0, block, _WORD):
            # Bit n says that a row starts at token n - (width - 2) of this word. Empty rows are left out, so no two
            # rows share a bit.
            n = start - (first + t - (width - 2))
            seen = (end > start) & (n >= 0) & (n < _WORD + width - 2)
            starts = jnp.sum(jnp.where(seen, 1 << jnp.where(seen, n, 0), 0), dtype=jnp.int32)
            for bit in range(min(_WORD, block - t)):
                yield ((starts >> bit) & ((1 << (width - 1)) - 1)) == 0

    @pt.when((program >= rows) | (end > start))
    def _():
        # One thread handles all rows of a channel and reads the row's block before it writes any block. The read block
        # and the written blocks may therefore be the same.
        def old(j):
            return _window_row_at(refs, options.layout, layer, read, window_row + j, channel)

        history = [_load(old(j), inside & is_row & (read != NULL_BLOCK)) for j in range(width - 1)]

        def keep(offset, block):
            """Write the window after `offset` tokens of the row to `block`."""
            mask = inside & (block != NULL_BLOCK)
            at = [offset - (width - 1) + j for j in range(width - 1)]
            window = [_load(refs.x.at[start + jnp.maximum(token, 0), channel], mask) for token in at]
            for j, (token, value) in enumerate(zip(at, window, strict=True)):
                for k, u in enumerate(history):
                    value = jnp.where(token == k - (width - 1), u, value)
                pt.store(_window_row_at(refs, options.layout, layer, block, jnp.int32(j), channel), value, mask=mask)

        def checkpoint(n, _):
            keep(refs.checkpoint_offset[row, n], refs.checkpoint_block[row, n])
            return _

        @pt.when(is_row)
        def _():
            keep(end - start, write)
            if refs.checkpoint_block is not None:
                jax.lax.fori_loop(jnp.int32(0), jnp.int32(refs.checkpoint_block.shape[1]), checkpoint, None)

        def new(t):
            return refs.x.at[jnp.clip(first + t, 0, tokens - 1), channel]

        before = [_load(new(j - (width - 1)), inside & ~is_row) for j in range(width - 1)]
        inputs = [jnp.where(is_row, *pair) for pair in zip(history, before, strict=True)]
        inputs += [_load(new(t), inside & (~is_row | (t < width - 1))) for t in range(block)]
        taps, bias = _parameters(refs, channel, inside)
        for t, past_first in enumerate(is_past_first()):
            token = first + t
            y = _output(inputs[t : t + width], taps, bias, activate)
            of_row = is_row & (token < end) & (t < width - 1)
            live = inside & (of_row | ~is_row & (past_first | (token >= total)) & (token < tokens))
            y = jnp.where(token < total, y, 0.0).astype(refs.x.dtype)
            for ref, index, inside_part in pt.parts(refs, options.parts, channel):
                pt.store(ref.at[token, index], y, mask=live & inside_part)


def causal_conv1d_prefill(
    x: jax.Array, pool: jax.Array, weight: jax.Array, bias: jax.Array | None, rows: Rows, *, options: Options, run: Run
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Launch the prefill kernel. See api.py."""
    config = run.config or default_prefill_config(options.layout)
    block = max(config.block, weight.shape[0] - 1)
    results = pt.call(
        functools.partial(_prefill_kernel, tile=config.tile, block=block, options=options, interpret=run.interpret),
        name="causal_conv1d_prefill",
        grid=(-(-weight.shape[1] // config.tile), rows.num_rows + -(-x.shape[0] // block)),
        inputs=dict(x=x, layer=rows.layer, weight=weight, bias=bias) | rows.window_inputs | rows.checkpoint_inputs,
        outputs=pt.part_shapes(x.shape[0], options.parts, x.dtype),
        updates=dict(pool=pool),
        num_warps=config.num_warps,
        interpret=run.interpret,
    )
    pool = results.pop("pool")
    return tuple(results.values()), pool
