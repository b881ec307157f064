"""The engine generates the right tokens whatever is shared, waits, is preempted or cached."""

import dataclasses
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from engine.programs import decisions
from fakes.engines import load_two_layers

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.engine.device import runner
from mamba_align_jax.engine.device.program import run_step
from mamba_align_jax.engine.reference import Reference
from mamba_align_jax.errors import QueueFullError
from mamba_align_jax.models import load_model

CHECKPOINT = Path(__file__).parents[1] / "data" / "qwen3_5_text"
# One set of sizes, so that the programs of a mode are compiled once for all tests.
SIZES = dict(block_size=16, kv_page_size=8, max_num_seqs=4, max_num_batched_tokens=48, max_model_len=160)
SIZES |= dict(num_state_blocks=60, num_kv_pages=90, prefix_cache="align", async_stepping=False)
MODES = {
    "none": dict(prefix_cache="none"),
    "pre_copy": dict(policy="pre_copy"),
    "copy_free": dict(policy="copy_free"),
    "async": dict(policy="copy_free", async_stepping=True),
}
SMALL = dict(num_kv_pages=24, num_state_blocks=6, checked=True)
pytestmark = pytest.mark.usefixtures("few_programs")
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return load_two_layers(CHECKPOINT)


@pytest.fixture(scope="module")
def reference(model):
    return Reference(model)


# A quick run leaves out one mode: test_speculation.py runs its policy.
@pytest.fixture(
    scope="module",
    params=[pytest.param(mode, marks=[pytest.mark.deep] if mode == "pre_copy" else []) for mode in MODES],
)
def mode(request):
    return request.param


def make(model, mode="copy_free", **overrides):
    return Engine(model, EngineConfig(**{**SIZES, **MODES[mode], **overrides}))


def prompts(rng, shared, suffixes):
    prefix = rng.integers(1, 256, shared).tolist()
    return [prefix + rng.integers(1, 256, n).tolist() for n in suffixes]


def assert_right(reference, outputs):
    verdicts = [reference.judge(output.prompt_token_ids, output.token_ids) for output in outputs]
    assert all(verdict.right for verdict in verdicts), verdicts
    # Ties are counted, and rare: at most one per thousand tokens.
    assert sum(verdict.ties for verdict in verdicts) <= max(1, sum(v.num_tokens for v in verdicts) / 1000)


def assert_everything_is_returned(engine):
    engine.cache.check()
    assert engine.stats.null_reads == 0
    assert engine.cache.states.pool.num_held == engine.cache.kv.pool.num_held == 0


def test_greedy_tokens_equal_those_of_transformers(mode):
    data = np.load(CHECKPOINT / "reference.npz")
    tokens = data["tokens"][0].tolist()
    (output,) = make(load_model(CHECKPOINT), mode).generate(tokens[:37], SamplingParams(max_tokens=32, ignore_eos=True))
    assert list(output.token_ids) == tokens[37:]
    assert output.finish_reason == "length"
    assert output.ttft_s < output.e2e_s


def test_shared_prefixes_and_conversations_hit_the_cache(rng, model, reference, mode):
    engine = make(model, mode)
    first = engine.generate(prompts(rng, 40, [9]), GREEDY)
    talk = [*first[0].prompt_token_ids, *first[0].token_ids, 5, 6]
    shared = list(first[0].prompt_token_ids[:40])
    # More requests than slots, some on the first one's prefix, one continuing it, one alone.
    second = engine.generate([talk, [*shared, 7, 8, 9], shared + [1] * 30, [3, 1, 2], [*shared, 4], [9] * 70], GREEDY)
    assert_right(reference, first + second)
    cached = [output.num_cached_tokens for output in second]
    if mode == "none":
        assert cached == [0] * 6
    else:
        # The talk continues from states that decoding kept. The first sibling finds the shared keys but no state inside the
        # first one's chunk, and leaves one at token 32 for those that follow.
        assert cached == [64, 0, 32, 0, 32, 0]
    stats = engine.stats
    assert stats.cached_tokens == sum(cached)
    assert (stats.admitted_requests, stats.hit_requests) == (7, sum(count > 0 for count in cached))
    assert (stats.finished_requests, stats.aborted_requests) == (7, 0)
    assert stats.prompt_tokens == stats.cached_tokens + stats.prefill_tokens
    assert (stats.state_bytes_copied > 0) == (mode == "pre_copy")
    assert_everything_is_returned(engine)


@pytest.mark.gpu
def test_engine_is_right_with_compiled_kernels(rng, model, reference, mode):
    test_greedy_tokens_equal_those_of_transformers(mode)
    test_shared_prefixes_and_conversations_hit_the_cache(rng, model, reference, mode)


