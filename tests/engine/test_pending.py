"""The histories that drafters on the device read hold each slot's tokens, wherever they came from."""

import jax.numpy as jnp
import numpy as np
import pytest
from fakes.speller import Speller

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.align.batch import StepBatch
from mamba_align_jax.engine.device import pending as module
from mamba_align_jax.engine.device.pending import Pending, record_prompts, store_tokens
from mamba_align_jax.engine.drafting.protocols import UNKNOWN
from pallas_kernels.rows import token_rows

SLOTS, LENGTH = 4, 20


def make():
    return Pending(
        tokens=jnp.zeros((SLOTS, 3), jnp.int32),
        num_drafts=jnp.zeros(SLOTS, jnp.int32),
        history=jnp.full((SLOTS, LENGTH), 77, jnp.int32),
    )


@pytest.mark.parametrize("count", [0, 1, 4, 9, LENGTH])
def test_tokens_of_a_hit_are_stored_in_calls_of_one_size(count, monkeypatch):
    monkeypatch.setattr(module, "_TOKENS_PER_CALL", 4)
    wanted = np.full((SLOTS, LENGTH), 77)
    wanted[2, :count] = np.arange(count)
    np.testing.assert_array_equal(store_tokens(make(), 2, list(range(count))).history, wanted)


def test_tokens_of_prefill_rows_and_the_tokens_after_them_are_recorded():
    """Decode rows, padding rows and padding tokens change nothing; a row at the end of what is known has no next token."""
    ints = lambda *values: jnp.array(values, jnp.int32)
    # Two decode rows of 1 and 2 tokens, a padding row, and prefill rows of 3, 4 and no tokens.
    batch = StepBatch(
        idx_mapping=ints(1, 0, -1, 3, 2, -1),
        query_start_loc=ints(0, 1, 3, 3, 6, 10, 10),
        num_drafts=ints(0, 1, *[-1] * 4),
    )
    rows, start = token_rows(batch.query_start_loc, 14), ints(5, 6, 0, 8, LENGTH - 4, 0)
    positions = jnp.where(rows.valid, start[rows.row] + rows.offset, 0)
    got = record_prompts(
        make(), batch, rows, positions, jnp.arange(100, 114, dtype=jnp.int32), ints(55, UNKNOWN, UNKNOWN)
    )
    wanted = np.full((SLOTS, LENGTH), 77)
    wanted[3, 8:12], wanted[2, LENGTH - 4 :] = [103, 104, 105, 55], [106, 107, 108, 109]
    np.testing.assert_array_equal(got.history, wanted)


def test_histories_hold_the_tokens_of_running_requests(rng, monkeypatch):
    """Also the tokens of a hit, and the token after a chunk, which no step has run."""
    monkeypatch.setattr(module, "_TOKENS_PER_CALL", 16)
    config = EngineConfig(
        block_size=8, kv_page_size=4, max_num_seqs=3, max_num_batched_tokens=16, max_model_len=160, num_kv_pages=90,
        num_state_blocks=60, num_speculative_tokens=2, async_stepping=True,
    )  # fmt: skip
    engine, shared, hits, chunks = Engine(Speller(), config), rng.integers(0, 50, 70).tolist(), 0, 0
    for cut in (70, 70, 41, 9, 0, 70):
        prompt = [*shared[:cut], *rng.integers(0, 50, 30).tolist()]
        engine.add_request(prompt, SamplingParams(max_tokens=20, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()
        history = np.asarray(engine.runner.device_state.pending.history)
        for request in engine.scheduler.running:
            known = request.min_computed + 1 if request.is_prefilling else request.num_computed
            assert history[request.slot, :known].tolist() == request.tokens[:known]
            hits, chunks = hits + (request.num_cached > 16), chunks + request.is_prefilling
    assert hits > 5
    assert chunks > 5
