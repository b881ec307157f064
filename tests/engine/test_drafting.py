"""Prompt lookup proposes the drafts that a search from scratch finds."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_align_jax import EngineConfig
from mamba_align_jax.engine.device.sizing import pages_spec
from mamba_align_jax.engine.drafting.choose import choose_drafter
from mamba_align_jax.engine.drafting.first_tokens import FirstTokens
from mamba_align_jax.engine.drafting.mtp import MTPDrafter
from mamba_align_jax.engine.drafting.prompt_lookup import PromptLookupDrafter
from mamba_align_jax.engine.drafting.prompt_lookup_device import DevicePromptLookup, HistoryDrafter
from mamba_align_jax.engine.drafting.protocols import Sampled, SampledStep
from mamba_align_jax.kv import KVSpec

PROPOSE = jax.jit(DevicePromptLookup.propose, static_argnums=(0, 3))


def search(tokens, longest, shortest, most):
    """Takes what followed the last occurrence of the longest n-gram that the tokens end with, by definition."""
    for n in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if n <= len(tokens) and tokens[end - n : end] == tokens[-n:]:
                sequence = list(tokens)
                for place in range(most):
                    sequence.append(sequence[end + place])
                return sequence[len(tokens) :]
    return []


@given(st.data())
def test_drafts_equal_those_of_a_search_from_scratch(data):
    """Several requests grow by any number of tokens between calls. Some are forgotten and come back."""
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


def test_drafts_repeat_if_too_few_tokens_follow_the_occurrence():
    assert PromptLookupDrafter(3, 1).draft("a", [7, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert PromptLookupDrafter(3, 2).draft("a", [1, 2, 3], 5) == []


class Counted(list):
    """A list that counts the tokens that are read from it."""

    read = 0

    def __getitem__(self, key):
        item = super().__getitem__(key)
        self.read += len(item) if isinstance(key, slice) else 1
        return item


def test_cost_of_a_call_depends_on_new_tokens_only():
    drafter, tokens = PromptLookupDrafter(4, 2), Counted(n * n % 9973 for n in range(20_000))
    drafter.draft(0, tokens, 4)
    tokens.read = 0
    tokens += [1, 4, 9]
    assert drafter.draft(0, tokens, 4) == [16, 25, 36, 49]
    assert tokens.read < 50


@pytest.mark.parametrize(("longest", "shortest"), [(1, 2), (3, 0)])
def test_wrong_sizes_raise(longest, shortest):
    with pytest.raises(ValueError, match=f"wanted 1 <= shortest <= longest, got {shortest} and {longest}"):
        PromptLookupDrafter(longest, shortest)


@settings(deadline=None)
@given(st.data())
def test_device_proposes_the_same_drafts_as_the_host(data):
    """Tokens after a row's length do not matter. A row has all drafts or none."""
    shortest = data.draw(st.integers(1, 2))
    lookup = DevicePromptLookup(shortest + data.draw(st.integers(0, 1)), shortest)
    rows = [data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=12)) for _ in range(3)]
    history = np.array([[*row, *data.draw(st.lists(st.integers(0, 2), min_size=12, max_size=12))][:12] for row in rows])
    drafts, count = PROPOSE(lookup, history, np.array([len(row) for row in rows]), 5)
    found = [search(row, lookup.longest, lookup.shortest, 5) for row in rows]
    assert count.tolist() == [len(tokens) for tokens in found]
    assert drafts.tolist() == [tokens or [0] * 5 for tokens in found]


def test_device_looks_as_far_back_as_it_reaches(rng):
    """The drafts are those that the host finds in a request's last tokens. A row that samples nothing has any slot."""
    lookup, slots = DevicePromptLookup(3, 1, reach=8), [2, 0, 9, 1]
    history, length = rng.integers(0, 4, (3, 30)).astype(np.int32), np.array([30, 5, 7, 9], np.int32)
    sampled = Sampled(np.array(slots, np.int32), np.zeros((4, 6), np.int32), np.ones(4, np.int32), length - 1)
    step = SampledStep(None, None, None, None, None, None, history, sampled)
    drafts, count, _ = jax.jit(lambda step: lookup.draft(step, 5))(step)
    for row in (0, 1, 3):
        found = search(history[slots[row], : length[row]][-8:].tolist(), 3, 1, 5)
        assert drafts[row].tolist() == (found or [0] * 5)
        assert count[row] == len(found)


