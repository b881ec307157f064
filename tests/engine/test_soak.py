"""Whole workloads through the engine, of which every token and every block is accounted for: the soak, small, and a matrix
of all that has gone wrong somewhere, drawn at random."""

import dataclasses
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import soak
from failures.speller import VOCAB, Speller, next_tokens
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.align.columns import blocks_per_request
from mamba_align_jax.cache.hashing import HashChain
from mamba_align_jax.cache.state_blocks import StateBlockManager
from mamba_align_jax.data import BYTE_MODEL
from mamba_align_jax.engine.scheduler import Scheduler
from mamba_align_jax.models import load_model

# Few programs: budgets and the room in the pools are drawn without changing what is compiled.
SIZES = dict(max_num_seqs=4, max_num_batched_tokens=48, max_model_len=64, prompt_lookup_min=1)
PAGES, LONGEST_ANSWER = 60, 12
CONFIGS = {
    "copy_free": dict(block_size=8, kv_page_size=4, num_speculative_tokens=3, num_state_blocks=30),
    "pre_copy": dict(block_size=16, kv_page_size=4, num_state_blocks=20, policy="pre_copy"),
    "windows as wide as blocks": dict(
        block_size=8, kv_page_size=8, num_speculative_tokens=7, num_state_blocks=50, policy="pre_copy", checked=True
    ),
}
MODEL = dict(block_size=16, kv_page_size=8, num_speculative_tokens=3, num_state_blocks=30)
SPELLER = Speller(soak.STUTTER)


def configured(**options):
    return EngineConfig(**SIZES, num_kv_pages=PAGES, **options)


def soaked(count, seed=0):
    """A small soak's engine, and what went wrong in it."""
    config = configured(**CONFIGS["copy_free"])
    engine = Engine(SPELLER, config)
    soak.poison(engine)
    books = np.random.default_rng(seed).integers(0, VOCAB, (4, 200)).tolist()
    return engine, soak.soak(engine, soak.Workload(seed, books, config), soak.Exactly(), count)


def test_a_small_soak():
    engine, (wrong, ties, leaked, aborted) = soaked(400)
    assert (wrong, ties, leaked) == ([], 0, 0)
    stats = engine.stats
    assert min(aborted, stats.preemptions, stats.evicted_state_blocks, stats.cached_tokens) > 10
    assert all(0 < accepted < drafts for accepted, drafts in zip(stats.accepted_tokens, stats.draft_tokens, strict=True))


def early(manager, request):
    """Columns go one too soon: the one that the next step reads."""
    record = manager._requests[request]
    gone = [column for column in record.columns if column <= record.committed // manager.block_size - 1 + 1]
    manager.pool.release([record.columns.pop(column) for column in gone[:-1] or gone[:0]])


def shifted(allocate):
    """Entries of a step change places."""

    def wrong(*args, **options):
        entries = allocate(*args, **options)
        return entries and [(c, b) for (c, _), (_, b) in zip(entries, entries[1:] + entries[:1], strict=True)]

    return wrong
