"""Sizes that no machine has are refused before memory is asked for."""

import pytest
from fakes.spelling_engine import SPELLER

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.engine.device.sizing import memory_bytes
from mamba_align_jax.engine.drafting.prompt_lookup import PromptLookupDrafter

SIZES = dict(block_size=8, kv_page_size=4, max_num_seqs=3, max_num_batched_tokens=20, max_model_len=64)
SIZES |= dict(num_state_blocks=12, num_kv_pages=18)
LARGEST = 2**31 - 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_state_blocks", LARGEST),
        ("num_kv_pages", LARGEST),
        ("max_num_seqs", 10**9),
        ("max_num_batched_tokens", LARGEST),
        ("max_prefill_rows", LARGEST),
    ],
)
def test_sizes_beyond_all_memory_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"must fit in {memory_bytes()} bytes of memory, got .*{name} = {value} of"):
        Engine(SPELLER, EngineConfig(**SIZES | {name: value}))


def test_pools_that_are_sized_for_too_many_requests_are_refused():
    sizes = SIZES | dict(max_num_seqs=10**9, num_state_blocks=None, num_kv_pages=None)
    with pytest.raises(ValueError, match=r"must fit in .* max_num_seqs = 1000000000 of"):
        Engine(SPELLER, EngineConfig(**sizes))


def test_blocks_longer_than_all_memory_are_refused():
    with pytest.raises(ValueError, match=r"num_kv_pages = 18 of 4294967296 bytes each"):
        Engine(SPELLER, EngineConfig(**SIZES | dict(block_size=2**30, kv_page_size=2**30)))


@pytest.mark.parametrize("name", ["num_state_blocks", "num_kv_pages", "max_model_len", "max_num_seqs", "max_waiting"])
def test_sizes_beyond_the_range_of_the_device_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be .*at most 2147483647, got 1099511627776"):
        EngineConfig(**SIZES | {name: 2**40})


def test_large_sizes_that_cost_nothing_are_taken():
    engine = Engine(SPELLER, EngineConfig(**SIZES, max_waiting=LARGEST, checkpoint_interval=2**30))
    assert len(engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3))) == 1


def test_n_grams_are_bounded():
    with pytest.raises(ValueError, match="prompt_lookup_max must be at most 256, got 2147483647"):
        EngineConfig(prompt_lookup_max=LARGEST)
    with pytest.raises(ValueError, match="longest must be at most 256, got 257"):
        PromptLookupDrafter(257, 1)
