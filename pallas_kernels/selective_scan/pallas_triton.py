"""selective_scan as a Pallas kernel: one program per (block of a head's channels, head, batch row).

The programs of a batch row own disjoint channels of its state, so each may overwrite what it has read.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels._math import softplus
from pallas_kernels.blocks import NULL_BLOCK
from pallas_kernels.selective_scan.config import Config, default_config


def _kernel(refs, *, block_dim, segment, unroll, dt_softplus, interpret):
    tokens, _, head_dim = refs.x.shape
    rows, (_, _, heads, _, state_dim) = refs.read_block.shape[0], refs.pool.shape
    head, row = pt.program_id(1), pt.program_id(2)
    # All that addresses depend on is loaded here, ahead of any branch: one trip to memory instead of one after another.
    start, end, total = refs.query_start_loc[row], refs.query_start_loc[row + 1], refs.query_start_loc[rows]
    layer, read, write = refs.layer[...], refs.read_block[row], refs.write_block[row]
    checkpoints = 0 if refs.checkpoint_block is None else refs.checkpoint_block.shape[1]

    channel, inside = pt.lanes(pt.program_id(0), block_dim, head_dim)
    column, column_inside = pt.segments(state_dim, min(segment, pt.power_of_two(state_dim)))
    state_inside = column_inside[:, None, :] & inside[None, :, None]
    group = head // (heads // refs.B.shape[1])

    def channels(ref, *at):
        return None if ref is None else pt.load(ref.at[(*at, head, channel)], mask=inside, other=0.0)

    def states(ref, *at):
        return ref.at[(*at, head, channel[None, :, None], column[:, None, :])]

    def take(token):
        """A token's inputs; behind the row's last token, that one's again."""
        token = jnp.minimum(token, end - 1)
        vectors = [pt.load(v.at[token, group, column], mask=column_inside, other=0.0) for v in (refs.B, refs.C)]
        return vectors, [channels(v, token) for v in (refs.x, refs.dt, refs.z)]

    @pt.when(end > start)
    def _():
        mask = state_inside & (read != NULL_BLOCK)
        initial = pt.load(states(refs.pool, layer, read), mask=mask, other=0.0).astype(jnp.float32)
        # In units of log 2, as exp2 is the faster exponential.
        rate = pt.load(states(refs.A), mask=state_inside, other=0.0).astype(jnp.float32) * pt.LOG2_E
        D, dt_bias = channels(refs.D), channels(refs.dt_bias)

        def advance(state, inputs, live):
            (B, C), (x, dt, z) = jax.tree.map(lambda value: value.astype(jnp.float32), inputs)
            dt = dt if dt_bias is None else dt + dt_bias.astype(jnp.float32)
            dt = softplus(dt) if dt_softplus else dt
            # A step of size 0 leaves the state as it is, to the bit: the loop needs no second body for what is left over.
            dt = jnp.where(live, dt, 0.0)
            state = state * pt.exp2(rate * dt[None, :, None], interpret) + (dt * x)[None, :, None] * B[:, None, :]
            y = pt.row_sum(state * C[:, None, :])
            y = y if D is None else y + D.astype(jnp.float32) * x
            return state, y if z is None else y * pt.silu(z, interpret)

        def run(begin, stop, state):
            """Tokens `begin` to `stop`, `unroll` in a turn."""

            def turn(i, carry):
                state, inputs = carry
                upcoming = []
                for t, given in enumerate(inputs):
                    token = begin + i * unroll + t
                    state, y = advance(state, given, token < stop)
                    out = y.astype(refs.out.dtype)
                    pt.store(refs.out.at[token, head, channel], out, mask=inside & (token < stop))
                    # On its way while the others of the turn are used, in the registers of the one that was.
                    upcoming.append(take(token + unroll))
                return state, upcoming

            turns = (stop - begin + unroll - 1) // unroll
            return jax.lax.fori_loop(jnp.int32(0), turns, turn, (state, [take(begin + t) for t in range(unroll)]))[0]

        def part(n, carry):
            """Up to a checkpoint, or to the row's end: the final state is the checkpoint there."""
            begin, state = carry
            offset, block = end - start, write
            if checkpoints:
                last, at = n == checkpoints, jnp.minimum(n, checkpoints - 1)
                offset = jnp.where(last, offset, refs.checkpoint_offset[row, at])
                block = jnp.where(last, block, refs.checkpoint_block[row, at])
                offset = jnp.where(last | (block != NULL_BLOCK), offset, begin - start)
            state = run(begin, start + offset, state)
            mask = state_inside & (block != NULL_BLOCK)
            pt.store(states(refs.pool, layer, block), state.astype(refs.pool.dtype), mask=mask)
            return start + offset, state

        jax.lax.fori_loop(jnp.int32(0), jnp.int32(checkpoints + 1), part, (start, initial))

    def zero(n, _):
        token = total + row + n * rows
        pt.store(refs.out.at[token, head, channel], jnp.zeros(channel.shape, refs.out.dtype), mask=inside)
        return _

    # Tokens behind the last row, dealt out to all rows.
    jax.lax.fori_loop(jnp.int32(0), (tokens - total - row + rows - 1) // rows, zero, None)


def selective_scan(
    x,
    dt,
    A,
    B,
    C,
    pool,
    layer,
    query_start_loc,
    read_block,
    write_block,
    checkpoint_offset,
    checkpoint_block,
    D,
    z,
    dt_bias,
    *,
    dt_softplus: bool,
    config: Config | None = None,
    interpret: bool = False,
):
    """See api.py."""
    _, heads, head_dim = x.shape
    config = config or default_config(pool.shape[-1], pool.dtype.itemsize)
    cut = dict(block_dim=config.block_dim, segment=config.segment, unroll=config.unroll)
    # Every thread of the kernel uses them: converted once, here.
    B, C = B.astype(jnp.float32), C.astype(jnp.float32)
    inputs = dict(x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, layer=layer, query_start_loc=query_start_loc)
    inputs |= dict(read_block=read_block, write_block=write_block)
    inputs |= dict(checkpoint_offset=checkpoint_offset, checkpoint_block=checkpoint_block)
    results = pt.call(
        functools.partial(_kernel, **cut, dt_softplus=dt_softplus, interpret=interpret),
        name="selective_scan",
        grid=(-(-head_dim // config.block_dim), heads, read_block.shape[0]),
        inputs=inputs,
        outputs=dict(out=jax.ShapeDtypeStruct(x.shape, x.dtype)),
        updates=dict(pool=pool),
        num_warps=config.num_warps,
        interpret=interpret,
    )
    return results["out"], results["pool"]
