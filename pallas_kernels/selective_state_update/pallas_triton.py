"""selective_state_update as a Pallas kernel: the rows of a program's block are a head's channels."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels import _state_rows
from pallas_kernels._math import silu, softplus
from pallas_kernels.selective_state_update.config import Config, default_config


def _recurrence(head, tiles, columns, *, refs, dt_softplus):
    column, column_inside = columns
    group = head // (refs.pool.shape[2] // refs.B.shape[1])

    def vector(ref, token):
        """States of one group, folded."""
        return pt.load(ref.at[token, group, column], mask=column_inside, other=0.0)

    def channels(ref, *at):
        """Per tile: a number per channel, or the head's one number; nothing where there is no such array."""
        if ref is None:
            return []
        if len(ref.shape) == len(at) + 1:
            return [ref[(*at, head)]] * len(tiles)
        return [pt.load(ref.at[(*at, head, channel)], mask=inside, other=0.0) for channel, inside in tiles]

    def rates():
        """Per tile: A in units of log 2, as exp2 is the faster exponential."""
        if len(refs.A.shape) == 1:
            return [refs.A[head].astype(jnp.float32) * pt.LOG2_E] * len(tiles)
        at = lambda channel: refs.A.at[head, channel[None, :, None], column[:, None, :]]
        mask = lambda inside: column_inside[:, None, :] & inside[None, :, None]
        return [
            pt.load(at(channel), mask=mask(inside), other=0.0).astype(jnp.float32) * pt.LOG2_E
            for channel, inside in tiles
        ]

    def take(token):
        z = channels(refs.z, token)
        return vector(refs.B, token), vector(refs.C, token), channels(refs.x, token), channels(refs.dt, token), z

    def parameters():
        return rates(), channels(refs.D), channels(refs.dt_bias)

    def fold(per_channel):
        return per_channel if per_channel.ndim == 0 else per_channel[None, :, None]

    def advance(parameters, inputs, states):
        A, D, dt_bias = parameters
        B, C, xs, dts, zs = jax.tree.map(lambda value: value.astype(jnp.float32), inputs)
        B, C = B[:, None, :], C[:, None, :]
        for i, state in enumerate(states):
            x, dt = xs[i], dts[i] + dt_bias[i].astype(jnp.float32) if dt_bias else dts[i]
            dt = softplus(dt) if dt_softplus else dt
            state = state * jnp.exp2(A[i] * fold(dt)) + fold(dt * x) * B
            y = pt.row_sum(state * C)
            y = y + D[i].astype(jnp.float32) * x if D else y
            yield (y * silu(zs[i]) if zs else y), state

    return _state_rows.Recurrence(take, parameters, advance)


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
    config = config or default_config(write_blocks.shape[1], pool.shape[-1], pool.dtype.itemsize)
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)

    def kernel(refs):
        recurrence = functools.partial(_recurrence, refs=refs, dt_softplus=dt_softplus)
        _state_rows.advance_rows(refs, config.block_dim, config.tile_dim, config.segment, recurrence)

    inputs = dict(x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, layer=layer)
    results = pt.call(
        kernel,
        name="selective_state_update",
        grid=_state_rows.grid(out, read_block.shape[0], config.block_dim),
        inputs=inputs | dict(query_start_loc=query_start_loc, read_block=read_block, write_blocks=write_blocks),
        outputs={"out": out},
        updates={"pool": pool},
        num_warps=config.num_warps,
        interpret=interpret,
    )
    return results["out"], results["pool"]