@pytest.mark.parametrize("async_stepping", [False, True])
def test_preempted_requests_are_right(rng, model, reference, async_stepping):
    engine = make(model, **SMALL, async_stepping=async_stepping)
    outputs = engine.generate(prompts(rng, 0, [30, 25, 40, 28]), SamplingParams(max_tokens=40, ignore_eos=True))
    assert engine.stats.preemptions > 0
    assert_right(reference, outputs)
    assert_everything_is_returned(engine)


def test_evicted_prefixes_are_recomputed(rng, model, reference):
    engine = make(model, **SMALL)
    batch = prompts(rng, 32, [5]) + prompts(rng, 0, [60, 60]) + prompts(rng, 0, [50])
    outputs = [output for prompt in [*batch, batch[0]] for output in engine.generate(prompt, GREEDY)]
    assert 0 < engine.stats.evicted_state_blocks < engine.stats.evicted_kv_pages
    assert_right(reference, outputs)


def test_lost_states_are_counted_and_located(rng, model):
    batch = prompts(rng, 20, [1])

    def lose(engine):
        allocate = engine.cache.allocate
        engine.cache.allocate = lambda *args, **kwargs: dataclasses.replace(allocate(*args, **kwargs), columns=[])
        return engine

    engine = lose(make(model))
    engine.generate(batch, SamplingParams(max_tokens=3, ignore_eos=True))
    assert engine.stats.null_reads == 3, "the second chunk and two decode steps"
    with pytest.raises(
        ValueError, match="slot 0: column 0 of group 'gdn' is written with a recurrent state, but the column has no"
    ):
        lose(make(model, **SMALL)).generate(batch)


def test_chunks_that_end_inside_blocks_are_right(rng, model, reference):
    """The token budget is smaller than a block."""
    engine = make(model, block_size=64, max_num_batched_tokens=48)
    batch = prompts(rng, 70, [10])
    outputs = [*engine.generate(batch, GREEDY), *engine.generate(batch, GREEDY)]
    assert_right(reference, outputs)
    assert outputs[1].num_cached_tokens == 64


@pytest.mark.parametrize("async_stepping", [False, True])
def test_requests_may_arrive_and_be_aborted_at_any_time(rng, model, reference, async_stepping):
    engine = make(model, async_stepping=async_stepping)
    batch = prompts(rng, 20, [5, 30, 1, 12, 40, 3])
    ids, outputs = [], []
    for number, prompt in enumerate(batch):
        ids.append(engine.add_request(prompt, GREEDY))
        outputs += engine.step()
        if number == 3:
            aborted = engine.abort(ids[1])
            assert aborted.finish_reason == "abort"
            assert engine.abort(ids[1]) is None
    while engine.has_unfinished:
        outputs += engine.step()
    assert sorted(output.request_id for output in outputs) == sorted(set(ids) - {ids[1]})
    assert_right(reference, [*outputs, aborted] if aborted.token_ids else outputs)
    assert_everything_is_returned(engine)
    assert engine.step() == []
    waits = engine.add_request(batch[0], GREEDY)
    assert engine.abort(waits).token_ids == ()
    stats = engine.stats
    assert (stats.admitted_requests, stats.finished_requests, stats.aborted_requests) == (6, 5, 2)


def test_requests_that_run_during_generate_are_returned_by_step(model):
    engine = make(model)
    other = engine.add_request([4, 5], dataclasses.replace(GREEDY, max_tokens=2))
    (output,) = engine.generate([1, 2, 3], GREEDY)
    assert output.request_id != other
    assert engine.has_unfinished
    assert [output.request_id for output in engine.step()] == [other]
    assert not engine.has_unfinished


def test_stop_tokens_end_a_request(model):
    engine = make(model)
    (free,) = engine.generate([1, 2, 3], GREEDY)
    stop = free.token_ids[4]
    end = free.token_ids.index(stop)
    (stopped,) = engine.generate([1, 2, 3], dataclasses.replace(GREEDY, stop_token_ids=(stop,)))
    assert stopped.token_ids == free.token_ids[: end + 1]
    assert stopped.finish_reason == "stop"


def test_prefixes_are_not_shared_across_salts(rng, model):
    engine = make(model)
    (prompt,) = prompts(rng, 40, [5])
    cached = lambda salt: engine.generate(prompt, dataclasses.replace(GREEDY, cache_salt=salt))[0].num_cached_tokens
    assert [cached("a"), cached("b"), cached("a"), cached("")] == [0, 0, 32, 0]


