"""A failure has an owner: whatever is raised, and wherever, only the requests on whose account it was raised end.

An exception is raised at every call that leaves the scheduler, the cache, the drafter and the runner, one at a time.
"""

import contextlib

import depth
import jax
import numpy as np
import pytest
from fakes.engines import launch_ahead
from fakes.raising import Drafting, PlannedError, raising
from fakes.speller import VOCAB
from fakes.spelling_engine import (
    DRAFTS,
    PARAMS,
    SIZES,
    SPELLER,
    STEPPING,
    assert_nothing_is_held,
    assert_right,
    prompts,
    serve,
)

from mamba_align_jax import Engine, EngineConfig
from mamba_align_jax.cache.block_pool import BlockPool
from mamba_align_jax.cache.hashing import HashChain
from mamba_align_jax.cache.hybrid import HybridCache
from mamba_align_jax.cache.kv_pages import KVPageManager
from mamba_align_jax.cache.state_blocks import StateBlockManager
from mamba_align_jax.engine.device import packing, runner
from mamba_align_jax.engine.device.packing import Packer
from mamba_align_jax.engine.device.runner import StepRunner
from mamba_align_jax.engine.drafting.prompt_lookup import PromptLookupDrafter
from mamba_align_jax.engine.running import core
from mamba_align_jax.engine.running.trace import read_trace
from mamba_align_jax.engine.sampling.adjust import SamplerState
from mamba_align_jax.engine.scheduling.request import Request
from mamba_align_jax.engine.scheduling.scheduler import Scheduler
from mamba_align_jax.engine.scheduling.stats import Counters
from mamba_align_jax.engine.scheduling.waiting import WaitingQueue

pytestmark = pytest.mark.usefixtures("one_program")

# Every method and function that a step, or the end of a request, calls on another part. The insides of the pools are
# among them.
CALLS = [
    *((Scheduler, name) for name in ("schedule", "dispatched", "finished", "remove", "_leave", "_preempt")),
    *(
        (Scheduler, name)
        for name in ("_plan_decode", "_verify_row", "_planned", "_drafts", "_plan_prefill", "_plan_chunk")
    ),
    *((HybridCache, name) for name in ("lookup", "checkpoints", "chunk_end", "allocate", "dispatched", "commit")),
    *((HybridCache, name) for name in ("free", "forget")),
    *((StateBlockManager, name) for name in ("lookup", "begin", "fits", "allocate", "publish", "commit", "release")),
    *((StateBlockManager, name) for name in ("free", "forget", "_offer")),
    *((KVPageManager, name) for name in ("lookup", "holds", "fits", "allocate", "can_publish", "publish", "free")),
    *((BlockPool, name) for name in ("allocate", "find", "hold", "release", "publish", "unpublish", "_evict")),
    (HashChain, "at"),
    *((PromptLookupDrafter, name) for name in ("draft", "forget")),
    *((WaitingQueue, name) for name in ("put_back", "remove")),
    *((Request, name) for name in ("append", "leave", "wait", "output")),
    *((Counters, name) for name in ("admit", "verify", "end")),
    *((StepRunner, name) for name in ("dispatch", "read", "_run", "_store_pages", "_store_request")),
    (SamplerState, "with_request"),
    *((Packer, name) for name in ("packed", "pack", "early_rows")),
    *((runner, name) for name in ("choose_bucket", "run_step")),
    (packing, "pack"),
    *((core, name) for name in ("count_row", "tokens_up_to_end")),
]
# Those that a run calls often enough for a later turn.
FREQUENT = (
    "commit",
    "dispatched",
    "allocate",
    "finished",
    "schedule",
    "dispatch",
    "read",
    "publish",
    "append",
    "begin",
)


