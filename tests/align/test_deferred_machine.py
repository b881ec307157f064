"""The random server under policy "deferred" with real kernels: every block is what its tokens make."""

import functools
from dataclasses import replace

import depth
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes.any_config import CHANNELS, DIM, LONGEST, SLOTS, AnyConfig, make_spec
from fakes.deferred_server import DeferredMachine
from fakes.kernel_machine import BLOCKS, INPUTS, TAPS, WIDTH, KernelMachine
from fakes.server import run
from oracles.ops import gates

from mamba_align_jax import StatePool, fold_slots, migrate, split_rows
from mamba_align_jax.layers.delta_rule import convolved_delta_rule
from mamba_align_jax.metadata.layer_step import LayerStep
from pallas_kernels import causal_conv1d_prefill, causal_conv1d_update

A, B = np.random.default_rng(1).normal(size=(2, 512, 1)).astype(np.float32)
A_LOG, BIAS = np.float32([-1.5]), np.float32([0.3])
# The lengths of fold groups, with the most drafts that each allows. Blocks of any size may follow.
SPECS = {
    L: make_spec(
        WIDTH,
        policy="deferred",
        fold_length=L,
        block_size=L,
        num_speculative_tokens=(L - 1) // 2,
        max_model_len=LONGEST,
    )
    for L in (3, 8)
}


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def run_kernels(align, pool, released, batch, indices, tokens):
    """The step of one layer of each group. Released blocks are set to NaN."""
    for group, blocks in enumerate(released):
        pool = pool.with_group(group, [x.at[:, blocks].set(jnp.nan, mode="drop") for x in pool.states[group]])
    pool = migrate(align, pool, indices, implementation="xla")
    rows = split_rows(batch, indices, SLOTS, SLOTS * align.window)
    x, a, b = tokens
    at = LayerStep(rows=rows, chunks=rows.chunks(x.shape[0]), layer=jnp.int32(0), implementation="xla")
    weights, (short,) = map(jnp.asarray, (TAPS, A_LOG, BIAS)), pool.states[1]
    out, *arrays = convolved_delta_rule(x, a, b, *weights, at, *pool.states[0], *pool.ring(0))

    def convolve(op, rows, x, short):
        return op(x, short, jnp.asarray(TAPS), None, rows, run=at.run)

    decode = lambda rows, *arrays: convolve(causal_conv1d_update, rows, *arrays)
    prefill = lambda rows, *arrays: convolve(causal_conv1d_prefill, rows, *arrays)
    short_out, short = at.at(0, group=1).apply(decode, prefill, (x,), (short,))
    return jnp.concatenate([out[:, 0], short_out], axis=1), pool.with_group(0, arrays).with_group(1, (short,))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def run_fold(align, block_size, state, pool, tables, slots):
    return fold_slots(
        AnyConfig(align, block_size, align.fold_length), state, pool, tables, slots, implementation="xla"
    )[1]


class DeferredKernelMachine(DeferredMachine):
    """Checks that every block of a real pool is the state of the literal pool's tokens, and that outputs are right."""

    width, keeps_interior, lengths = WIDTH, False, tuple(SPECS)
    decay, beta = gates(A, B, A_LOG, BIAS)
    check_close, check_image = KernelMachine.check_close, KernelMachine.check_image
    image, fill_arrays = KernelMachine.image, KernelMachine.fill_arrays

    def start(self):
        self.real = SPECS[self.align.fold_length]
        pool = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), StatePool.create(self.real, BLOCKS))
        self.arrays, self.past = {"deferred": pool}, {(): (np.zeros((1, DIM, DIM)), None)}

    def fill(self, block, tokens):
        super().fill(block, tokens)
        self.fill_arrays(block, tokens)

    def arrange(self, rows, order):
        """Puts the decode and verify rows first."""
        order = [r for r in order if r < SLOTS]
        halves = [[row for row in rows if (row.drafts >= 0) == leads] for leads in (True, False)]
        return [row for half in halves for row in super(DeferredKernelMachine, self).arrange(half, order)]

    def replay(self, policy, batch, indices, plan):
        super().replay(policy, batch, indices, plan)
        pool = self.pools[policy]
        given = [block for row in pool.rows for block in row.given]
        released = np.full((2, BLOCKS), BLOCKS, np.int32)
        released[:, : len(given)] = given, [self.num_blocks - block for block in given]
        ids = np.concatenate([np.array(row.inputs, np.int32) % 512 for row in pool.rows])
        tokens = [
            np.full((SLOTS * (self.real.window + LONGEST), x.shape[1]), np.nan, np.float32) for x in (INPUTS, A, B)
        ]
        for array, values in zip(tokens, (INPUTS, A, B), strict=True):
            array[: len(ids)] = values[ids]
        # The bookkeeping ran for more drafts.
        indices = replace(indices, write=indices.write[..., : self.real.window])
        out, self.arrays[policy] = run_kernels(self.real, self.arrays[policy], released, batch, indices, tokens)
        wanted = [self.image(row.before + row.inputs[: t + 1])[1] for row in pool.rows for t in range(len(row.inputs))]
        self.check_close(np.asarray(out)[: len(ids)], np.reshape(wanted, (len(ids), DIM + CHANNELS)))
        self.check_image(pool, jax.tree.map(np.array, self.arrays[policy]))

    def folded(self, slots):
        pool = self.arrays["deferred"]
        self.arrays["deferred"] = run_fold(self.real, np.int32(self.size), self.before_fold, pool, self.tables, slots)
        self.check_image(self.pools["deferred"], jax.tree.map(np.array, self.arrays["deferred"]))


@pytest.mark.deep
def test_kernels_agree_with_the_replay_in_tokens():
    events = run(DeferredKernelMachine, depth.examples(quick=5, full=12), steps=depth.examples(quick=80, full=1500))
    assert events["settles and keeps a window"] + events["a window is kept at its end"] > 0 or not depth.is_full()