def test_requested_boundaries_stay_cached_and_misses_have_a_reason(rng, model, reference):
    engine = make(model, checkpoint_interval=64)
    (prompt,) = prompts(rng, 90, [1])
    answer = lambda tokens, **params: engine.generate(tokens, dataclasses.replace(GREEDY, **params))[0]
    first = answer(prompt, checkpoint_at=[50, 16, 20, 92, 3])
    assert (first.checkpoint_at, first.num_cached_tokens, first.cache_miss) == ((16, 48), 0, "not identical")
    # At 16 and 48 the caller wants a state, at 64 the engine, at 80 the prompt ends; decoding has passed 96.
    outputs = [answer([*prompt[:end], 1, 2]) for end in (17, 31, 50, 66, 85)]
    assert [output.num_cached_tokens for output in outputs] == [16, 16, 48, 64, 80]
    assert answer([*prompt, *first.token_ids, 5]).num_cached_tokens == 96
    assert answer([1, 2, 3]).cache_miss == "below one block"
    assert_right(reference, [first, *outputs])
    engine.reset_prefix_cache()
    again = answer(prompt)
    assert (again.token_ids, again.num_cached_tokens, again.cache_miss) == (first.token_ids, 0, "evicted")
    assert answer(prompt).num_cached_tokens == 80
    assert_everything_is_returned(engine)


@pytest.mark.parametrize("async_stepping", [False, True])
def test_step_that_raises_ends_only_the_requests_that_ran(rng, model, reference, monkeypatch, async_stepping):
    """The pools may be gone. Waiting and new requests are served from fresh ones, and no count is lost."""
    engine = make(model, async_stepping=async_stepping)
    batch = prompts(rng, 40, [5, 6, 7, 8, 9, 10])
    (before,) = engine.generate(batch[0], GREEDY)
    ids, read = [engine.add_request(prompt, GREEDY) for prompt in batch], engine.runner.read
    outputs = [output for _ in range(4) for output in engine.step()]

    def fail(dispatched):
        for array in jax.tree.leaves(engine.runner.device_state):
            array.delete()
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine.runner, "read", fail)
    failed = engine.step()
    assert [output.request_id for output in failed] == ids[:4]
    assert {(output.finish_reason, str(output.error)) for output in failed} == {("error", "the device is gone")}
    assert engine.cache.states.pool.keys == engine.cache.kv.pool.keys == frozenset()
    monkeypatch.setattr(engine.runner, "read", read)
    while engine.has_unfinished:
        outputs += engine.step()
    assert [(output.request_id, output.num_cached_tokens) for output in outputs] == [(ids[4], 0), (ids[5], 0)]
    outputs += engine.generate(batch[0], GREEDY)
    assert outputs[-1].token_ids == before.token_ids
    assert_right(reference, outputs)
    assert_everything_is_returned(engine)


def test_interrupt_ends_running_requests_and_generate_aborts_its_own(rng, model, monkeypatch):
    engine = make(model)
    (prompt,) = prompts(rng, 40, [5])
    other, read = engine.add_request(prompt, GREEDY), engine.runner.read

    def interrupt(dispatched):
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.runner, "read", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompt, GREEDY)
    monkeypatch.setattr(engine.runner, "read", lambda dispatched: 1 / 0)
    new = engine.add_request(prompt, GREEDY)
    assert [output.request_id for output in engine.step()] == [other, new]
    with pytest.raises(ZeroDivisionError):
        engine.generate([prompt, prompt], GREEDY)
    monkeypatch.setattr(engine.runner, "read", read)
    assert not engine.has_unfinished
    assert engine.step() == []
    assert engine.generate(prompt, GREEDY)[0].finish_reason == "length"
    assert_everything_is_returned(engine)


def test_sampled_tokens_depend_on_the_request_only(rng, model):
    engine = make(model)
    params = [
        SamplingParams(max_tokens=12, temperature=1.0, top_k=k, top_p=p, seed=7)
        for k, p in ((0, 1.0), (5, 0.9), (1, 1.0))
    ]
    (prompt,) = prompts(rng, 0, [20])
    alone = [engine.generate(prompt, p)[0].token_ids for p in params]
    ids = [engine.add_request(prompt, p) for p in params]
    outputs = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output.token_ids for output in engine.step()}
    assert [outputs[i] for i in ids] == alone
    greedy = engine.generate(prompt, SamplingParams(max_tokens=12))[0].token_ids
    assert alone[2] == greedy, "the most likely token alone is greedy"
    assert alone[0] != greedy
    assert engine.generate(prompt, dataclasses.replace(params[0], seed=8))[0].token_ids != alone[0]


@pytest.mark.usefixtures("every_program")
def test_no_program_is_compiled_after_warmup(rng, model):
    engine = make(model)
    count = 0

    def advance():
        nonlocal count
        count += 1

    assert engine.warmup(advance) >= 0
    assert count == engine.num_programs
    before, pool = run_step._cache_size(), engine.runner.device_state.pool
    engine.generate(prompts(rng, 20, [1, 2, 30, 60, 5, 9]), GREEDY)
    assert run_step._cache_size() == before
    assert pool.states[0][0].is_deleted(), "the pools were donated"


