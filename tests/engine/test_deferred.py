"""An engine with policy "deferred": boundaries are published once they are folded, and requests hold few blocks."""

import dataclasses
import functools
from pathlib import Path

import numpy as np
import pytest
from fakes.engines import load_two_layers, poison
from fakes.foresight import Foresight, found_in, in_turn, one_by_one
from fakes.speller import VOCAB, Speller
from fakes.speller import next_token as next_of_any

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.engine.device.runner import StepRunner
from mamba_align_jax.engine.reference import Reference
from mamba_align_jax.engine.scheduling.buckets import Bucket
from mamba_align_jax.engine.scheduling.levels import Level
from mamba_align_jax.models import load_model

DATA = Path(__file__).parents[1] / "data"
SPELLER = Speller(adds=True)
next_token = functools.partial(next_of_any, adds=True)
SIZES = dict(policy="deferred", fold_length=8, block_size=16, kv_page_size=4, max_num_seqs=3, max_model_len=128)
SIZES |= dict(max_num_batched_tokens=32, num_kv_pages=120, num_state_blocks=30, num_speculative_tokens=3, checked=True)
SIZES |= dict(prefix_cache="align", async_stepping=False)
pytestmark = pytest.mark.usefixtures("one_program")
BOTH = pytest.mark.parametrize("stepping", [dict(), dict(async_stepping=True)], ids=["sync", "async"])


def make(plan=((3, 3), (3, 0), (2, 1)), **changes):
    config = EngineConfig(**SIZES | changes)
    drafter = None
    if not config.async_stepping and config.num_speculative_tokens:
        drafter = Foresight(one_by_one(next_token), in_turn(plan), VOCAB)
    engine = Engine(SPELLER, config, drafter=drafter)
    poison(engine)
    return engine


def book(number, length):
    return [(number + 7 * n) % VOCAB for n in range(length)]


def serve(engine, prompt, count, **params):
    """Serves a prompt alone. Returns all its tokens, and how many were cached."""
    (output,) = engine.generate([prompt], SamplingParams(max_tokens=count, ignore_eos=True, **params))
    tokens = list(prompt)
    for token in output.token_ids:
        assert token == next_token(tokens)
        tokens.append(token)
    assert engine.stats.null_reads == 0
    engine.cache.check()
    assert engine.cache.states.pool.num_held == 0
    return tokens, output.num_cached_tokens


@BOTH
@pytest.mark.parametrize("end", range(29, 38))
def test_a_request_leaves_the_last_boundary_that_it_passed(end, stepping):
    """Whether the boundary 32 was folded by the next step or, if there was none, at the request's end."""
    engine = make(**stepping)
    tokens, _ = serve(engine, book(0, 20), end - 20)
    # The last token has no state.
    last = (end - 1) // 16 * 16
    assert engine.cache.cached_prefix([*tokens, 0]).num_tokens == last
    again, cached = serve(engine, tokens + book(1, 3), 9)
    assert cached == last
    assert again[:end] == tokens


def test_a_boundary_is_published_when_the_step_that_folds_it_was_dispatched():
    engine = make(num_speculative_tokens=0)
    prompt = book(2, 10)
    engine.add_request(prompt, SamplingParams(max_tokens=20, ignore_eos=True))
    lengths = []
    while engine.has_unfinished:
        engine.step()
        tokens = list(prompt)
        while len(tokens) < 40:
            tokens.append(next_token(tokens))
        lengths.append(engine.cache.cached_prefix(tokens).num_tokens)
    # The first step leaves 10 tokens. The seventh has computed 16 of them, and the eighth folds the boundary.
    assert lengths.index(16) == 7
    assert lengths == sorted(lengths)


