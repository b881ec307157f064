"""ssd on Hopper GPUs. A program has one head of one row, or 64 of its channels, and runs the row's chunks in order.

Its three warpgroups work on different chunks at the same time: one fetches the tokens of the chunks to come, one carries the
state from chunk to chunk, and one makes the outputs. What the step sizes alone decide comes from a launch before this one
(decays.py).
"""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_mosaic as pm
from pallas_kernels._dot import pieces
from pallas_kernels.blocks import NULL_BLOCK
from pallas_kernels.chunks import Chunks
from pallas_kernels.ssd.decays import Factors, decays

_TILE = 64  # the tokens of a chunk, and the channels and the columns of a state in one tile
_STAGES = 2  # chunks whose tokens are in shared memory
_STATES = 2  # states in shared memory
_PIECES = 2  # bfloat16 numbers that stand for a float32 one in products that states depend on
_AT = Factors()


def unsupported(x: jax.Array, B: jax.Array, C: jax.Array, pool: jax.Array, chunk_size: int) -> str | None:
    """Returns the reason why the kernel cannot run these arguments, or None if it can."""
    head_dim, state_dim = pool.shape[3:]
    if any(v.dtype != jnp.bfloat16 for v in (x, B, C)):
        return f"x, B and C must be bfloat16, got {x.dtype}, {B.dtype} and {C.dtype}"
    if chunk_size != _TILE:
        return f"chunk_size must be {_TILE}, got {chunk_size}"
    if head_dim % _TILE or state_dim not in (_TILE, 2 * _TILE):
        return f"head_dim must be a multiple of 64 and state_dim 64 or 128, got {head_dim} and {state_dim}"
    return None