@given(st.lists(st.integers(0, 5), max_size=8), st.data())
def test_a_drafter_reads_the_tokens_that_a_list_had(tokens, data):
    expected, live = list(tokens), list(tokens)
    given = FirstTokens(live)
    live += [7, 8, 9]
    assert (len(given), list(given), [*reversed(given)]) == (len(expected), expected, expected[::-1])
    part = data.draw(st.slices(len(expected)) | st.builds(slice, *[st.none() | st.integers(-12, 12)] * 2))
    assert given[part] == expected[part]
    assert type(given[part]) is list
    assert given == expected
    assert given == FirstTokens(expected)
    assert given != [*expected, 7]
    assert given.__add__([7]) == [*expected, 7]
    assert repr(given) == repr(expected)
    for place in range(-12, 12):
        if -len(expected) <= place < len(expected):
            assert given[place] == expected[place]
        else:
            with pytest.raises(IndexError):
                given[place]


class Minimal:
    """A drafter of a user: it has `draft` and `forget` and nothing else."""

    def draft(self, request, tokens, most):
        return [tokens[-1]] * most

    def forget(self, request):
        pass


class Remembering(Minimal, dict):
    """A drafter of a user that keeps what it knows in itself, so that it is false while it knows nothing."""


class OnDevice(HistoryDrafter):
    """A drafter of a user that runs on the device."""


@pytest.mark.parametrize(
    ("config", "own", "wanted"),
    [
        (dict(num_speculative_tokens=0), None, (None, None)),
        (dict(num_speculative_tokens=0), Minimal(), (None, None)),
        (dict(), None, (PromptLookupDrafter, None)),
        (dict(), Minimal(), (Minimal, None)),
        (dict(), Remembering(), (Remembering, None)),
        (dict(), OnDevice(), (None, OnDevice)),
        (dict(async_stepping=True), None, (None, DevicePromptLookup)),
        (dict(async_stepping=True), OnDevice(), (None, OnDevice)),
        (dict(speculation="mtp"), None, (None, MTPDrafter)),
        (dict(speculation="mtp", async_stepping=True), None, (None, MTPDrafter)),
    ],
)
def test_drafter_follows_the_configuration(config, own, wanted):
    model = SimpleNamespace(mtp=object())
    drafters = choose_drafter(EngineConfig(**{"num_speculative_tokens": 2, **config}), model, own)
    assert tuple(None if drafter is None else type(drafter) for drafter in drafters) == wanted
    assert own is None or own in drafters or wanted == (None, None)


@pytest.mark.parametrize("num_drafts", [0, 2])
@pytest.mark.parametrize(
    "drafter",
    [5, 0, "", {}, object(), SimpleNamespace(draft=len), SimpleNamespace(draft=1, forget=2), Minimal, OnDevice],
)
def test_what_is_no_drafter_is_refused(drafter, num_drafts):
    with pytest.raises(ValueError, match="drafter must be None, a DeviceDrafter, or a Drafter with"):
        choose_drafter(EngineConfig(num_speculative_tokens=num_drafts), SimpleNamespace(), drafter)


@pytest.mark.parametrize(("drafter", "layers"), [(DevicePromptLookup(3, 2), 4), (MTPDrafter(), 5), (None, 4)])
def test_pages_have_the_layers_of_the_drafter(drafter, layers):
    spec = KVSpec(4, 2, 8, 8)
    model = SimpleNamespace(kv_spec=lambda: spec)
    assert pages_spec(model, drafter) == dataclasses.replace(spec, num_layers=layers)
