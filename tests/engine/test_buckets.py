"""Programs: every plan has one, padding is bounded, and there are few of them."""

import collections
import itertools
from types import SimpleNamespace

import pytest
from fakes.speller import Speller

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.engine.device.program import run_step
from mamba_align_jax.engine.scheduling.buckets import (
    Bucket,
    all_buckets,
    choose_bucket,
    decode_sizes,
    mixed_sizes,
    prefill_sizes,
    programs_of,
)
from mamba_align_jax.engine.scheduling.levels import Level, level_of


def plan(decode, chunks=(), temperature=0.0):
    request = SimpleNamespace(level=level_of(SamplingParams(temperature=temperature)))
    row = lambda tokens: SimpleNamespace(num_tokens=tokens, request=request, samples=True, scores_prompt=False)
    decode_rows, prefill_rows = [row(1) for _ in range(decode)], [row(tokens) for tokens in chunks]
    return SimpleNamespace(decode=decode_rows, prefill=prefill_rows, rows=decode_rows + prefill_rows)


@pytest.mark.parametrize("seqs", [1, 2, 4, 5, 8, 16, 20, 64, 100, 256])
def test_every_plan_has_a_program_that_pads_little(seqs):
    buckets = all_buckets(seqs, 4, 2048)
    for decode, temperature in itertools.product(range(1, seqs + 1), (0.0, 1.0)):
        chosen = choose_bucket(buckets, plan(decode, temperature=temperature))
        assert (chosen.prefill_rows, chosen.prefill_tokens) == (0, 0), "a step without prompts runs no prompt's kernels"
        assert chosen.level == (Level.DRAW if temperature > 0 else Level.MOST_LIKELY)
        padding = chosen.decode_rows - decode
        assert padding <= max(7, chosen.decode_rows / 3)
    for decode, tokens in itertools.product((0, 1, seqs), (1, 127, 129, 700, 1025, 2048)):
        chosen = choose_bucket(buckets, plan(decode, [tokens]))
        assert (chosen.decode_rows == 0) == (decode == 0), "a step of prompts alone runs no decode kernels"
        assert tokens <= chosen.prefill_tokens < max(2 * tokens, 129)


def test_sizes():
    assert decode_sizes(256) == [1, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    assert decode_sizes(100) == [1, 4, 8, 16, 24, 32, 48, 64, 96, 100]
    assert [decode_sizes(n) for n in (1, 2, 4, 5, 8)] == [[1], [1, 2], [1, 4], [1, 4, 5], [1, 4, 8]]
    assert [mixed_sizes(n) for n in (4, 64, 255, 256, 1024)] == [[4], [64], [255], [256, 64], [1024, 256, 64]]
    assert prefill_sizes(2048) == [2048, 1024, 512, 256, 128]
    assert [prefill_sizes(n) for n in (1, 128, 300)] == [[1], [128], [300, 150]]


def test_small_engines_have_few_programs():
    greedy = lambda *sizes: len(programs_of(all_buckets(*sizes), draws=False))
    assert [greedy(2, 4, 48), greedy(8, 4, 512), greedy(64, 4, 2048), greedy(256, 4, 2048)] == [4, 9, 18, 27]
    assert len(set(all_buckets(64, 4, 2048))) == 2 * greedy(64, 4, 2048)


def test_programs_that_change_logits_are_for_requests_that_draw_and_that_do_not():
    buckets = all_buckets(8, 4, 512)
    levels = lambda **options: collections.Counter(bucket.level for bucket in programs_of(buckets, **options))
    assert set(levels()) == {Level.MOST_LIKELY, Level.DRAW}
    higher = {level: count for level, count in levels(full=True).items() if level > Level.DRAW}
    assert higher.keys() == {Level.FULL, Level.CONSTRAINED, Level.PROMPT}
    assert levels(draws=False, full=True) == {Level.MOST_LIKELY: levels()[Level.MOST_LIKELY]} | higher


@pytest.fixture
def few_sizes():
    return dict(block_size=8, kv_page_size=8, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64)


def test_engine_whose_requests_draw_nothing_compiles_half_of_the_programs(few_sizes):
    engine, compiled = Engine(Speller(), EngineConfig(**few_sizes)), []
    engine.warmup(lambda: compiled.append(1), draws=False)
    assert 2 * len(compiled) == engine.num_programs == 8
    before = run_step._cache_size()
    engine.generate([[1, 2, 3], list(range(30))], SamplingParams(max_tokens=4))
    assert run_step._cache_size() == before
    engine.generate([1, 2, 3], SamplingParams(max_tokens=4, temperature=1.0))
    assert run_step._cache_size() > before


@pytest.mark.deep
def test_engine_that_is_warm_at_every_level_compiles_nothing(few_sizes):
    engine = Engine(Speller(), EngineConfig(**few_sizes))
    engine.warmup(full=True)
    before = run_step._cache_size()
    prompts = [[1, 2, 3], list(range(30))]
    for fields in (dict(), dict(temperature=1.0), dict(logit_bias={1: 2.0}), dict(prompt_logprobs=0)):
        for batch in (prompts[:1], prompts):
            engine.generate(batch, SamplingParams(max_tokens=4, **fields))
    assert run_step._cache_size() == before


def test_rows_count_as_well_as_tokens():
    buckets = [Bucket(4, 2, 64), Bucket(4, 8, 64)]
    assert choose_bucket(buckets, plan(1, [3, 3])) == buckets[0]
    assert choose_bucket(buckets, plan(1, [3, 3, 3])) == buckets[1]
