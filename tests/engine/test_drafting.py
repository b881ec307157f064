"""Prompt lookup against a search from scratch."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_align_jax.engine.drafting.prompt_lookup import PromptLookupDrafter
from mamba_align_jax.engine.drafting.prompt_lookup_device import DevicePromptLookup

PROPOSE = jax.jit(DevicePromptLookup.propose, static_argnums=(0, 3))


def search(tokens, longest, shortest, most):
    """The definition: the longest n-gram at the end that occurred before, its latest occurrence, and what followed."""
    for n in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if n <= len(tokens) and tokens[end - n : end] == tokens[-n:]:
                sequence = list(tokens)
                for place in range(most):
                    sequence.append(sequence[end + place])
                return sequence[len(tokens) :]
    return []


@given(st.data())
def test_drafts_are_those_of_a_search_from_scratch(data):
    """Requests in turn, each growing by any number of tokens between its calls, some forgotten and back."""
    shortest = data.draw(st.integers(1, 3))
    longest = data.draw(st.integers(shortest, 5))
    drafter, requests = PromptLookupDrafter(longest, shortest), {}
    for _ in range(data.draw(st.integers(1, 12))):
        request, most = data.draw(st.integers(0, 1)), data.draw(st.integers(1, 6))
        if data.draw(st.integers(0, 9)) == 9:
            drafter.forget(request)
            requests.pop(request, None)
        tokens = requests.setdefault(request, [0])
        tokens += data.draw(st.lists(st.integers(0, 2), max_size=8))
        assert drafter.draft(request, tokens, most) == search(tokens, longest, shortest, most)


def test_what_lies_between_repeats_where_the_occurrence_is_near():
    assert PromptLookupDrafter(3, 1).draft("a", [7, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert PromptLookupDrafter(3, 2).draft("a", [1, 2, 3], 5) == []


class Counted(list):
    """Counts the tokens that are read of it."""

    read = 0

    def __getitem__(self, key):
        item = super().__getitem__(key)
        self.read += len(item) if isinstance(key, slice) else 1
        return item


def test_a_step_costs_what_it_brings():
    drafter, tokens = PromptLookupDrafter(4, 2), Counted(n * n % 9973 for n in range(20_000))
    drafter.draft(0, tokens, 4)
    tokens.read = 0
    tokens += [1, 4, 9]
    assert drafter.draft(0, tokens, 4) == [16, 25, 36, 49]
    assert tokens.read < 50


@pytest.mark.parametrize(("longest", "shortest"), [(1, 2), (3, 0)])
def test_bad_sizes_are_named(longest, shortest):
    with pytest.raises(ValueError, match=f"wanted 1 <= shortest <= longest, got {shortest} and {longest}"):
        PromptLookupDrafter(longest, shortest)


@settings(deadline=None)
@given(st.data())
def test_the_device_finds_the_same_drafts(data):
    """Whatever stands behind a row's tokens; the number of drafts is all or none."""
    shortest = data.draw(st.integers(1, 2))
    lookup = DevicePromptLookup(shortest + data.draw(st.integers(0, 1)), shortest)
    rows = [data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=12)) for _ in range(3)]
    history = np.array([[*row, *data.draw(st.lists(st.integers(0, 2), min_size=12, max_size=12))][:12] for row in rows])
    drafts, count = PROPOSE(lookup, history, np.array([len(row) for row in rows]), 5)
    found = [search(row, lookup.longest, lookup.shortest, 5) for row in rows]
    assert count.tolist() == [len(tokens) for tokens in found]
    assert drafts.tolist() == [tokens or [0] * 5 for tokens in found]
