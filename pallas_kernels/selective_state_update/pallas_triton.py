"""selective_state_update as a Pallas kernel. The state rows of a program are channels of one head."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels import _state_rows
from pallas_kernels._math import silu
from pallas_kernels._pallas_triton import Lanes, Refs
from pallas_kernels._state_space import StateSpace, step_size
from pallas_kernels.dispatch import Run
from pallas_kernels.rows import Rows
from pallas_kernels.selective_state_update.config import default_config


def _recurrence(
    head: jax.Array, tiles: list[Lanes], columns: Lanes, *, refs: Refs, dt_softplus: bool
) -> _state_rows.Recurrence:
    """Make the recurrence of one head, for `_state_rows.advance_rows`. It reads the arrays of `StateSpace`."""
    column, column_inside = columns
    group = head // (refs.pool.shape[2] // refs.B.shape[1])

    def vector(ref, token):
        """Load B or C of the head's group, folded into segments."""
        return pt.load(ref.at[token, group, column], mask=column_inside, other=0.0)

    def channels(ref, *at):
        """Load for each tile a value per channel, or the head's one value. Return [] if there is no such array."""
        if ref is None:
            return []
        if len(ref.shape) == len(at) + 1:
            return [ref[(*at, head)]] * len(tiles)
        return [pt.load(ref.at[(*at, head, channel)], mask=inside, other=0.0) for channel, inside in tiles]

    def rates():
        """Load A for each tile, in units of log 2, because exp2 is the fastest exponential."""
        if len(refs.A.shape) == 1:
            return [refs.A[head].astype(jnp.float32) * pt.LOG2_E] * len(tiles)

        def load(channel, inside):
            at = refs.A.at[head, channel[None, :, None], column[:, None, :]]
            mask = column_inside[:, None, :] & inside[None, :, None]
            return pt.load(at, mask=mask, other=0.0).astype(jnp.float32) * pt.LOG2_E

        return [load(*tile) for tile in tiles]

    def take(token):
        z = channels(refs.z, token)
        return vector(refs.B, token), vector(refs.C, token), channels(refs.x, token), channels(refs.dt, token), z

    def parameters():
        return rates(), channels(refs.D), channels(refs.dt_bias)

    def fold(per_channel):
        """Shape a value per channel to broadcast against a tile of the state."""
        return per_channel if per_channel.ndim == 0 else per_channel[None, :, None]

    def advance(parameters, inputs, states):
        A, D, dt_bias = parameters
        B, C, xs, dts, zs = jax.tree.map(lambda value: value.astype(jnp.float32), inputs)
        B, C = B[:, None, :], C[:, None, :]
        for i, state in enumerate(states):
            x, dt = xs[i], step_size(dts[i], dt_bias[i] if dt_bias else None, dt_softplus)
            state = state * jnp.exp2(A[i] * fold(dt)) + fold(dt * x) * B
            y = pt.row_sum(state * C)
            y = y + D[i].astype(jnp.float32) * x if D else y
            yield (y * silu(zs[i]) if zs else y), state

    return _state_rows.Recurrence(take, parameters, advance)


def selective_state_update(
    inputs: StateSpace, pool: jax.Array, rows: Rows, *, dt_softplus: bool, run: Run
) -> tuple[jax.Array, jax.Array]:
    """Launch the kernel. See api.py."""
    config = run.config or default_config(rows.write.shape[1], pool.shape[-1], pool.dtype.itemsize)
    out = jax.ShapeDtypeStruct(inputs.x.shape, inputs.x.dtype)

    def kernel(refs):
        recurrence = functools.partial(_recurrence, refs=refs, dt_softplus=dt_softplus)
        _state_rows.advance_rows(refs, config.block_dim, config.tile_dim, config.segment, recurrence)

    results = pt.call(
        kernel,
        name="selective_state_update",
        grid=_state_rows.grid(out, rows.num_rows, config.block_dim),
        inputs=inputs._asdict() | rows.update_inputs,
        outputs={"out": out},
        updates={"pool": pool},
        num_warps=config.num_warps,
        interpret=run.interpret,
    )
    return results["out"], results["pool"]
