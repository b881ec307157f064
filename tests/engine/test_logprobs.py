"""Log-probabilities of generated tokens and of prompts are the model's, whatever is cached, drafted or preempted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine.programs import shapes
from fakes.speller import VOCAB, next_tokens
from fakes.stuttering_engine import MODEL, SIZES, STEPPING, STUTTER, asked, expected, params_of, serve

from mamba_align_jax import Engine, EngineConfig
from mamba_align_jax.engine.sampling.logprobs import score, score_prompt
from mamba_align_jax.engine.scheduling.buckets import Bucket
from mamba_align_jax.engine.scheduling.levels import Level

pytestmark = pytest.mark.usefixtures("one_program")


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


def assert_scored(found, token, chosen, num_top):
    """`found` is right for `token` in a place where the speller says `chosen`."""
    wanted = log_softmax(-((np.arange(VOCAB) - chosen) ** 2.0))
    assert found.token_id == token
    # A difference of logits up to 3600 is exact, and the logarithm of the sum is rounded to float32.
    np.testing.assert_allclose(found.logprob, wanted[token], rtol=1e-6, atol=1e-6)
    assert [each for each, _ in found.top] == np.argsort(-wanted, kind="stable")[:num_top].tolist()
    np.testing.assert_allclose([value for _, value in found.top], np.sort(wanted)[::-1][:num_top], rtol=1e-6, atol=1e-6)


def assert_right(output, params):
    """All log-probabilities that were asked for are those of the speller's own logits."""
    tokens = [*output.prompt_token_ids, *output.token_ids]
    said, start = next_tokens(tokens, STUTTER), len(output.prompt_token_ids)
    if params.logprobs is None:
        assert output.logprobs is None
    else:
        assert len(output.logprobs) == len(output.token_ids)
        for number, found in enumerate(output.logprobs):
            assert_scored(found, tokens[start + number], said[start + number - 1], params.logprobs)
    if params.prompt_logprobs is None:
        assert output.prompt_logprobs is None
    else:
        assert len(output.prompt_logprobs) == start
        assert output.prompt_logprobs[0] is None
        assert output.num_cached_tokens == 0
        assert output.cache_miss in (None, "prompt_logprobs" if start > 1 else "below one block")
        for number, found in enumerate(output.prompt_logprobs[1:], 1):
            assert_scored(found, tokens[number], said[number - 1], params.prompt_logprobs)


@pytest.mark.parametrize("vocab", [3, 20, 300, 2049, 5000])
def test_scores_are_those_of_float64(rng, vocab):
    logits, tokens = rng.normal(0, 5, (7, vocab)).astype(np.float32), rng.integers(0, vocab, 7).astype(np.int32)
    got = score(jnp.asarray(logits), jnp.asarray(tokens))
    for row, token, *found in zip(logits, tokens, *got, strict=True):
        wanted, num_top = log_softmax(row), min(20, vocab)
        np.testing.assert_allclose(found[0], wanted[token], atol=1e-5)
        assert found[1].tolist() == np.argsort(-wanted, kind="stable")[:num_top].tolist()
        np.testing.assert_allclose(found[2], np.sort(wanted)[::-1][:num_top], atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 127, 128, 300])
def test_prompts_are_scored_in_parts(rng, tokens):
    hidden = jnp.asarray(rng.integers(0, VOCAB, (tokens, 1)).astype(np.float32))
    following = jnp.asarray(rng.integers(0, VOCAB, tokens).astype(np.int32))
    jax.tree.map(
        np.testing.assert_array_equal, score_prompt(MODEL, hidden, following), score(MODEL.logits(hidden), following)
    )


@pytest.mark.parametrize("stepping", STEPPING)
def test_log_probabilities_are_right_under_any_stepping(rng, stepping):
    """Requests that ask for none, for their own tokens', for their prompts', and for both run side by side."""
    asks = (dict(), dict(logprobs=3), dict(prompt_logprobs=0), dict(logprobs=0, prompt_logprobs=20))
    prompts = asked(rng)
    requests = [(prompt, params_of(name, **ask)) for name in ("neutral", "all") for prompt in prompts for ask in asks]
    requests += [(prompt, params_of("neutral", max_tokens=0, prompt_logprobs=1)) for prompt in prompts]
    requests += [([5], params_of("neutral", prompt_logprobs=2))]
    engine = Engine(MODEL, EngineConfig(**SIZES | STEPPING[stepping]))
    outputs = serve(engine, requests)
    for (prompt, params), output in zip(requests, outputs, strict=True):
        assert list(output.token_ids) == expected(prompt, params)
        assert_right(output, params)
    if stepping != "uncached":
        assert any(output.num_cached_tokens for output in outputs)
    if stepping in ("tight", "drafts"):
        assert engine.stats.preemptions > 0


