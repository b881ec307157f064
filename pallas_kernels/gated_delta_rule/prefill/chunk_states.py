"""The third prefill kernel: carries each row's state through its chunks, and writes outputs, states and checkpoints."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels._dot import Operand, as_terms, dot
from pallas_kernels._pallas_triton import Refs
from pallas_kernels._tiles import as_operand, iota, key_lanes, load_terms
from pallas_kernels.blocks import NULL_BLOCK, StateLayout
from pallas_kernels.gated_delta_rule.config import PrefillConfig


def states(refs: Refs, *, size: int, config: PrefillConfig, layout: StateLayout, interpret: bool) -> None:
    """Handle one row, value head and tile of value dims. The state is a tile [keys, values] in registers.

    Reads `v`, the rows, `solve`, `attention`, `decay`, and either `q`, `k` and `scales` or, if decays are per key channel,
    `q_before`, `k_before` and `k_after`. Updates `pool` and writes `out`. A chunk has up to `size` tokens.
    """
    tokens, value_heads, value_dim = refs.v.shape
    _, key_heads, key_dim = refs.k.shape
    value_tile, head, row = pt.program_id(0), pt.program_id(1), pt.program_id(2)
    # Everything that addresses depend on is loaded here, before any branch.
    rows = refs.read_block.shape[0]
    begin, end, total = refs.query_start_loc[row], refs.query_start_loc[row + 1], refs.query_start_loc[rows]
    layer, read, write, first = refs.layer[...], refs.read_block[row], refs.write_block[row], refs.first_chunk[row]
    key_head = head // (value_heads // key_heads)
    value, value_inside = pt.lanes(value_tile, config.tile_value, value_dim)
    key, key_inside = pt.lanes(0, key_lanes(key_dim), key_dim)
    lane = iota((size,), 0)
    checkpoints = 0 if refs.checkpoint_block is None else refs.checkpoint_block.shape[1]
    exact = refs.k.dtype == jnp.bfloat16
    product = functools.partial(dot, interpret=interpret)

    def split(x: jax.Array) -> Operand:
        return as_terms(x, config.pieces) if exact else x

    def rounded(x: Operand) -> Operand:
        """Return the operand in one term, for products that only outputs depend on."""
        if not exact:
            return x
        return x[0] if isinstance(x, tuple) else x.astype(jnp.bfloat16)

    def tile_of(block: jax.Array):
        """Return the program's tile of a block's state, and which of its elements exist."""
        indices = value[None, :], key[:, None]
        at = refs.pool.at[(layer, block, head, *(indices if layout == "VK" else indices[::-1]))]
        return at, value_inside[None, :] & key_inside[:, None] & (block != NULL_BLOCK)

    @pt.when(end > begin)
    def _():
        # The number of tokens before the row's first one since the last position at which chunks are cut. If the row
        # has only one chunk, any value that keeps it in one chunk will do.
        lead = size - (refs.cu_chunk_seqlens[first + 1] - begin)

        def advance(n, state):
            """Run chunk n of the row and return the new state."""
            chunk = first + n
            token = begin + jnp.maximum(n * size - lead, 0) + lane
            inside = token < jnp.minimum(begin + (n + 1) * size - lead, end)

            def square(ref):
                return load_terms(ref, head, chunk, lane[:, None], lane[None, :])

            # Values that no product takes are loaded first, because the compiler prefetches only operands of products.
            if refs.scales is None:
                mask = jnp.broadcast_to(key_inside[None, :], (size, key.shape[0]))

                def keys(ref):
                    return load_terms(ref, head, chunk, lane[:, None], key[None, :], mask=mask)

                decay = pt.load(refs.decay.at[head, chunk, key], mask=key_inside, other=0.0)[:, None]
                q_before, k_before, k_after = keys(refs.q_before), keys(refs.k_before), keys(refs.k_after)
                of_query = of_key = to_end = 1.0
            else:
                mask = inside[:, None] & key_inside[None, :]

                def keys(ref):
                    return as_operand(pt.load(ref.at[token[:, None], key_head, key[None, :]], mask=mask, other=0.0))

                def scale(kind):
                    return pt.load(refs.scales.at[jnp.int32(kind), head, chunk, lane])[:, None]

                of_key, of_query, to_end, decay = scale(0), scale(1), scale(2), refs.decay[head, chunk]
                q_before, k_before = keys(refs.q), keys(refs.k)
                k_after = k_before
            at, mask = (token[:, None], head, value[None, :]), inside[:, None] & value_inside[None, :]
            v = pt.load(refs.v.at[at], mask=mask, other=0.0).astype(jnp.float32)
            solve, attention = square(refs.solve), square(refs.attention)

            before = split(state)
            added = product(solve, split(v - of_key * product(k_before, before)))
            out = of_query * product(q_before, rounded(before)) + product(attention, rounded(added))
            pt.store(refs.out.at[at], out.astype(refs.out.dtype), mask=mask)
            return decay * state + product(k_after, split(to_end * added), contract=(0, 0))

        def segment(n, carry):
            """Run the chunks up to checkpoint n and store its state. The final state is the last checkpoint."""
            chunk, state = carry
            offset, block = end - begin, write
            if checkpoints:
                final, at = n == checkpoints, jnp.minimum(n, checkpoints - 1)
                offset = jnp.where(final, offset, jnp.minimum(refs.checkpoint_offset[row, at], offset))
                block = jnp.where(final, block, refs.checkpoint_block[row, at])
            stop = jnp.maximum(chunk, (lead + offset + size - 1) // size)
            state = jax.lax.fori_loop(chunk, stop, advance, state)
            at, mask = tile_of(block)
            pt.store(at, state.astype(refs.pool.dtype), mask=mask & (offset > 0))
            return stop, state

        at, mask = tile_of(read)
        state = pt.load(at, mask=mask, other=0.0).astype(jnp.float32)
        jax.lax.fori_loop(0, checkpoints + 1, segment, (jnp.int32(0), state))

    def clear(n, _):
        """Write zeros to the n-th tile of padding tokens that this row clears."""
        token = total + (row + n * rows) * size + lane
        mask = (token < tokens)[:, None] & value_inside[None, :]
        zeros = jnp.zeros((size, config.tile_value), refs.out.dtype)
        pt.store(refs.out.at[token[:, None], head, value[None, :]], zeros, mask=mask)

    # The tokens after the last row are divided among the rows.
    jax.lax.fori_loop(0, ((tokens - total + size - 1) // size - row + rows - 1) // rows, clear, None)
