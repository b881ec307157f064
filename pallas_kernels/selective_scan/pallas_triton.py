"""selective_scan as a Pallas kernel, with one program per block of a head's channels, head, and row of the batch.

The programs of one batch row own disjoint channels of its state, so each of them may overwrite the block that it has
read.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels._pallas_triton import Refs
from pallas_kernels._state_space import StateSpace, step_size
from pallas_kernels.blocks import NULL_BLOCK
from pallas_kernels.dispatch import Run
from pallas_kernels.rows import Rows
from pallas_kernels.selective_scan.config import default_config


def _kernel(refs: Refs, *, block_dim: int, segment: int, unroll: int, dt_softplus: bool, interpret: bool) -> None:
    """Run one row for a block of channels. Read all inputs of `call` below, update `pool` and write `out`."""
    tokens, _, head_dim = refs.x.shape
    rows, (_, _, heads, _, state_dim) = refs.read_block.shape[0], refs.pool.shape
    head, row = pt.program_id(1), pt.program_id(2)
    # Everything that addresses depend on is loaded here, before any branch, so that the loads share one trip to memory.
    start, end, total = refs.query_start_loc[row], refs.query_start_loc[row + 1], refs.query_start_loc[rows]
    layer, read, write = refs.layer[...], refs.read_block[row], refs.write_block[row]
    checkpoints = 0 if refs.checkpoint_block is None else refs.checkpoint_block.shape[1]

    channel, inside = pt.lanes(pt.program_id(0), block_dim, head_dim)
    column, column_inside = pt.segments(state_dim, min(segment, pt.power_of_two(state_dim)))
    state_inside = column_inside[:, None, :] & inside[None, :, None]
    group = head // (heads // refs.B.shape[1])

    def channels(ref, *at):
        """Load a value per channel, or None if there is no such array."""
        return None if ref is None else pt.load(ref.at[(*at, head, channel)], mask=inside, other=0.0)

    def states(ref, *at):
        return ref.at[(*at, head, channel[None, :, None], column[:, None, :])]

    def take(token, stop):
        """Load a token's inputs. From `stop` on, load the token before `stop` again: 0 times a later token may be NaN."""
        token = jnp.maximum(jnp.minimum(token, stop - 1), start)
        vectors = [pt.load(v.at[token, group, column], mask=column_inside, other=0.0) for v in (refs.B, refs.C)]
        return vectors, [channels(v, token) for v in (refs.x, refs.dt, refs.z)]

    @pt.when(end > start)
    def _():
        mask = state_inside & (read != NULL_BLOCK)
        initial = pt.load(states(refs.pool, layer, read), mask=mask, other=0.0).astype(jnp.float32)
        # Rates are in units of log 2, because exp2 is the fastest exponential.
        rate = pt.load(states(refs.A), mask=state_inside, other=0.0).astype(jnp.float32) * pt.LOG2_E
        D, dt_bias = channels(refs.D), channels(refs.dt_bias)

        def advance(state, inputs, live):
            (B, C), (x, dt, z) = jax.tree.map(lambda value: value.astype(jnp.float32), inputs)
            dt = step_size(dt, dt_bias, dt_softplus)
            # A step of size 0 leaves the state unchanged, except for the sign of a zero. The loop therefore needs no second
            # body for the tokens left over by its last full iteration.
            dt = jnp.where(live, dt, 0.0)
            state = state * pt.exp2(rate * dt[None, :, None], interpret) + (dt * x)[None, :, None] * B[:, None, :]
            y = pt.row_sum(state * C[:, None, :])
            y = y if D is None else y + D.astype(jnp.float32) * x
            return state, y if z is None else y * pt.silu(z, interpret)

        def run(begin, stop, state):
            """Run tokens `begin` to `stop`, `unroll` of them in each iteration of the loop, and return the new state."""

            def iteration(i, carry):
                state, inputs = carry
                upcoming = []
                for t, given in enumerate(inputs):
                    token = begin + i * unroll + t
                    state, y = advance(state, given, token < stop)
                    out = y.astype(refs.out.dtype)
                    pt.store(refs.out.at[token, head, channel], out, mask=inside & (token < stop))
                    # The next iteration's token is loaded into this token's registers while the other tokens of this one
                    # are used.
                    upcoming.append(take(token + unroll, stop))
                return state, upcoming

            iterations = (stop - begin + unroll - 1) // unroll
            first = [take(begin + t, stop) for t in range(unroll)]
            return jax.lax.fori_loop(jnp.int32(0), iterations, iteration, (state, first))[0]

        def up_to_checkpoint(n, carry):
            """Run the row up to checkpoint n and store the state. The final state is the last checkpoint."""
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

        jax.lax.fori_loop(jnp.int32(0), jnp.int32(checkpoints + 1), up_to_checkpoint, (start, initial))

    def zero(n, _):
        token = total + row + n * rows
        pt.store(refs.out.at[token, head, channel], jnp.zeros(channel.shape, refs.out.dtype), mask=inside)
        return _

    # The tokens after the last row are divided among the rows.
    jax.lax.fori_loop(jnp.int32(0), (tokens - total - row + rows - 1) // rows, zero, None)


def selective_scan(
    inputs: StateSpace, pool: jax.Array, rows: Rows, *, dt_softplus: bool, run: Run
) -> tuple[jax.Array, jax.Array]:
    """Launch the kernel. See api.py."""
    _, heads, head_dim = inputs.x.shape
    config = run.config or default_config(pool.shape[-1], pool.dtype.itemsize)
    cut = dict(block_dim=config.block_dim, segment=config.segment, unroll=config.unroll)
    # Every thread of the kernel uses B and C, so they are converted once, here.
    inputs = inputs._replace(B=inputs.B.astype(jnp.float32), C=inputs.C.astype(jnp.float32))
    results = pt.call(
        functools.partial(_kernel, **cut, dt_softplus=dt_softplus, interpret=run.interpret),
        name="selective_scan",
        grid=(-(-head_dim // config.block_dim), heads, rows.num_rows),
        inputs=inputs._asdict() | rows.prefill_inputs,
        outputs=dict(out=jax.ShapeDtypeStruct(inputs.x.shape, inputs.x.dtype)),
        updates=dict(pool=pool),
        num_warps=config.num_warps,
        interpret=run.interpret,
    )
    return results["out"], results["pool"]
