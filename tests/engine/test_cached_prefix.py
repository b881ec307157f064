"""Tests of `Engine.cached_prefix`, which says what is cached of a prompt and changes nothing."""

import pytest
from fakes.speller import VOCAB, Speller

from mamba_align_jax import Engine, EngineConfig, SamplingParams

pytestmark = pytest.mark.usefixtures("one_program")

SIZES = dict(block_size=8, kv_page_size=4, max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64)
SIZES |= dict(num_state_blocks=12, num_kv_pages=20, checked=True)
PROMPT = [3 + number % 5 for number in range(30)]


@pytest.fixture
def engine():
    return Engine(Speller(), EngineConfig(**SIZES))


def test_a_cached_prefix_is_what_the_next_request_starts_from(engine):
    nothing = engine.cached_prefix(PROMPT)
    assert (nothing.num_tokens, nothing.num_paged_tokens, nothing.boundaries) == (0, 0, ())
    assert nothing.miss == "not identical"
    engine.generate(PROMPT, SamplingParams(max_tokens=2, ignore_eos=True))
    before = engine.stats, engine.cache.states.pool.keys, engine.cache.kv.pool.keys
    found = engine.cached_prefix(PROMPT)
    assert (found.num_tokens, found.num_paged_tokens, found.miss) == (24, 28, None)
    assert 24 in found.boundaries
    # The state after 24 tokens is of no use to a prompt that ends there, and an earlier one may not be kept.
    assert engine.cached_prefix(PROMPT[:24]).num_tokens < 24
    other = engine.cached_prefix([*PROMPT[:12], *reversed(PROMPT[:12])])
    assert (other.num_paged_tokens, other.num_tokens) == (12, max((b for b in other.boundaries if b <= 12), default=0))
    assert other.miss == ("not identical" if other.num_tokens == 8 else "no checkpoint")
    assert engine.cached_prefix(PROMPT, "another tenant") == nothing
    assert before == (engine.stats, engine.cache.states.pool.keys, engine.cache.kv.pool.keys)
    (output,) = engine.generate(PROMPT, SamplingParams(max_tokens=1, ignore_eos=True))
    assert output.num_cached_tokens == found.num_tokens


def test_an_evicted_state_is_named(engine):
    engine.generate(PROMPT, SamplingParams(max_tokens=2, ignore_eos=True))
    for number in range(8):
        engine.generate([number + 1] * 30, SamplingParams(max_tokens=2, ignore_eos=True))
    gone = engine.cached_prefix(PROMPT)
    assert (gone.num_tokens, gone.boundaries, gone.miss) == (0, (), "evicted")


def test_mode_none_caches_nothing():
    engine = Engine(Speller(), EngineConfig(**SIZES | dict(prefix_cache="none")))
    engine.generate(PROMPT, SamplingParams(max_tokens=2, ignore_eos=True))
    assert engine.cached_prefix(PROMPT).boundaries == ()


def test_what_is_no_prompt_is_refused_by_name(engine):
    for tokens, salt, name in (
        ([VOCAB], "", "prompt_token_ids"),
        ("text", "", "prompt_token_ids"),
        ([1], 5, "cache_salt"),
    ):
        with pytest.raises(ValueError, match=name):
            engine.cached_prefix(tokens, salt)
