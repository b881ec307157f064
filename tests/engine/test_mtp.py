"""Drafts of the model's own head equal those of a fresh run over the same tokens, and every token is right."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine.programs import decisions
from fakes.draft_head_weights import write_small_with_head

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.align.batch import StepBatch
from mamba_align_jax.align.config import AlignConfig
from mamba_align_jax.align.pool import StatePool
from mamba_align_jax.align.state import AlignState
from mamba_align_jax.align.step import begin_step
from mamba_align_jax.align.tables import BlockTables
from mamba_align_jax.engine.device.program import Graph, run_step
from mamba_align_jax.engine.drafting.mtp import draft_with_head
from mamba_align_jax.engine.reference import Reference
from mamba_align_jax.engine.scheduling.buckets import Bucket
from mamba_align_jax.engine.scheduling.levels import Level
from mamba_align_jax.kv import KVPages
from mamba_align_jax.metadata.step_inputs import step_inputs
from mamba_align_jax.models import load_model

CHECKPOINT = Path(__file__).parents[1] / "data" / "qwen3_5_text"
K, PAGE = 3, 8
SIZES = dict(block_size=8, kv_page_size=PAGE, max_num_seqs=4, max_num_batched_tokens=48, max_model_len=96)
SIZES |= dict(num_speculative_tokens=K, speculation="mtp", num_state_blocks=26, num_kv_pages=24, checked=True)
SIZES |= dict(prefix_cache="align")
pytestmark = pytest.mark.usefixtures("fewest_programs")
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(write_small_with_head(CHECKPOINT, tmp_path_factory.mktemp("small")))


@functools.partial(jax.jit, static_argnames=("graph", "align"))
def _whole(params, tokens, length, *, graph, align):
    model, size = graph.model(params), tokens.shape[0]
    batch = StepBatch(
        idx_mapping=jnp.zeros(1, jnp.int32), query_start_loc=jnp.stack([jnp.int32(0), length - 1]),
        num_drafts=jnp.full(1, -1, jnp.int32),
    )  # fmt: skip
    kv, tables = KVPages.create(model.kv_spec(draft=True), 3, size), jnp.ones((1, 1, align.num_columns), jnp.int32)
    _, indices = begin_step(align, AlignState.create(align), batch, BlockTables(blocks=tables))
    step = step_inputs(
        batch, indices, num_decode_rows=0, page_tables=jnp.array([[1, 2]], jnp.int32), num_tokens=size,
        page_size=size, num_pages=3,
    )  # fmt: skip
    hidden, _, kv = model(tokens, step, StatePool.create(align, 2), kv)
    drafts, _ = draft_with_head(model, hidden, jnp.roll(tokens, -1), step, kv, (length - 2)[None], jnp.ones(1, bool), K)
    return drafts[0]


@pytest.fixture(scope="module")
def fresh(model):
    """Returns the head's drafts after tokens that run in one piece."""
    graph, params = Graph.split(model)
    align = AlignConfig(groups=model.state_groups(), block_size=96, max_num_seqs=1, max_model_len=96, mode="none")

    def fresh(tokens):
        padded = np.zeros(96, np.int32)
        padded[: len(tokens)] = tokens
        return _whole(params, padded, jnp.int32(len(tokens)), graph=graph, align=align).tolist()

    return fresh


@pytest.fixture(scope="module")
def reference(model):
    return Reference(model)


@pytest.fixture(scope="module", params=[pytest.param(False, marks=pytest.mark.deep), True], ids=["sync", "async"])
def make(request, model):
    return lambda: Engine(model, EngineConfig(async_stepping=request.param, **SIZES))