@pytest.mark.parametrize("after", [False, pytest.param(True, marks=pytest.mark.deep)], ids=["before", "after"])
@pytest.mark.parametrize("stepping", [*STEPPING, "ahead"])
@pytest.mark.parametrize("place", CALLS, ids=lambda place: f"{place[0].__name__.split('.')[-1]}.{place[1]}")
def test_failing_call_ends_at_most_the_requests_of_its_step(rng, place, stepping, after, monkeypatch):
    """The turns are early, in the middle and late. Steps that are launched ahead need more blocks."""
    asked, happened = prompts(rng), 0
    options = STEPPING["async" if stepping == "ahead" else stepping]
    if stepping == "ahead":
        launch_ahead(monkeypatch)
        options = options | dict(num_state_blocks=14)
    engine = Engine(SPELLER, EngineConfig(**SIZES | options))
    for turn in (0, 7, 30) if depth.is_full() else (5 if place[1] in FREQUENT else 0,):
        engine.reset_prefix_cache()
        with raising(*place, turn, after) as raised:
            outputs = serve(engine, asked)
        failed = [output for output in outputs if output.error is not None]
        assert_right(outputs, asked)
        assert_nothing_is_held(engine)
        assert [output.finish_reason for output in failed] == ["error"] * len(failed)
        assert {output.error for output in failed} <= set(raised)
        of_a_step = place[0] in (StepRunner, Packer, SamplerState, packing, runner)
        assert len(failed) <= (SIZES["max_num_seqs"] if of_a_step else len(raised)), "innocent requests ended"
        happened += bool(raised)
        # The engine goes on as if nothing had been.
        assert_right(serve(engine, asked), asked)
        assert_nothing_is_held(engine)
    if stepping == "sync" or place[0] is not PromptLookupDrafter:
        assert happened or place[1] in ("early_rows", "_store_pages", "unpublish"), "the call never came"


def test_cache_survives_a_failure_while_the_pools_exist(rng):
    engine, asked = Engine(SPELLER, EngineConfig(**SIZES)), prompts(rng)[:1]
    serve(engine, asked)
    for place in ((HybridCache, "allocate"), (HybridCache, "commit"), (StepRunner, "dispatch"), (StepRunner, "read")):
        with raising(*place, 0):
            (failed,) = serve(engine, asked)
        (output,) = serve(engine, asked)
        assert failed.finish_reason == "error"
        assert output.num_cached_tokens == 16
        assert_right([output], asked)


def test_lost_pools_end_the_requests_that_ran(rng, monkeypatch):
    engine, asked = Engine(SPELLER, EngineConfig(**SIZES)), prompts(rng)
    read, ran = engine.runner.read, []

    def lose(dispatched):
        ran.extend(request.id for request in engine.scheduler.running)
        monkeypatch.setattr(engine.runner, "read", read)
        for array in jax.tree.leaves(engine.runner.device_state):
            array.delete()
        raise PlannedError

    monkeypatch.setattr(engine.runner, "read", lose)
    outputs = serve(engine, asked)
    assert 0 < len(ran) < len(outputs)
    assert [output.request_id for output in outputs if output.finish_reason == "error"] == sorted(ran)
    assert_right(outputs, asked)
    assert_nothing_is_held(engine)


NO_DRAFTS = ([999], [-1], [VOCAB], [1.5, 2], ["a"], [None], None, 3, "ab", b"ab", [[1]], [True], {1: 2}, [2**70])


@pytest.mark.parametrize(
    "proposed", [*NO_DRAFTS, np.array([999, 1]), [1] * 50, np.array([3, 4])], ids=lambda value: type(value).__name__
)
def test_wrong_drafts_change_nothing(rng, proposed):
    engine = Engine(SPELLER, EngineConfig(**SIZES, **DRAFTS), drafter=Drafting(proposed))
    for _ in range(2):
        asked = prompts(rng)
        outputs = serve(engine, asked)
        assert all(output.error is None for output in outputs)
        assert_right(outputs, asked)
        assert_nothing_is_held(engine)


