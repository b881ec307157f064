"""`block_idx` returns the columns in which a row's tokens lie."""

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_align_jax.vllm_compat.block_idx import block_idx

COUNTS = st.tuples(st.integers(0, 30), st.integers(0, 13))
SIZES = (1, 3, 4)
on_device = jax.jit(block_idx, static_argnums=2)


@given(st.lists(COUNTS, min_size=5, max_size=5), st.sampled_from(SIZES))
@settings(max_examples=200, deadline=None)
def test_block_idx_is_the_column_of_each_token(rows, size):
    block = lambda token: max(token, 0) // size
    wanted = [(block(nc - 1), block(nc), block(nc + q - 1)) for nc, q in rows]
    assert [block_idx(nc, q, size) for nc, q in rows] == wanted
    computed, tokens = np.array(rows, np.int32).T
    for found in (block_idx(computed, tokens, size), on_device(computed, tokens, size)):
        np.testing.assert_array_equal(np.stack(found, axis=1), wanted)
        assert {x.dtype.name for x in found} == {"int32"}
