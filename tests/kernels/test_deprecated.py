"""Old keywords of the ops work for one release and warn. Delete this file with pallas_kernels/_deprecated.py."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import causal_conv1d_prefill, causal_conv1d_update, state_copy


@pytest.mark.parametrize("op", [causal_conv1d_update, causal_conv1d_prefill])
def test_read_row_of_the_convolution_is_window_row(op):
    x, pool, weight = jnp.ones((2, 8)), jnp.arange(96.0).reshape(1, 3, 4, 8), jnp.ones((3, 8))
    row = jnp.array([1])
    arguments = x, pool, 0, weight, None, jnp.array([0, 2]), row
    wanted = op(*arguments, window_row=row, write_block=row + 1, implementation="xla")
    with pytest.warns(DeprecationWarning, match=f"{op.__name__}: keyword 'read_row' is now 'window_row'") as warned:
        actual = op(*arguments, read_row=row, write_block=row + 1, implementation="xla")
    assert warned[0].filename == __file__
    for one, other in zip(actual, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_row_offset_of_state_copy_is_window_row():
    pool, row = jnp.arange(96.0).reshape(1, 3, 4, 8), jnp.array([1])
    wanted = state_copy(pool, row, row + 1, window_row=row, implementation="xla")
    with pytest.warns(DeprecationWarning, match="state_copy: keyword 'row_offset' is now 'window_row'"):
        actual = state_copy(pool, row, row + 1, row_offset=row, implementation="xla")
    np.testing.assert_array_equal(actual, wanted)


def test_the_old_and_the_new_keyword_exclude_each_other():
    pool, row = jnp.zeros((1, 3, 4, 8)), jnp.array([1])
    with pytest.raises(TypeError, match="state_copy: 'row_offset' is the old name of 'window_row', got both"):
        state_copy(pool, row, row + 1, row_offset=row, window_row=row)