def run(engine, requests, fresh):
    """Returns the outputs in order. After every third step it compares each slot's drafts with those of a fresh run."""
    ids, outputs, compared = [engine.add_request(*request) for request in requests], {}, 0
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step()}
        state = engine.runner.device_state
        for request in engine.scheduler.running if engine.stats.steps % 3 == 0 else ():
            slot, held = request.slot, engine.cache.kv._requests[request.id].pages
            row = np.asarray(state.page_tables[slot])
            assert row.tolist() == held + [0] * (len(row) - len(held)), "a guess would be written to another's page"
            if request.is_prefilling or not state.pending.num_drafts[slot]:
                continue
            length = int(state.state.num_computed_tokens[slot]) + 1
            # A guess at a place without a page may meet another's in the NULL page.
            pages = row[np.minimum(length - 1 + np.arange(K), 95) // PAGE]
            sure = 1 + int(np.cumprod(pages[:-1] > 0).sum())
            wanted = fresh(np.asarray(state.pending.history)[slot, :length])[:sure]
            assert np.asarray(state.pending.tokens)[slot, 1 : 1 + sure].tolist() == wanted
            compared += sure
    return [outputs[i] for i in ids], compared


def assert_right(reference, outputs):
    verdicts = [reference.judge(output.prompt_token_ids, output.token_ids) for output in outputs]
    assert all(verdict.right for verdict in verdicts), verdicts
    assert sum(verdict.ties for verdict in verdicts) <= 1


def test_drafts_equal_those_of_a_fresh_run_and_every_token_is_right(rng, make, fresh, reference):
    """The requests have chunked prompts next to decode rows, preemptions, and a prefix hit."""
    batch = [rng.integers(1, 256, length).tolist() for length in (30, 25, 56, 28, 9, 17)]
    engine = make()
    engine.warmup()
    programs = run_step._cache_size()
    outputs, compared = run(engine, [(prompt, GREEDY) for prompt in batch], fresh)
    assert compared > 60
    assert_right(reference, outputs)
    stats = engine.stats
    assert stats.preemptions > 0
    assert stats.null_reads == 0
    assert all(0 < a < d for a, d in zip(stats.accepted_tokens, stats.draft_tokens, strict=True)), stats
    assert stats.accepted_tokens[0] > 0.5 * stats.draft_tokens[0]
    (again,) = engine.generate(
        [[*outputs[-1].prompt_token_ids, *outputs[-1].token_ids, 3]], dataclasses.replace(GREEDY, max_tokens=9)
    )
    assert again.num_cached_tokens == 56
    assert_right(reference, [again])
    assert run_step._cache_size() == programs
    # A GPU's host would wait for a decision, and not be a step ahead.
    for bucket in (Bucket(4, 4, 48, Level.MOST_LIKELY), Bucket(4, 0, 0, Level.MOST_LIKELY)):
        assert decisions(engine.runner.trace(bucket)) == 0
    engine.cache.check()
    assert engine.cache.states.pool.num_held == engine.cache.kv.pool.num_held == 0


def test_requests_choose_their_number_of_drafts_and_sampling(rng, make, fresh, reference):
    prompt = rng.integers(1, 256, 12).tolist()
    sampled = SamplingParams(max_tokens=30, temperature=0.5, top_k=20, seed=11, ignore_eos=True)
    own = [dataclasses.replace(params, num_speculative_tokens=n) for params in (GREEDY, sampled) for n in (0, 2)]
    outputs, _ = run(make(), [(prompt, params) for params in own], fresh)
    assert_right(reference, outputs[:2])
    assert outputs[2].token_ids == outputs[3].token_ids
    assert [output.num_draft_tokens for output in (outputs[0], outputs[2])] == [0, 0]
    assert 0 < outputs[1].num_accepted_tokens < outputs[1].num_draft_tokens
    assert outputs[3].num_accepted_tokens > 0


def test_shared_prefix_with_another_continuation_is_right(rng, make, reference):
    """The head's last key of a shared prefix depends on the token after it. Drafts may be wrong there, tokens not."""
    engine, prompt = make(), rng.integers(1, 256, 40).tolist()
    for n in range(3):
        (output,) = engine.generate([[*prompt, n + 1, n + 2]], GREEDY)
        assert_right(reference, [output])
    assert output.num_cached_tokens == 40


def test_an_aborted_prompt_is_resumed_from_its_last_boundary(rng, make, reference):
    engine, prompt, few = make(), rng.integers(1, 256, 80).tolist(), dataclasses.replace(GREEDY, max_tokens=9)
    number = engine.add_request(prompt, few)
    engine.step()
    engine.abort(number)
    while engine.has_unfinished:
        engine.step()
    (output,) = engine.generate([prompt], few)
    assert output.num_cached_tokens == 48
    assert_right(reference, [output])


@pytest.mark.gpu
def test_drafts_of_the_head_are_right_with_compiled_kernels(rng, make, fresh, reference):
    with jax.default_matmul_precision("highest"):
        test_drafts_equal_those_of_a_fresh_run_and_every_token_is_right(rng, make, fresh, reference)
        test_requests_choose_their_number_of_drafts_and_sampling(rng, make, fresh, reference)
        test_shared_prefix_with_another_continuation_is_right(rng, make, reference)


def test_wrong_use_of_the_head_raises(model):
    other = load_model(CHECKPOINT)
    with pytest.raises(ValueError, match="speculation='mtp' needs a model with an MTP head"):
        Engine(other, EngineConfig(**SIZES))
    assert Engine(other, EngineConfig(**SIZES | {"num_speculative_tokens": 0})).sizes.kv_page_bytes == 4096
    assert Engine(model, EngineConfig(**SIZES)).sizes.kv_page_bytes == 8192
    with pytest.raises(
        ValueError, match=r"drafter must be None or a DeviceDrafter under async_stepping or speculation='mtp'"
    ):
        Engine(model, EngineConfig(**SIZES), drafter=object())
    with pytest.raises(ValueError, match=r"speculation must be one of \('prompt_lookup', 'mtp'\), got 'eagle'"):
        EngineConfig(speculation="eagle")
