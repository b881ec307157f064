"""An engine whose steps are launched by a thread: right tokens, failures that end what was lost, and interrupts."""

import re
import threading
from dataclasses import replace

import depth
import jax
import numpy as np
import pytest
from fakes.engines import launch_ahead
from fakes.letters import Letters
from fakes.raising import Calls, PlannedError
from fakes.speller import Speller
from fakes.spelling_engine import DRAFTS, PARAMS, SIZES, SPELLER, assert_nothing_is_held, assert_right
from fakes.spelling_engine import prompts as drawn_prompts
from fakes.spelling_engine import serve as served
from jax.sharding import Mesh

from benchmarks.random_model import TINY, random_model
from mamba_align_jax import Engine, EngineConfig
from mamba_align_jax.engine.device import runner
from mamba_align_jax.engine.drafting.prompt_lookup_device import HistoryDrafter
from mamba_align_jax.sharding import AXIS

CONFIG = EngineConfig(**SIZES, **DRAFTS, async_stepping=True)
ROOMY = replace(CONFIG, num_state_blocks=40, num_kv_pages=80)  # nothing is evicted


def fail(*arguments, **static):
    raise PlannedError


def finished(engine):
    """Steps until all requests have ended, and returns their outputs."""
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    return outputs


@pytest.fixture
def ahead(monkeypatch):
    launch_ahead(monkeypatch)


@pytest.fixture
def gate(monkeypatch):
    """Lets `run_step` run only while it is set."""
    gate, run_step = threading.Event(), runner.run_step

    def waiting(*arguments, **static):
        assert gate.wait(300)
        return run_step(*arguments, **static)

    monkeypatch.setattr(runner, "run_step", waiting)
    yield gate
    gate.set()


@pytest.mark.parametrize("devices", [None, 1])
def test_an_engine_on_one_device_launches_each_step_itself(devices):
    mesh = None if devices is None else Mesh(np.array(jax.devices()[:devices]), (AXIS,))
    config = EngineConfig(num_state_blocks=20, num_kv_pages=80, max_model_len=64, async_stepping=True)
    engine = Engine(random_model(TINY), config, mesh=mesh)
    assert engine.runner._thread is None
    assert engine.steps_in_flight == 1


@pytest.mark.usefixtures("ahead")
def test_a_synchronous_engine_launches_each_step_itself():
    engine = Engine(SPELLER, EngineConfig(**SIZES))
    assert engine.runner._thread is None
    assert engine.steps_in_flight == 0


@pytest.mark.usefixtures("one_program", "ahead")
def test_two_steps_are_in_flight(rng):
    """The first two calls read nothing, and each later one reads the oldest step."""
    engine = Engine(SPELLER, CONFIG)
    engine.add_request(drawn_prompts(rng)[0], PARAMS)
    unread = []
    while engine.has_unfinished:
        engine.step()
        unread.append(len(engine.unread_steps))
    assert unread[:3] == [1, 2, 2]
    assert max(unread) == 2


def test_a_request_may_hold_one_block_more(rng, monkeypatch):
    blocks = fewest_blocks()
    launch_ahead(monkeypatch)
    assert fewest_blocks() == blocks + 1
    engine, asked = Engine(SPELLER, with_blocks(blocks + 1)), drawn_prompts(rng)
    assert_right(served(engine, asked), asked)


def with_blocks(count):
    return EngineConfig(**SIZES | dict(num_state_blocks=count), async_stepping=True)


def fewest_blocks():
    with pytest.raises(ValueError, match="num_state_blocks must be at least") as refused:
        Engine(SPELLER, with_blocks(2))
    return int(re.search(r"at least (\d+)", str(refused.value))[1])


@pytest.mark.usefixtures("one_program", "ahead")
def test_a_step_is_planned_while_the_one_before_is_launched(rng, gate):
    engine, asked = Engine(SPELLER, CONFIG), drawn_prompts(rng)[:1]
    (request,) = [engine.add_request(prompt, PARAMS) for prompt in asked]
    assert engine.step() == []
    assert len(engine.unread_steps) == 1
    gate.set()
    while engine.has_unfinished:
        outputs = engine.step()
    assert [output.request_id for output in outputs] == [request]


