"""Interior checkpoints are the block boundaries strictly inside a prefill row."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_align_jax.align.interior import interior_checkpoints, prefill_checkpoints
from pallas_kernels import NULL_BLOCK, RowCheckpoints, Rows, causal_conv1d_prefill

COUNTS = st.tuples(st.integers(0, 30), st.integers(0, 13))
SIZES = (1, 3, 4)
checkpoints_on_device = jax.jit(interior_checkpoints, static_argnums=(2, 3))


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 9), st.integers(0, 12))
def test_prefill_checkpoints_are_the_boundaries_inside_the_row(computed, tokens, block_size, columns):
    row = [100 + column for column in range(columns)]
    inside = [b for b in range(computed + 1, computed + tokens) if b % block_size == 0]
    offsets, blocks = prefill_checkpoints(computed, tokens, block_size, row)
    assert [computed + offset for offset in offsets] == inside
    assert blocks == [100 + b // block_size - 1 if b <= columns * block_size else NULL_BLOCK for b in inside]


@given(st.lists(COUNTS, min_size=5, max_size=5), st.sampled_from(SIZES))
@settings(max_examples=200, deadline=None)
def test_interior_checkpoints_are_the_boundaries_inside_each_row(rows, size):
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


def test_a_prefill_op_keeps_the_states_at_the_checkpoints():
    x = jnp.arange(1.0, 11.0)[:, None]
    pool = jnp.full((1, 8, 3, 1), jnp.nan)
    # 10 tokens from position 3 on, in blocks of 4: boundaries 4, 8 and 12.
    offset, block = (jnp.array([kept], jnp.int32) for kept in prefill_checkpoints(3, 10, 4, [3, 4, 5, 6]))
    ints = lambda *values: jnp.array(values, jnp.int32)
    rows = Rows(
        query_start_loc=ints(0, 10),
        layer=0,
        window_read=ints(NULL_BLOCK),
        window_row=ints(0),
        write=ints(6)[:, None],
        checkpoints=RowCheckpoints(offset=offset, block=block),
    )
    _, pool = causal_conv1d_prefill(x, pool, jnp.ones((4, 1)), None, rows)
    np.testing.assert_array_equal(pool[0, 3:7, :, 0], [[0, 0, 1], [3, 4, 5], [7, 8, 9], [8, 9, 10]])
    assert jnp.isnan(pool[0, [0, 1, 2, 7]]).all()
