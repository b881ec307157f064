"""Penalties, biases, `min_tokens` and `min_p` follow their definitions, whatever is cached, drafted or preempted."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes.speller import VOCAB, next_tokens
from fakes.stuttering_engine import (
    DRAWN,
    END,
    MODEL,
    OPTIONS,
    SIZES,
    STEPPING,
    STUTTER,
    asked,
    expected,
    params_of,
    serve,
)
from oracles.sampling import adjusted, distribution

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.engine.sampling.adjust import AdjustOptions, SamplerState, adjust, drop_unlikely
from mamba_align_jax.engine.sampling.draw import sample
from mamba_align_jax.engine.scheduling.buckets import Bucket
from mamba_align_jax.engine.scheduling.levels import Level

pytestmark = pytest.mark.usefixtures("one_program")


def test_logits_are_changed_by_the_definitions(rng):
    """Rows in any slots, with any drafts before the token; a row whose slot is out of range is not changed."""
    slots, K, names = 9, 3, list(OPTIONS)
    state = SamplerState.create(slots, VOCAB, 1)
    state = jax.tree.map(lambda x: x + 1, state)  # What earlier requests left.
    slot = rng.permutation(slots)[: len(names)].astype(np.int32)
    prompts = [rng.integers(0, VOCAB, 40).tolist() for _ in names]
    generated = [rng.integers(0, VOCAB, n).tolist() for n in (0, 4, 30, 7, 60, 2, 3, 1)]
    drafts = rng.integers(0, VOCAB, (len(names), K)).astype(np.int32)
    for each, name in enumerate(names):
        history = prompts[each], generated[each]
        state = state.with_request(int(slot[each]), *history, params_of(name), [END])
    logits = rng.normal(0, 4, (len(names), VOCAB)).astype(np.float32)
    params = [params_of(name) for name in names]
    floats = lambda name: jnp.array([getattr(each, name) for each in params], jnp.float32)
    options = AdjustOptions(
        slot=jnp.asarray(slot).at[0].set(slots),
        min_p=floats("min_p"),
        repetition=floats("repetition_penalty"),
        presence=floats("presence_penalty"),
        frequency=floats("frequency_penalty"),
    )
    for count in range(1 + K):
        before = np.where(np.arange(K) < count, drafts, 2**31 - 1)
        position = np.array([len(p) + len(g) + count for p, g in zip(prompts, generated, strict=True)], np.int32)
        got = adjust(jnp.asarray(logits), state, options, jnp.asarray(before), jnp.asarray(position))
        for each in range(1, len(names)):
            history = prompts[each], [*generated[each], *drafts[each, :count].tolist()]
            wanted = adjusted(logits[each], params[each], *history, [END])
            np.testing.assert_allclose(got[each], wanted, rtol=1e-6, atol=1e-5)
        np.testing.assert_array_equal(got[0], logits[0])


@pytest.mark.parametrize("repetition", [2.0**-126, 3e38])
def test_penalties_leave_logits_finite_and_what_is_forbidden_forbidden(repetition):
    """Otherwise a difference of two of them would be no number, and any token could be drawn."""
    state = SamplerState.create(1, VOCAB, 1)
    params = SamplingParams(repetition_penalty=repetition)
    state = state.with_request(0, list(range(VOCAB)), [3], params, [END])
    values = [jnp.array([x], jnp.float32) for x in (0, repetition, 0, 0)]
    logits = jnp.where(jnp.arange(VOCAB) < 2, -jnp.inf, jnp.linspace(-30, 20, VOCAB, dtype=jnp.float32))[None]
    before, position = jnp.zeros((1, 0), jnp.int32), jnp.array([VOCAB + 1], jnp.int32)
    got = adjust(logits, state, AdjustOptions(jnp.array([0], jnp.int32), *values), before, position)
    assert jnp.isneginf(got[0, :2]).all()
    assert jnp.isfinite(got[0, 2:]).all()
    assert (got[0] <= 0)[logits[0] <= 0].all()


def test_generated_tokens_are_counted_like_those_of_the_host(rng):
    """A slot's rows are the same whether its tokens were counted by steps or written when the request entered."""
    prompt, tokens = rng.integers(0, VOCAB, 9).tolist(), rng.integers(0, VOCAB, (4, 3)).astype(np.int32)
    counts, params = np.array([1, 3, 2, 1], np.int32), params_of("all")
    state = SamplerState.create(5, VOCAB, 0).with_request(2, prompt, (), params, ())
    kept = []
    for row, count in zip(tokens, counts, strict=True):
        # The other row's slot is out of range.
        pair = np.stack([row, row]), np.array([count, 3], np.int32)
        state = state.counting(jnp.array([2, 5]), *map(jnp.asarray, pair))
        kept += row[:count].tolist()
    written = SamplerState.create(5, VOCAB, 0).with_request(2, prompt, kept, params, ())
    jax.tree.map(np.testing.assert_array_equal, state, written)