def test_a_drafter_can_not_change_the_tokens_and_may_keep_them(rng):
    class Keeping(Drafting):
        def draft(self, request, tokens, max_drafts):
            kept.append((tokens, list(tokens)))
            tokens[:].reverse()
            for change in ("reverse", "clear", "append"):
                assert not hasattr(tokens, change)
            with pytest.raises(TypeError):
                tokens[0] = 1
            return tokens[-2:]

    kept, asked = [], prompts(rng)
    outputs = serve(Engine(SPELLER, EngineConfig(**SIZES, **DRAFTS), drafter=Keeping(None)), asked)
    assert all(output.error is None for output in outputs)
    assert_right(outputs, asked)
    assert kept
    assert all(list(tokens) == before for tokens, before in kept)


def test_a_drafter_that_is_false_is_used_like_any_other(rng):
    class Remembering(dict):
        """It keeps what it knows in itself, so that it is false while it knows nothing."""

        asked = 0

        def draft(self, request, tokens, max_drafts):
            self[request], self.asked = len(tokens), self.asked + 1
            return [tokens[-1], VOCAB]

        def forget(self, request):
            self.pop(request, None)

    drafter = Remembering()
    engine, asked = Engine(SPELLER, EngineConfig(**SIZES, **DRAFTS), drafter=drafter), prompts(rng)
    outputs = serve(engine, asked)
    assert all(output.error is None for output in outputs)
    assert_right(outputs, asked)
    assert drafter.asked > 0
    assert not drafter, "it is told to forget"


def test_request_whose_drafter_raises_ends_alone(rng):
    class Choosy(Drafting):
        def draft(self, request, tokens, max_drafts):
            if tokens[:2] == asked[1][:2] and len(tokens) > len(asked[1]) + 4:
                raise PlannedError("draft")
            return []

    asked = [rng.integers(0, VOCAB, n).tolist() for n in (5, 6, 7, 8)]
    engine = Engine(SPELLER, EngineConfig(**SIZES, **DRAFTS), drafter=Choosy(None))
    outputs = serve(engine, asked)
    assert [output.finish_reason for output in outputs] == ["length", "error", "length", "length"]
    assert isinstance(outputs[1].error, PlannedError)
    assert engine.stats.preemptions == 0, "the others are not disturbed"
    assert_right(outputs, asked)
    assert_nothing_is_held(engine)


def test_trace_that_can_not_be_written_ends_alone(rng, tmp_path, monkeypatch):
    engine, asked = Engine(SPELLER, EngineConfig(**SIZES)), prompts(rng)
    with engine.trace(tmp_path / "trace"):
        monkeypatch.setattr(engine.core.tracing, "write", lambda step: 1 / 0)
        assert_right(serve(engine, asked), asked)


def test_trace_that_failed_ends_no_later_one(rng, tmp_path):
    """A device that is full refuses every write, also the one that closing the file tries."""
    engine, asked = Engine(SPELLER, EngineConfig(**SIZES)), prompts(rng)
    failed, file = contextlib.ExitStack(), tmp_path / "trace"
    failed.enter_context(engine.trace("/dev/full"))
    assert_right(serve(engine, asked), asked)
    with engine.trace(file):
        assert_right(serve(engine, asked), asked)
        num_steps = len(list(read_trace(file)))
        failed.close()
        assert_right(serve(engine, asked), asked)
        with pytest.raises(ValueError, match="a trace is being written already"), engine.trace(tmp_path / "other"):
            pass
    assert len(list(read_trace(file))) > num_steps > 0
    assert not (tmp_path / "other").exists()
    for path in (None, 5, b"trace"):
        with pytest.raises(ValueError, match="path must be str or Path"), engine.trace(path):
            pass


def test_engine_refuses_calls_from_what_it_calls(rng):
    class Caller(Drafting):
        def draft(self, request, tokens, max_drafts):
            return engine.step()

    engine = Engine(SPELLER, EngineConfig(**SIZES, **DRAFTS), drafter=Caller(None))
    with pytest.raises(RuntimeError, match="the engine was called by a function that it is calling itself"):
        engine.generate([1, 2, 3], PARAMS)
    assert_nothing_is_held(engine)
