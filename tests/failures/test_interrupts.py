"""Interrupts lose nothing: a KeyboardInterrupt at any line leaves every request running, waiting or finished."""

import itertools
import sys

import depth
import numpy as np
import pytest
from fakes.letters import Letters
from fakes.raising import PACKAGE, Calls, Interrupt
from fakes.spelling_engine import DRAFTS, SIZES, SPELLER

from mamba_align_jax import Engine, EngineConfig

pytestmark = pytest.mark.usefixtures("one_program")
STEPPING = {
    "sync": dict(DRAFTS, checked=True),
    "async": dict(DRAFTS, async_stepping=True),
    "pre_copy": dict(policy="pre_copy", max_waiting=20, overtaking_limit=3),
    "deferred": dict(DRAFTS, policy="deferred", fold_length=8, checked=True),
}


@pytest.mark.parametrize("stepping", STEPPING)
def test_interrupt_at_any_line_loses_nothing(stepping):
    """The calls and the lines are drawn. Requests run, wait and are cached when the interrupt comes."""
    rng = np.random.default_rng(len(stepping))
    engine = Engine(SPELLER, EngineConfig(**SIZES, **STEPPING[stepping]), tokenizer=Letters())
    calls, places = Calls(engine, rng), set()
    calls.generate()
    lines = dict.fromkeys(("add", "step", "update", "abort", "generate"), 300)
    for number in itertools.count():
        for _ in range(rng.integers(0, 4)):
            calls.add()
        for _ in range(rng.integers(0, 12)):
            (calls.step, calls.update)[rng.integers(2)]()
        name = ("step", "update", "generate", "abort", "add")[rng.choice(5, p=(0.3, 0.25, 0.2, 0.15, 0.1))]
        before = set(calls.prompts)
        with Interrupt(int(rng.integers(lines[name]))) as interrupt:
            getattr(calls, name)()
        # The next turns are within what this kind of call takes.
        lines[name] = max(lines[name] if interrupt.place else interrupt.lines, 10)
        if interrupt.place:
            places.add(interrupt.place)
            assert calls.prompts.keys() == before
        assert not engine.core.turns._lock._is_owned()
        assert not engine.core.turns._gate._is_owned()
        engine.cache.check()
        calls.drain()
        calls.check()
        if number >= depth.examples(40, 700) and len(places) > depth.examples(15, 150):
            break


def test_every_line_of_the_short_calls_may_be_interrupted():
    """`add_request`, `abort` and a step that ends a request are cut off at each of their lines in turn."""
    engine = Engine(SPELLER, EngineConfig(**SIZES), tokenizer=Letters())
    calls = Calls(engine, np.random.default_rng(0))
    for name in ("add", "abort", "step", "update"):
        for turn in itertools.count(0, 1 if depth.is_full() else 9):
            calls.add()
            calls.step()
            while name in ("step", "update") and engine.scheduler.running[0].num_left > 1:
                calls.step()
            with Interrupt(turn) as interrupt:
                getattr(calls, name)()
            calls.drain()
            calls.check()
            if interrupt.place is None:
                break


def test_a_request_is_queued_only_if_its_caller_gets_its_id():
    """`add_request` is cut off before each line of the core in turn, also when the request is queued already."""
    engine = Engine(SPELLER, EngineConfig(**SIZES), tokenizer=Letters())
    calls = Calls(engine, np.random.default_rng(0))
    for turn in itertools.count():
        with Interrupt(turn, f"{PACKAGE}/engine/running/core.py") as interrupt:
            calls.add()
        if interrupt.place is None:
            break
        assert not calls.prompts
        assert not engine.core.requests
        assert not engine.core.waiting
        assert not engine.has_unfinished
    assert turn > 15
    calls.drain()
    calls.check()


@pytest.mark.parametrize("file", ["running/updates", "running/results", "scheduling/request"])
def test_every_line_that_makes_an_update_may_be_interrupted(file):
    """A request has tokens that were shown and tokens that were not when the interrupt comes."""
    engine = Engine(SPELLER, EngineConfig(**SIZES), tokenizer=Letters())
    calls = Calls(engine, np.random.default_rng(0))
    for turn in itertools.count():
        calls.add()
        for _ in range(5):
            calls.update()
        with Interrupt(turn, f"{PACKAGE}/engine/{file}.py") as interrupt:
            calls.update()
        calls.drain()
        calls.check()
        if interrupt.place is None:
            break
    assert turn > 10


def test_two_interrupts_leak_nothing():
    """The second one comes while the engine recovers from the first."""
    engine = Engine(SPELLER, EngineConfig(**SIZES, **DRAFTS), tokenizer=Letters())
    rng = np.random.default_rng(2)
    calls = Calls(engine, rng)
    recover = engine.core._recover
    for turn in range(0, 400, 1 if depth.is_full() else 20):
        for _ in range(4):
            calls.add()
        for _ in range(rng.integers(1, 8)):
            calls.step()

        def interrupted(turn=turn):
            engine.core._recover = recover
            with pytest.MonkeyPatch.context():
                second = Interrupt(turn)
                sys.settrace(second.trace)
                try:
                    recover()
                finally:
                    sys.settrace(None)

        engine.core._recover = interrupted
        with Interrupt(int(rng.integers(200))):
            calls.step()
        engine.core._recover = recover
        calls.drain()
        calls.check()
