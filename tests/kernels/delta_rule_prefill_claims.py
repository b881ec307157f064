"""Prompts of the gated delta rule, and the claims that hold for states in every layout."""

import jax.numpy as jnp
import numpy as np
from kernels import delta_rule_claims
from kernels.common import assert_close, assert_untouched, how, pack, run_by
from kernels.delta_rule_claims import LAYER, Dims, make, rows_of, state_of, unpack
from oracles.ops import gated_delta_rule

from pallas_kernels import (
    RowCheckpoints,
    Run,
    chunk_rows,
    gated_delta_rule_gates,
    gated_delta_rule_prefill,
    gated_delta_rule_update,
)

CHUNK = 64
DIMS = delta_rule_claims.DIMS | {"64 x 128": Dims(2, 4, 64, 128), "three heads": Dims(1, 3, 128, 64)}
# So many heads that the Mosaic GPU kernels take 128 value dims of a head at a time.
DIMS |= {"16 of 32": Dims(16, 32, 128, 128), "32 of 32": Dims(32, 32, 128, 128)}


# Most calls are padded to these sizes, so that they share a program.
TOKENS, ROWS, CHECKPOINTS = 352, 9, 2


def prefill(inputs, pool, lengths, computed, read, write, checkpoints=None, *, padded=True, chunk=CHUNK, **options):
    """Calls the op, padded with tokens that hold NaN and with rows without tokens, whose blocks nothing may touch."""
    tokens, rows = inputs[2].shape[0], len(lengths)
    if padded and tokens <= TOKENS and rows <= ROWS:
        inputs = [np.concatenate([x, np.full((TOKENS - tokens, *x.shape[1:]), np.nan, x.dtype)]) for x in inputs]
        computed, read, write = ([*x, *[fill] * (ROWS - rows)] for x, fill in ((computed, 7), (read, 5), (write, 20)))
        checkpoints = checkpoints or np.zeros((2, rows, CHECKPOINTS), int)
    fill = lambda x: None if x is None else jnp.pad(jnp.asarray(x, jnp.int32), ((0, len(computed) - rows), (0, 0)))
    offsets, blocks = map(fill, (None, None) if checkpoints is None else checkpoints)
    inputs, loc = map(jnp.asarray, inputs), pack(lengths, len(computed) - rows)
    computed, read, write = (jnp.asarray(x, jnp.int32) for x in (computed, read, write))
    q, k, v, g, beta = inputs
    kept = None if checkpoints is None else RowCheckpoints(offset=offsets, block=blocks)
    rows = rows_of(loc, read, write[:, None], checkpoints=kept, chunks=chunk_rows(loc, computed, v.shape[0], chunk))
    run = Run(**{name: options.pop(name) for name in ("implementation", "config", "interpret") if name in options})
    out, pool = gated_delta_rule_prefill(q, k, v, g, beta, pool, rows, run=run, **options)
    return (np.asarray(out) if padded else out), pool


def make_prefill(rng, lengths, dims, dtype=jnp.float32, state_dtype=jnp.float32, extra_tokens=0, kda=False):
    """Returns the inputs as NumPy arrays, because slicing them compiles nothing, and a dirty pool."""
    qkv, a, b, A_log, dt_bias, pool = make(rng, lengths, dims, dtype, state_dtype, extra_tokens, kda=kda)
    q, k, v = (x.astype(np.float32).astype(dtype) for x in unpack(qkv, dims))
    return (q, k, v, *map(np.asarray, gated_delta_rule_gates(a, b, A_log, dt_bias))), pool


def float64(*arrays):
    return [np.asarray(x).astype(np.float64) for x in arrays]


def terms_of(dims, tokens=CHUNK):
    """Returns the number of terms of a chunk's correction: sums over its tokens of sums over keys, a few times over."""
    return 16 * (tokens + dims.key_dim)


def assert_rows_match_the_oracle(inputs, lengths, read, kept, out, before, after, scale, terms):
    """Checks the outputs, the states in `kept` (per row {offset: block}), and that nothing else in the pool changed."""
    # With a decay per key channel, bfloat16 keys are decayed and rounded to bfloat16 before they are multiplied.
    decayed = inputs[3].ndim == 3 and inputs[1].dtype == jnp.bfloat16
    dtype = jnp.bfloat16 if decayed else after.dtype
    loc, arrays = np.cumsum([0, *lengths]), float64(*inputs)
    for r, n in enumerate(lengths):
        tokens = slice(loc[r], loc[r] + n)
        wanted, states = gated_delta_rule(*(x[tokens] for x in arrays), state_of(before, read[r]), scale)
        assert_close(out[tokens], wanted, out.dtype, terms, f"row {r}")
        for offset, block in kept[r].items():
            if n and block:
                state = state_of(after, block)
                assert_close(state, states[offset - 1], dtype, terms, f"state of row {r} after {offset}")
    assert not out[sum(lengths) :].any()
    written = [block for row, n in zip(kept, lengths, strict=True) for block in row.values() if n and block]
    assert_untouched(before[LAYER : LAYER + 1], after[LAYER : LAYER + 1], written)
    assert_untouched(before[:LAYER], after[:LAYER], written=())


