"""Rows of the gated delta rule, and the claims that hold for states in every layout."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.common import (
    assert_close,
    assert_untouched,
    dirty_pool,
    mixed_rows,
    pack,
    run_by,
)
from oracles.ops import gated_delta_rule, gates

from pallas_kernels import (
    Gates,
    Rows,
    gated_delta_rule_gates,
    gated_delta_rule_recurrent,
    gated_delta_rule_update,
)

LAYER, LAYERS, BLOCKS = 1, 2, 24


@dataclasses.dataclass(frozen=True)
class Dims:
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 16
    value_dim: int = 32


DIMS = {
    "grouped": Dims(),
    "equal heads": Dims(3, 3, 32, 16),
    "96 x 192": Dims(1, 2, 96, 192),
    "256 x 64": Dims(1, 2, 256, 64),
    "odd": Dims(1, 3, 24, 20),
    "kimi": Dims(2, 2, 128, 128),
    "narrow": Dims(1, 2, 8, 10),
    "128 x 64": Dims(2, 6, 128, 64),
    "64 x 128": Dims(1, 1, 64, 128),
}


def make(rng, lengths, dims, dtype=jnp.float32, state_dtype=jnp.float32, extra_tokens=3, clean=(3, 4, 5), kda=False):
    tokens = sum(lengths) + extra_tokens

    def draw(*shape):
        x = rng.normal(size=(tokens, *shape)).astype(np.float32)
        x[sum(lengths) :] = np.nan  # padding tokens may hold anything
        return jnp.asarray(x).astype(dtype)

    channels = 2 * dims.key_heads * dims.key_dim + dims.value_heads * dims.value_dim
    head = lambda *key: jnp.asarray(rng.normal(size=(dims.value_heads, *key)), jnp.float32)
    key = (dims.key_dim,) if kda else ()
    pool = dirty_pool(rng, (LAYERS, BLOCKS, dims.value_heads, dims.value_dim, dims.key_dim), state_dtype, clean)
    return draw(channels), draw(dims.value_heads, *key), draw(dims.value_heads), head(), head(*key), pool


def rows_of(loc, read, write, **more):
    """Returns rows of the tests' layer, whose states are read and written."""
    return Rows(query_start_loc=loc, layer=LAYER, read=read, write=write, **more)


def padded_rows(lengths, read, write):
    """Returns the rows of `mixed_rows`, with two rows of padding."""
    return rows_of(pack(lengths, padding_rows=2), jnp.array([*read, 5, 0]), jnp.asarray(write))


def unpack(qkv, dims):
    qkv = np.asarray(qkv.astype(jnp.float32), np.float64)
    keys = dims.key_heads * dims.key_dim
    q, k, v = qkv[:, :keys], qkv[:, keys : 2 * keys], qkv[:, 2 * keys :]
    return (
        q.reshape(-1, dims.key_heads, dims.key_dim),
        k.reshape(-1, dims.key_heads, dims.key_dim),
        v.reshape(-1, dims.value_heads, dims.value_dim),
    )


def state_of(pool, block):
    state = np.asarray(pool.astype(jnp.float32), np.float64)[LAYER, block]
    return state if block else np.zeros_like(state)


def assert_rows_match_the_oracle(lengths, read, write, out, before, after, row_inputs, scale, l2norm=True):
    """Checks the outputs, every state that was kept, and that nothing else in the pool changed."""
    key_dim, written = before.shape[-1], []
    ends = np.cumsum([0, *lengths])
    for r, n in enumerate(lengths):
        tokens = slice(ends[r], ends[r] + n)
        inputs = (x[tokens] for x in row_inputs)
        wanted, states = gated_delta_rule(*inputs, state_of(before, read[r]), scale, l2norm)
        # A token's output sums key_dim products of a state, which n steps of key_dim products each have made.
        terms = 4 * (n + 1) * key_dim
        assert_close(out[tokens], wanted, out.dtype, terms, f"row {r}")
        for t in range(n):
            if write[r, t]:
                written.append(write[r, t])
                assert_close(state_of(after, write[r, t]), states[t], after.dtype, terms, f"state {r}, {t}")
    assert not np.asarray(out[sum(lengths) :].astype(jnp.float32)).any()
    assert_untouched(before, after, written)
    assert_untouched(before[:LAYER], after[:LAYER], written=())


def check_update_matches_the_oracle(rng, dims, dtype, state_dtype, l2norm, window, implementation):
    dims = DIMS[dims]
    lengths, read, write = mixed_rows(window)
    qkv, a, b, A_log, dt_bias, pool = make(rng, lengths, dims, dtype, state_dtype)
    scale = dims.key_dim**-0.5 if l2norm else 1 / dims.key_dim
    out, after = gated_delta_rule_update(
        qkv,
        a,
        b,
        A_log,
        dt_bias,
        pool,
        padded_rows(lengths, read, write),
        use_qk_l2norm=l2norm,
        scale=None if l2norm else scale,
        run=run_by(implementation),
    )
    gated = gates(*(x.astype(jnp.float32) for x in (a, b)), A_log, dt_bias)
    assert_rows_match_the_oracle(lengths, read, write, out, pool, after, (*unpack(qkv, dims), *gated), scale, l2norm)


