"""Verify rows of `delta_rule_step` keep the window and the state after each token, in float64's numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import ops

from mamba_align_jax.integrations.delta_rule_step import BlockRows, Taps, delta_rule_step

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, WIDTH, BLOCKS = 2, 4, 16, 32, 4, 40
# Float32 against float64, relative to the largest value.
TOLERANCE = 2e-5
# A row is (tokens, the block that it reads, the block after its first token, the token that is kept, the block for that).
# Row 3 writes the block that it reads. Rows 2 and 5 have no tokens.
ROWS = [(3, 30, 1, 2, 35), (1, 7, 5, 0, 36), (0, 31, 9, 0, 0), (2, 14, 13, 0, 0), (4, 32, 17, 3, 37), (0, 0, 0, 0, 0)]
DRAFTS = 3


def draw(per_channel):
    """A step's arguments. What it must not read is NaN."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    key_heads = HEADS if per_channel else KEY_HEADS
    channels, gate = 2 * key_heads * KEY_DIM + HEADS * VALUE_DIM, (HEADS, KEY_DIM) if per_channel else (HEADS,)
    lengths = np.array([row[0] for row in ROWS])
    tokens = lengths.sum() + 5
    inputs = normal(tokens, channels), normal(tokens, *gate), normal(tokens, HEADS)
    for x in inputs:
        x[lengths.sum() :] = np.nan
    pools = normal(BLOCKS, channels, WIDTH - 1), normal(BLOCKS, HEADS, KEY_DIM, VALUE_DIM)
    for pool in pools:
        pool[np.setdiff1d(np.arange(BLOCKS), [row[1] for row in ROWS if row[0]])] = np.nan
    first = np.array([row[2] for row in ROWS])
    rows = BlockRows(
        query_start_loc=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        block=np.array([row[1] for row in ROWS], np.int32),
        kept_block=np.array([row[4] for row in ROWS], np.int32),
        kept_source=np.array([row[2] + row[3] if row[4] else 0 for row in ROWS], np.int32),
        token_blocks=np.where(first[:, None] > 0, first[:, None] + np.arange(DRAFTS + 1), 0).astype(np.int32),
    )
    return inputs, Taps(normal(channels, WIDTH), normal(HEADS), normal(*gate)), rows, pools


def expected(inputs, weights, rows, pools):
    """The same in float64, row by row and token by token. Also returns the blocks that are written."""
    windows, states = (pool.astype(np.float64) for pool in pools)
    qkv, a, b = inputs
    key_heads = (qkv.shape[1] - HEADS * VALUE_DIM) // (2 * KEY_DIM)
    before, written = (windows.copy(), states.copy()), []
    out = np.zeros((len(qkv), HEADS, VALUE_DIM))
    for n, (length, read, first, kept, kept_block) in enumerate(ROWS):
        if length == 0:
            continue
        part = slice(rows.query_start_loc[n], rows.query_start_loc[n] + length)
        x, inputs = ops.causal_conv1d(qkv[part], before[0][read].T, weights.conv.T, None, silu=True)
        q, k, v = np.split(x, [key_heads * KEY_DIM, 2 * key_heads * KEY_DIM], axis=1)
        q, k, v = (part.reshape(length, -1, dim) for part, dim in ((q, KEY_DIM), (k, KEY_DIM), (v, VALUE_DIM)))
        g, beta = ops.gates(a[part], b[part], weights.A_log, weights.dt_bias)
        state = before[1][read].swapaxes(1, 2)
        y, after = ops.gated_delta_rule(q, k, v, g, beta, state, KEY_DIM**-0.5)
        out[part] = y
        for t in range(length):
            for block in (first + t, kept_block if t == kept else 0):
                if block:
                    windows[block], states[block] = inputs[t + 1 : t + WIDTH].T, after[t].swapaxes(1, 2)
                    written.append(block)
    return out, windows, states, sorted(written)


@pytest.mark.parametrize("implementation", ["xla", pytest.param("triton", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("per_channel", [False, True])
def test_each_token_and_the_boundary_have_a_window_and_a_state(per_channel, implementation):
    arguments = draw(per_channel)
    inputs, weights, rows, pools = jax.tree.map(jnp.asarray, arguments)
    step = jax.jit(functools.partial(delta_rule_step, decode=False, implementation=implementation))
    out, windows, states = step(*inputs, weights, rows, *pools)
    right, *right_pools, written = expected(*arguments)
    assert np.abs(out - right).max() < TOLERANCE * np.abs(right).max()
    for pool, right_pool, before in zip((windows, states), right_pools, arguments[3], strict=True):
        others = np.setdiff1d(np.arange(1, BLOCKS), written)
        np.testing.assert_array_equal(pool[others], before[others])
        largest = np.abs(right_pool[written]).max()
        assert np.abs(pool[jnp.array(written)] - right_pool[written]).max() < TOLERANCE * largest


def test_rows_without_drafts_are_decode_rows():
    inputs, weights, rows, pools = draw(per_channel=False)
    pools = [np.nan_to_num(pool) for pool in pools]
    starts = np.arange(len(ROWS) + 1, dtype=np.int32)
    rows = BlockRows(starts, rows.block, token_blocks=rows.block[:, None])
    verified = delta_rule_step(*inputs, weights, rows, *map(jnp.asarray, pools), decode=False)
    rows = rows._replace(token_blocks=None)
    decoded = delta_rule_step(*inputs, weights, rows, *map(jnp.asarray, pools), decode=True)
    for x, y in zip(verified, decoded, strict=True):
        np.testing.assert_array_equal(x[1:], y[1:])


def test_a_donated_step_copies_no_pool(optimized_programs):
    inputs, weights, rows, (windows, states) = jax.tree.map(jnp.asarray, draw(per_channel=False))
    pools = jnp.zeros((2048, *windows.shape[1:])), jnp.zeros((2048, *states.shape[1:]))
    step = jax.jit(functools.partial(delta_rule_step, decode=False), donate_argnums=(5, 6))
    memory = step.lower(*inputs, weights, rows, *pools).compile().memory_analysis()
    assert memory.temp_size_in_bytes < min(pool.nbytes for pool in pools)
    assert memory.alias_size_in_bytes >= sum(pool.nbytes for pool in pools)
