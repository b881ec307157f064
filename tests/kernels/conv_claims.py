"""Rows of causal_conv1d, and the claims that hold for windows in every layout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from kernels.common import assert_close, assert_untouched, dirty_pool, pack, run_by
from oracles.ops import causal_conv1d

from pallas_kernels import RowCheckpoints, Rows, causal_conv1d_prefill, causal_conv1d_update
from pallas_kernels.causal_conv1d.config import Config, PrefillConfig

LAYER, LAYERS, BLOCKS, CHANNELS = 1, 2, 20, 40


def make(rng, lengths, width, dtype, K=0, bias=False, extra_tokens=3, blocks_to_read=(3, 4, 5)):
    tokens = sum(lengths) + extra_tokens
    x = rng.normal(size=(tokens, CHANNELS)).astype(np.float32)
    x[sum(lengths) :] = np.nan  # padding tokens may hold anything
    pool = dirty_pool(rng, (LAYERS, BLOCKS, width - 1 + K, CHANNELS), dtype, clean=blocks_to_read)
    weight = jnp.asarray(rng.normal(size=(width, CHANNELS)), jnp.float32)
    return (
        jnp.asarray(x).astype(dtype),
        pool,
        weight,
        jnp.asarray(rng.normal(size=CHANNELS), jnp.float32) if bias else None,
    )


def rows_of(loc, read, row, write, **more):
    """Returns rows of the tests' layer, whose windows are read from `row` on."""
    write = jnp.asarray(write)[:, None]
    return Rows(query_start_loc=loc, layer=LAYER, window_read=read, window_row=row, write=write, **more)


def one_row(length, block):
    """Returns a row of layer 0 that reads and writes one block."""
    one = lambda v: jnp.array([v])
    return Rows(query_start_loc=pack([length]), layer=0, window_read=one(block), window_row=one(0), write=one([block]))


def oracle_row(x, pool, weight, bias, start, length, read, row, silu):
    width = weight.shape[0]
    window = np.asarray(pool.astype(jnp.float32))[LAYER, read, row : row + width - 1]
    history = window if read else np.zeros((width - 1, CHANNELS))
    tokens = np.asarray(x.astype(jnp.float32))[start : start + length]
    return causal_conv1d(tokens, history, np.asarray(weight), None if bias is None else np.asarray(bias), silu)


def check_update_matches_the_oracle(rng, width, K, bias, activation, dtype, implementation):
    # Decode and verify rows, an empty row, a skipped write, a row that writes its read block, a fresh row, padding
    # rows.
    lengths = [1, K + 1, 0, 1, min(2, K + 1), 1]
    read, row = [3, 4, 5, 0, 4, 5], [0, K, 0, 0, min(1, K), 0]
    write = [3, 6, 7, 8, 9, 0]
    x, pool, weight, bias = make(rng, lengths, width, dtype, K, bias)
    loc = pack(lengths, padding_rows=2)
    padded = [jnp.array([*v, 5, 5]) for v in (read, row)] + [jnp.array([*write, 10, 11])]
    y, after = causal_conv1d_update(
        x, pool, weight, bias, rows_of(loc, *padded), activation=activation, run=run_by(implementation)
    )
    for r, n in enumerate(lengths):
        start = int(loc[r])
        out, inputs = oracle_row(x, pool, weight, bias, start, n, read[r], row[r], activation == "silu")
        assert_close(y[start : start + n], out, dtype, width, f"row {r}")
        if n and write[r]:
            kept = np.asarray(after.astype(jnp.float32))[LAYER, write[r], : width - 2 + n]
            np.testing.assert_array_equal(kept, inputs[1:])
    assert not np.asarray(y[sum(lengths) :]).any()
    assert_untouched(pool, after, written=(3, 6, 8, 9))
    assert_untouched(pool[:LAYER], after[:LAYER], written=())


def check_update_of_a_row_depends_on_that_row_alone(rng, implementation):
    """A row gives the same bits alone, among other rows, in another order, and with padding."""
    lengths = [1, 3, 1, 2, 1]
    x, pool, weight, bias = make(rng, lengths, 4, jnp.bfloat16, 2, bias=True, blocks_to_read=(1, 2, 3, 4, 5))
    loc = np.asarray(pack(lengths))
    how = run_by(implementation)
    run = jax.jit(lambda x, *rows: causal_conv1d_update(x, pool, weight, bias, rows_of(*rows), run=how))

    def results(rows, padding):
        tokens = np.concatenate([np.arange(loc[r], loc[r + 1]) for r in rows] + [np.zeros(padding, int)])
        block = lambda first: jnp.array([r + first for r in rows] + [0] * padding)
        here = pack([lengths[r] for r in rows], padding)
        y, after = run(x[tokens], here, block(1), block(0) % 3, block(6))
        return {
            r: (
                np.asarray(y[here[i] : here[i + 1]].astype(jnp.float32)),
                np.asarray(after[LAYER, r + 6, : 2 + lengths[r]].astype(jnp.float32)),
            )
            for i, r in enumerate(rows)
        }

    wanted = results([0, 1, 2, 3, 4], 0)
    for rows, padding in [([0], 0), ([2, 0, 4], 0), ([4, 3, 2, 1, 0], 3), ([1], 9)]:
        for r, (y, window) in results(rows, padding).items():
            np.testing.assert_array_equal(y, wanted[r][0])
            np.testing.assert_array_equal(window, wanted[r][1])


