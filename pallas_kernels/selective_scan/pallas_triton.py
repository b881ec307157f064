"""selective_scan as a Pallas kernel, with one program per block of a head's channels, head, and row of the batch.

The programs of one batch row own disjoint channels of its state, so each of them may overwrite the block that it has
read.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels._pallas_triton import Refs
from pallas_kernels._state_space import StateSpace, step_size
from pallas_kernels.blocks import NULL_BLOCK
from pallas_kernels.dispatch import Run
from pallas_kernels.rows import Rows
from pallas_kernels.selective_scan.config import Config, default_config


class _Program:
    """The work of a program: one row and a block of a head's channels. It updates `pool` and writes `out`."""

    def __init__(self, refs: Refs, config: Config, dt_softplus: bool, interpret: bool) -> None:
        self.refs, self.unroll, self.dt_softplus, self.interpret = refs, config.unroll, dt_softplus, interpret
        heads, state_dim = refs.pool.shape[2], refs.pool.shape[4]
        self.head, self.row = pt.program_id(1), pt.program_id(2)
        # Everything that addresses depend on is loaded here, before any branch, so that the loads share one trip to memory.
        row, starts, self.rows = self.row, refs.query_start_loc, refs.read_block.shape[0]
        self.start, self.end, self.total = starts[row], starts[row + 1], starts[self.rows]
        self.layer, self.read, self.write = refs.layer[...], refs.read_block[row], refs.write_block[row]
        self.channel, self.inside = pt.lanes(pt.program_id(0), config.block_dim, refs.x.shape[2])
        segment = min(config.segment, pt.power_of_two(state_dim))
        self.column, self.column_inside = pt.segments(state_dim, segment)
        self.state_inside = self.column_inside[:, None, :] & self.inside[None, :, None]
        self.group = self.head // (heads // refs.B.shape[1])

    def run(self) -> None:
        """Run the row, and store zeros in outputs of padding tokens, which are divided among the rows."""
        pt.when(self.end > self.start)(self.run_tokens)
        padding = self.refs.x.shape[0] - self.total - self.row + self.rows - 1
        jax.lax.fori_loop(jnp.int32(0), padding // self.rows, self.clear, None)

    def clear(self, n: jax.Array, _: None) -> None:
        """Write zeros to the n-th padding token that this row clears."""
        at = self.refs.out.at[self.total + self.row + n * self.rows, self.head, self.channel]
        pt.store(at, jnp.zeros(self.channel.shape, self.refs.out.dtype), mask=self.inside)

    def channels(self, ref: Any, *at: jax.Array) -> jax.Array | None:
        """Load a value per channel, or None if there is no such array."""
        return None if ref is None else pt.load(ref.at[(*at, self.head, self.channel)], mask=self.inside, other=0.0)

    def states(self, ref: Any, *at: jax.Array) -> Any:
        """Return the program's tile of an array of states."""
        return ref.at[(*at, self.head, self.channel[None, :, None], self.column[:, None, :])]

    def take(self, token: jax.Array, stop: jax.Array) -> Any:
        """Load a token's inputs. From `stop` on, load the token before `stop` again: 0 times a later token may be NaN."""
        refs, token = self.refs, jnp.maximum(jnp.minimum(token, stop - 1), self.start)
        of_group = lambda ref: pt.load(ref.at[token, self.group, self.column], mask=self.column_inside, other=0.0)
        return [of_group(ref) for ref in (refs.B, refs.C)], [self.channels(v, token) for v in (refs.x, refs.dt, refs.z)]

    def run_tokens(self) -> None:
        """Run all tokens, and store the states at checkpoints and at the row's end."""
        refs, row, start = self.refs, self.row, self.start
        checkpoints = 0 if refs.checkpoint_block is None else refs.checkpoint_block.shape[1]
        mask = self.state_inside & (self.read != NULL_BLOCK)
        at = self.states(refs.pool, self.layer, self.read)
        initial = pt.load(at, mask=mask, other=0.0).astype(jnp.float32)
        # Rates are in units of log 2, because exp2 is the fastest exponential.
        rate = pt.load(self.states(refs.A), mask=self.state_inside, other=0.0).astype(jnp.float32) * pt.LOG2_E
        parameters = rate, self.channels(refs.D), self.channels(refs.dt_bias)

        def up_to_checkpoint(n, carry):
            """Run the row up to checkpoint n and store the state. The final state is the last checkpoint."""
            begin, state = carry
            offset, block = self.end - start, self.write
            if checkpoints:
                last, at = n == checkpoints, jnp.minimum(n, checkpoints - 1)
                offset = jnp.where(last, offset, refs.checkpoint_offset[row, at])
                block = jnp.where(last, block, refs.checkpoint_block[row, at])
                offset = jnp.where(last | (block != NULL_BLOCK), offset, begin - start)
            state = self.run_until(begin, start + offset, state, parameters)
            mask = self.state_inside & (block != NULL_BLOCK)
            pt.store(self.states(refs.pool, self.layer, block), state.astype(refs.pool.dtype), mask=mask)
            return start + offset, state

        jax.lax.fori_loop(jnp.int32(0), jnp.int32(checkpoints + 1), up_to_checkpoint, (start, initial))

    def run_until(self, begin: jax.Array, stop: jax.Array, state: jax.Array, parameters: Any) -> jax.Array:
        """Run tokens `begin` to `stop`, `unroll` of them in each iteration of the loop, and return the new state."""
        refs, unroll = self.refs, self.unroll

        def iteration(i, carry):
            state, inputs = carry
            upcoming = []
            for t, given in enumerate(inputs):
                token = begin + i * unroll + t
                state, y = self.advance(parameters, state, given, token < stop)
                out = y.astype(refs.out.dtype)
                pt.store(refs.out.at[token, self.head, self.channel], out, mask=self.inside & (token < stop))
                # The next iteration's token is loaded into this token's registers while the other tokens of this one
                # are used.
                upcoming.append(self.take(token + unroll, stop))
            return state, upcoming

        iterations = (stop - begin + unroll - 1) // unroll
        first = [self.take(begin + t, stop) for t in range(unroll)]
        return jax.lax.fori_loop(jnp.int32(0), iterations, iteration, (state, first))[0]

    def advance(self, parameters: Any, state: jax.Array, inputs: Any, live: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Advance the state by one token, if it is `live`. Return the new state and the output."""
        rate, D, dt_bias = parameters
        (B, C), (x, dt, z) = jax.tree.map(lambda value: value.astype(jnp.float32), inputs)
        dt = step_size(dt, dt_bias, self.dt_softplus)
        # A step of size 0 leaves the state unchanged, except for the sign of a zero. The loop therefore needs no second
        # body for the tokens left over by its last full iteration.
        dt = jnp.where(live, dt, 0.0)
        state = state * pt.exp2(rate * dt[None, :, None], self.interpret) + (dt * x)[None, :, None] * B[:, None, :]
        y = pt.row_sum(state * C[:, None, :])
        y = y if D is None else y + D.astype(jnp.float32) * x
        return state, y if z is None else y * pt.silu(z, self.interpret)


def selective_scan(
    inputs: StateSpace, pool: jax.Array, rows: Rows, *, dt_softplus: bool, run: Run
) -> tuple[jax.Array, jax.Array]:
    """Launch the kernel. See api.py."""
    _, heads, head_dim = inputs.x.shape
    config = run.config or default_config(pool.shape[-1], pool.dtype.itemsize)
    # Every thread of the kernel uses B and C, so they are converted once, here.
    inputs = inputs._replace(B=inputs.B.astype(jnp.float32), C=inputs.C.astype(jnp.float32))
    results = pt.call(
        lambda refs: _Program(refs, config, dt_softplus, run.interpret).run(),
        name="selective_scan",
        grid=(-(-head_dim // config.block_dim), heads, rows.num_rows),
        inputs=inputs._asdict() | rows.prefill_inputs,
        outputs=dict(out=jax.ShapeDtypeStruct(inputs.x.shape, inputs.x.dtype)),
        updates=dict(pool=pool),
        num_warps=config.num_warps,
        interpret=run.interpret,
    )
    return results["out"], results["pool"]
