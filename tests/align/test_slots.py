"""Rows set the values of their slots, and nothing else changes."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_align_jax.align.slots import set_slots


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([(), (1,), (3,)]), st.integers(1, 9))
def test_each_row_sets_its_slot(data, rest, slots):
    """Rows whose slot is negative, or none of the array's, are skipped."""
    real = data.draw(st.lists(st.integers(0, slots - 1), unique=True))
    skipped = st.sampled_from([-1, -slots, slots, slots + 5])
    slot = data.draw(st.permutations([*real, *data.draw(st.lists(skipped, max_size=3))]))
    array = np.arange(slots * np.prod(rest, dtype=int), dtype=np.int32).reshape(slots, *rest)
    values = 1000 + np.arange(len(slot) * np.prod(rest, dtype=int), dtype=np.int32).reshape(len(slot), *rest)
    wanted = array.copy()
    for row, each in enumerate(slot):
        if 0 <= each < slots:
            wanted[each] = values[row]
    found = set_slots(jnp.asarray(array), jnp.asarray(slot, jnp.int32), jnp.asarray(values))
    np.testing.assert_array_equal(found, wanted)
    assert found.dtype == array.dtype


def test_one_value_is_every_rows():
    found = set_slots(jnp.arange(5, dtype=jnp.int32), jnp.array([3, -1, 0], jnp.int32), jnp.int32(9))
    np.testing.assert_array_equal(found, [9, 1, 2, 9, 4])