@pytest.mark.parametrize("name", DRAWN)
def test_drawn_tokens_have_the_defined_distribution(rng, name):
    """Each token's frequency among 20,000 draws lies within six standard deviations of its probability."""
    params, draws, vocab = params_of(name), 20_000, 24
    logits = rng.normal(0, 30, vocab).astype(np.float32)
    wanted = distribution(logits, params)
    many = lambda value, dtype: jnp.full(draws, value, dtype)
    kept = drop_unlikely(
        jnp.tile(logits, (draws, 1)), many(params.temperature, jnp.float32), many(params.min_p, jnp.float32)
    )
    options = many(params.temperature, jnp.float32), many(params.top_k, jnp.int32), many(params.top_p, jnp.float32)
    drawn = sample(kept, *options, jnp.arange(draws, dtype=jnp.int32), many(5, jnp.int32))
    observed = np.bincount(drawn, minlength=vocab) / draws
    assert not observed[wanted == 0].any()
    assert (np.abs(observed - wanted) <= 6 * np.sqrt(wanted * (1 - wanted) / draws) + 1e-9).all()
    assert (wanted == 0).any() == (name != "drawn")


@pytest.mark.parametrize("stepping", STEPPING)
def test_greedy_tokens_follow_the_definitions(rng, stepping):
    """Requests of all kinds run side by side. Those that change nothing generate what they generate alone."""
    engine, prompts = Engine(MODEL, EngineConfig(**SIZES | STEPPING[stepping])), asked(rng)
    requests = [(prompt, params_of(name)) for name in OPTIONS for prompt in prompts]
    outputs = serve(engine, requests)
    for (prompt, params), output in zip(requests, outputs, strict=True):
        assert list(output.token_ids) == expected(prompt, params), params
        if params == params_of("neutral"):
            assert list(output.token_ids) == next_tokens([*prompt, *output.token_ids[:-1]], STUTTER)[len(prompt) - 1 :]
    if stepping != "uncached":
        assert any(output.num_cached_tokens for output in outputs)
    if "drafts" in stepping:
        assert sum(output.num_accepted_tokens for output in outputs[7:]) > 0
    if stepping in ("tight", "drafts"):
        assert engine.stats.preemptions > 0


@pytest.mark.parametrize("stepping", STEPPING)
def test_drawn_tokens_are_those_of_a_plain_engine(rng, stepping):
    prompts = asked(rng)
    requests = [(prompt, params_of(name)) for name in DRAWN for prompt in prompts]
    one_by_one = Engine(MODEL, EngineConfig(**SIZES | STEPPING["plain"]))
    wanted = [serve(one_by_one, [request])[0].token_ids for request in requests]
    outputs = serve(Engine(MODEL, EngineConfig(**SIZES | STEPPING[stepping])), requests)
    assert [output.token_ids for output in outputs] == wanted
    assert len(set(wanted)) > len(prompts)


