"""What an engine chooses where its configuration leaves a field out."""

import dataclasses

import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.random_model import MODELS
from mamba_align_jax import Engine, EngineConfig
from mamba_align_jax.data import BYTE_MODEL
from mamba_align_jax.engine.device.defaults import complete, scratch_bytes
from mamba_align_jax.engine.device.explanation import Explanation
from mamba_align_jax.engine.device.model_facts import facts_of
from mamba_align_jax.engine.device.sizing import DeviceMemory, align_config, pool_sizes
from mamba_align_jax.models import load_model
from mamba_align_jax.models.qwen3_5 import Model

GB = 10**9
CHOSEN = (
    *("prefix_cache", "block_size", "kv_page_size", "async_stepping", "max_num_seqs", "max_num_batched_tokens"),
    *("max_mixed_tokens", "max_prefill_rows"),
)
OUTLINES = {}


def outline(name):
    """A model with shapes instead of weights, and its sizes."""
    if name not in OUTLINES:
        model = nnx.eval_shape(lambda: Model(MODELS[name], nnx.Rngs(0)))
        OUTLINES[name] = model, facts_of(model)
    return OUTLINES[name]


def plan(name, gb, kind="NVIDIA H200", **fields):
    """The configuration of an engine whose weights are on the device, the sizes of its pools, and why."""
    model, facts = outline(name)
    memory = DeviceMemory(kind, gb * GB, gb * GB - facts.weight_bytes)
    config, reasons = complete(EngineConfig(**fields), model, facts, memory)
    align, scratch = align_config(config, model), scratch_bytes(config, model, facts)
    sizes = pool_sizes(align, config, model, memory, reserved_bytes=scratch)
    return config, sizes, Explanation.of(config, reasons, align, sizes, memory, facts, scratch)


def test_an_h200_gets_the_configuration_of_the_benchmarks_for_the_models_of_the_documents():
    for name in ("qwen3.5-4b", "qwen3.5-35b-a3b"):
        config, _, _ = plan(name, 137)
        assert config.async_stepping
        assert (config.prefix_cache, config.block_size, config.kv_page_size) == ("all", 64, 64)
        assert (config.max_num_batched_tokens, config.max_mixed_tokens) == (8192, 2048)
        assert config.max_num_seqs == (256 if name == "qwen3.5-4b" else 96)


def test_the_pools_of_a_4b_model_have_110_gb_of_an_h200():
    _, sizes, _ = plan("qwen3.5-4b", 137)
    states, pages = sizes.state_blocks * sizes.state_block_bytes, sizes.kv_pages * sizes.kv_page_bytes
    assert states + pages >= 110 * GB
    assert 0.98 < states / pages < 1.02


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_is_given_stays_and_all_else_is_chosen_so_that_it_fits(data):
    model, facts = outline("qwen3.5-4b")
    values = {
        "prefix_cache": st.sampled_from(["none", "align", "all"]),
        "block_size": st.sampled_from([16, 48, 64, 512]),
        "kv_page_size": st.sampled_from([1, 8, 16, 64]),
        "async_stepping": st.booleans(),
        "max_num_seqs": st.integers(1, 300),
        "max_num_batched_tokens": st.integers(1, 20000),
        "max_mixed_tokens": st.integers(1, 20000),
        "max_prefill_rows": st.integers(1, 9),
        "num_speculative_tokens": st.integers(0, 7),
        "policy": st.sampled_from(["copy_free", "pre_copy", "deferred"]),
        "checkpoint_interval": st.sampled_from([64, 192, 512, 4096]),
        "num_state_blocks": st.integers(2000, 4000),
        "num_kv_pages": st.integers(2, 20000),
    }
    given_fields = {name: data.draw(values[name]) for name in data.draw(st.sets(st.sampled_from(sorted(values))))}
    try:
        config = EngineConfig(**given_fields)
    except ValueError:
        return
    limit = data.draw(st.integers(0, 200)) * GB
    kind = data.draw(st.sampled_from(["NVIDIA H200", "NVIDIA A100-SXM4-40GB", "NVIDIA L4"]))
    for memory in (DeviceMemory(kind, limit, limit), DeviceMemory("cpu")):
        try:
            chosen, reasons = complete(config, model, facts, memory)
        except ValueError:
            # Some given sizes leave no block that all of them divide.
            assert len(given_fields) > 1
            continue
        assert {name: getattr(chosen, name) for name in given_fields} == {
            name: getattr(config, name) for name in given_fields
        }
        assert all(getattr(chosen, name) is not None for name in CHOSEN)
        assert reasons.keys() == {name for name in CHOSEN if getattr(config, name) is None}
        assert chosen.max_mixed_tokens <= chosen.max_num_batched_tokens
        assert chosen == complete(chosen, model, facts, memory)[0]
        align_config(chosen, model)