def _kernel(names, *arrays, checkpoints: int):
    refs = SimpleNamespace(**(dict(z=None, skip=None) | dict(zip(names, arrays, strict=True))))
    head, row, part = (pm.axis_index(axis) for axis in ("head", "row", "part"))
    rows, heads, state_dim = refs.read_block.shape[0], refs.x.shape[1], refs.pool.shape[4]
    (token_rows, token_tiles), (out_rows, out_tile) = refs.tokens, refs.outputs
    columns = range(state_dim // _TILE)
    group = jax.lax.div(head, jnp.int32(heads // refs.B.shape[1]))
    dims = pm.slice_of(part * _TILE, _TILE)
    start, end, total = refs.query_start_loc[row], refs.query_start_loc[row + 1], refs.query_start_loc[rows]
    layer, read, first = refs.layer[0], refs.read_block[row], refs.first_chunk[row]
    first_length = refs.cu_chunk_seqlens[first + 1] - start

    def chunks_up_to(length):
        """Returns the number of chunks that hold the row's first `length` tokens."""
        return jnp.where(length > 0, 1 + jax.lax.div(length - first_length + _TILE - 1, jnp.int32(_TILE)), 0)

    count = chunks_up_to(end - start)

    def tokens_of(chunk):
        """Returns a chunk's first token and its number of tokens."""
        token = start + jnp.maximum(first_length + (chunk - 1) * _TILE, 0)
        return token, jnp.minimum(start + first_length + chunk * _TILE, end) - token

    def stage(chunk):
        return jax.lax.rem(chunk, jnp.int32(_STAGES))

    def fetch():
        pm.set_max_registers(40, action="decrease")

        def one(chunk, _):
            at = stage(chunk)

            @pm.when(chunk >= _STAGES)
            def _():
                pm.wait(refs.free.at[at])

            token, _ = tokens_of(chunk)
            here, full = pm.slice_of(token, _TILE), refs.full.at[at]
            pm.copy_in(refs.x.at[here, head, dims], token_rows["x"].at[at], full)
            if refs.z is not None:
                pm.copy_in(refs.z.at[here, head, dims], token_rows["z"].at[at], full)
            for name in ("B", "C"):
                for n in columns:
                    source = getattr(refs, name).at[here, group, pm.slice_of(n * _TILE, _TILE)]
                    pm.copy_in(source, token_rows[name].at[at, n], full)
            factors = refs.factors.at[head, first + chunk]
            pm.copy_in(factors.at[pm.slice_of(0, 4)], refs.per_row.at[at], full)
            pm.copy_in(factors.at[pm.slice_of(2, 4)], refs.per_column.at[at], full)

        jax.lax.fori_loop(0, count, one, None)

        @pm.loop(jnp.maximum(count - _STAGES, 0), count)
        def _(chunk):
            pm.wait(refs.free.at[stage(chunk)])

    def keep_live(tile, live):
        """Sets the rows of a tile in shared memory from `live` on to zero. They have tokens of other chunks."""
        tile[...] = jnp.where(pm.rows((_TILE, _TILE)) < live, pm.load(tile), pm.zeros((_TILE, _TILE), tile.dtype))

    def carry_state():
        pm.set_max_registers(232, action="increase")

        def place(block, n):
            return refs.pool.at[layer, block, head, dims, pm.slice_of(n * _TILE, _TILE)]

        def advance(chunk, state):
            at, out = stage(chunk), jax.lax.rem(chunk, jnp.int32(_STATES))

            @pm.when(chunk >= _STATES)
            def _():
                pm.wait(refs.state_free.at[out])

            for n in columns:
                for piece, value in enumerate(pieces(state[n], _PIECES)):
                    refs.states[out, piece, n] = value
            pm.commit()
            pm.arrive(refs.state_full.at[out])
            pm.wait(refs.full.at[at])
            _, live = tokens_of(chunk)
            B = token_tiles["B"].at[at]

            @pm.when(live < _TILE)
            def _():
                for n in columns:
                    keep_live(B.at[n], live)

            x = pm.load(token_tiles["x"].at[at]).astype(jnp.float32)
            weight = pm.along_rows(pm.load_per_row(refs.per_row.at[at, _AT.weight]), _TILE)
            weighted = jnp.where(pm.rows((_TILE, _TILE)) < live, weight * x, pm.zeros((_TILE, _TILE), jnp.float32))
            for piece, value in enumerate(pieces(weighted, _PIECES)):
                refs.weighted[piece] = value
            pm.commit()
            decay = refs.per_column[at, _AT.end - _AT.whole, 0]
            left = [refs.weighted.at[piece].T for piece in reversed(range(_PIECES))]
            added = pm.multiply_all((_TILE, _TILE), [[(a, B.at[n]) for a in left] for n in columns])
            pm.arrive(refs.free.at[at])
            return [decay * s + a for s, a in zip(state, added, strict=True)]

        def segment(n, carry):
            """Runs the chunks up to checkpoint n and stores its state. The final state is the last checkpoint."""
            chunk, state = carry
            offset, block = end - start, refs.write_block[row]
            if checkpoints:
                final, at = n == checkpoints, jnp.minimum(n, checkpoints - 1)
                offset = jnp.where(final, offset, jnp.minimum(refs.checkpoint_offset[row, at], offset))
                block = jnp.where(final, block, refs.checkpoint_block[row, at])
            stop = jnp.maximum(chunk, chunks_up_to(offset))
            state = jax.lax.fori_loop(chunk, stop, advance, state)

            @pm.when((block != NULL_BLOCK) & (offset > 0))
            def _():
                for n in columns:
                    place(block, n)[...] = state[n].astype(refs.pool.dtype)

            return stop, state

        def initial(n):
            load = lambda: pm.load_directly(place(read, n)).astype(jnp.float32)
            return jax.lax.cond(read != NULL_BLOCK, load, lambda: pm.zeros((_TILE, _TILE), jnp.float32))

        carry = jnp.int32(0), [initial(n) for n in columns]
        jax.lax.fori_loop(0, checkpoints + 1, segment, carry)

        @pm.loop(jnp.maximum(count - _STATES, 0), count)
        def _(chunk):
            pm.wait(refs.state_free.at[jax.lax.rem(chunk, jnp.int32(_STATES))])

    def store_tokens(token, live):
        """Stores the first `live` rows of the tile of outputs."""

        def store(first, size):
            source = out_rows.at[pm.slice_of(first, size)]
            pm.copy_out(source, refs.out.at[pm.slice_of(token + first, size), head, dims])

        pm.when(live == _TILE)(lambda: store(0, _TILE))
        for size in (32, 16, 8, 4, 2, 1):
            pm.when((live < _TILE) & (live & size != 0))(
                lambda size=size: store(jax.lax.div(live, jnp.int32(2 * size)) * (2 * size), size)
            )

    def write_outputs():
        pm.set_max_registers(232, action="increase")
        shape = _TILE, _TILE

        def one(chunk, _):
            at, state = stage(chunk), jax.lax.rem(chunk, jnp.int32(_STATES))
            token, live = tokens_of(chunk)
            pm.wait(refs.full.at[at])
            x, B, C = (token_tiles[name].at[at] for name in ("x", "B", "C"))
            (products,) = pm.multiply_all(shape, [[(C.at[n], B.at[n].T) for n in columns]])
            per_row = lambda n: pm.along_rows(pm.load_per_row(refs.per_row.at[at, n]), _TILE)
            per_column = lambda n: pm.along_columns(pm.load_per_column(refs.per_column.at[at, n - _AT.whole]), _TILE)
            between = (per_row(_AT.whole) - per_column(_AT.whole)) + (per_row(_AT.rest) - per_column(_AT.rest))
            causal = pm.rows(shape) >= pm.columns(shape)
            nothing = pm.zeros(shape, jnp.float32)
            within = jnp.where(causal, jnp.exp2(between) * per_column(_AT.dt) * products, nothing).astype(jnp.bfloat16)

            @pm.when(live < _TILE)
            def _():
                keep_live(x, live)
                pm.commit()

            pm.wait(refs.state_full.at[state])
            of_state = [(C.at[n], refs.states.at[state, p, n].T) for p in reversed(range(_PIECES)) for n in columns]
            (y,) = pm.multiply_all(shape, [of_state])
            pm.arrive(refs.state_free.at[state])
            y = per_row(_AT.from_state) * y + pm.multiply(shape, [lambda: ([within], x)])
            if refs.skip is not None:
                skip = pm.along_columns(pm.load_per_column(refs.skip_tile), _TILE)
                y = y + skip * pm.load(x).astype(jnp.float32)
            if refs.z is not None:
                z = pm.load(token_tiles["z"].at[at]).astype(jnp.float32)
                y = y * z / (1.0 + jnp.exp(-z))
            pm.arrive(refs.free.at[at])
            pm.wait_for_copies_out(0, wait_read_only=True)
            out_tile[...] = y.astype(jnp.bfloat16)
            pm.commit()
            store_tokens(token, live)

        if refs.skip is not None:
            pm.copy_in(refs.skip.at[head, dims], refs.skip_tile, refs.skip_full)
            pm.wait(refs.skip_full)
        jax.lax.fori_loop(0, count, one, None)
        pm.wait_for_copies_out(0, wait_read_only=True)
        clear()

    def clear():
        """Writes zeros to this row's share of the tokens after the last row."""
        tokens = refs.x.shape[0]
        tiles = jax.lax.div(tokens - total + _TILE - 1, jnp.int32(_TILE))

        @pm.when(tiles > row)
        def _():
            out_tile[...] = pm.zeros((_TILE, _TILE), jnp.bfloat16)
            pm.commit()

            @pm.loop(0, jax.lax.div(tiles - row + rows - 1, jnp.int32(rows)))
            def _(n):
                token = total + (row + n * rows) * _TILE
                store_tokens(token, jnp.minimum(tokens - token, _TILE))

            pm.wait_for_copies_out(0, wait_read_only=True)

    pm.run_by_warpgroup([fetch, carry_state, write_outputs], refs.done)


def ssd(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    query_start_loc: jax.Array,
    chunks: Chunks,
    read_block: jax.Array,
    write_block: jax.Array,
    checkpoint_offset: jax.Array | None,
    checkpoint_block: jax.Array | None,
    D: jax.Array | None,
    z: jax.Array | None,
    dt_bias: jax.Array | None,
    *,
    dt_softplus: bool,
) -> tuple[jax.Array, jax.Array]:
    """Launches both kernels. See api.py."""
    heads, head_dim, state_dim = pool.shape[2:]
    parts, rows = state_dim // _TILE, read_block.shape[0]
    checkpoints = 0 if checkpoint_offset is None else checkpoint_offset.shape[1]
    skip = None
    if D is not None:
        skip = jnp.broadcast_to(D.astype(jnp.float32).reshape(heads, -1), (heads, head_dim))
    given = dict(layer=layer.reshape(1), query_start_loc=query_start_loc, first_chunk=chunks.first_chunk_indices)
    given |= dict(cu_chunk_seqlens=chunks.cu_chunk_seqlens, read_block=read_block, write_block=write_block)
    if checkpoints:
        given |= dict(checkpoint_offset=checkpoint_offset, checkpoint_block=checkpoint_block)
    given |= dict(x=x, B=B, C=C, z=z, skip=skip)
    given |= dict(factors=decays(dt, A, dt_bias, chunks, dt_softplus=dt_softplus))
    of_stage = dict(x=(_STAGES,), B=(_STAGES, parts), C=(_STAGES, parts))
    copies = 1 + 2 * parts + 2
    if z is not None:
        of_stage["z"], copies = (_STAGES,), copies + 1
    scratch = dict(
        tokens=pm.token_tiles({name: (*shape, _TILE, _TILE) for name, shape in of_stage.items()}, x.dtype),
        per_row=pm.shared((_STAGES, 4, _TILE), jnp.float32),
        per_column=pm.shared((_STAGES, 4, _TILE), jnp.float32),
        states=pm.tiled(_STATES, _PIECES, parts, _TILE, _TILE, dtype=jnp.bfloat16),
        weighted=pm.tiled(_PIECES, _TILE, _TILE, dtype=jnp.bfloat16),
        outputs=pm.token_tiles((_TILE, _TILE), x.dtype),
        full=pm.Barrier(num_arrivals=copies, num_barriers=_STAGES),
        free=pm.Barrier(num_arrivals=2, num_barriers=_STAGES),
        state_full=pm.Barrier(num_barriers=_STATES),
        state_free=pm.Barrier(num_barriers=_STATES),
        done=pm.Barrier(num_arrivals=3),
    )
    if skip is not None:
        scratch |= dict(skip_tile=pm.shared((_TILE,), jnp.float32), skip_full=pm.Barrier())
    updated = jax.new_ref(pool)
    arrays = {name: array for name, array in given.items() if array is not None}
    out = pm.kernel(
        functools.partial(_kernel, [*arrays, "pool", "out", *scratch], checkpoints=checkpoints),
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(rows, head_dim // _TILE, heads),
        grid_names=("row", "part", "head"),
        num_threads=3,
        thread_name=pm.WARPGROUP,
        scratch_types=list(scratch.values()),
        kernel_name="ssd",
    )(*arrays.values(), updated)
    return out, jax.freeze(updated)