@pytest.mark.parametrize("lost", [(), ("device_state",), ("sampler",)], ids=["kept", "pools", "sampler"])
@pytest.mark.parametrize("stepping", ["plain", "async_drafts"])
def test_tokens_are_the_same_after_an_interrupt(rng, stepping, lost, monkeypatch):
    """Also if the step that was cut off has lost the pools or the counts of tokens."""
    engine = Engine(MODEL, EngineConfig(**SIZES | STEPPING[stepping]))
    requests = [(prompt, params_of(name)) for name in ("all", "frequency", "neutral") for prompt in asked(rng)[:3]]
    read = engine.runner.read

    def interrupted(dispatched):
        monkeypatch.setattr(engine.runner, "read", read)
        for name in lost:
            for array in jax.tree.leaves(getattr(engine.runner, name)):
                array.delete()
        raise KeyboardInterrupt

    def before_step(number):
        if number in (4, 9, 20):
            monkeypatch.setattr(engine.runner, "read", interrupted)

    outputs = serve(engine, requests, before_step)
    assert [list(output.token_ids) for output in outputs] == [expected(*request) for request in requests]
    assert engine.stats.preemptions >= 6


def test_lower_levels_run_the_program_that_they_ran_before():
    """Their programs have the same text after a request has changed logits, and no array of biases."""
    engine = Engine(MODEL, EngineConfig(**SIZES))
    buckets = [Bucket(3, prefill, tokens, level) for level in (0, 1) for prefill, tokens in ((0, 0), (4, 20))]
    texts = [engine.runner.trace(bucket).lower().as_text() for bucket in buckets]
    engine.generate([1, 2, 3], params_of("neutral"))
    assert engine.runner.sampler is None
    engine.generate([1, 2, 3], params_of("all"))
    assert engine.runner.sampler.seen.shape == (SIZES["max_num_seqs"], VOCAB)
    assert [engine.runner.trace(bucket).lower().as_text() for bucket in buckets] == texts
    assert "top_k" not in "".join(texts)
    full = engine.runner.trace(buckets[0]._replace(level=Level.FULL)).lower().as_text()
    biases = "tensor<3x365xf32>"
    assert biases in full
    assert biases not in "".join(texts)


def test_failure_to_make_the_state_reaches_the_caller(monkeypatch):
    engine = Engine(MODEL, EngineConfig(**SIZES))

    def fail(*sizes):
        raise MemoryError

    monkeypatch.setattr(SamplerState, "create", fail)
    with pytest.raises(MemoryError):
        engine.add_request([1, 2], params_of("all"))
    assert not engine.has_unfinished
    assert len(engine.generate([1, 2], params_of("neutral"))[0].token_ids) == 18


def test_tokens_out_of_the_vocabulary_are_refused():
    engine = Engine(MODEL, EngineConfig(**SIZES))
    with pytest.raises(ValueError, match=r"logit_bias must be in \[0, 61\), got 61"):
        engine.add_request([1], SamplingParams(logit_bias={VOCAB: 1}))


def test_stop_tokens_that_min_tokens_can_not_forbid_are_refused():
    stops = tuple(range(65))
    assert SamplingParams(stop_token_ids=stops).stop_token_ids == stops
    with pytest.raises(ValueError, match="stop_token_ids must be at most 64 tokens if there is min_tokens, got 65"):
        SamplingParams(stop_token_ids=stops, min_tokens=1)
    with pytest.raises(ValueError, match="min_tokens must be at most max_tokens, got 65"):
        dataclasses.replace(SamplingParams(), min_tokens=65)


def test_a_warm_engine_makes_no_transfer_that_jax_can_be_set_to_refuse(rng):
    engine = Engine(MODEL, EngineConfig(**SIZES | STEPPING["async_drafts"]))
    requests = [(prompt, params_of(name)) for prompt, name in zip(asked(rng), [*OPTIONS, *DRAWN], strict=False)]
    wanted = serve(engine, requests)
    engine.reset_prefix_cache()
    with jax.transfer_guard("disallow"):
        found = serve(engine, requests)
    assert all(each.token_ids for each in found)
    assert [each.token_ids for each in found] == [each.token_ids for each in wanted]