@pytest.mark.parametrize("stepping", ["tight", "async_drafts"])
def test_log_probabilities_are_right_after_an_interrupt(rng, stepping, monkeypatch):
    engine = Engine(MODEL, EngineConfig(**SIZES | STEPPING[stepping]))
    requests = [(prompt, params_of("frequency", logprobs=1, prompt_logprobs=1)) for prompt in asked(rng)]

    def before_step(number):
        """Cuts every eighth step off after it has taken in the first row."""
        scheduler, calls = engine.scheduler, []

        def cut_off(*args):
            if number % 8 == 7 and calls:
                raise KeyboardInterrupt
            calls.append(type(scheduler).finished(scheduler, *args))

        monkeypatch.setattr(scheduler, "finished", cut_off)

    for (prompt, params), output in zip(requests, serve(engine, requests, before_step), strict=True):
        assert list(output.token_ids) == expected(prompt, params)
        assert_right(output, params)
    assert engine.stats.preemptions > 5, "nothing was cut off"


@pytest.mark.parametrize("stepping", STEPPING)
def test_request_of_no_tokens_ends_when_its_prompt_has_run(rng, stepping):
    """Also if the prompt is as long as a sequence can be. What it has computed is cached."""
    engine = Engine(MODEL, EngineConfig(**SIZES | STEPPING[stepping]))
    prompt = rng.integers(0, VOCAB, SIZES["max_model_len"]).tolist()
    (output,) = serve(engine, [(prompt, params_of("neutral", max_tokens=0))])
    assert (output.token_ids, output.finish_reason, output.ttft_s) == ((), "length", None)
    (again,) = serve(engine, [(prompt, params_of("neutral", max_tokens=0))])
    assert again.num_cached_tokens == (0 if stepping == "uncached" else 56)


def test_updates_have_each_log_probability_once(rng):
    engine = Engine(MODEL, EngineConfig(**SIZES | STEPPING["drafts"]))
    params = params_of("neutral", logprobs=2, prompt_logprobs=1)
    ids = [engine.add_request(prompt, params) for prompt in asked(rng)]
    updates = {number: [] for number in ids}
    while engine.has_unfinished:
        for update in engine.step_outputs():
            updates[update.request_id].append(update)
    for parts in updates.values():
        output = parts[-1].output
        assert len(parts) > 3
        assert [found for part in parts for found in part.logprobs] == list(output.logprobs)
        assert [part.prompt_logprobs for part in parts] == [output.prompt_logprobs] + [None] * (len(parts) - 1)
        assert_right(output, params)


def test_no_program_holds_the_logits_of_all_tokens():
    engine = Engine(MODEL, EngineConfig(**SIZES | dict(max_num_batched_tokens=1024, max_model_len=1024)))
    found = shapes(engine.runner.trace(Bucket(3, 4, 1024, Level.PROMPT)))
    assert (128, VOCAB) in found
    assert not [shape for shape in found if VOCAB in shape and np.prod(shape) > 200 * VOCAB]


def test_neighbours_do_not_pay(rng):
    """A request that asks for nothing runs the lowest programs once the one that asks has ended."""
    engine, levels = Engine(MODEL, EngineConfig(**SIZES)), []
    run = engine.runner._run
    engine.runner._run = lambda bucket, places: levels.append(bucket.level) or run(bucket, places)
    prompt = rng.integers(0, VOCAB, 30).tolist()
    asks = [params_of("neutral"), params_of("neutral", max_tokens=3, logprobs=1, prompt_logprobs=0)]
    outputs = serve(engine, [(prompt, params) for params in asks])
    assert outputs[0].token_ids[:3] == outputs[1].token_ids
    assert {Level.PROMPT, Level.FULL} < set(levels)
    assert set(levels[-4:]) == {Level.DRAW}  # The fixture has no program below it.
