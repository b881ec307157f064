"""Packed tokens are separated by kind, and find their rows, as in loops over rows and tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_align_jax.vllm_compat.token_split import split_tokens
from pallas_kernels.rows import token_rows

ROWS, TOKENS = 6, 32
# (tokens, computed, is_verify). One program runs all batches; the rest of the bucket is padding.
BATCHES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20), st.booleans()), min_size=ROWS, max_size=ROWS)


def pack(batch):
    lengths, computed, verify = zip(*batch, strict=True)
    loc = np.cumsum([0, *lengths], dtype=np.int32)
    drafts = np.array([n - 1 if v else -1 for n, v in zip(lengths, verify, strict=True)], np.int32)
    # A verify row without tokens is still a verify row.
    return loc, np.asarray(computed, np.int32), np.where(verify, np.maximum(drafts, 0), drafts), verify


@functools.partial(jax.jit, static_argnames="bound")
def split_and_merge(loc, drafts, x, bound=None):
    split = split_tokens(loc, drafts, TOKENS, bound)
    verify, other = split.take(x)
    return split, verify, other, split.merge(10 * verify, -other)


def by_loop(loc, verify):
    sides, starts = ([], []), ([0], [0])
    for row in range(ROWS):
        for side in (0, 1):
            if bool(verify[row]) == (side == 0):
                sides[side].extend(range(loc[row], loc[row + 1]))
            starts[side].append(len(sides[side]))
    return sides, starts


@given(BATCHES)
@settings(max_examples=100, deadline=None)
def test_split_and_put_back(batch):
    loc, _, drafts, verify = pack(batch)
    x = np.arange(1, TOKENS + 1, dtype=np.float32)[:, None] * [1.0, 1000.0]
    (verify_tokens, other_tokens), starts = by_loop(loc, verify)
    split, taken, rest, merged = jax.tree.map(np.asarray, split_and_merge(loc, drafts, x))
    np.testing.assert_array_equal(split.verify_query_start_loc, starts[0])
    np.testing.assert_array_equal(split.other_query_start_loc, starts[1])
    for found, tokens, values in (
        (split.verify_tokens, verify_tokens, taken),
        (split.other_tokens, other_tokens, rest),
    ):
        np.testing.assert_array_equal(found[: len(tokens)], tokens)
        assert (found[len(tokens) :] == TOKENS).all()
        np.testing.assert_array_equal(values[: len(tokens)], x[tokens])
        assert not values[len(tokens) :].any()
    wanted = np.zeros_like(x)
    wanted[verify_tokens], wanted[other_tokens] = 10 * x[verify_tokens], -x[other_tokens]
    np.testing.assert_array_equal(merged, wanted)
    assert {a.dtype.name for a in jax.tree.leaves(split)} == {"int32", "bool"}


def test_the_worked_example():
    """A chunk between two verify rows, as in vLLM's builder; a bound keeps the verify rows' arrays short."""
    loc = jnp.array([0, 3, 8, 11, 11, 11, 11])
    split, taken, rest, merged = split_and_merge(loc, jnp.array([2, -1, 2, -1, -1, -1]), jnp.arange(TOKENS), 9)
    np.testing.assert_array_equal(split.verify_query_start_loc[:4], [0, 3, 3, 6])
    np.testing.assert_array_equal(split.other_query_start_loc[:4], [0, 0, 5, 5])
    np.testing.assert_array_equal(split.verify_tokens, [0, 1, 2, 8, 9, 10, TOKENS, TOKENS, TOKENS])
    np.testing.assert_array_equal(split.other_tokens[:6], [3, 4, 5, 6, 7, TOKENS])
    assert taken.shape == (9,)
    assert rest.shape == (TOKENS,)
    np.testing.assert_array_equal(merged[:12], [0, 10, 20, -3, -4, -5, -6, -7, 80, 90, 100, 0])


rows_on_device = jax.jit(lambda loc: token_rows(loc, TOKENS))


@given(BATCHES)
@settings(max_examples=100, deadline=None)
def test_every_token_finds_its_row_and_its_offset(batch):
    loc, _, _, _ = pack(batch)
    found = jax.tree.map(np.asarray, rows_on_device(loc))
    wanted = [(row, n) for row, (length, _, _) in enumerate(batch) for n in range(length)]
    assert list(zip(found.row, found.offset, strict=True))[: len(wanted)] == wanted
    np.testing.assert_array_equal(found.valid, np.arange(TOKENS) < len(wanted))
