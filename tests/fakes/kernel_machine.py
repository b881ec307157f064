"""A random server whose steps run the kernels, compared with a replay in tokens."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from fakes.any_config import CHANNELS, DIM, LONGEST, POLICIES, SLOTS, WIDEST
from fakes.server import Machine
from oracles.ops import causal_conv1d, gated_delta_rule
from oracles.tokens import JUNK, last_inputs

from mamba_align_jax import StatePool, split_rows
from mamba_align_jax.align.step import copy_states
from pallas_kernels import (
    Run,
    causal_conv1d_prefill,
    causal_conv1d_update,
    chunk_rows,
    gated_delta_rule_prefill,
    gated_delta_rule_recurrent,
)

# The same steps with real kernels.

BLOCKS, WIDTH, CHUNK = 128, WIDEST.groups[0].states[0].width, 4
PREFILL_TOKENS = SLOTS * LONGEST
DECODE_TOKENS = SLOTS * WIDEST.window
NUMBERS = np.random.default_rng(0)
TAPS = NUMBERS.normal(size=(WIDTH, CHANNELS)).astype(np.float32)
# The layers' inputs for each token, for more tokens than a sequence can have.
INPUTS = NUMBERS.normal(size=(512, CHANNELS)).astype(np.float32)
DECAY = -NUMBERS.uniform(0.01, 0.3, (512, 1)).astype(np.float32)
BETA = NUMBERS.uniform(0.5, 1, (512, 1)).astype(np.float32)


def heads(x):
    return (x[:, None, DIM * i : DIM * (i + 1)] for i in range(3))


# Without this option (tests/conftest.py) XLA fuses layers with copies, and the policies round differently.
EMITTERS = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else {}


XLA = Run(implementation="xla")


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1, compiler_options=EMITTERS)
def run_kernels(align, pool, released, batch, indices, plan, tokens):
    """The step of one layer of each group. Released blocks are set to NaN."""
    for group, blocks in enumerate(released):
        pool = pool.with_group(group, [x.at[:, blocks].set(jnp.nan, mode="drop") for x in pool.states[group]])
    pool = copy_states(align, pool, indices.migration, implementation="xla")
    x, g, beta = tokens

    def layers(causal_conv1d, delta_rule, rows, x, g, beta, conv, recurrent, short):
        run_conv = lambda pool, group: causal_conv1d(x, pool, jnp.asarray(TAPS), None, rows.of_group(group, 0), run=XLA)
        short_out, short = run_conv(short, 1)
        out, conv = run_conv(conv, 0)
        out, recurrent = delta_rule(rows.of_group(0, 0), *heads(out), g, beta, recurrent)
        return jnp.concatenate([out[:, 0], short_out], axis=1), conv, recurrent, short

    def decode(rows, *args):
        rule = lambda rows, *args: gated_delta_rule_recurrent(*args, rows, run=XLA)
        return layers(causal_conv1d_update, rule, rows, *args)

    def prefill(rows, *args):
        def rule(rows, q, k, v, *args):
            chunks = chunk_rows(rows.query_start_loc, rows.num_computed_tokens, v.shape[0], CHUNK)
            return gated_delta_rule_prefill(q, k, v, *args, replace(rows, chunks=chunks), run=XLA)

        return layers(causal_conv1d_prefill, rule, rows, *args)

    (conv, recurrent), (short,) = pool.states
    out, conv, recurrent, short = split_rows(batch, indices, SLOTS).apply(
        decode, prefill, (x, g, beta), (conv, recurrent, short), DECODE_TOKENS
    )
    pool = pool.with_group(0, (conv, recurrent)).with_group(1, (short,))
    return out, copy_states(align, pool, plan, implementation="xla")


class KernelMachine(Machine):
    """Checks that every block of a real pool is the state of the literal pool's tokens, and that outputs are right."""

    width, keeps_interior = WIDTH, False
    decay, beta = DECAY, BETA

    def start(self):
        empty = lambda: jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), StatePool.create(WIDEST, BLOCKS))
        self.arrays, self.outputs = {policy: empty() for policy in POLICIES}, {}
        self.past = {(): (np.zeros((1, DIM, DIM)), None)}

    def fill(self, block, tokens):
        super().fill(block, tokens)
        self.fill_arrays(block, tokens)

    def fill_arrays(self, block, tokens):
        """Puts the state of tokens into a block of every pool."""
        window = [INPUTS[t % 512] if t >= 0 else np.zeros(CHANNELS) for t in last_inputs(tokens, WIDTH)]
        for policy, arrays in self.arrays.items():
            (conv, recurrent), (short,) = arrays.states
            conv = conv.at[0, block, : WIDTH - 1].set(np.float32(window))
            short = short.at[0, self.num_blocks - block, : WIDTH - 1].set(np.float32(window))
            recurrent = recurrent.at[0, block].set(np.float32(self.image(tokens)[0]))
            self.arrays[policy] = arrays.with_group(0, (conv, recurrent)).with_group(1, (short,))

    def arrange(self, rows, order):
        """Puts the rows of the update kernels first: verify rows, and single tokens with a past."""
        decode = lambda row: row.drafts >= 0 or (len(row.inputs) == 1 and row.before)
        leading, others = [row for row in rows if decode(row)], [row for row in rows if not decode(row)]
        halves = [
            super(KernelMachine, self).arrange(half, [r for r in order if r < SLOTS]) for half in (leading, others)
        ]
        return halves[0] + halves[1]

    def replay(self, policy, batch, indices, plan):
        super().replay(policy, batch, indices, plan)
        pool = self.pools[policy]
        given = [block for row in pool.rows for block in row.given]
        released = np.full((2, BLOCKS), BLOCKS, np.int32)
        released[:, : len(given)] = given, [self.num_blocks - block for block in given]
        ids = np.concatenate([np.array(row.inputs, np.int32) % 512 for row in pool.rows])
        tokens = [
            np.full((DECODE_TOKENS + PREFILL_TOKENS, x.shape[1]), np.nan, np.float32) for x in (INPUTS, DECAY, BETA)
        ]
        for array, values in zip(tokens, (INPUTS, DECAY, BETA), strict=True):
            array[: len(ids)] = values[ids]
        out, self.arrays[policy] = run_kernels(
            POLICIES[policy], self.arrays[policy], released, batch, indices, plan, tokens
        )
        self.outputs[policy] = np.asarray(out)[: len(ids)]
        np.testing.assert_array_equal(self.outputs[policy], self.outputs["copy_free"])
        wanted = [self.image(row.before + row.inputs[: t + 1])[1] for row in pool.rows for t in range(len(row.inputs))]
        self.check_close(self.outputs[policy], np.reshape(wanted, self.outputs[policy].shape))
        # Copied, because a view would prevent the donation of the buffers.
        self.check_image(pool, jax.tree.map(np.array, self.arrays[policy]))

    def check_image(self, pool, arrays):
        """Compares a block: windows must be equal to the inputs, states must be close to those in float64."""
        (conv, recurrent), (short,) = ([array[0] for array in group] for group in arrays.states)
        for block, (tokens, window) in enumerate(zip(pool.recurrent, pool.conv, strict=True)):
            if tokens != JUNK:
                self.check_close(recurrent[block], self.image(tokens)[0])
            rows = [t for t, token in enumerate(window) if token != JUNK]
            wanted = [INPUTS[window[t] % 512] if window[t] >= 0 else np.zeros(CHANNELS) for t in rows]
            if rows:
                np.testing.assert_array_equal(conv[block][rows], wanted)
                np.testing.assert_array_equal(short[self.num_blocks - block][rows], wanted)

    def check_close(self, got, wanted):
        """Each token adds a few roundings of 2^-24 to states of size 1. A missing token changes them by 0.01."""
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4)

    def image(self, tokens):
        """Returns the state after `tokens` and the output of the last one, in float64."""
        if tokens not in self.past:
            state, _ = self.image(tokens[:-1])
            ids = np.array(tokens[-WIDTH:]) % 512
            history = np.zeros((WIDTH - 1, CHANNELS))
            history[WIDTH - len(ids) :] = INPUTS[ids[:-1]]
            y, _ = causal_conv1d(INPUTS[ids[-1:]], history, TAPS, None, silu=True)
            token = ids[-1:]
            out, states = gated_delta_rule(*heads(y), self.decay[token], self.beta[token], state, DIM**-0.5)
            self.past[tokens] = states[-1], np.concatenate([out[0, 0], y[0]])
        return self.past[tokens]
