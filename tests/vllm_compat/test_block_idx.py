"""Blocks of mode "all" against the tokens that lie in them."""

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_align_jax.align.interior import interior_checkpoints
from mamba_align_jax.vllm_compat.block_idx import block_idx

COUNTS = st.tuples(st.integers(0, 30), st.integers(0, 13))
SIZES = (1, 3, 4)
on_device = jax.jit(block_idx, static_argnums=2)
checkpoints_on_device = jax.jit(interior_checkpoints, static_argnums=(2, 3))


@given(st.lists(COUNTS, min_size=5, max_size=5), st.sampled_from(SIZES))
@settings(max_examples=200, deadline=None)
def test_block_idx_is_where_the_tokens_lie(rows, size):
    block = lambda token: max(token, 0) // size
    wanted = [(block(nc - 1), block(nc), block(nc + q - 1)) for nc, q in rows]
    assert [block_idx(nc, q, size) for nc, q in rows] == wanted
    computed, tokens = np.array(rows, np.int32).T
    for found in (block_idx(computed, tokens, size), on_device(computed, tokens, size)):
        np.testing.assert_array_equal(np.stack(found, axis=1), wanted)
        assert {x.dtype.name for x in found} == {"int32"}


@given(st.lists(COUNTS, min_size=5, max_size=5), st.sampled_from(SIZES))
@settings(max_examples=200, deadline=None)
def test_checkpoints_are_the_boundaries_inside_a_chunk(rows, size):
    bound = (13 + size - 2) // size
    computed, tokens = np.array(rows, np.int32).T
    for run in (interior_checkpoints, checkpoints_on_device):
        offset, column = (np.asarray(x) for x in run(computed, tokens, size, bound))
        assert offset.dtype == column.dtype == np.int32
        assert (np.diff(offset, axis=1) > 0).all()
        for r, (nc, q) in enumerate(rows):
            # The state after n tokens of the row is that of a whole block.
            wanted = [(n, (nc + n) // size - 1) for n in range(1, q) if (nc + n) % size == 0]
            real = column[r] >= 0
            assert [*zip(offset[r, real], column[r, real], strict=True)] == wanted