@pytest.mark.parametrize("count", range(2, 12))
def test_a_preempted_request_resumes_from_the_last_boundary_that_it_passed(count):
    engine, params = make(), SamplingParams(max_tokens=40, ignore_eos=True)
    number = engine.add_request(book(3, 9), params)
    for _ in range(count):
        engine.step()
    request = engine.core.requests[number]
    computed, prefilled = request.num_computed, engine.stats.prefill_tokens
    engine.scheduler._preempt(request)
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    tokens = book(3, 9)
    for token in outputs[0].token_ids:
        assert token == next_token(tokens)
        tokens.append(token)
    # The token that was sampled last has no state yet.
    assert engine.stats.prefill_tokens - prefilled == computed % 16 + 1
    assert engine.stats.null_reads == 0


@BOTH
@pytest.mark.parametrize("K", [0, 3])
def test_a_running_request_holds_two_blocks_whatever_the_number_of_drafts(stepping, K):
    engine = make(num_speculative_tokens=K, block_size=32, fold_length=8, **stepping)
    assert engine.align.blocks_per_request(engine.config.steps_in_flight) == 2 + engine.config.steps_in_flight
    number = engine.add_request(book(5, 40), SamplingParams(max_tokens=80, ignore_eos=True))
    held = []
    while engine.has_unfinished:
        engine.step()
        if engine.scheduler.running:
            held.append(len(engine.cache.states.columns(number)))
    assert max(held) <= 2
    assert np.mean(held) < 1.8


@BOTH
@pytest.mark.parametrize("K", [0, 3])
def test_no_byte_of_a_state_is_copied(stepping, K):
    engine = make(num_speculative_tokens=K, **stepping)
    serve(engine, book(6, 20), 60)
    assert engine.cache.cached_prefix([*book(6, 20), *range(60)]).num_tokens == 16
    assert engine.stats.state_bytes_copied == 0


def test_an_aborted_request_leaves_its_boundaries_and_nothing_else():
    engine = make()
    prompt, tokens = book(7, 20), book(7, 20)
    while len(tokens) < 60:
        tokens.append(next_token(tokens))
    for count in range(1, 14):
        number = engine.add_request(prompt, SamplingParams(max_tokens=30, ignore_eos=True, cache_salt=str(count)))
        for _ in range(count):
            engine.step()
        request = engine.core.requests[number]
        computed = request.num_computed
        engine.abort(number)
        while engine.has_unfinished:
            engine.step()
        assert engine.cache.cached_prefix(tokens, str(count).encode()).num_tokens == computed // 16 * 16
        engine.cache.check()
        assert engine.cache.states.pool.num_held == 0


def test_a_prefix_moves_to_another_engine_and_policy():
    engine, other = make(), make(policy="copy_free")
    tokens, _ = serve(engine, book(8, 20), 40)
    data = engine.export_prefix(tokens)
    assert other.import_prefix(data, tokens) == 48
    again, cached = serve(other, [*tokens, 1, 2], 5)
    assert cached == 48
    back = make()
    assert back.import_prefix(other.export_prefix(again), again) == 64
    assert serve(back, [*again, 3], 5)[1] == 64


MODEL = dict(SIZES, kv_page_size=8, num_kv_pages=64, block_size=16)


@functools.cache
def tiny(name="qwen3_5_text"):
    """Two layers of Qwen3.5, one of each kind, or all of Mamba-2."""
    return load_two_layers(DATA / name) if name == "qwen3_5_text" else load_model(DATA / name, "float32")


