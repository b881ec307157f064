"""Failures of whole engines elsewhere do not happen here, over a model whose tokens are exactly known."""

import itertools

import jax
import numpy as np
import pytest
from fakes.engines import poison
from fakes.speller import VOCAB, Speller, next_token

from mamba_align_jax import Engine, EngineConfig, SamplingParams

pytestmark = pytest.mark.usefixtures("fewest_programs")

BLOCK = 8
SIZES = dict(block_size=BLOCK, kv_page_size=4, max_num_seqs=4, max_num_batched_tokens=20, max_model_len=64)
# Four long requests at once need more blocks and pages.
SIZES |= dict(num_state_blocks=14, num_kv_pages=31)
THREE = SamplingParams(max_tokens=3, ignore_eos=True)
LONG = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return Speller()


@pytest.fixture(params=["sync", "async"])
def engine(model, request):
    return Engine(model, EngineConfig(**SIZES, async_stepping=request.param == "async"))


def prompt(rng, tokens):
    return rng.integers(0, VOCAB, tokens).tolist()


def assert_right(*outputs):
    for output in outputs:
        tokens = list(output.prompt_token_ids)
        for token in output.token_ids:
            assert token == next_token(tokens), f"after {len(tokens)} tokens of {len(output.prompt_token_ids)}"
            tokens.append(token)


def run(engine, steps=1000):
    outputs = []
    while engine.has_unfinished and steps:
        outputs += engine.step()
        steps -= 1
    return outputs


def assert_nothing_is_held(engine):
    engine.cache.check()
    assert engine.cache.states.pool.num_held == engine.cache.kv.pool.num_held == engine.stats.null_reads == 0


def contents(engine):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(engine.runner.device_state)]


def test_prompts_of_every_length_cold_and_repeated(rng, engine):
    """Prompts of each length are right at first, and cached up to the last boundary when they are repeated."""
    poison(engine)
    for length in range(1, 4 * BLOCK + 3):
        tokens = prompt(rng, length)
        cold, again = (engine.generate(tokens, THREE)[0] for _ in range(2))
        assert_right(cold, again)
        assert (cold.num_cached_tokens, again.num_cached_tokens) == (0, (length - 1) // BLOCK * BLOCK)
    assert_nothing_is_held(engine)


def test_prompts_below_a_block_are_warned_of(rng, model, caplog):
    """The warning comes once, after most of the first prompts were too short."""
    engine = Engine(model, EngineConfig(**SIZES))
    for number in range(40):
        engine.add_request(prompt(rng, BLOCK + (number % 4 == 0)), SamplingParams(max_tokens=1))
    run(engine)
    Engine(model, EngineConfig(**SIZES | dict(max_model_len=BLOCK + 1)))
    Engine(model, EngineConfig(**SIZES | dict(max_model_len=BLOCK)))
    Engine(model, EngineConfig(**SIZES | dict(max_model_len=BLOCK, prefix_cache="none")))
    assert [r.getMessage() for r in caplog.records if r.name.endswith("block_size_warning")] == [
        "block_size 8: 24 of the first 32 prompts had no more tokens than that, too few to hit the prefix cache",
        "block_size 8 is too long for max_model_len 8: no prompt ever hits the prefix cache",
    ]


def test_fresh_requests_in_poisoned_pools(rng, engine):
    """There are more requests than slots, the shortest of one token. No request reads what a block held before."""
    poison(engine)
    ids = [engine.add_request(prompt(rng, n), LONG) for n in (1, 17, 2, 9, 1, 30, 8)]
    outputs = run(engine)
    assert len(outputs) == len(ids)
    assert_right(*outputs)
    assert_nothing_is_held(engine)


def test_a_one_token_tail_beside_decode_rows(rng, engine):
    engine.add_request(prompt(rng, 5), LONG)
    engine.step()
    engine.add_request(prompt(rng, 2 * BLOCK + 1), THREE)
    engine.add_request(prompt(rng, 1), THREE)
    outputs = run(engine)
    assert len(outputs) == 3
    assert_right(*outputs)


def test_requests_preempted_at_any_length(rng, engine):
    for length in range(6, 6 + BLOCK):
        ids = [engine.add_request(prompt(rng, length + 3 * n), SamplingParams(max_tokens=25)) for n in range(4)]
        outputs = run(engine)
        assert len(outputs) == len(ids)
        assert_right(*outputs)
        assert_nothing_is_held(engine)
    assert engine.stats.preemptions >= BLOCK


def test_a_retry_after_an_abort_within_the_prompt(rng, engine):
    """The retry may find what the aborted request has computed, but nothing else."""
    poison(engine)
    for steps in range(4):
        tokens = prompt(rng, 57)
        first = engine.add_request(tokens, THREE)
        run(engine, steps)
        engine.abort(first)
        assert_nothing_is_held(engine)
        (retry,) = engine.generate(tokens, THREE)
        assert retry.num_cached_tokens <= 2 * BLOCK * steps
        assert_right(retry)


def test_identical_prompts_in_one_pass(rng, engine):
    """Neither request reads a state that the other one writes in the same step, and one of the two copies is kept."""
    poison(engine)
    tokens = prompt(rng, 2 * BLOCK + 1)
    for _ in range(2):
        engine.add_request(tokens[: BLOCK + 2], THREE)
    both = run(engine)
    assert [output.num_cached_tokens for output in both] == [0, 0]
    (third,) = engine.generate(tokens[: BLOCK + 2], THREE)
    assert third.num_cached_tokens == BLOCK
    assert_right(*both, third)
    assert_nothing_is_held(engine)


def test_warming_up_while_requests_run_changes_nothing(rng, engine):
    """Warm-up steps have only padding rows, which change no slot."""
    for length in (1, 20, 40):
        engine.add_request(prompt(rng, length), LONG)
    outputs = run(engine, 4)
    before = contents(engine)
    engine.warmup()
    assert contents(engine) == before
    outputs += run(engine)
    assert len(outputs) == 3
    assert_right(*outputs)


def test_batches_of_every_size_beside_padding(rng, engine):
    poison(engine)
    for number in range(1, SIZES["max_num_seqs"] + 1):
        for n in range(number):
            engine.add_request(prompt(rng, 3 + n), THREE)
        outputs = run(engine)
        assert len(outputs) == number
        assert_right(*outputs)


def test_every_step_has_host_arrays_of_its_own(rng, engine, monkeypatch):
    """On a CPU the device borrows aligned memory of the host, so the next step must not write what a step in flight reads.

    Steps that differ in nothing have the same arrays, which are never written again: see tests/engine/test_packing.py.
    """
    sent, do_step = [], engine.runner.do_step
    monkeypatch.setattr(engine.runner, "do_step", lambda bucket, inputs: sent.append(inputs) or do_step(bucket, inputs))
    engine.add_request(prompt(rng, 9), THREE)
    assert_right(*run(engine))
    assert len(sent) > 3
    assert len({id(inputs) for inputs in sent}) > 2
    for earlier, later in itertools.combinations(sent, 2):
        assert later is earlier or not np.shares_memory(earlier.words, later.words)
