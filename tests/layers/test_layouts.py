"""set_pool_layouts: which models take which layouts."""

import pytest
from flax import nnx

from benchmarks.precision import configuration
from mamba_align_jax.layers.layouts import set_pool_layouts
from mamba_align_jax.models import ARCHITECTURES


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
