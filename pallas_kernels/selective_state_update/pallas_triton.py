"""selective_state_update as a Pallas kernel: one program per (block of channels, head, row of the batch).

Programs of a row share B and C but own disjoint rows of the state, so each may overwrite what it has read.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels._math import silu, softplus
from pallas_kernels._pool import NULL_BLOCK
from pallas_kernels.selective_state_update.config import Config, default_config

_LOG2_E = 1.4426950408889634


def _update_kernel(refs, *, config, dt_softplus):
    tokens, rows, window = refs.x.shape[0], refs.read_block.shape[0], refs.write_blocks.shape[1]
    _, _, heads, head_dim, state_dim = refs.pool.shape
    block, head, program = pt.program_id(0), pt.program_id(1), pt.program_id(2)
    # All that addresses depend on is loaded here, ahead of any branch: one trip to memory instead of one after another.
    row = jnp.minimum(program, rows - 1)
    start, end, total = refs.query_start_loc[row], refs.query_start_loc[row + 1], refs.query_start_loc[rows]
    layer, read, first_write = refs.layer[...], refs.read_block[row], refs.write_blocks[row, 0]

    group = head // (heads // refs.B.shape[1])
    column, column_inside = pt.segments(state_dim, min(config.segment, pt.power_of_two(state_dim)))
    num_tiles = config.block_dim // config.tile_dim
    tiles = [pt.lanes(block * num_tiles + i, config.tile_dim, head_dim) for i in range(num_tiles)]

    def states(block):
        for channel, inside in tiles:
            at = refs.pool.at[layer, block, head, channel[None, :, None], column[:, None, :]]
            yield at, column_inside[:, None, :] & inside[None, :, None] & (block != NULL_BLOCK)

    def vector(ref, token):
        """States of one group, folded."""
        return pt.load(ref.at[token, group, column], mask=column_inside, other=0.0)

    def channels(ref, *at):
        """Per tile: a number per channel, or the head's one number."""
        if len(ref.shape) == len(at) + 1:
            return [ref[(*at, head)]] * num_tiles
        return [pt.load(ref.at[(*at, head, channel)], mask=inside, other=0.0) for channel, inside in tiles]

    def rates():
        """Per tile: A in units of log 2, as exp2 is the faster exponential."""
        if len(refs.A.shape) == 1:
            return [refs.A[head].astype(jnp.float32) * _LOG2_E] * num_tiles
        at = lambda channel: refs.A.at[head, channel[None, :, None], column[:, None, :]]
        mask = lambda inside: column_inside[:, None, :] & inside[None, :, None]
        return [
            pt.load(at(channel), mask=mask(inside), other=0.0).astype(jnp.float32) * _LOG2_E
            for channel, inside in tiles
        ]

    def take(token):
        z = [] if refs.z is None else channels(refs.z, token)
        return vector(refs.B, token), vector(refs.C, token), channels(refs.x, token), channels(refs.dt, token), z

    def fold(per_channel):
        return per_channel if per_channel.ndim == 0 else per_channel[None, :, None]

    @pt.when((program < rows) & (end > start))
    def _():
        initial = [pt.load(at, mask=mask, other=0.0).astype(jnp.float32) for at, mask in states(read)]
        inputs = take(start)
        A = rates()
        D = [] if refs.D is None else channels(refs.D)
        dt_bias = [] if refs.dt_bias is None else channels(refs.dt_bias)

        def advance(token, write, tile_states, inputs):
            B, C, xs, dts, zs = jax.tree.map(lambda value: value.astype(jnp.float32), inputs)
            B, C = B[:, None, :], C[:, None, :]
            after = []
            for i, ((channel, inside), (at, mask)) in enumerate(zip(tiles, states(write), strict=True)):
                x, dt = xs[i], dts[i] + dt_bias[i].astype(jnp.float32) if dt_bias else dts[i]
                dt = softplus(dt) if dt_softplus else dt
                state = tile_states[i] * jnp.exp2(A[i] * fold(dt)) + fold(dt * x) * B
                y = pt.row_sum(state * C)
                y = y + D[i].astype(jnp.float32) * x if D else y
                y = y * silu(zs[i]) if zs else y
                pt.store(at, state.astype(refs.pool.dtype), mask=mask)
                pt.store(refs.out.at[token, head, channel], y.astype(refs.out.dtype), mask=inside)
                after.append(state)
            return after

        if window == 1:
            advance(start, first_write, initial, inputs)
            return

        def step(token, carry):
            # The next token's inputs are on their way while this one's are used.
            following = jnp.minimum(token + 1, end - 1)
            upcoming = (refs.write_blocks[row, following - start], take(following))
            write, inputs, tile_states = carry
            return *upcoming, advance(token, write, tile_states, inputs)

        jax.lax.fori_loop(start, end, step, (first_write, inputs, initial))

    # Tokens behind the last row have no row of their own.
    @pt.when((program < tokens) & (program >= total))
    def _():
        for channel, inside in tiles:
            pt.store(refs.out.at[program, head, channel], jnp.zeros(channel.shape, refs.out.dtype), mask=inside)


def selective_state_update(
    x,
    dt,
    A,
    B,
    C,
    pool,
    layer,
    query_start_loc,
    read_block,
    write_blocks,
    D,
    z,
    dt_bias,
    *,
    dt_softplus: bool,
    config: Config | None = None,
    interpret: bool = False,
):
    """See api.py."""
    rows = read_block.shape[0]
    _, _, heads, head_dim, state_dim = pool.shape
    config = config or default_config(rows, write_blocks.shape[1], state_dim, pool.dtype.itemsize)
    inputs = dict(x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, layer=layer)
    results = pt.call(
        functools.partial(_update_kernel, config=config, dt_softplus=dt_softplus),
        name="selective_state_update",
        grid=(-(-head_dim // config.block_dim), heads, max(x.shape[0], rows)),
        inputs=inputs | dict(query_start_loc=query_start_loc, read_block=read_block, write_blocks=write_blocks),
        outputs=dict(out=jax.ShapeDtypeStruct(x.shape, x.dtype)),
        updates=dict(pool=pool),
        num_warps=config.num_warps,
        interpret=interpret,
    )
    return results["out"], results["pool"]
