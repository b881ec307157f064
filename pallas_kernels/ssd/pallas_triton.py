"""ssd as a Pallas kernel.

One program per block of channels, head and row runs the row's chunks in order, with its state in registers.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels import device
from pallas_kernels._dot import as_terms, dot
from pallas_kernels._math import silu
from pallas_kernels._pallas_triton import Lanes, Refs
from pallas_kernels._state_space import StateSpace, step_size
from pallas_kernels.blocks import NULL_BLOCK
from pallas_kernels.dispatch import Run
from pallas_kernels.rows import Rows
from pallas_kernels.ssd.config import Config, default_config
from pallas_kernels.ssd.decays import sums_on_fixed_grid

# If x, B and C are bfloat16, the number of bfloat16 terms into which the float32 side of a product is split.
_STATE_TERMS = 2  # for products that read or update the state: a relative error of 2^-16
_WITHIN_TERMS = 1  # for products within a chunk, which only outputs depend on: 2^-8, the same as the outputs' rounding
_SHARED_BYTES = 200 * 1024  # the shared memory that a program may use, out of an H200's 227 KiB
_MAX_FRACTION = 1.25  # of a GPU's shared memory that `unsupported` may count: other tensor cores read registers too


def _operand_dtype(inputs: StateSpace | Refs) -> Any:
    """Return the dtype in which x, B and C are multiplied: bfloat16 if all of them are, and float32 otherwise.

    float16's range is too small for the terms of a state.
    """
    return jnp.bfloat16 if all(v.dtype == jnp.bfloat16 for v in (inputs.x, inputs.B, inputs.C)) else jnp.float32


def _config(inputs: StateSpace, rows: Rows, config: Config | None) -> Config:
    """Return `config` or the default, with a block that is no larger than head_dim needs."""
    _, heads, head_dim = inputs.x.shape
    itemsize, channels = jnp.dtype(_operand_dtype(inputs)).itemsize, rows.num_rows * heads * head_dim
    config = config or default_config(channels, inputs.B.shape[-1], rows.chunks.chunk_size, itemsize)
    return dataclasses.replace(config, block_dim=min(config.block_dim, _extent(head_dim)))


def unsupported(inputs: StateSpace, rows: Rows, config: Config | None) -> str | None:
    """Return the reason why the kernel cannot run these arguments, or None if it can."""
    chunk_size = rows.chunks.chunk_size
    if chunk_size not in (16, 32, 64, 128, 256):
        return f"chunk_size must be a power of two from 16 to 256, got {chunk_size}"
    if chunk_size > 64 and device.has_little_shared_memory():
        return f"chunk_size must be at most 64 on a GPU with little shared memory, got {chunk_size}"
    block_dim = _config(inputs, rows, config).block_dim
    state_dim, itemsize = _extent(inputs.B.shape[-1]), jnp.dtype(_operand_dtype(inputs)).itemsize
    # float32 operands of a product cannot be transposed, so they are in shared memory in both orders.
    tiles = 4 if itemsize == 4 else 2
    elements = chunk_size * (tiles * state_dim + chunk_size) + 2 * block_dim * (chunk_size + state_dim)
    needed, available = elements * itemsize, min(_SHARED_BYTES, int(_MAX_FRACTION * device.shared_bytes()))
    if needed > available:
        return (
            f"chunks of {chunk_size} tokens and states of {state_dim} need {needed} bytes of shared memory, "
            f"more than {available}"
        )
    return None


def _extent(extent: int) -> int:
    """Return the size of a tile's axis that holds a whole axis of an array. A product needs at least 16."""
    return max(pt.power_of_two(extent), 16)