def check_every_config_computes_the_same_bits(rng, implementation):
    x, pool, weight, _ = make(rng, [1, 3], 4, jnp.float32, 2)
    rows = rows_of(pack([1, 3]), jnp.array([3, 0]), jnp.array([1, 0]), jnp.array([6, 7]))
    results = [
        causal_conv1d_update(x, pool, weight, None, rows, run=run_by(implementation, Config(*config)))
        for config in ((16, 1), (64, 2), (512, 4))
    ]
    for y, after in results[1:]:
        np.testing.assert_array_equal(y, results[0][0])
        assert_untouched(results[0][1], after, written=())


def how_prefill(implementation):
    # In interpret mode a block of tokens is unrolled at compile time, so a short block compiles faster.
    return run_by(implementation, PrefillConfig(64, 5, 1) if implementation == "interpret" else None)


def exact(implementation, *arrays):
    """In interpret mode, rounds the numbers so that their sums are exact.

    XLA may otherwise round the sum of one unrolled token differently from another's.
    """
    return [jnp.round(4 * x) / 4 if implementation == "interpret" else x for x in arrays]


def check_prefill_matches_the_oracle(rng, width, K, bias, activation, dtype, implementation):
    lengths = [7, 1, 0, 64, 2, 3, 65, 1, 1, 63]
    read, row = [3, 0, 4, 5, 4, 0, 12, 4, 13, 0], [0, 0, 0, K, K, 0, 0, 0, K, 0]
    write = [3, 6, 7, 8, 9, 10, 14, 0, 13, 15]
    # Each checkpoint is (row, column, tokens, block). Some go to the row's own read block, some are at its very start.
    checkpoints = [(0, 1, 2, 1), (3, 0, 40, 5), (4, 0, 0, 16), (4, 1, 1, 17), (6, 0, 12, 12), (6, 1, 65, 18)]
    x, pool, weight, bias = make(rng, lengths, width, dtype, K, bias, extra_tokens=37, blocks_to_read=(3, 4, 5, 12, 13))
    loc = pack(lengths, padding_rows=1)
    padded = [jnp.array([*v, 5]) for v in (read, row)] + [jnp.array([*write, 11])]
    # An offset without a block may be anything.
    offsets, blocks = np.tile(np.int32([10**6, 1]), (11, 1)), np.zeros((11, 2), np.int32)
    for r, column, offset, block in checkpoints:
        offsets[r, column], blocks[r, column] = offset, block
    offsets[10], blocks[10] = 1, 19
    rows = rows_of(loc, *padded, checkpoints=RowCheckpoints(offset=jnp.asarray(offsets), block=jnp.asarray(blocks)))
    y, after = causal_conv1d_prefill(
        x, pool, weight, bias, rows, activation=activation, run=how_prefill(implementation)
    )
    for r, n in enumerate(lengths):
        start = int(loc[r])
        out, inputs = oracle_row(x, pool, weight, bias, start, n, read[r], row[r], activation == "silu")
        assert_close(y[start : start + n], out, dtype, width, f"row {r}")
        kept = [(offset, block) for row_, _, offset, block in checkpoints if row_ == r]
        for offset, block in kept + [(n, write[r])] * (n > 0 and write[r] > 0):
            window = np.asarray(after.astype(jnp.float32))[LAYER, block, : width - 1]
            np.testing.assert_array_equal(window, inputs[offset : offset + width - 1])
    assert not np.asarray(y[sum(lengths) :]).any()
    assert_untouched(pool, after, written=(1, 3, 5, 6, 8, 9, 10, 12, 13, 14, 15, 16, 17, 18))
    assert_untouched(pool[:LAYER], after[:LAYER], written=())


def check_prefill_split_anywhere_is_bit_identical(rng, implementation):
    x, pool, weight, _ = make(rng, [37], 4, jnp.float32, extra_tokens=0)
    x, pool, weight = exact(implementation, x, pool, weight)

    @jax.jit
    def run(x, pool, loc, read, write):
        rows = rows_of(loc, read[None], jnp.array([0]), write[None])
        return causal_conv1d_prefill(x, pool, weight, None, rows, run=how_prefill(implementation))

    whole, after = run(x, pool, pack([37]), jnp.int32(3), jnp.int32(6))
    for split in (1, 2, 3, 5, 16, 36):
        first, between = run(x, pool, pack([split]), jnp.int32(3), jnp.int32(7))
        # The rest comes in an array of the same length, in which the tokens after it are padding.
        rest = jnp.roll(x, -split, axis=0)
        second, last = run(rest, between, pack([37 - split]), jnp.int32(7), jnp.int32(8))
        np.testing.assert_array_equal(jnp.concatenate([first[:split], second[: 37 - split]]), whole)
        np.testing.assert_array_equal(last[LAYER, 8], after[LAYER, 6])