@pytest.mark.usefixtures("one_program", "ahead")
def test_what_is_read_of_the_device_is_what_the_last_step_leaves(rng, gate):
    """Also while steps wait to be launched, which give away the arrays that were there before."""
    engine, arrays = Engine(SPELLER, CONFIG), []
    engine.add_request(drawn_prompts(rng)[0], PARAMS)
    engine.step()
    reader = threading.Thread(target=lambda: arrays.extend(jax.tree.leaves(engine.runner.device_state)))
    reader.start()
    reader.join(0.2)
    assert reader.is_alive()
    gate.set()
    reader.join(300)
    assert not any(array.is_deleted() for array in arrays)
    assert engine.runner.is_intact()


@pytest.mark.usefixtures("one_program", "ahead")
@pytest.mark.parametrize("turn", [0, 1, 9])
def test_a_step_that_was_not_launched_ends_its_requests_and_the_engine_goes_on(rng, turn, monkeypatch):
    """No later command is begun, because it would find the pools of another step. The pools and the cache are made anew."""
    engine, asked, launched = Engine(SPELLER, CONFIG), drawn_prompts(rng), []
    run_step, do_reset, resets = runner.run_step, engine.runner.do_reset, []

    def failing(*arguments, **static):
        launched.append(len(resets))
        if len(launched) == turn + 1:
            raise PlannedError
        return run_step(*arguments, **static)

    monkeypatch.setattr(runner, "run_step", failing)
    monkeypatch.setattr(engine.runner, "do_reset", lambda: (resets.append(len(launched)), do_reset()))
    outputs = served(engine, asked)
    assert_right(outputs, asked)
    assert_nothing_is_held(engine)
    failed = [output for output in outputs if output.error is not None]
    assert 0 < len(failed) <= SIZES["max_num_seqs"]
    assert all(isinstance(output.error, PlannedError) for output in failed)
    assert resets == [turn + 1]
    assert_right(again := served(engine, asked), asked)
    assert all(output.error is None for output in again)
    assert_nothing_is_held(engine)


@pytest.mark.usefixtures("one_program")
@pytest.mark.parametrize("launches_ahead", [False, True])
@pytest.mark.parametrize("how", ["export", "save"])
def test_nothing_leaves_an_engine_that_a_step_has_not_computed(rng, how, launches_ahead, monkeypatch, tmp_path):
    """A step's pages and boundary are published when it is dispatched, and the launch may fail afterwards."""
    if launches_ahead:
        launch_ahead(monkeypatch)
    engine, prompt, run_step = Engine(SPELLER, ROOMY), drawn_prompts(rng)[0], runner.run_step
    monkeypatch.setattr(runner, "run_step", fail)
    engine.add_request(prompt, PARAMS)
    outputs = engine.step()
    bundle = engine.export_prefix(prompt) if how == "export" else engine.save_cache(tmp_path)
    outputs += engine.step()
    assert [type(output.error) for output in outputs] == [PlannedError]
    monkeypatch.setattr(runner, "run_step", run_step)
    other = Engine(SPELLER, ROOMY)
    other.import_prefix(bundle) if how == "export" else other.load_cache(tmp_path)
    for each in (other, engine):
        assert_right(served(each, [prompt]), [prompt])


@pytest.mark.usefixtures("one_program", "ahead")
def test_a_prefix_that_is_imported_after_a_failed_launch_is_cached(rng, monkeypatch):
    source, engine, prompt = Engine(SPELLER, ROOMY), Engine(SPELLER, ROOMY), drawn_prompts(rng)[0]
    served(source, [prompt])
    run_step = runner.run_step
    monkeypatch.setattr(runner, "run_step", fail)
    engine.add_request(prompt[:3], PARAMS)
    engine.step()
    engine.import_prefix(source.export_prefix(prompt))
    monkeypatch.setattr(runner, "run_step", run_step)
    assert [type(output.error) for output in engine.step()] == [PlannedError]
    assert engine.cached_prefix(prompt).num_tokens == source.cached_prefix(prompt).num_tokens > 0
    assert_right(served(engine, [prompt]), [prompt])