def check_prefill_matches_the_oracle(rng, dims, dtype, state_dtype, kda, implementation):
    """Rows start at and between ends of chunks; one is empty, others are fresh, keep checkpoints or write in place."""
    dims, lengths = DIMS[dims], [1, 63, 0, 64, 65, 130, 5]
    computed, read, write = [0, 1, 64, 64, 37, 128, 63], [0, 3, 4, 4, 5, 0, 4], [6, 3, 7, 8, 9, 10, 0]
    inputs, pool = make_prefill(rng, lengths, dims, dtype, state_dtype, kda=kda)
    # Row 4 keeps a state in the block that it has read. An offset without a block may be anything.
    offsets, blocks = np.zeros((7, 2), np.int32), np.zeros((7, 2), np.int32)
    offsets[4], blocks[4] = (27, 99), (5, 0)
    offsets[5], blocks[5] = (64, 128), (12, 13)
    out, after = prefill(inputs, pool, lengths, computed, read, write, (offsets, blocks), **how(implementation))
    kept = [
        {n: write[r]} | dict(zip(offsets[r].tolist(), blocks[r].tolist(), strict=True)) for r, n in enumerate(lengths)
    ]
    assert_rows_match_the_oracle(inputs, lengths, read, kept, out, pool, after, dims.key_dim**-0.5, terms_of(dims))


def check_prefill_split_on_the_grid_is_bit_identical(rng, dims, dtype, kda, implementation):
    """A row gives the same bits in one call, split at the end of a chunk, with checkpoints, and beside other rows."""
    dims, start, total = DIMS[dims], 64, 200
    inputs, pool = make_prefill(rng, [total + 50], dims, dtype, kda=kda)
    part = lambda a, b: [x[a:b] for x in inputs]
    run = lambda *arguments, **options: prefill(*arguments, **options, **how(implementation))
    whole, after = run(part(0, total), pool, [total], [start], [3], [6], padded=False)
    for split in (64, 128, 192):
        checkpoints = np.array([[64, split]]), np.array([[0, 11]])
        again, kept = run(part(0, total), pool, [total], [start], [3], [6], checkpoints)
        first, resumed = run(part(0, split), pool, [split], [start], [3], [7])
        beside = [np.concatenate([y, x]) for x, y in zip(part(split, total), part(total, total + 50), strict=True)]
        rest = total - split
        second, resumed = run(beside, resumed, [50, rest, 0], [3, start + split, 0], [4, 7, 0], [9, 8, 0])
        np.testing.assert_array_equal(again[:total], whole)
        np.testing.assert_array_equal(np.concatenate([first[:split], second[50 : 50 + rest]]), whole)
        np.testing.assert_array_equal(kept[LAYER, 6], after[LAYER, 6])
        np.testing.assert_array_equal(kept[LAYER, 11], resumed[LAYER, 7])
        np.testing.assert_array_equal(resumed[LAYER, 8], after[LAYER, 6])


def check_prefill_then_update_continues_one_recurrence(rng, implementation):
    """Both ops use the same layout of states, [value_dim, key_dim]."""
    dims, n = DIMS["kimi" if implementation == "mosaic_gpu" else "grouped"], 70
    qkv, a, b, A_log, dt_bias, pool = make(rng, [n], dims, extra_tokens=0)
    q, k, v = (x.astype(np.float32) for x in unpack(qkv, dims))
    inputs = q, k, v, *map(np.asarray, gated_delta_rule_gates(a, b, A_log, dt_bias))
    whole, _ = prefill(inputs, pool, [n], [0], [0], [6], **how(implementation))
    _, pool = prefill([x[: n - 1] for x in inputs], pool, [n - 1], [0], [0], [7], **how(implementation))
    last, _ = gated_delta_rule_update(
        *(qkv[-1:], a[-1:], b[-1:], A_log, dt_bias, pool),
        rows_of(pack([1]), jnp.array([7]), jnp.array([[7]])),
        run=run_by(implementation),
    )
    assert_close(last, *float64(whole[n - 1 : n]), jnp.float32, terms_of(dims), "output")
