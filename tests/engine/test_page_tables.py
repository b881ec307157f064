"""The page tables on the device take the entries that change, and long hits bring theirs ahead of the step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine.programs import shapes
from fakes.speller import Speller, next_token
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.random_model import TINY, random_model
from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.engine.device import packing, page_tables
from mamba_align_jax.engine.device.page_tables import PageUpdates, set_pages, store_pages
from mamba_align_jax.engine.scheduling.buckets import Bucket
from mamba_align_jax.engine.scheduling.levels import Level

SLOTS, PAGES = 5, 7
ENTRY = st.tuples(st.integers(0, SLOTS - 1), st.integers(0, PAGES - 1), st.integers(1, 99))
SIZES = dict(block_size=8, kv_page_size=1, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=1000)


@given(
    st.lists(st.tuples(st.lists(st.integers(0, SLOTS - 1), unique=True), st.lists(ENTRY, unique_by=lambda e: e[:2])))
)
@settings(max_examples=30, deadline=None)
def test_updates_clear_slots_and_then_set_entries(steps):
    wanted, tables = np.zeros((SLOTS, PAGES), np.int32), jnp.zeros((SLOTS, PAGES), jnp.int32)
    for number, (cleared, entries) in enumerate(steps):
        wanted[cleared] = 0
        for slot, column, page in entries:
            wanted[slot, column] = page
        if number % 2:
            tables = store_pages(tables, cleared, entries)
        else:
            tables = set_pages(tables, PageUpdates.from_host(SLOTS, SLOTS, SLOTS * PAGES, cleared, entries))
        np.testing.assert_array_equal(tables, wanted)


def test_more_entries_than_fit_one_call_are_stored(monkeypatch):
    monkeypatch.setattr(page_tables, "_UPDATES_PER_CALL", 4)
    entries = [(slot, number, 10 * slot + number + 1) for slot in range(SLOTS) for number in range(PAGES)]
    tables = store_pages(jnp.full((SLOTS, PAGES), 77, jnp.int32), list(range(SLOTS)), entries)
    np.testing.assert_array_equal(tables, 10 * np.arange(SLOTS)[:, None] + np.arange(PAGES) + 1)


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="cleared and entries must be at most 1 and 2, got 0 and 3"):
        PageUpdates.from_host(SLOTS, 1, 2, [], [(0, 0, 1)] * 3)
    with pytest.raises(ValueError, match="cleared and entries must be at most 1 and 2, got 2 and 0"):
        PageUpdates.from_host(SLOTS, 1, 2, [0, 1], [])


@pytest.mark.parametrize("is_async", [False, True])
def test_a_long_hit_brings_its_pages_ahead_of_the_step(is_async, rng, monkeypatch):
    monkeypatch.setattr(packing, "_PAGES_OF_HITS", 512)
    engine = Engine(Speller(), EngineConfig(async_stepping=is_async, **SIZES))
    prompt = rng.integers(0, 50, 800).tolist()
    early, store = [], engine.runner._store_pages
    engine.runner._store_pages = lambda rows: early.append(rows) or store(rows)
    for number in range(3):
        (output,) = engine.generate([*prompt, number], SamplingParams(max_tokens=5, ignore_eos=True))
        assert output.num_cached_tokens == (800 if number else 0)
        tokens = [*prompt, number]
        for token in output.token_ids:
            assert token == next_token(tokens)
            tokens.append(token)
    assert [[len(row.allocation.pages) for row in rows] for rows in early] == [[801], [801]]
    held = np.asarray(engine.runner.device_state.page_tables)
    assert set(held[held > 0]) <= set(range(1, engine.sizes.kv_pages))


@pytest.mark.parametrize("drafts", [0, 2])
def test_what_the_host_sends_does_not_grow_with_the_longest_sequence(drafts):
    sent, options = [], dict(num_speculative_tokens=drafts, async_stepping=True)
    for max_model_len in (64, 1000):
        engine = Engine(Speller(), EngineConfig(**SIZES | options | {"max_model_len": max_model_len}))
        inputs = engine.runner.packer.pack(Bucket(2, 4, 16), [None] * 6)
        sent.append([leaf.shape for leaf in jax.tree.leaves(inputs)])
    assert sent[0] == sent[1]


@pytest.mark.parametrize("bucket", [Bucket(2, 0, 0, Level.MOST_LIKELY), Bucket(2, 3, 32, Level.MOST_LIKELY)])
def test_what_a_step_computes_does_not_grow_with_the_longest_sequence(bucket):
    """Tables and histories of all slots are updated in place. Nothing else has their width but zeros for entered slots."""
    config = EngineConfig(
        max_num_seqs=5, max_prefill_rows=3, max_model_len=40_000, num_kv_pages=2600, num_state_blocks=20,
        num_speculative_tokens=2, async_stepping=True, block_size=64,
    )  # fmt: skip
    runner = Engine(random_model(TINY), config).runner
    columns = runner.align.num_columns
    found = {shape for shape in shapes(runner.trace(bucket)) if {40_000, 2500, columns} & set(shape)}
    entered = {(3, 2500)} if bucket.prefill_rows else set()
    assert found == {(5, 40_000), (5, 2500), (1, 5, columns)} | entered
