"""Interrupts lose nothing: a KeyboardInterrupt at any line leaves every request running, waiting or finished."""

import itertools
import sys
from pathlib import Path

import depth
import numpy as np
import pytest
from failures.test_owners import DRAFTS, FULL, SIZES, SPELLER, assert_nothing_is_held, assert_right
from fakes.letters import Letters
from fakes.speller import VOCAB

import mamba_align_jax
from mamba_align_jax import Engine, EngineConfig, SamplingParams

pytestmark = pytest.mark.usefixtures("one_program")
PACKAGE = str(Path(mamba_align_jax.__file__).parent)
STEPPING = {
    "sync": dict(DRAFTS, checked=True),
    "async": dict(DRAFTS, async_stepping=True),
    "pre_copy": dict(policy="pre_copy", max_waiting=20, overtaking_limit=3),
    "deferred": dict(DRAFTS, policy="deferred", fold_length=8, checked=True),
}
# The stop string never comes whole, but parts of it are held back.
PARAMS = SamplingParams(max_tokens=18, ignore_eos=True, stop=tuple(chr(60 + token) + "\n" for token in range(30)))


class Interrupt:
    """Raises KeyboardInterrupt once, before the line number `turn` of this package that runs within the context.

    Only lines of files whose paths begin with `path` are counted.
    """

    def __init__(self, turn, path=PACKAGE):
        self.turn, self.path, self.lines, self.place = turn, path, 0, None

    def __enter__(self):
        sys.settrace(self.trace)
        return self

    def __exit__(self, kind, error, traceback):
        sys.settrace(None)
        return kind is KeyboardInterrupt

    def trace(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line" and frame.f_code.co_filename.startswith(self.path):
            self.lines += 1
            if self.lines > self.turn and self.place is None:
                self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self.trace


class Calls:
    """Draws calls of an engine, and keeps account of all requests that were ever added, whatever interrupts a call."""

    def __init__(self, engine, rng):
        self.engine, self.rng = engine, rng
        self.prompts, self.outputs, self.shown = {}, {}, {}
        self.shared = rng.integers(0, VOCAB, 40).tolist()

    def prompt(self):
        rng = self.rng
        return self.shared[: rng.integers(1, 20)] + rng.integers(0, VOCAB, rng.integers(1, 6)).tolist()

    def take(self, outputs):
        for output in outputs:
            assert output.request_id not in self.outputs, "an output came twice"
            self.outputs[output.request_id] = output

    def add(self):
        prompt = self.prompt()
        self.prompts[self.engine.add_request(prompt, PARAMS)] = prompt

    def step(self):
        self.take(self.engine.step())

    def update(self):
        """Takes what is new. The tokens and the texts of a request's updates are its output's, one after the other."""
        for update in self.engine.step_outputs():
            tokens, text = self.shown.get(update.request_id, ((), ""))
            tokens, text = self.shown[update.request_id] = tokens + update.token_ids, text + update.text
            if update.output:
                assert (tokens, text) == (update.output.token_ids, update.output.text)
                self.take([update.output])

    def abort(self):
        live = sorted(self.prompts.keys() - self.outputs.keys())
        if live:
            output = self.engine.abort(live[self.rng.integers(len(live))])
            self.take([output] if output else [])

    def generate(self):
        prompts = [self.prompt(), self.prompt()]
        outputs = self.engine.generate(prompts, FULL)
        assert_right(outputs, prompts)

    def interrupt_often(self, rounds, lines, names, steps=("step",), after=lambda: None):
        """Adds requests, makes steps, and interrupts a call in one of its first lines, again and again.

        Returns how many calls were interrupted before their end.

        Args:
            rounds: How often a call is interrupted.
            lines: The number of a call's lines in one of which it is interrupted.
            names: The calls to choose from.
            steps: The kinds of steps that come before.
            after: Is called after each round, when no request is left.
        """
        rng, interrupted = self.rng, 0
        for number in range(rounds):
            for _ in range(rng.integers(1, 4)):
                self.add()
            for _ in range(rng.integers(0, 12)):
                getattr(self, steps[rng.integers(len(steps))])()
            name = names[rng.integers(len(names))]
            with Interrupt(int(rng.integers(lines))) as interrupt:
                getattr(self, name)()
            interrupted += interrupt.place is not None
            if number % 5 == 4:
                self.engine.reset_prefix_cache()
            self.drain()
            self.check()
            after()
        return interrupted

    def drain(self):
        for _ in range(600):
            if not self.engine.has_unfinished:
                return
            (self.step, self.update)[self.rng.integers(2)]()
        raise AssertionError("the engine does not come to an end")

    def check(self):
        """Every request that was added has come out once, with the right tokens or some of them."""
        assert self.outputs.keys() == self.prompts.keys(), "a request was lost, or came from nowhere"
        aborted = [n for n, output in self.outputs.items() if output.finish_reason == "abort"]
        whole = sorted(self.outputs.keys() - set(aborted))
        assert all(self.outputs[n].finish_reason == "length" for n in whole)
        assert_right([self.outputs[n] for n in whole], [self.prompts[n] for n in whole])
        assert all(output.text == Letters().decode(output.token_ids) for output in self.outputs.values())
        for number, (tokens, text) in self.shown.items():
            output = self.outputs[number]
            assert (output.token_ids[: len(tokens)], output.text[: len(text)]) == (tokens, text)
        assert_nothing_is_held(self.engine)
        self.prompts, self.outputs, self.shown = {}, {}, {}


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
        assert not engine._turns._lock._is_owned()
        assert not engine._turns._gate.locked()
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


@pytest.mark.parametrize("file", ["updates", "results", "request"])
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
    recover = engine._recover
    for turn in range(0, 400, 1 if depth.is_full() else 20):
        for _ in range(4):
            calls.add()
        for _ in range(rng.integers(1, 8)):
            calls.step()

        def interrupted(turn=turn):
            engine._recover = recover
            with pytest.MonkeyPatch.context():
                second = Interrupt(turn)
                sys.settrace(second.trace)
                try:
                    recover()
                finally:
                    sys.settrace(None)

        engine._recover = interrupted
        with Interrupt(int(rng.integers(200))):
            calls.step()
        engine._recover = recover
        calls.drain()
        calls.check()