@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba2"])
def test_a_prompt_resumed_from_a_deferred_boundary_equals_one_that_never_speculated(name, monkeypatch):
    """One program runs every row, so that a token's inputs have the same bits however it is stepped."""
    monkeypatch.setattr(StepRunner, "buckets", [Bucket(3, 3, 32, Level.MOST_LIKELY)])
    model, prompt = tiny(name), np.random.default_rng(0).integers(0, 250, 21).tolist()
    plain = Engine(model, EngineConfig(**MODEL | dict(num_speculative_tokens=0)))
    poison(plain)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    (wanted,) = plain.generate([prompt], params)
    sequence = [*prompt, *wanted.token_ids]
    drafter = Foresight(found_in([sequence]), in_turn([(3, 3), (3, 1), (2, 0), (3, 2)]), 250)
    drafting = Engine(model, EngineConfig(**MODEL), drafter=drafter)
    poison(drafting)
    (first,) = drafting.generate([prompt], params)
    assert first.token_ids == wanted.token_ids
    assert sum(drafting.stats.accepted_tokens) > 0
    # The request ends with 70 computed tokens.
    (again,) = drafting.generate([sequence[:70]], dataclasses.replace(params, max_tokens=1))
    assert again.num_cached_tokens == 64
    assert again.token_ids == (sequence[70],)
    assert drafting.stats.null_reads == 0
    states = []
    for engine in (plain, drafting):
        ((_, block),) = engine.cache.lookup(sequence[:66]).state.blocks
        states.append(engine.runner.device_state.pool.read_block(0, block))
    for one, other in zip(*states, strict=True):
        # Of a window, the rows after the first width - 1 have no meaning.
        kept = slice(0, 3) if one.ndim == 3 else slice(None)
        np.testing.assert_allclose(one[:, kept], other[:, kept], rtol=0, atol=1e-5)


def check_drafts(preempted, name="qwen3_5_text"):
    """Requests that share a prefix are right with any drafts, in chunks, and after preemption."""
    model, rng = tiny(name), np.random.default_rng(1)
    prefix = rng.integers(1, 250, 33).tolist()
    batch = [prefix + rng.integers(1, 250, length).tolist() for length in (3, 12, 20, 7)]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    config = EngineConfig(**MODEL | dict(num_kv_pages=20 if preempted else 64))
    plain = Engine(model, config).generate(batch, dataclasses.replace(params, num_speculative_tokens=0))
    drafter = Foresight(
        found_in([[*o.prompt_token_ids, *o.token_ids] for o in plain]), in_turn([(3, 3), (3, 1), (0, 0), (2, 2)]), 250
    )
    engine = Engine(model, config, drafter=drafter)
    poison(engine)
    outputs, reference = engine.generate(batch, params), Reference(model)
    verdicts = [reference.judge(o.prompt_token_ids, o.token_ids) for o in [*plain, *outputs]]
    assert all(verdict.right for verdict in verdicts), verdicts
    assert sum(verdict.ties for verdict in verdicts) <= 1
    assert (engine.stats.preemptions > 0) == preempted
    assert sum(engine.stats.accepted_tokens) > 0
    assert engine.stats.null_reads == 0
    (again,) = engine.generate([batch[0] + list(outputs[0].token_ids)], params)
    assert again.num_cached_tokens == 64 or preempted  # A small pool has evicted it.
    assert reference.judge(again.prompt_token_ids, again.token_ids).right


@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba2"])
@pytest.mark.parametrize("preempted", [False, True])
def test_requests_with_drafts_are_right(preempted, name):
    check_drafts(preempted, name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba2"])
def test_requests_with_drafts_are_right_with_compiled_kernels(name):
    check_drafts(True, name)


def test_models_without_a_recurrent_state_are_refused():
    message = "must have groups with a ring, which only gated delta nets and Mamba-2 have, got"
    with pytest.raises(ValueError, match=message):
        Engine(load_model(DATA / "lfm2"), EngineConfig(policy="deferred"))


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("fold_length must divide block_size = 16 under policy 'deferred', got 12", dict(fold_length=12)),
        (
            r"fold_length must be more than 2 \* num_speculative_tokens = 8 under policy 'deferred', got 8",
            dict(num_speculative_tokens=4),
        ),
        ("fold_length must be at least 1, got 0", dict(fold_length=0)),
    ],
)
def test_bad_lengths_are_refused(message, changes):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**SIZES | changes)
    # In mode "none" there are no boundaries.
    EngineConfig(**SIZES | dict(prefix_cache="none", fold_length=12))
