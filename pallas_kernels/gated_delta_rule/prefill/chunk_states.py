"""The third prefill kernel: carries each row's state through its chunks, and writes outputs, states and checkpoints."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels._dot import Operand, as_terms, dot
from pallas_kernels._pallas_triton import Refs
from pallas_kernels._tiles import as_operand, iota, key_lanes, load_terms
from pallas_kernels.blocks import NULL_BLOCK, StateLayout
from pallas_kernels.gated_delta_rule.config import PrefillConfig


class _Program:
    """The work of a program: one row, value head and tile of value dims. The state is a tile [keys, values] in registers."""

    def __init__(self, refs: Refs, size: int, config: PrefillConfig, layout: StateLayout, interpret: bool) -> None:
        self.refs, self.size, self.config, self.layout = refs, size, config, layout
        value_tile, self.head, self.row = (pt.program_id(axis) for axis in range(3))
        # Everything that addresses depend on is loaded here, before any branch.
        row, starts, self.rows = self.row, refs.query_start_loc, refs.read_block.shape[0]
        self.begin, self.end, self.total = starts[row], starts[row + 1], starts[self.rows]
        self.layer, self.read, self.write = refs.layer[...], refs.read_block[row], refs.write_block[row]
        self.first = refs.first_chunk[row]
        self.key_head = self.head // (refs.v.shape[1] // refs.k.shape[1])
        self.value, self.value_inside = pt.lanes(value_tile, config.tile_value, refs.v.shape[2])
        self.key, self.key_inside = pt.lanes(0, key_lanes(refs.k.shape[2]), refs.k.shape[2])
        self.lane = iota((size,), 0)
        self.exact = refs.k.dtype == jnp.bfloat16
        self.product = functools.partial(dot, interpret=interpret)

    def run(self) -> None:
        """Run the row, and store zeros in outputs of padding tokens, which are divided among the rows."""
        pt.when(self.end > self.begin)(self.run_chunks)
        tiles = (self.refs.v.shape[0] - self.total + self.size - 1) // self.size
        jax.lax.fori_loop(0, (tiles - self.row + self.rows - 1) // self.rows, self.clear, None)

    def clear(self, n: jax.Array, _: None) -> None:
        """Write zeros to the n-th tile of padding tokens that this row clears."""
        token = self.total + (self.row + n * self.rows) * self.size + self.lane
        mask = (token < self.refs.v.shape[0])[:, None] & self.value_inside[None, :]
        zeros = jnp.zeros((self.size, self.config.tile_value), self.refs.out.dtype)
        pt.store(self.refs.out.at[token[:, None], self.head, self.value[None, :]], zeros, mask=mask)

    def run_chunks(self) -> None:
        """Run all chunks, and store the states at checkpoints and at the row's end."""
        refs, size = self.refs, self.size
        checkpoints = 0 if refs.checkpoint_block is None else refs.checkpoint_block.shape[1]
        # The number of tokens before the row's first one since the last position at which chunks are cut. If the row
        # has only one chunk, any value that keeps it in one chunk will do.
        lead = size - (refs.cu_chunk_seqlens[self.first + 1] - self.begin)
        advance = functools.partial(self.advance, lead)

        def segment(n, carry):
            """Run the chunks up to checkpoint n and store its state. The final state is the last checkpoint."""
            chunk, state = carry
            offset, block = self.end - self.begin, self.write
            if checkpoints:
                final, at = n == checkpoints, jnp.minimum(n, checkpoints - 1)
                offset = jnp.where(final, offset, jnp.minimum(refs.checkpoint_offset[self.row, at], offset))
                block = jnp.where(final, block, refs.checkpoint_block[self.row, at])
            stop = jnp.maximum(chunk, (lead + offset + size - 1) // size)
            state = jax.lax.fori_loop(chunk, stop, advance, state)
            at, mask = self.tile_of(block)
            pt.store(at, state.astype(refs.pool.dtype), mask=mask & (offset > 0))
            return stop, state

        at, mask = self.tile_of(self.read)
        state = pt.load(at, mask=mask, other=0.0).astype(jnp.float32)
        jax.lax.fori_loop(0, checkpoints + 1, segment, (jnp.int32(0), state))

    def split(self, x: jax.Array) -> Operand:
        """Return the operand in terms, for products that the state depends on."""
        return as_terms(x, self.config.pieces) if self.exact else x

    def rounded(self, x: Operand) -> Operand:
        """Return the operand in one term, for products that only outputs depend on."""
        if not self.exact:
            return x
        return x[0] if isinstance(x, tuple) else x.astype(jnp.bfloat16)

    def tile_of(self, block: jax.Array) -> tuple[Any, jax.Array]:
        """Return the program's tile of a block's state, and which of its elements exist."""
        indices = self.value[None, :], self.key[:, None]
        indices = indices if self.layout == "VK" else indices[::-1]
        at = self.refs.pool.at[(self.layer, block, self.head, *indices)]
        return at, self.value_inside[None, :] & self.key_inside[:, None] & (block != NULL_BLOCK)

    def advance(self, lead: jax.Array, n: jax.Array, state: jax.Array) -> jax.Array:
        """Run chunk n of the row and return the new state."""
        refs, head, size, split, product = self.refs, self.head, self.size, self.split, self.product
        chunk = self.first + n
        token = self.begin + jnp.maximum(n * size - lead, 0) + self.lane
        inside = token < jnp.minimum(self.begin + (n + 1) * size - lead, self.end)
        # Values that no product takes are loaded first, because the compiler prefetches only operands of products.
        if refs.scales is None:
            q_before, k_before, k_after, decay = self.load_decayed(chunk)
            of_query = of_key = to_end = 1.0
        else:
            mask = inside[:, None] & self.key_inside[None, :]

            def keys(ref):
                at = ref.at[token[:, None], self.key_head, self.key[None, :]]
                return as_operand(pt.load(at, mask=mask, other=0.0))

            def scale(kind):
                return pt.load(refs.scales.at[jnp.int32(kind), head, chunk, self.lane])[:, None]

            of_key, of_query, to_end, decay = scale(0), scale(1), scale(2), refs.decay[head, chunk]
            q_before, k_before = keys(refs.q), keys(refs.k)
            k_after = k_before
        at, mask = (token[:, None], head, self.value[None, :]), inside[:, None] & self.value_inside[None, :]
        v = pt.load(refs.v.at[at], mask=mask, other=0.0).astype(jnp.float32)
        square = lambda ref: load_terms(ref, head, chunk, self.lane[:, None], self.lane[None, :])
        solve, attention = square(refs.solve), square(refs.attention)

        before = split(state)
        added = product(solve, split(v - of_key * product(k_before, before)))
        out = of_query * product(q_before, self.rounded(before)) + product(attention, self.rounded(added))
        pt.store(refs.out.at[at], out.astype(refs.out.dtype), mask=mask)
        return decay * state + product(k_after, split(to_end * added), contract=(0, 0))

    def load_decayed(self, chunk: jax.Array) -> tuple[Operand, Operand, Operand, jax.Array]:
        """Load a chunk's decayed queries and keys, and the decay over it per key channel."""
        refs = self.refs
        mask = jnp.broadcast_to(self.key_inside[None, :], (self.size, self.key.shape[0]))
        decay = pt.load(refs.decay.at[self.head, chunk, self.key], mask=self.key_inside, other=0.0)[:, None]
        load = lambda ref: load_terms(ref, self.head, chunk, self.lane[:, None], self.key[None, :], mask=mask)
        return load(refs.q_before), load(refs.k_before), load(refs.k_after), decay


def states(refs: Refs, *, size: int, config: PrefillConfig, layout: StateLayout, interpret: bool) -> None:
    """Handle one row, value head and tile of value dims.

    Reads `v`, the rows, `solve`, `attention`, `decay`, and either `q`, `k` and `scales` or, if decays are per key channel,
    `q_before`, `k_before` and `k_after`. Updates `pool` and writes `out`. A chunk has up to `size` tokens.
    """
    _Program(refs, size, config, layout, interpret).run()
