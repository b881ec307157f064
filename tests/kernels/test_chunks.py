"""chunk_rows against the loop that it vectorises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import chunk_rows


def by_loop(lengths, computed, chunk_size):
    """Returns each chunk's start (and the end of the last), each chunk's row, and each row's last chunk."""
    starts, rows, last, token = [], [], [], 0
    for row, (length, position) in enumerate(zip(lengths, computed, strict=True)):
        end = token + length
        while token < end:
            starts.append(token)
            rows.append(row)
            step = min(chunk_size - position % chunk_size, end - token)
            token, position = token + step, position + step
        last.append(len(starts) - 1 if length else -1)
    return [*starts, token], rows, last


ROWS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 30)), min_size=1, max_size=6)


@given(ROWS, st.sampled_from([1, 2, 4, 5]), st.integers(0, 7))
@settings(max_examples=200, deadline=None)
def test_chunks_match_a_loop(rows, chunk_size, padding_tokens):
    lengths, computed = zip(*rows, strict=True)
    starts, owners, last = by_loop(lengths, computed, chunk_size)
    loc = np.cumsum([0, *lengths], dtype=np.int32)
    chunks = chunk_rows(loc, np.asarray(computed, np.int32), int(loc[-1]) + padding_tokens, chunk_size)
    n = len(owners)
    np.testing.assert_array_equal(chunks.cu_chunk_seqlens[: n + 1], starts)
    assert (chunks.cu_chunk_seqlens[n:] == loc[-1]).all()
    np.testing.assert_array_equal(chunks.seq_idx[:n], owners)
    assert (chunks.seq_idx[n:] == -1).all()
    np.testing.assert_array_equal(chunks.last_chunk_indices, last)
    counts = [owners.count(row) for row in range(len(lengths))]
    np.testing.assert_array_equal(chunks.first_chunk_indices, np.cumsum([0, *counts])[:-1])


@given(ROWS, st.integers(0, 7))
@settings(max_examples=30, deadline=None)
def test_device_and_host_cut_the_same_chunks(rows, padding_tokens):
    lengths, computed = (np.asarray(x, np.int32) for x in zip(*rows, strict=True))
    loc = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    num_tokens = int(loc[-1]) + padding_tokens
    host = chunk_rows(loc, computed, num_tokens, 4)
    device = jax.jit(lambda *rows: chunk_rows(*rows, num_tokens, 4))(jnp.asarray(loc), jnp.asarray(computed))
    for one, other in zip(jax.tree.leaves(host), jax.tree.leaves(device), strict=True):
        assert isinstance(one, np.ndarray)
        assert one.dtype == other.dtype == np.int32
        np.testing.assert_array_equal(one, other)


def test_one_array_may_be_of_numpy_and_the_other_one_traced():
    loc, computed = np.array([0, 7, 12], np.int32), np.array([6, 0], np.int32)
    wanted = jax.tree.leaves(chunk_rows(loc, computed, 12, 4))
    for got in (
        chunk_rows(loc, jnp.asarray(computed), 12, 4),
        chunk_rows(jnp.asarray(loc), computed, 12, 4),
        jax.jit(lambda computed: chunk_rows(loc, computed, 12, 4))(computed),
        jax.jit(lambda loc: chunk_rows(loc, computed, 12, 4))(loc),
    ):
        for one, other in zip(jax.tree.leaves(got), wanted, strict=True):
            np.testing.assert_array_equal(one, other)


def test_worked_example():
    """Two rows at positions 6 and 0 have 7 and 5 new tokens and chunks of 4. A row without tokens is between them."""
    chunks = chunk_rows(np.array([0, 7, 7, 12], np.int32), np.array([6, 9, 0], np.int32), 12, 4)
    np.testing.assert_array_equal(chunks.cu_chunk_seqlens[:6], [0, 2, 6, 7, 11, 12])
    np.testing.assert_array_equal(chunks.seq_idx[:5], [0, 0, 0, 2, 2])
    np.testing.assert_array_equal(chunks.last_chunk_indices, [2, -1, 4])


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6))
@settings(max_examples=50, deadline=None)
def test_packed_positions_can_serve_as_absolute_positions(lengths):
    loc = np.cumsum([0, *lengths], dtype=np.int32)
    chunks = chunk_rows(loc, loc[:-1], int(loc[-1]), 4)
    wanted = sorted({*range(0, int(loc[-1]), 4), *loc.tolist()})
    np.testing.assert_array_equal(np.unique(chunks.cu_chunk_seqlens), wanted)


def test_errors_name_the_bad_argument():
    loc, computed = np.array([0, 2], np.int32), np.array([0], np.int32)
    with pytest.raises(ValueError, match="chunk_size must be positive, got 0"):
        chunk_rows(loc, computed, 2, 0)
    with pytest.raises(ValueError, match="at least one row"):
        chunk_rows(loc[:1], computed[:0], 0)
    with pytest.raises(ValueError, match="query_start_loc must be Int32"):
        chunk_rows(loc.astype(np.float32), computed, 2)
