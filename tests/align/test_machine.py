"""Each step of a random server reads exactly its own past, and leaves its states where the next step reads them."""

import depth
import pytest
from fakes.deferred_server import DeferredMachine
from fakes.kernel_machine import KernelMachine
from fakes.server import Machine, run

EVENTS = {
    *("moves left", "crosses after several were accepted", "reads several columns back", "chunk after verify"),
    *("boundary saved from the next column", "boundary saved in place", "prefix hits", "no tokens", "pool too small"),
    *("two unread steps", "resumed", "boundaries inside chunks", "enters inside a block", "goes back"),
}


def test_every_step_reads_its_own_past():
    events = run(Machine, depth.examples(quick=8, full=215), steps=depth.examples(quick=300, full=10_000))
    # A fifth of the steps may miss the rarest events.
    if depth.is_full():
        assert {event for event, times in events.items() if times >= 10} == EVENTS, events


DEFERRED_EVENTS = (EVENTS - {"moves left"}) | {
    *("folds", "crosses without a fold", "settles", "settles after a fold", "folds at its end"),
    *("published by the next step", "published by a step in flight", "settles and keeps a window"),
    *("a window is kept at its end", "a decode row of a known token is published"),
}


def test_every_step_reads_its_own_past_from_deferred_states():
    events = run(DeferredMachine, depth.examples(quick=8, full=215), steps=depth.examples(quick=300, full=10_000))
    if depth.is_full():
        # A window rarely moves left, because steps are short beside blocks.
        assert {event for event, times in events.items() if times >= 10} >= DEFERRED_EVENTS, events


@pytest.mark.deep
def test_kernels_agree_with_the_replay_in_tokens():
    run(KernelMachine, depth.examples(quick=5, full=12), steps=depth.examples(quick=80, full=200))