def test_what_an_engine_can_not_call_or_load_is_refused(model):
    for call, name in (
        (lambda wrong: make(model).warmup(wrong), "progress"),
        (lambda wrong: Engine.from_pretrained(CHECKPOINT, progress=wrong), "progress"),
        (lambda wrong: Engine.from_pretrained(wrong), "path"),
    ):
        for wrong in (None, 5):
            with pytest.raises(ValueError, match=f"^{name} must be "):
                call(wrong)


@pytest.mark.usefixtures("every_program")
@pytest.mark.parametrize("is_gpu", [False, True])
def test_warmup_that_is_given_up_compiles_no_more(model, monkeypatch, is_gpu):
    """On a GPU many programs are handed to threads at once, and those that wait for a thread are never begun."""
    engine, compiled, may_go_on = make(model), [], threading.Event()

    def compile_slowly(bucket):
        compiled.append(bucket)
        assert len(compiled) == 1 or may_go_on.wait(300)

    def give_up():
        # The thread that ends the pool waits for the programs that have been begun.
        threading.Timer(0.2, may_go_on.set).start()
        raise KeyboardInterrupt

    traced = lambda bucket: types.SimpleNamespace(lower=lambda: program(bucket))
    program = lambda bucket: types.SimpleNamespace(compile=lambda: compile_slowly(bucket))
    monkeypatch.setattr(engine.runner, "trace", traced)
    monkeypatch.setattr(runner, "ThreadPoolExecutor", lambda: ThreadPoolExecutor(2))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu" if is_gpu else "cpu")
    with pytest.raises(KeyboardInterrupt):
        engine.warmup(give_up)
    assert len(compiled) <= 3 < engine.num_programs


@pytest.mark.usefixtures("every_program")
def test_programs_have_no_conditional(model):
    """The host would wait for a conditional on a GPU, and could not dispatch a step ahead."""
    runner = make(model, async_stepping=True, num_speculative_tokens=2).runner
    for bucket in runner.buckets:
        if bucket.decode_rows in (0, 4):
            assert decisions(runner.trace(bucket)) == 0, bucket


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (dict(policy="eager"), "policy must be one of .* got 'eager'"),
        (dict(prefix_cache="some"), r"prefix_cache must be None or one of \('none', 'align', 'all'\), got 'some'"),
        (dict(num_speculative_tokens=16), "block_size must be at least num_speculative_tokens . 1 = 17, got 16"),
        (dict(block_size=20), "block_size must be a multiple of kv_page_size = 8, got 20"),
        (dict(checkpoint_interval=24), "checkpoint_interval must be None or a multiple of block_size = 16, got 24"),
        (dict(num_state_blocks=2), "num_state_blocks must be at least 3 for one request, got 2"),
        (dict(num_kv_pages=1), "num_kv_pages must be at least 2, got 1"),
        (dict(max_model_len=2000), "max_model_len must be at most the model's 1024, got 2000"),
        (dict(state_dtype="int8"), "state_dtype must be .* got 'int8'"),
        (
            dict(state_layout="KV", policy="deferred"),
            "state_layout must be None or 'VK' under policy 'deferred', got 'KV'",
        ),
        (dict(memory_fraction=1.5), "memory_fraction must be in"),
        (dict(max_num_seqs=0), "max_num_seqs must be None or at least 1, got 0"),
        (dict(max_waiting=0), "max_waiting must be None or at least 1, got 0"),
    ],
)
def test_wrong_configurations_raise(model, overrides, message):
    with pytest.raises(ValueError, match=message):
        make(model, **overrides)


def test_wrong_requests_raise_and_change_nothing(model):
    engine = make(model, num_kv_pages=10, max_waiting=2)
    for prompt, params, message in (
        ([], GREEDY, "prompt_token_ids must not be empty"),
        ([1, 256], GREEDY, r"must be in \[0, 256\), got 256"),
        ([1, -1], GREEDY, r"must be in \[0, 256\), got -1"),
        ([1] * 150, GREEDY, "must fit in max_model_len = 160, got 150 . 20"),
        ([1] * 60, GREEDY, "must fit in 9 KV pages of 8, got 80 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.generate([[1, 2, 3], prompt], params)
        assert not engine.has_unfinished
    with pytest.raises(QueueFullError, match="max_waiting = 2 requests wait already"):
        engine.generate([[1, 2, 3]] * 3, GREEDY)
    assert not engine.has_unfinished
    for bad in (
        dict(max_tokens=-1),
        dict(logit_bias=np.array(2)),
        dict(temperature=-1),
        dict(top_p=0.0),
        dict(top_k=-1),
        dict(seed=-1),
        dict(checkpoint_at=[-1]),
    ):
        with pytest.raises(ValueError, match=f"{next(iter(bad))} must be"):
            SamplingParams(**bad)
    assert_everything_is_returned(engine)
