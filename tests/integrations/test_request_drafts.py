"""A drafter's memory ends with a request, however it ends, and a step's work does not grow with its text."""

import gc
import itertools
from types import SimpleNamespace

import pytest

from mamba_align_jax.engine.drafting.prompt_lookup import PromptLookupDrafter
from mamba_align_jax.integrations.request_drafts import Joined, RequestDrafts
from mamba_align_jax.integrations.sglang_jax_speculation import _row, _until_stop


class Request:
    """A request of another stack, which compares requests by identity and has no end that all of them reach."""

    def __init__(self, rid, prompt, outputs):
        self.rid, self.origin_input_ids, self.output_ids = rid, prompt, outputs
        self.sampling_params = SimpleNamespace(max_new_tokens=10**6)

    def _check_token_based_finish(self, new_accepted_tokens):
        if 0 not in new_accepted_tokens:
            return False
        self.finished_len = len(self.output_ids) - len(new_accepted_tokens) + new_accepted_tokens.index(0) + 1
        return True


class Counted(list):
    """A list that counts how many of its elements are read."""

    read = 0

    def __getitem__(self, place):
        found = super().__getitem__(place)
        Counted.read += len(found) if isinstance(place, slice) else 1
        return found

    def __iter__(self):
        Counted.read += len(self)
        return super().__iter__()


def test_the_index_of_a_request_goes_with_it():
    """Requests that are aborted while they are retracted, or for want of memory, are never processed as finished."""
    drafter = PromptLookupDrafter(3, 1)
    drafts = RequestDrafts(drafter)
    gc.disable()  # What is dropped is collected at once, by its count of references.
    try:
        running = Request("running", [1, 2, 1], [2])
        for number in range(50):
            request = Request(f"aborted {number}", [number] * 40, [99])
            assert drafts.draft(request, 2) == []
            assert drafts.draft(running, 2) == [1, 2]
            assert [rid for rid, _ in drafter._indices] in (["running", request.rid], [request.rid, "running"])
            del request
        drafts.draft(running, 2)
        assert [rid for rid, _ in drafter._indices] == ["running"]
        drafts.forget(running)
        assert not drafter._indices
        del running
        assert not drafts._names
    finally:
        gc.enable()


def test_a_request_that_has_the_id_of_an_aborted_one_has_its_own_drafts():
    """The first is still held, as the batch of the last step holds it, when a client uses its id again."""
    drafts = RequestDrafts(PromptLookupDrafter(3, 1))
    aborted = Request("r", [5, 6, 7, 8, 5], [6])
    assert drafts.draft(aborted, 2) == [7, 8]
    again = Request("r", [5, 9, 5], [])
    assert drafts.draft(again, 2) == [9, 5]
    del aborted
    again.output_ids += [9, 5]
    assert drafts.draft(again, 2) == [9, 5]


def test_a_retracted_request_keeps_its_index():
    drafter = PromptLookupDrafter(3, 1)
    drafts, request = RequestDrafts(drafter), Request("r", [1, 2, 3], [1])
    assert drafts.draft(request, 1) == [2]
    (index,) = drafter._indices.values()
    request.output_ids.append(2)
    assert drafts.draft(request, 1) == [3]
    assert [*drafter._indices.values()] == [index]


def test_a_request_that_is_collected_while_the_drafter_works_is_forgotten_later():
    calls = []

    class Drafter:
        def draft(self, request, tokens, max_drafts):
            calls.append(("draft", request[0]))
            held.clear()
            calls.append(("drafted", request[0]))
            return []

        def forget(self, request):
            calls.append(("forget", request[0]))

    drafts, held = RequestDrafts(Drafter()), []
    other = Request("other", [1], [2])
    gone = Request("gone", [1], [2])
    drafts.draft(gone, 1)
    held.append(gone)
    del gone
    drafts.draft(other, 1)
    drafts.draft(other, 1)
    of_other = [("draft", "other"), ("drafted", "other")]
    assert calls == [("draft", "gone"), ("drafted", "gone"), *of_other, ("forget", "gone"), *of_other]


def test_no_more_drafts_than_asked_for():
    drafter = SimpleNamespace(draft=lambda request, tokens, max_drafts: [1, 2, 3])
    assert RequestDrafts(drafter).draft(Request("r", [1], [2]), 2) == [1, 2]


def test_the_work_of_a_step_does_not_grow_with_the_text():
    """Reads as many tokens of a request after 50,000 tokens of prompt and 20,000 of an answer as after a few."""

    def read(num_prompt, num_outputs):
        # Each token says which one follows, so that drafts are found.
        prompt, outputs = Counted(i % 7 for i in range(num_prompt)), Counted()
        outputs += [(num_prompt + i) % 7 for i in range(num_outputs)]
        request, drafts = Request("r", prompt, outputs), RequestDrafts(PromptLookupDrafter(4, 2))
        _row(request, drafts, 4, 64)
        found = []
        for _ in range(3):
            Counted.read = 0
            request.output_ids.append((num_prompt + len(outputs)) % 7)
            row = _row(request, drafts, 4, 64)
            assert row.tokens == [(row.computed + i) % 7 for i in range(4)]
            assert _until_stop(request, [1, 2, 0, 4]) == 3
            assert _until_stop(request, [1, 2]) == 2
            found.append(Counted.read)
        return found

    few = read(30, 20)
    assert read(50_000, 20_000) == few
    assert max(few) < 40


@pytest.mark.parametrize("sizes", [(0, 0), (0, 4), (4, 0), (3, 5)])
def test_two_lists_read_as_one(sizes):
    first, second = [*range(sizes[0])], [*range(10, 10 + sizes[1])]
    joined, whole = Joined(first, second), first + second
    assert (len(joined), [*joined]) == (len(whole), whole)
    ends = [None, *range(-10, 11)]
    for begin, end, step in itertools.product(ends, ends, (None, 1, 2, -1, -3)):
        assert joined[begin:end:step] == whole[begin:end:step]
    for place in range(-10, 11):
        if -len(whole) <= place < len(whole):
            assert joined[place] == whole[place]
        else:
            with pytest.raises(IndexError):
                joined[place]
    second.append(99)
    assert joined[-1] == 99
