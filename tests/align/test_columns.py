"""The arithmetic of columns gives the same results for Python ints, NumPy arrays and JAX arrays."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mamba_align_jax.align import columns


@given(st.integers(0, 60), st.integers(1, 20), st.integers(0, 8), st.integers(1, 9), st.integers(1, 9))
def test_formulas_are_the_same_for_every_kind_of_integer(computed, tokens, drafts, accepted, block_size):
    def outcome(computed, tokens, drafts, accepted):
        column = columns.running_column(computed, tokens, block_size)
        certain = columns.certain_tokens(computed, tokens, drafts)
        save = columns.boundary_save(certain, columns.tokens_after(certain, accepted), block_size)
        return column, *save, columns.accepted_after_save(accepted, save.passed, save.target, column)

    numbers = computed, tokens, drafts, accepted
    wanted = outcome(*numbers)
    assert all(type(x) in (int, bool) for x in wanted)
    for kind in (np.int32, lambda n: np.array([n], np.int32)):
        assert [int(np.squeeze(x)) for x in outcome(*map(kind, numbers))] == list(wanted)