def check_update_with_a_decay_per_key_channel_matches_the_oracle(rng, dims, dtype, lower_bound, implementation):
    """Kimi delta attention with both kinds of gate, in rows of several tokens, each with its own gates."""
    dims = DIMS[dims]
    lengths, read, write = mixed_rows(4)
    qkv, a, b, A_log, dt_bias, pool = make(rng, lengths, dims, dtype, kda=True)
    rows, bounded = padded_rows(lengths, read, write), Gates(lower_bound=lower_bound)
    out, after = gated_delta_rule_update(
        qkv, a, b, A_log, dt_bias, pool, rows, gates=bounded, run=run_by(implementation)
    )
    gated = gates(*(x.astype(jnp.float32) for x in (a, b)), A_log, dt_bias, lower_bound)
    inputs = (*unpack(qkv, dims), *gated)
    assert_rows_match_the_oracle(lengths, read, write, out, pool, after, inputs, dims.key_dim**-0.5)


def check_recurrent_matches_the_oracle(rng, dims, dtype, kda, window, implementation):
    dims = DIMS[dims]
    lengths, read, write = mixed_rows(window)
    qkv, a, b, A_log, dt_bias, pool = make(rng, lengths, dims, dtype, kda=kda)
    q, k, v = (jnp.asarray(x, jnp.float32).astype(dtype) for x in unpack(qkv, dims))
    g, beta = gated_delta_rule_gates(a, b, A_log, dt_bias)
    rows = padded_rows(lengths, read, write)
    out, after = gated_delta_rule_recurrent(q, k, v, g, 2 * beta, pool, rows, scale=0.3, run=run_by(implementation))
    inputs = (*unpack(qkv, dims), np.asarray(g, np.float64), 2 * np.asarray(beta, np.float64))
    assert_rows_match_the_oracle(lengths, read, write, out, pool, after, inputs, 0.3)


def check_update_of_a_row_depends_on_that_row_alone(rng, dims, state_dtype, implementation):
    """A row gives the same bits alone, among others, in another order, with padding, and as decode or verify row."""
    dims, lengths = DIMS[dims], [1, 3, 1, 2, 1]
    qkv, a, b, A_log, dt_bias, pool = make(rng, lengths, dims, jnp.bfloat16, state_dtype, clean=(1, 2, 3, 4, 5))
    loc = np.asarray(pack(lengths))
    how = run_by(implementation)
    run = jax.jit(
        lambda qkv, a, b, *rows: gated_delta_rule_update(qkv, a, b, A_log, dt_bias, pool, rows_of(*rows), run=how)
    )

    def results(rows, window, padding):
        tokens = np.concatenate([np.arange(loc[r], loc[r + 1]) for r in rows] + [np.zeros(padding, int)])
        # In interpret mode a window of one is a separate program, which XLA may round differently.
        window = 3 if implementation == "interpret" else window
        write = np.zeros((len(rows) + padding, window), np.int32)
        for i in range(len(rows)):
            write[i, :] = 6 + 3 * i + np.arange(window)
        read = jnp.array([r + 1 for r in rows] + [0] * padding)
        here = pack([lengths[r] for r in rows], padding)
        out, after = run(qkv[tokens], a[tokens], b[tokens], here, read, jnp.asarray(write))
        return {
            r: (
                np.asarray(out[here[i] : here[i + 1]].astype(jnp.float32)),
                np.asarray(after[LAYER, write[i, lengths[r] - 1]].astype(jnp.float32)),
            )
            for i, r in enumerate(rows)
        }

    wanted = results([0, 1, 2, 3, 4], 3, 0)
    for rows, window, padding in [
        ([0], 1, 0),
        ([2, 0, 4], 1, 0),
        ([4, 3, 2, 1, 0], 3, 3),
        ([1], 3, 0),
        ([0], 3, 7),
        ([0], 1, 40),
    ]:
        for r, (out, state) in results(rows, window, padding).items():
            np.testing.assert_array_equal(out, wanted[r][0])
            np.testing.assert_array_equal(state, wanted[r][1])


# On the GPU the sizes fill a warp's tiles, and the default configurations depend on rows and window.
ALONE = [
    ("grouped", jnp.float32, "xla"),
    pytest.param("grouped", jnp.float32, "interpret", marks=pytest.mark.deep),
    *(
        pytest.param(dims, dtype, "triton", marks=pytest.mark.gpu)
        for dims in ("grouped", "kimi")
        for dtype in (jnp.float32, jnp.bfloat16)
    ),
]