class _Row:
    """The work of a program: the chunks of a row, for some channels of a head."""

    def __init__(
        self, refs: Refs, head: jax.Array, row: jax.Array, channels: Lanes, chunk_size: int, dt_softplus: bool
    ) -> None:
        self.refs, self.head, self.row = refs, head, row
        self.chunk_size, self.dt_softplus = chunk_size, dt_softplus
        _, _, heads, _, state_dim = refs.pool.shape
        self.group = head // (heads // refs.B.shape[1])
        self.start, self.end = refs.query_start_loc[row], refs.query_start_loc[row + 1]
        # Only a row's first chunk can start between two positions at which chunks are cut.
        self.first_length = refs.cu_chunk_seqlens[refs.first_chunk_indices[row] + 1] - self.start
        self.layer, self.dtype = refs.layer[...], _operand_dtype(refs)
        self.channel, self.channel_inside = channels
        self.column, self.column_inside = pt.lanes(0, _extent(state_dim), state_dim)
        self.lane, _ = pt.lanes(0, chunk_size, chunk_size)
        self.causal = self.lane[:, None] >= self.lane[None, :]
        self.rate = refs.A[head].astype(jnp.float32) * pt.LOG2_E
        self.dt_bias = None if refs.dt_bias is None else refs.dt_bias[head].astype(jnp.float32)
        if refs.D is None:
            self.skip = None
        elif len(refs.D.shape) == 1:
            self.skip = refs.D[head].astype(jnp.float32)
        else:
            skip = pt.load(refs.D.at[head, self.channel], mask=self.channel_inside, other=0.0)
            self.skip = skip.astype(jnp.float32)[None, :]

    def run(self, interpret: bool) -> None:
        """Run all chunks. Update `pool` and write `out`."""
        refs, advance = self.refs, functools.partial(self.advance, interpret)
        at, mask = self.tile_of(refs.read_block[self.row])
        carry = self.load_dt(0), pt.load(at, mask=mask, other=0.0).astype(jnp.float32)
        chunk, count = jnp.int32(0), self.chunks_up_to(self.end - self.start)

        def advance_to(stop, chunk, block, carry):
            """Run the chunks from `chunk` up to `stop` and store the state in `block`."""
            dt, state = jax.lax.fori_loop(chunk, stop, advance, carry)
            at, mask = self.tile_of(block)
            pt.store(at, state.astype(refs.pool.dtype), mask=mask)
            return dt, state

        if refs.checkpoint_offset is not None:

            def segment(n, carry):
                chunk, carry = carry
                # If there is no checkpoint to keep, the offset is undefined.
                stop = jnp.clip(self.chunks_up_to(refs.checkpoint_offset[self.row, n]), chunk, count)
                return stop, advance_to(stop, chunk, refs.checkpoint_block[self.row, n], carry)

            segments = jnp.int32(refs.checkpoint_offset.shape[1])
            chunk, carry = jax.lax.fori_loop(jnp.int32(0), segments, segment, (chunk, carry))
        advance_to(count, chunk, refs.write_block[self.row], carry)

    def chunks_up_to(self, length: jax.Array) -> jax.Array:
        """Return the number of chunks that hold the row's first `length` tokens."""
        return 1 + jax.lax.div(length - self.first_length + self.chunk_size - 1, jnp.int32(self.chunk_size))

    def tokens_of(self, chunk: Any) -> tuple[jax.Array, jax.Array]:
        """Return the packed tokens of a chunk, and which of them exist. After the row's last chunk none does."""
        token = self.start + jnp.maximum(self.first_length + (chunk - 1) * self.chunk_size, 0) + self.lane
        return token, token < jnp.minimum(self.start + self.first_length + chunk * self.chunk_size, self.end)

    def load_dt(self, chunk: Any) -> jax.Array:
        """Load the step sizes of a chunk."""
        token, live = self.tokens_of(chunk)
        return pt.load(self.refs.dt.at[token, self.head], mask=live, other=0.0)

    def tile_of(self, block: jax.Array) -> tuple[Any, jax.Array]:
        """Return the program's tile of a block's state, and which of its elements exist."""
        at = self.refs.pool.at[self.layer, block, self.head, self.channel[None, :], self.column[:, None]]
        return at, self.column_inside[:, None] & self.channel_inside[None, :] & (block != NULL_BLOCK)

    def split(self, tile: jax.Array, count: int) -> tuple[jax.Array, ...]:
        """Return the `count` terms in which a float32 tile is multiplied."""
        return as_terms(tile, count) if self.dtype == jnp.bfloat16 else (tile,)

    def advance(self, interpret: bool, chunk: jax.Array, carry: Any) -> Any:
        """Run a chunk. The carry has its step sizes and the state before it [state_dim, channels]."""
        refs, head, (raw_dt, state) = self.refs, self.head, carry
        token, live = self.tokens_of(chunk)
        # dt is too narrow to be copied asynchronously. The next chunk's is therefore loaded while this one's is used.
        upcoming = self.load_dt(chunk + 1)

        def tile(ref, at, index, inside):
            mask = live[:, None] & inside[None, :]
            return pt.load(ref.at[token[:, None], at, index[None, :]], mask=mask, other=0.0)

        x = tile(refs.x, head, self.channel, self.channel_inside)
        of_group = self.group, self.column, self.column_inside
        B, C = (tile(ref, *of_group).astype(self.dtype) for ref in (refs.B, refs.C))

        dt = jnp.where(live, step_size(raw_dt.astype(jnp.float32), self.dt_bias, self.dt_softplus), 0.0)
        whole, rest = sums_on_fixed_grid(self.rate * dt)
        last = self.lane == self.chunk_size - 1
        whole_end, rest_end = (jnp.sum(jnp.where(last, x, 0.0)) for x in (whole, rest))

        def decay(whole, rest):
            return jnp.exp2(whole + rest)

        between = (whole[:, None] - whole[None, :]) + (rest[:, None] - rest[None, :])
        between = pt.exp2(jnp.where(self.causal, between, -jnp.inf), interpret)
        within = between * dt[None, :] * dot(C, B.T, interpret=interpret)
        y = decay(whole, rest)[:, None] * dot(C, self.split(state, _STATE_TERMS), interpret=interpret)
        for term in reversed(self.split(within, _WITHIN_TERMS)):
            y = y + dot(term, x.astype(self.dtype), interpret=interpret)

        # The terms' products are added to the state one after the other, so that their sum needs no registers.
        decayed = (decay(whole_end - whole, rest_end - rest) * dt)[:, None] * x.astype(jnp.float32)
        state = decay(whole_end, rest_end) * state
        for term in reversed(self.split(decayed, _STATE_TERMS)):
            state = state + dot(B.T, term, interpret=interpret)

        y = y if self.skip is None else y + self.skip * x.astype(jnp.float32)
        if refs.z is not None:
            y = y * silu(tile(refs.z, head, self.channel, self.channel_inside).astype(jnp.float32))
        out = refs.out.at[token[:, None], head, self.channel[None, :]]
        pt.store(out, y.astype(refs.out.dtype), mask=live[:, None] & self.channel_inside[None, :])
        return upcoming, state


