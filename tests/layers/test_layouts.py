"""Which models take which layouts of their pools, and that an engine's layouts leave its model as it is."""

from typing import get_args

import jax
import pytest
from fakes.driver import DATA
from flax import nnx

from benchmarks.precision import configuration
from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.engine import config
from mamba_align_jax.layers.layouts import set_pool_layouts, with_pool_layouts
from mamba_align_jax.models import ARCHITECTURES, load_model
from pallas_kernels import StateLayout, WindowLayout

pytestmark = pytest.mark.usefixtures("for_a_cpu_alone")

SIZES = dict(block_size=16, kv_page_size=8, max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64)
SIZES |= dict(num_state_blocks=12, num_kv_pages=24, checked=True)


def outline(name):
    """A model without weights."""
    return nnx.eval_shape(lambda: ARCHITECTURES[name].Model(configuration(name), nnx.Rngs(0)))


def layouts(model):
    return {state.layout for group in model.state_groups() for state in group.states}


def test_a_model_has_the_layouts_that_were_set_last():
    model = outline("qwen3_5_text")
    assert layouts(model) == {"SD", "VK"}
    set_pool_layouts(model, windows="DS", states="KV")
    assert layouts(model) == {"DS", "KV"}
    set_pool_layouts(model, states="KV")
    assert layouts(model) == {"SD", "KV"}
    # Other models keep theirs.
    assert layouts(outline("qwen3_5_text")) == {"SD", "VK"}


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (dict(windows="DS", states="KV"), "states must be 'VK' for a model without delta rules, got 'KV'"),
        (dict(windows="ds"), r"windows must be one of \('SD', 'DS'\), got 'ds'"),
        (dict(windows="DS", states=None), r"states must be one of \('VK', 'KV'\), got None"),
    ],
)
def test_an_impossible_layout_changes_nothing(wanted, message):
    model = outline("mamba2")
    with pytest.raises(ValueError, match=f"set_pool_layouts: {message}"):
        set_pool_layouts(model, **wanted)
    assert layouts(model) == {"SD", "VK"}


def test_a_model_with_other_layouts_shares_its_parameters():
    model = load_model(DATA / "qwen3_5_text")
    other = with_pool_layouts(model, "DS", "KV")
    assert (layouts(model), layouts(other)) == ({"SD", "VK"}, {"DS", "KV"})
    mine, theirs = jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(other))
    assert all(a is b for a, b in zip(mine, theirs, strict=True))
    # A layout that is not named stays, and a model that has its layouts already is not copied.
    assert layouts(with_pool_layouts(other, state_layout="VK")) == {"DS", "VK"}
    assert with_pool_layouts(other, "DS") is other
    assert with_pool_layouts(model) is model


@pytest.mark.parametrize(
    ("name", "wanted", "message"),
    [
        ("mamba2", dict(state_layout="KV"), "state_layout must be None or 'VK' for a model without delta rules"),
        ("mamba2", dict(window_layout="DS", state_layout="KV"), "state_layout must be None or 'VK' for a model"),
        ("qwen3_5_text", dict(window_layout="sd"), r"window_layout must be None or one of \('SD', 'DS'\), got 'sd'"),
    ],
)
def test_a_layout_that_a_model_cannot_have_is_refused(name, wanted, message):
    model = outline(name)
    with pytest.raises(ValueError, match=f"^{message}"):
        with_pool_layouts(model, **wanted)
    assert layouts(model) == {"SD", "VK"}


def test_an_engine_refuses_a_layout_before_it_makes_pools():
    model = load_model(DATA / "mamba2")
    with pytest.raises(
        ValueError, match=r"^state_layout must be None or 'VK' for a model without delta rules, got 'KV'$"
    ):
        Engine(model, EngineConfig(**SIZES, window_layout="DS", state_layout="KV"))
    assert layouts(model) == {"SD", "VK"}


def test_configurations_have_the_layouts_of_the_ops():
    assert get_args(WindowLayout) == config.WINDOW_LAYOUTS
    assert get_args(StateLayout) == config.STATE_LAYOUTS


@pytest.mark.usefixtures("one_program")
def test_engines_of_one_model_may_have_different_layouts():
    """Their steps alternate. One model has been changed by `set_pool_layouts`, which an engine's own fields override."""
    model, prompt = load_model(DATA / "qwen3_5_text"), list(range(1, 40))
    wanted = {"SD", "VK"}, {"DS", "KV"}, {"DS", "VK"}
    engines = [Engine(model, EngineConfig(**SIZES))]
    engines.append(Engine(model, EngineConfig(**SIZES, window_layout="DS", state_layout="KV")))
    set_pool_layouts(model, windows="DS", states="KV")
    engines.append(Engine(model, EngineConfig(**SIZES, state_layout="VK")))
    for engine, found in zip(engines, wanted, strict=True):
        assert {state.layout for group in engine.align.groups for state in group.states} == found
        for tokens in (prompt, prompt[:20]):
            engine.add_request(tokens, SamplingParams(max_tokens=8, ignore_eos=True))
    outputs = [{} for _ in engines]
    while engines[0].has_unfinished:
        for engine, found in zip(engines, outputs, strict=True):
            found |= {output.request_id: output.token_ids for output in engine.step()}
    assert len(outputs[0]) == 2
    assert outputs[0] == outputs[1] == outputs[2]