def check_prefill_of_a_row_depends_on_that_row_alone(rng, implementation):
    """A row gives the same bits alone, among dozens of other rows, in another order, with padding, and beside NaN."""
    lengths = [1, 19, 64, 2, 3] + [1, 0, 2, 5] * 6
    x, pool, weight, bias = make(rng, lengths, 4, jnp.bfloat16, bias=True, extra_tokens=0)
    x, pool, weight, bias = exact(implementation, x, pool, weight, bias)
    loc = np.asarray(pack(lengths))
    how = how_prefill(implementation)
    run = jax.jit(lambda x, *rows: causal_conv1d_prefill(x, pool, weight, bias, rows_of(*rows), run=how))

    def results(rows, padding, spoilt=()):
        x_ = np.asarray(x)
        tokens = [np.full_like(x_[loc[r] : loc[r + 1]], np.nan if r in spoilt else 0) for r in rows]
        tokens = np.concatenate([spoil + x_[loc[r] : loc[r + 1]] for r, spoil in zip(rows, tokens, strict=True)])
        tokens = np.pad(tokens, ((0, len(x_) + padding - len(tokens)), (0, 0)))
        here = pack([lengths[r] for r in rows], len(lengths) + padding - len(rows))
        read, write = (np.zeros(len(here) - 1, np.int32) for _ in range(2))
        # The rows from number 5 on write nothing.
        read[: len(rows)], write[: len(rows)] = [(3, 4, 0)[r % 3] for r in rows], [r + 6 if r < 5 else 0 for r in rows]
        y, after = jax.tree.map(np.asarray, run(tokens, here, read, np.zeros_like(read), write))
        return {
            r: (y[here[i] : here[i + 1]].astype(np.float32), after[LAYER, r + 6].astype(np.float32))
            for i, r in enumerate(rows)
            if r < 5 and r not in spoilt
        }

    wanted = results(range(len(lengths)), 0)
    for rows, padding, spoilt in [
        ([0], 0, ()),
        ([1], 20, ()),
        ([2, 0, 4], 0, ()),
        ([4, 3, 2, 1, 0], 20, ()),
        (range(len(lengths)), 0, range(0, len(lengths), 2)),
    ]:
        for r, (y, window) in results(rows, padding, spoilt).items():
            np.testing.assert_array_equal(y, wanted[r][0])
            np.testing.assert_array_equal(window, wanted[r][1])


def check_every_prefill_config_computes_the_same_bits(rng, implementation):
    x, pool, weight, _ = make(rng, [1, 50, 2], 4, jnp.float32)
    x, pool, weight = exact(implementation, x, pool, weight)
    rows = rows_of(pack([1, 50, 2]), jnp.array([3, 0, 4]), jnp.array([0, 0, 0]), jnp.array([6, 7, 8]))
    results = [
        causal_conv1d_prefill(x, pool, weight, None, rows, run=run_by(implementation, PrefillConfig(*config)))
        for config in ((16, 4, 1), (64, 18, 2))
    ]
    for y, after in results[1:]:
        np.testing.assert_array_equal(y, results[0][0])
        assert_untouched(results[0][1], after, written=())


def check_a_prefill_chunk_may_follow_a_verify_step(rng, implementation):
    """A chunk after a verify step with two of three tokens accepted continues as if five tokens had run in one call."""
    x, pool, weight, _ = make(rng, [8], 4, jnp.float32, K=2, extra_tokens=0)
    x, pool, weight = exact(implementation, x, pool, weight)
    row = lambda length, *blocks: rows_of(pack([length]), *(jnp.array([block]) for block in blocks))
    tokens, how = jnp.concatenate([x[:2], x[3:6]]), how_prefill(implementation)
    whole, _ = causal_conv1d_prefill(tokens, pool, weight, None, row(5, 3, 0, 6), run=how)
    _, pool = causal_conv1d_update(x[:3], pool, weight, None, row(3, 3, 0, 7), run=run_by(implementation))
    chunk, _ = causal_conv1d_prefill(x[3:6], pool, weight, None, row(3, 7, 1, 8), run=how)
    np.testing.assert_array_equal(chunk, whole[2:])


def transposed(op):
    """Returns `op` on pools of layout "DS". It takes and returns pools of layout "SD"."""

    @functools.wraps(op)
    def run(x, pool, *arguments, **options):
        y, pool = op(x, pool.swapaxes(2, 3), *arguments, layout="DS", **options)
        return y, pool.swapaxes(2, 3)

    return run