def ssd(inputs: StateSpace, pool: jax.Array, rows: Rows, *, dt_softplus: bool, run: Run) -> tuple[jax.Array, jax.Array]:
    """Launch the kernel. See api.py."""
    num_tokens, heads, head_dim = inputs.x.shape
    num_rows, chunks, chunk_size = rows.num_rows, rows.chunks, rows.chunks.chunk_size
    config = _config(inputs, rows, run.config)
    block_dim = config.block_dim

    def kernel(refs: Refs) -> None:
        dim_block, head, row = pt.program_id(0), pt.program_id(1), pt.program_id(2)
        channels = pt.lanes(dim_block, block_dim, head_dim)
        here = jnp.minimum(row, num_rows - 1)
        start, end = refs.query_start_loc[here], refs.query_start_loc[here + 1]

        @pt.when((row < num_rows) & (end > start))
        def _():
            _Row(refs, head, row, channels, chunk_size, dt_softplus).run(run.interpret)

        # One more row of programs writes zeros to the tokens after the last row.
        @pt.when(row == num_rows)
        def _():
            lane, _ = pt.lanes(0, chunk_size, chunk_size)
            zeros = jnp.zeros((chunk_size, block_dim), refs.out.dtype)
            tail = refs.query_start_loc[num_rows]

            def clear(tile, _):
                token = tail + tile * chunk_size + lane
                mask = (token < num_tokens)[:, None] & channels[1][None, :]
                pt.store(refs.out.at[token[:, None], head, channels[0][None, :]], zeros, mask=mask)

            tiles = jax.lax.div(num_tokens - tail + chunk_size - 1, jnp.int32(chunk_size))
            jax.lax.fori_loop(jnp.int32(0), tiles, clear, None)

    of_chunks = dict(cu_chunk_seqlens=chunks.cu_chunk_seqlens, first_chunk_indices=chunks.first_chunk_indices)
    results = pt.call(
        kernel,
        name="ssd",
        # The programs of a group are next to each other in the grid, because they read the same B and C.
        grid=(-(-head_dim // block_dim), heads, num_rows + 1),
        inputs=inputs._asdict() | rows.prefill_inputs | of_chunks,
        outputs={"out": jax.ShapeDtypeStruct(inputs.x.shape, inputs.x.dtype)},
        updates={"pool": pool},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=run.interpret,
    )
    return results["out"], results["pool"]
