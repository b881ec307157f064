"""With `prefix_cache="all"` a request hits every boundary that an earlier one has passed, wherever its chunks ended."""

import json

import pytest
from fakes.engines import poison
from fakes.speller import Speller, next_token

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.engine.device.sizing import align_config
from pallas_kernels import UnsupportedError

SPELLER = Speller()
SIZES = dict(prefix_cache="all", block_size=8, kv_page_size=4, max_num_seqs=3, max_num_batched_tokens=20)
SIZES |= dict(max_model_len=64, num_kv_pages=60, num_state_blocks=30, num_speculative_tokens=3, checked=True)
pytestmark = pytest.mark.usefixtures("one_program")
FEW = SamplingParams(max_tokens=3, ignore_eos=True)


def make(**changes):
    engine = Engine(SPELLER, EngineConfig(**SIZES | changes))
    poison(engine)
    return engine


def serve(engine, *prompts, params=FEW):
    """Serves the prompts together, and returns how many tokens of each were cached."""
    outputs = engine.generate([list(prompt) for prompt in prompts], params)
    for output in outputs:
        tokens = list(output.prompt_token_ids)
        for token in output.token_ids:
            assert token == next_token(tokens)
            tokens.append(token)
    engine.cache.check()
    assert engine.cache.states.pool.num_held == 0
    assert engine.stats.null_reads == 0
    return [(output.num_cached_tokens, output.cache_miss) for output in outputs]


def book(number, length):
    return [(number + 7 * n) % 61 for n in range(length)]


@pytest.mark.parametrize("changes", [dict(), dict(policy="pre_copy"), dict(async_stepping=True)])
def test_a_prompt_hits_the_last_boundary_that_it_shares_at_once(changes):
    engine = make(**changes)
    first = book(0, 45)
    assert serve(engine, first) == [(0, "not identical")]
    # The boundaries 8, 24 and 32 were inside chunks of 20 tokens.
    siblings = [first[:end] + book(1, 3) for end in (12, 31, 39)]
    assert serve(engine, *siblings) == [(8, None), (24, "not identical"), (32, "not identical")]
    assert engine.cache.cached_prefix(first).boundaries == (8, 16, 24, 32, 40)


def test_boundaries_that_decoding_passed_stay():
    engine = make()
    prompt = book(2, 10)
    (output,) = engine.generate([prompt], SamplingParams(max_tokens=30, ignore_eos=True))
    answer = prompt + list(output.token_ids)
    assert engine.cache.cached_prefix(answer).boundaries == (8, 16, 24, 32)
    assert serve(engine, answer[:17]) == [(16, None)]


def test_chunks_stop_at_no_boundary_inside_and_end_on_one_or_with_the_prompt(tmp_path):
    engine = make()
    with engine.trace(tmp_path / "steps"):
        serve(engine, book(0, 45), book(1, 11))
    steps = [json.loads(line) for line in (tmp_path / "steps").read_text().splitlines()]
    chunks = [[(row["computed"], row["scheduled"]) for row in step["rows"] if row["prefill"]] for step in steps[:3]]
    assert chunks == [[(0, 16)], [(16, 16)], [(32, 13)]]
    assert [row["published"] for step in steps[:2] for row in step["rows"]] == [16, 32]


def test_evicted_states_are_named_and_the_smallest_pool_serves():
    # A request holds 5 blocks at most while it decodes, and a chunk of 20 tokens takes 3 more.
    with pytest.raises(ValueError, match="num_state_blocks must be at least 9 for one request, got 8"):
        make(num_state_blocks=8)
    engine = make(num_state_blocks=9)
    prompts = [book(n, 40) for n in range(4)]
    serve(engine, *prompts)
    assert engine.stats.evicted_state_blocks > 0
    assert serve(engine, prompts[0])[0][1] == "evicted"


@pytest.mark.parametrize("changes", [dict(), dict(policy="deferred", fold_length=8), dict(async_stepping=True)])
def test_chunk_is_shorter_where_running_requests_leave_few_blocks(changes, tmp_path):
    """The answers that run leave at most 4 blocks, and a chunk of 40 tokens needs 5."""
    adds, sizes = "policy" in changes, dict(num_speculative_tokens=0, max_num_seqs=5, max_num_batched_tokens=40)
    num_blocks = 9 if changes else 8
    engine = Engine(Speller(adds=adds), EngineConfig(**SIZES | sizes | dict(num_state_blocks=num_blocks) | changes))
    poison(engine)
    for number in range(num_blocks - 5):
        engine.add_request(book(number, 3), SamplingParams(max_tokens=20, ignore_eos=True))
    outputs = []
    with engine.trace(tmp_path / "steps"):
        for _ in range(8):
            outputs += engine.step()
        number = engine.add_request(book(5, 40), FEW)
        while engine.has_unfinished:
            outputs += engine.step()
    for output in outputs:
        tokens = list(output.prompt_token_ids)
        for token in output.token_ids:
            assert token == next_token(tokens, adds=adds)
            tokens.append(token)
    steps = [json.loads(line) for line in (tmp_path / "steps").read_text().splitlines()]
    rows = [row for step in steps for row in step["rows"] if row["prefill"] and row["request"] == number]
    ends = [row["computed"] + row["scheduled"] for row in rows]
    assert len(outputs) == num_blocks - 4
    assert len(ends) > 1
    assert not any(end % 8 for end in ends)
    assert engine.stats.null_reads == 0
    engine.cache.check()


def test_pools_are_sized_for_chunks():
    engine = make(num_state_blocks=None, num_kv_pages=None)
    # 5 for each of 3 running requests, 3 for the chunks of a step, and 4 x 3 sequences of 8 columns.
    assert engine.sizes.state_blocks == 1 + 3 * 5 + 3 + 12 * 8


def test_models_that_keep_no_boundaries_inside_chunks_are_refused_by_name():
    class Foreign(Speller):
        without_interior = property()

    with pytest.raises(UnsupportedError, match="keep no boundaries inside a chunk, got 'all' and Foreign"):
        align_config(EngineConfig(**SIZES), Foreign())
    assert align_config(EngineConfig(**SIZES | dict(prefix_cache="align")), Foreign()).mode == "align"
