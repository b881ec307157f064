"""An interrupt at any instruction leaves no lock held, and a process that was forked is told that it can't go on."""

import contextlib
import itertools
import os
import random
import signal
import sys
import threading

import depth
import pytest
from fakes.spelling_engine import SIZES, SPELLER

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.engine import turns as module
from mamba_align_jax.engine.turns import Turns

FEW = SamplingParams(max_tokens=2, ignore_eos=True)
FILES = (module.__file__, contextlib.__file__, __file__)


class AtInstruction:
    """Raises KeyboardInterrupt once, before the instruction or line number `turn` of a call's frames in `FILES`."""

    def __init__(self, turn):
        self.turn, self.seen, self.has_struck = turn, 0, False

    def call(self, function, *arguments):
        sys.settrace(self.enter)
        try:
            function(*arguments)
        except KeyboardInterrupt:
            assert self.has_struck
        finally:
            sys.settrace(None)

    def enter(self, frame, event, argument):
        if frame.f_code.co_filename not in FILES or frame.f_code is AtInstruction.call.__code__:
            return None
        frame.f_trace_opcodes = True
        return self.strike

    def strike(self, frame, event, argument):
        if event in ("line", "opcode") and not self.has_struck:
            self.seen += 1
            if self.seen > self.turn:
                self.has_struck = True
                raise KeyboardInterrupt
        return self.strike


def is_free(turns):
    """Whether another thread can take a turn."""
    entered = threading.Event()
    threading.Thread(target=turns.take, args=(entered.set,), daemon=True).start()
    return entered.wait(300)


def nothing():
    pass


def fail():
    raise ValueError("planned")


def caught(turns, function):
    with contextlib.suppress(ValueError):
        turns.take(function)


@pytest.mark.parametrize("function", [nothing, fail])
def test_interrupt_at_any_instruction_leaves_no_lock_held(function):
    turns, struck, held = Turns("the engine"), [], []

    def strike_each():
        for turn in itertools.count():
            strike = AtInstruction(turn)
            strike.call(caught, turns, function)
            held.extend((turn, lock) for lock in (turns._lock, turns._gate) if lock._is_owned())
            turns.take(nothing)
            if held or not strike.has_struck:
                break
            struck.append(turn)

    # An interrupt in the middle of Python's handling of an exception makes that one the context of all that come after it
    # in the thread.
    thread = threading.Thread(target=strike_each)
    thread.start()
    thread.join(300)
    assert not held
    assert len(struck) > 60
    assert is_free(turns)


@contextlib.contextmanager
def storm(code, budget):
    """Real signals, which raise KeyboardInterrupt within calls of one function. Some come soon after the one before.

    Args:
        code: The function's code.
        budget: Counts them, and ends the storm when it has none left.
    """
    rng = random.Random(0)

    def strike(number, frame):
        while frame is not None and frame.f_code is not code:
            frame = frame.f_back
        if budget[0] > 0:
            signal.setitimer(signal.ITIMER_REAL, rng.choice((2e-5, 2e-4)) * rng.uniform(0.1, 1))
            if frame is not None:
                budget[0] -= 1
                raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, 1e-4)
    try:
        yield
    finally:
        budget[0] = 0
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_real_interrupts_leave_no_lock_held():
    turns = Turns("the engine")
    budget = [depth.examples(1500, 50_000)]
    with storm(Turns._take.__code__, budget):
        while budget[0]:
            with contextlib.suppress(KeyboardInterrupt):
                turns.take(nothing)
            assert not turns._lock._is_owned(), budget
            assert not turns._gate._is_owned(), budget
    assert is_free(turns)


@pytest.mark.deep
def test_real_interrupts_leave_an_engine_usable(monkeypatch):
    engine = Engine(SPELLER, EngineConfig(**SIZES))
    # Those that come in a finalizer are lost, and pytest can't be interrupted while it takes note of that.
    monkeypatch.setattr(sys, "unraisablehook", id)
    budget = [depth.examples(100, 3000)]
    with storm(Engine.abort.__code__, budget):
        while budget[0]:
            with contextlib.suppress(KeyboardInterrupt):
                engine.abort(engine.add_request([1, 2, 3], FEW))
    for request in list(engine.core.requests):
        engine.abort(request)
    (output,) = engine.generate([1, 2, 3], FEW)
    assert len(output.token_ids) == 2
    assert is_free(engine.core.turns)


def in_child(function):
    """Returns what a function returns, or the text of what it raises, in a process that is forked from this one."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = str(function())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text


@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning", "ignore:.*fork:DeprecationWarning")
def test_an_engine_refuses_to_work_in_a_process_that_was_forked():
    """Even while another thread has the lock, which no one gives back in the child."""
    engine = Engine(SPELLER, EngineConfig(**SIZES))
    engine.generate([1, 2, 3], FEW)
    calls = (
        engine.step,
        lambda: engine.generate([1, 2, 3], FEW),
        lambda: engine.add_request([1], FEW),
        lambda: engine.abort(0),
    )
    taken, done = threading.Event(), threading.Event()
    holder = threading.Thread(target=engine.core.turns.take, args=(lambda: (taken.set(), done.wait(300)),))
    holder.start()
    assert taken.wait(300)
    for call in calls:
        text = in_child(call)
        assert text.startswith("RuntimeError: the engine works in the process that made it"), text
    done.set()
    holder.join(300)
    assert len(engine.generate([1, 2, 3], FEW)[0].token_ids) == 2
