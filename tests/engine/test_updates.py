"""`step_outputs` tells what is new of each request: its updates, put together, are its output."""

from dataclasses import replace

import pytest
from fakes.speller import VOCAB
from fakes.spelling_engine import DRAFTS, SIZES, SPELLER, assert_nothing_is_held, assert_right, drain, joined, prompts
from fakes.spelling_engine import PARAMS as SPELLED

from mamba_align_jax import Engine, EngineConfig, SamplingParams

pytestmark = pytest.mark.usefixtures("one_program")
STEPPING = {"sync": {}, "drafts": DRAFTS, "async": dict(DRAFTS, async_stepping=True)}


@pytest.mark.parametrize("stepping", STEPPING)
def test_updates_put_together_are_the_output(rng, stepping):
    engine, asked = Engine(SPELLER, EngineConfig(**SIZES, **STEPPING[stepping])), prompts(rng)
    ids = [engine.add_request(prompt, SPELLED) for prompt in asked]
    updates = drain(engine)
    assert engine.stats.preemptions, "the pools are too large for this test"
    whole = joined(updates)
    assert whole.keys() == set(ids)
    outputs = [whole[name].output for name in ids]
    assert_right(outputs, asked)
    for name, output in zip(ids, outputs, strict=True):
        update = whole[name]
        assert update.token_ids == output.token_ids
        assert (update.text, output.text) == (None, None)
        assert (update.num_cached_tokens, update.cache_miss) == (output.num_cached_tokens, output.cache_miss)
        # Tokens are shown in the call that reads them, not at the end.
        assert sum(update.request_id == name for update in updates) > 5
    assert engine.step_outputs() == []
    assert not engine.core.updates._shown
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("stepping", STEPPING)
def test_log_probabilities_come_with_their_tokens(rng, stepping):
    """Those of the prompt come once, and the others as many as tokens."""
    engine, asked = Engine(SPELLER, EngineConfig(**SIZES, **STEPPING[stepping])), prompts(rng)[:4]
    params = replace(SPELLED, logprobs=2, prompt_logprobs=1)
    ids = [engine.add_request(prompt, params) for prompt in asked]
    updates = drain(engine)
    for update in updates:
        assert [one.token_id for one in update.logprobs] == list(update.token_ids)
    for name, prompt in zip(ids, asked, strict=True):
        update = joined(updates)[name]
        assert (update.logprobs, update.prompt_logprobs) == (update.output.logprobs, update.output.prompt_logprobs)
        assert [one and one.token_id for one in update.prompt_logprobs] == [None, *prompt[1:]]


def test_step_and_step_outputs_take_turns(rng):
    engine, asked = Engine(SPELLER, EngineConfig(**SIZES, **DRAFTS)), prompts(rng)
    ids = [engine.add_request(prompt, SPELLED) for prompt in asked]
    updates, outputs = [], {}
    for number in range(600):
        if not engine.has_unfinished:
            break
        if number % 3 == 0:
            outputs |= {output.request_id: output for output in engine.step()}
        else:
            updates += engine.step_outputs()
    whole = joined(updates)
    ended = {name: update.output for name, update in whole.items() if update.output}
    assert not ended.keys() & outputs.keys(), "an output came twice"
    assert_right([(outputs | ended)[name] for name in ids], asked)
    for name, output in ended.items():
        assert whole[name].token_ids == output.token_ids


def test_requests_of_generate_are_not_reported(rng):
    engine = Engine(SPELLER, EngineConfig(**SIZES))
    advance, seen = engine.core.advance, []

    def watched():
        advance()
        engine.core.advance = advance
        engine.core.turns._lock.release()
        try:
            seen.extend(engine.step_outputs())
        finally:
            engine.core.turns._lock.acquire()
        engine.core.advance = watched

    engine.core.advance = watched
    name = engine.add_request([1, 2, 3], SPELLED)
    engine.generate([4, 5], SamplingParams(max_tokens=10, ignore_eos=True))
    assert {update.request_id for update in seen} == {name}


def test_error_and_abort_come_with_what_is_new(rng, monkeypatch):
    engine = Engine(SPELLER, EngineConfig(**SIZES))
    prompt = rng.integers(0, VOCAB, 5).tolist()
    name = engine.add_request(prompt, SPELLED)
    shown = [token for _ in range(3) for update in engine.step_outputs() for token in update.token_ids]
    monkeypatch.setattr(engine.runner, "dispatch", lambda plan: 1 / 0)
    (update,) = engine.step_outputs()
    assert update.output.finish_reason == "error"
    assert isinstance(update.output.error, ZeroDivisionError)
    assert (*shown, *update.token_ids) == update.output.token_ids
    assert len(shown) >= 2
    assert engine.abort(name) is None
