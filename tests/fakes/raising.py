"""Calls that raise, interrupts at any line, and drawn calls of an engine that account for every request."""

import contextlib
import functools
import itertools
import sys
from pathlib import Path

import pytest
from fakes.letters import Letters
from fakes.speller import VOCAB
from fakes.spelling_engine import (
    FULL,
    assert_nothing_is_held,
    assert_right,
)

import mamba_align_jax
from mamba_align_jax import SamplingParams


class PlannedError(Exception):
    pass


@contextlib.contextmanager
def raising(owner, name, turn, after=False):
    """Makes the call number `turn` of a function raise, before or after it does its work. Gives the list of errors."""
    function, turns, raised = getattr(owner, name), itertools.count(), []

    @functools.wraps(function)
    def call(*args, **kwargs):
        due = next(turns) == turn
        result = function(*args, **kwargs) if after or not due else None
        if due:
            raised.append(PlannedError(f"{name}, call {turn}"))
            raise raised[-1]
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        yield raised


class Drafting:
    """A drafter that proposes what it is given, whatever that is."""

    def __init__(self, proposed):
        self.proposed = proposed

    def draft(self, request, tokens, max_drafts):
        if isinstance(self.proposed, Exception):
            raise self.proposed
        return self.proposed

    def forget(self, request):
        raise PlannedError("forget")


PACKAGE = str(Path(mamba_align_jax.__file__).parent)
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
