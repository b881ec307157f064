"""Long answers are the JSON that one piece would be, and no slice of them is long."""

import json

from hypothesis import given
from hypothesis import strategies as st

from mamba_align_jax.serve import long_answers
from mamba_align_jax.serve.long_answers import SLICE_BYTES, json_slices
from mamba_align_jax.serve.refusals import to_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


def with_iterators(value):
    """The value with an iterator in place of each list."""
    if isinstance(value, dict):
        return {key: with_iterators(one) for key, one in value.items()}
    return iter([with_iterators(one) for one in value]) if isinstance(value, list) else value


@given(VALUES)
def test_slices_are_the_json_of_the_value(value):
    assert b"".join(json_slices(value)) == b"".join(json_slices(with_iterators(value))) == to_json(value)


def test_slices_have_the_same_length_and_long_lists_are_written_in_parts(monkeypatch):
    encoded = []
    monkeypatch.setattr(long_answers, "to_json", lambda value: encoded.append(value) or to_json(value))
    value = {"token_ids": list(range(50_000)), "text": "x" * 100_000, "scores": [[n] for n in range(2001)]}
    slices = [*json_slices(value)]
    assert json.loads(b"".join(slices)) == value
    assert {len(one) for one in slices[:-1]} == {SLICE_BYTES}
    assert len(slices[-1]) <= SLICE_BYTES
    assert max(len(one) for one in encoded if isinstance(one, list)) == 1000
