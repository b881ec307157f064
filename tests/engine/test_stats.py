"""The engine's counters survive whatever is rebuilt after a step that raised."""

import dataclasses

import jax
import pytest
from fakes.speller import VOCAB, Speller

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.engine.scheduling.stats import Counters, EngineStats

pytestmark = pytest.mark.usefixtures("one_program")
# Four long requests need more blocks and pages than there are.
SIZES = dict(block_size=8, kv_page_size=4, max_num_seqs=4, max_num_batched_tokens=20, max_model_len=64)
SIZES |= dict(num_state_blocks=14, num_kv_pages=31, num_speculative_tokens=2, prompt_lookup_min=1)
PARAMS = SamplingParams(max_tokens=25, ignore_eos=True)


def test_counts_survive_a_step_that_raises(rng, monkeypatch):
    engine, seen = Engine(Speller(stutter=1), EngineConfig(**SIZES)), []
    prompts = [rng.integers(0, VOCAB, 20).tolist() for _ in range(6)]
    engine.generate(prompts, PARAMS)

    def fail(dispatched):
        seen.append(engine.stats)
        # The pools are lost as well.
        for array in jax.tree.leaves(engine.runner.device_state):
            array.delete()
        raise RuntimeError("planned")

    cache, scheduler = engine.cache, engine.scheduler
    engine.add_request(prompts[0], PARAMS)
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "read", fail)
        engine.step()
    assert engine.cache is not cache
    assert engine.scheduler is not scheduler
    failed = engine.stats
    assert failed == dataclasses.replace(seen[0], failed_requests=1)
    assert min(failed.preemptions, failed.evicted_state_blocks, failed.evicted_kv_pages, *failed.draft_tokens) > 0
    engine.generate(prompts, PARAMS)
    stats = engine.stats
    for name in ("steps", "preemptions", "evicted_state_blocks", "evicted_kv_pages", "prefill_tokens"):
        assert getattr(stats, name) > getattr(failed, name), name


@pytest.mark.parametrize("async_stepping", [False, True])
def test_a_request_whose_first_step_is_cut_off_is_counted_once(async_stepping, monkeypatch):
    engine = Engine(Speller(stutter=1), EngineConfig(**SIZES, async_stepping=async_stepping))
    engine.add_request([1] * 12, PARAMS)

    def interrupt(dispatched):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "read", interrupt)
        if async_stepping:
            engine.step()
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    while engine.has_unfinished:
        engine.step()
    stats = engine.stats
    assert (stats.admitted_requests, stats.finished_requests, stats.prompt_tokens) == (1, 1, 12)


@pytest.mark.parametrize("ends", [True, False])
def test_a_request_that_begins_again_has_what_is_cached_then(ends):
    """The cache is emptied while the result of its first step is unread."""
    engine, prompt = Engine(Speller(stutter=1), EngineConfig(**SIZES, async_stepping=True)), list(range(20))
    engine.generate([prompt], PARAMS)
    before, request = engine.stats, engine.add_request(prompt, PARAMS)
    engine.step()
    assert engine.scheduler.running[0].num_cached > 0
    engine.on_cache_event(lambda events: None)
    if ends:
        output = engine.abort(request)
    else:
        (output,) = [output for _ in range(60) for output in engine.step()]
    assert (output.num_cached_tokens, output.cache_miss) == (0, None if ends else "not identical")
    names = ("cached_tokens", "prefill_tokens", "prompt_tokens", "hit_requests")
    cached, computed, given, hits = (getattr(engine.stats, name) - getattr(before, name) for name in names)
    assert cached + computed == given == (0 if ends else len(prompt))
    assert (cached, hits) == (0, 0)


def test_a_request_that_never_ran_has_used_nothing_of_the_cache():
    engine, prompt = Engine(Speller(stutter=1), EngineConfig(**SIZES | dict(max_num_batched_tokens=8))), list(range(20))
    engine.generate([prompt], PARAMS)
    engine.add_request([40] * 30, PARAMS)  # takes the budget of the step
    waiting = engine.add_request(prompt, PARAMS)
    engine.step()
    output = engine.abort(waiting)
    assert (output.num_cached_tokens, output.cache_miss) == (0, None)
    assert engine.stats.cached_tokens == 0


def test_snapshot_does_not_change_with_its_counters():
    counters = Counters(2)
    before = counters.snapshot()
    counters.verify(num_drafts=2, num_accepted=1)
    counters.admit(num_tokens=9, num_cached=4)
    counters.end("length")
    counters.end("abort")
    assert before == EngineStats(draft_tokens=(0, 0), accepted_tokens=(0, 0))
    assert counters.snapshot() == EngineStats(
        admitted_requests=1, hit_requests=1, prompt_tokens=9, cached_tokens=4, finished_requests=1, aborted_requests=1,
        draft_tokens=(1, 1), accepted_tokens=(1, 0),
    )  # fmt: skip


def test_a_count_without_a_name_in_the_stats_is_refused():
    with pytest.raises(KeyError, match="step"):
        Counters().add(step=1)
