"""Requests keep and hit states inside blocks, at multiples of the cache's granularity: here 64 tokens in blocks of 128."""

import pytest
from fakes.engines import poison
from fakes.speller import Speller, next_token

from mamba_align_jax import Engine, EngineConfig, SamplingParams

BLOCK, GRAIN = 128, 64
SIZES = dict(block_size=BLOCK, kv_page_size=16, max_num_seqs=3, max_num_batched_tokens=200, max_model_len=768)
SIZES |= dict(num_state_blocks=30, num_kv_pages=200, checked=True)
DRAFTS = dict(num_speculative_tokens=3)
CHANGES = {
    "copy_free": dict(async_stepping=True, **DRAFTS),
    "pre_copy": dict(policy="pre_copy"),
    "deferred": dict(policy="deferred", **DRAFTS),
    "all": dict(prefix_cache="all"),
}
LESS = "pre_copy", "all"
pytestmark = pytest.mark.usefixtures("one_program")


def make(case="copy_free", **changes):
    """An engine whose pools are NaN at first."""
    changes = SIZES | CHANGES[case] | changes
    engine = Engine(Speller(adds=case == "deferred"), EngineConfig(**changes))
    poison(engine)
    return engine


def serve(engine, *requests, max_tokens=3):
    """Serves (prompt, checkpoint_at) pairs together, checks every token, and returns how many of each were cached."""
    adds = engine.config.policy == "deferred"
    params = [SamplingParams(max_tokens=max_tokens, ignore_eos=True, checkpoint_at=at) for _, at in requests]
    outputs = engine.generate([list(prompt) for prompt, _ in requests], params)
    for output in outputs:
        tokens = list(output.prompt_token_ids)
        for token in output.token_ids:
            assert token == next_token(tokens, adds=adds)
            tokens.append(token)
    engine.cache.check()
    assert engine.cache.states.pool.num_held == engine.cache.kv.pool.num_held == 0
    assert engine.stats.null_reads == 0
    return [output.num_cached_tokens for output in outputs]


def book(number, length):
    return [(number + 7 * n) % 61 for n in range(length)]


@pytest.mark.parametrize("case", ["copy_free", "deferred", *(pytest.param(c, marks=pytest.mark.deep) for c in LESS)])
def test_a_request_starts_inside_a_block_where_an_earlier_one_was_asked_to_keep_its_state(case):
    engine = make(case)
    tools = book(0, 210)
    assert serve(engine, (tools + book(1, 20), (210,))) == [0]
    assert 192 in engine.cache.cached_prefix(tools).boundaries
    # The first two start from one state together, and end in its block and after it.
    others = (tools + book(2, 9), ()), (tools + book(3, 150), (350,)), (tools[:200] + book(4, 1), ())
    assert serve(engine, *others) == [192, 192, 192]
    assert serve(engine, (tools + book(3, 180), ())) == [320]
    # What they wrote is not in the block from which they started.
    assert serve(engine, (tools + book(5, 40), ())) == [192]
    if case in ("deferred", "all"):
        # Nothing else is copied. Two states were kept inside blocks, and five requests started from them.
        assert engine.stats.state_bytes_copied == 7 * engine.align.bytes_per_block


def test_the_granularity_is_that_of_pages_and_chunks_and_a_pool_without_a_spare_block_has_boundaries_alone():
    granularity = lambda **changes: Engine(Speller(), EngineConfig(**SIZES | changes)).cache.states.granularity
    assert granularity() == GRAIN
    assert granularity(kv_page_size=BLOCK) == BLOCK
    assert granularity(block_size=32) == 32
    assert granularity(block_size=192, kv_page_size=96) == 192
    assert granularity(prefix_cache="none") == BLOCK
    # A request holds two blocks.
    assert [granularity(num_state_blocks=count) for count in (3, 4)] == [BLOCK, GRAIN]