def test_pools_leave_what_steps_and_weights_need():
    model, facts = outline("qwen3.5-35b-a3b")
    config, sizes, _ = plan("qwen3.5-35b-a3b", 137)
    used = sizes.state_blocks * sizes.state_block_bytes + sizes.kv_pages * sizes.kv_page_bytes
    left = 137 * GB - facts.weight_bytes - scratch_bytes(config, model, facts)
    assert 0.945 * left < used <= 0.95 * left


def test_a_given_pool_leaves_the_rest_to_the_other():
    _, sizes, _ = plan("qwen3.5-4b", 137, num_kv_pages=1000)
    assert sizes.kv_pages == 1000
    assert sizes.state_blocks * sizes.state_block_bytes > 110 * GB
    _, sizes, _ = plan("qwen3.5-4b", 137, num_state_blocks=1000)
    assert sizes.state_blocks == 1000
    assert sizes.kv_pages * sizes.kv_page_bytes > 65 * GB


def test_hits_lose_few_tokens_of_the_shared_prefix():
    config, _, _ = plan("qwen3.5-35b-a3b", 137)
    for shared, least in ((200, 0.85), (700, 0.9), (3000, 0.97), (20000, 0.99)):
        assert shared // config.block_size * config.block_size >= least * shared


def test_a_smaller_gpu_runs_fewer_requests_with_longer_blocks():
    small, large = plan("qwen3.5-4b", 37, "NVIDIA A100-SXM4-40GB")[0], plan("qwen3.5-4b", 137)[0]
    assert small.max_num_seqs < large.max_num_seqs
    assert small.block_size > large.block_size
    assert small.max_mixed_tokens < large.max_mixed_tokens


def test_prompts_that_take_as_long_as_given_are_as_long_beside_decoding_requests():
    assert plan("qwen3.5-4b", 137, max_num_batched_tokens=8192)[0].max_mixed_tokens == 8192


def test_an_engine_shows_what_it_has_chosen():
    model = load_model(BYTE_MODEL)
    engine = Engine(model, EngineConfig(max_num_seqs=3, max_model_len=128))
    assert dataclasses.asdict(engine.config).items() >= dict(max_num_seqs=3, block_size=64, kv_page_size=16).items()
    text = str(engine.explain())
    assert "block_size" in text
    assert "max_num_seqs" not in text
    assert "of 411,648 bytes" in text
    described = engine.explain().as_dict()
    assert described["chosen"]["max_num_batched_tokens"] == dict(value=512, why="the device is a CPU")
    assert described["cached_states"] == engine.sizes.state_blocks - 1


def test_a_drafter_on_the_host_is_stepped_synchronously():
    model, facts = outline("qwen3.5-4b")
    memory = DeviceMemory("NVIDIA H200", 137 * GB, 128 * GB)
    config, reasons = complete(EngineConfig(), model, facts, memory, drafts_on_host=True)
    assert not config.async_stepping
    assert reasons["async_stepping"] == "the drafter runs on the host"


@pytest.mark.parametrize("name", CHOSEN)
def test_fields_may_be_left_out_by_none(name):
    assert getattr(EngineConfig(**{name: None}), name) is None