@pytest.mark.usefixtures("one_program")
@pytest.mark.parametrize("launches_ahead", [False, True])
def test_a_reset_that_failed_is_repeated(rng, launches_ahead, monkeypatch):
    if launches_ahead:
        launch_ahead(monkeypatch)
    engine, make, calls, asked = Engine(SPELLER, CONFIG), runner.DeviceState.create, [], drawn_prompts(rng)[:1]

    def failing(*arguments, **options):
        calls.append(arguments)
        return fail() if len(calls) == 1 else make(*arguments, **options)

    engine.add_request(asked[0], PARAMS)
    engine.step()
    engine.runner._is_sound, engine.core.changing.is_torn = False, True  # as after a failure
    monkeypatch.setattr(runner.DeviceState, "create", failing)
    with pytest.raises(PlannedError):
        engine.step()
    assert_right(finished(engine), asked)
    assert len(calls) == 2


@pytest.mark.usefixtures("ahead")
def test_old_pools_are_gone_when_new_ones_are_made(monkeypatch):
    """There is no room for both. An exception keeps what was passed to the functions that it went through."""
    exists = []

    class Failing(Speller):
        def __call__(self, *arguments, **options):
            raise PlannedError

    engine = Engine(Failing(2, adds=True), CONFIG)
    old, make = jax.tree.leaves(engine.runner.device_state), runner.DeviceState.create

    def creating(*arguments, **options):
        exists.extend(not array.is_deleted() for array in old)
        return make(*arguments, **options)

    monkeypatch.setattr(runner.DeviceState, "create", creating)
    engine.add_request([1, 2, 3], PARAMS)
    outputs = finished(engine)
    assert [type(output.error) for output in outputs] == [PlannedError]
    assert len(exists) == len(old)
    assert not any(exists)


@pytest.mark.usefixtures("one_program")
@pytest.mark.parametrize("launches_ahead", [False, True])
def test_a_fold_that_fails_ends_no_later_request(rng, launches_ahead, monkeypatch):
    """The request that it belonged to has ended."""
    if launches_ahead:
        launch_ahead(monkeypatch)
    engine = Engine(SPELLER, replace(ROOMY, num_speculative_tokens=0, policy="deferred", fold_length=8))
    run_fold, calls, params = runner.run_fold, [], replace(PARAMS, max_tokens=8)

    def failing(*arguments, **static):
        calls.append(static)
        return fail() if len(calls) == 1 else run_fold(*arguments, **static)

    monkeypatch.setattr(runner, "run_fold", failing)
    prompts = [rng.integers(0, 61, 9).tolist() for _ in range(2)]
    # Each request ends on a boundary, so that it leaves a fold.
    for prompt in prompts:
        engine.add_request(prompt, params)
        (output,) = finished(engine)
        assert launches_ahead is False or output.error is None
    assert engine.runner.failure is None
    assert len(calls) == 2
    assert output.error is None


@pytest.mark.usefixtures("one_program", "ahead")
def test_a_drafter_that_calls_the_engine_from_the_thread_is_refused():
    """The engine's caller waits for the thread, which would wait for the caller."""

    class Calling(HistoryDrafter):
        def propose(self, history, length, max_drafts):
            engine.abort(10_000)

    engine = Engine(SPELLER, CONFIG, drafter=Calling())
    engine.add_request([1, 2, 3], PARAMS)
    (output,) = finished(engine)
    assert isinstance(output.error, RuntimeError)
    assert "called by a function that it is calling itself" in str(output.error)


@pytest.mark.usefixtures("one_program", "ahead")
def test_interrupts_lose_nothing():
    """Prefixes are shared, requests are preempted, aborted and change logits, and drafts are made on the device."""
    rng = np.random.default_rng(3)
    engine = Engine(SPELLER, CONFIG, tokenizer=Letters())
    calls = Calls(engine, rng)
    calls.generate()
    names = "step", "update", "generate", "abort", "add"
    interrupted = calls.interrupt_often(depth.examples(8, 60), 250, names, steps=("step", "update"))
    assert interrupted
    assert engine.stats.hit_requests > 0
    assert engine.runner._failure is None
