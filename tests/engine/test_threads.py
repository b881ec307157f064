"""Several threads call one engine: requests come and are aborted while steps run, and calls of `generate` share steps."""

import threading
import time

import numpy as np
import pytest
from fakes.speller import VOCAB
from fakes.spelling_engine import DRAFTS, SIZES, SPELLER, assert_nothing_is_held, assert_right

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.engine.running.trace import TracedStep, read_trace
from mamba_align_jax.engine.turns import Turns

pytestmark = pytest.mark.usefixtures("one_program")
PARAMS = SamplingParams(max_tokens=18, ignore_eos=True)
STEPPING = {"sync": DRAFTS, "async": dict(DRAFTS, async_stepping=True)}


def run_all(*functions):
    """Runs functions in threads of their own, and raises the first exception of any."""
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"
    if errors:
        raise errors[0]


@pytest.fixture(params=STEPPING)
def engine(request):
    engine = Engine(SPELLER, EngineConfig(**SIZES, **STEPPING[request.param]))
    engine.generate([1, 2], PARAMS)
    return engine


def prompt(rng):
    return rng.integers(0, VOCAB, rng.integers(1, 25)).tolist()


def test_requests_come_and_go_while_steps_run(engine):
    asked, outputs, aborted = {}, {}, {}
    adding = threading.Event()

    def step():
        while engine.has_unfinished or not adding.is_set():
            for output in engine.step():
                assert output.request_id not in outputs
                outputs[output.request_id] = output

    def add(seed):
        rng = np.random.default_rng(seed)
        for number in range(12):
            tokens = prompt(rng)
            name = engine.add_request(tokens, PARAMS)
            asked[name] = tokens
            time.sleep(float(rng.uniform(0, 0.01)))
            if number % 3 == 0:
                output = engine.abort(name)
                if output is not None:
                    aborted[name] = output

    def add_all():
        try:
            run_all(*(lambda seed=seed: add(seed) for seed in range(4)))
        finally:
            adding.set()

    run_all(step, step, add_all, lambda: [engine.reset_prefix_cache() for _ in range(5)])
    assert len(asked) == 48
    assert outputs.keys() | aborted.keys() == asked.keys()
    assert not outputs.keys() & aborted.keys(), "an output came twice"
    assert all(output.finish_reason == "abort" for output in aborted.values())
    names = sorted(outputs)
    assert_right([outputs[name] for name in names], [asked[name] for name in names])
    assert_nothing_is_held(engine)


def test_calls_of_generate_share_the_steps(engine):
    def generate(seed):
        rng = np.random.default_rng(seed)
        for _ in range(3):
            asked = [prompt(rng) for _ in range(3)]
            assert_right(engine.generate(asked, PARAMS), asked)

    run_all(*(lambda seed=seed: generate(seed) for seed in range(6)), engine.warmup)
    assert_nothing_is_held(engine)
    assert not engine.has_unfinished


def test_abort_from_another_thread_ends_a_call_of_generate(engine):
    def abort():
        while len(engine.core.requests) < 2:
            time.sleep(0.0005)
        assert all(engine.abort(name) is not None for name in list(engine.core.requests))

    def generate():
        outputs = engine.generate([[1, 2, 3], [4, 5, 6]], SamplingParams(max_tokens=50, ignore_eos=True))
        assert [output.finish_reason for output in outputs] == ["abort", "abort"]

    run_all(generate, abort)
    assert_nothing_is_held(engine)


def test_a_trace_that_ends_waits_for_the_step_that_is_written(engine, monkeypatch, tmp_path):
    """The next trace has all steps that are read after it begins."""
    of, entered, gate = TracedStep.of, threading.Event(), threading.Event()

    def slow(*arguments):
        entered.set()
        assert gate.wait(300)
        return of(*arguments)

    monkeypatch.setattr(TracedStep, "of", slow)
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=6, ignore_eos=True))
    with engine.trace(tmp_path / "first"):
        while engine.config.async_stepping and not engine.unread_steps:
            engine.step()
        stepping = threading.Thread(target=engine.step)
        stepping.start()
        assert entered.wait(300)
        threading.Timer(0.2, gate.set).start()
    stepping.join(300)
    steps = engine.stats.steps
    with engine.trace(tmp_path / "second"):
        while engine.has_unfinished:
            engine.step()
    numbers = [[step.step for step in read_trace(tmp_path / name)] for name in ("first", "second")]
    assert numbers == [[steps], [*range(steps + 1, engine.stats.steps + 1)]]


def test_a_thread_that_helps_must_not_take_a_turn():
    turns = Turns("the engine", lambda: threading.current_thread() is helper)
    refused = []

    def help_out():
        with pytest.raises(RuntimeError, match="called by a function that it is calling itself"):
            turns.take(lambda: None)
        refused.append(True)

    helper = threading.Thread(target=help_out)
    turns.take(lambda: (helper.start(), helper.join(300)))
    assert refused


def test_waiting_thread_gets_its_turn():
    """A thread that takes the lock again and again lets another one in after each call."""
    turns, calls, waits, got_in = Turns("the engine"), [], [], threading.Event()

    def often():
        while not got_in.is_set():
            turns.take(lambda: (calls.append(1), time.sleep(0.002)))
            assert len(calls) < 2000, "the other thread starves"

    def once():
        for _ in range(20):
            before = len(calls)
            turns.take(lambda: None)
            waits.append(len(calls) - before)
        got_in.set()

    run_all(often, once)
    # A busy machine may stop this thread for a while before it waits, but not every time.
    assert sorted(waits)[len(waits) // 2] < 10
