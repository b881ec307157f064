"""Old names keep working for one release, and each use of one warns where it is used."""

import dataclasses
import importlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mamba_align_jax as ma
from mamba_align_jax import _deprecated
from mamba_align_jax.align.policy import Migration, ReadPlaces
from mamba_align_jax.layers.attention import Attention
from mamba_align_jax.layers.gated_delta_net import GatedDeltaNet
from mamba_align_jax.layers.mamba1 import Mamba1Mixer
from mamba_align_jax.metadata.step_inputs import step_inputs

# One name or more of every module that has moved.
MOVED = {
    "mamba_align_jax.spec": ["AlignConfig", "ConvState", "GroupSpec", "RecurrentState"],
    "mamba_align_jax.pool": ["StatePool"],
    "mamba_align_jax.align.host": ["preprocess_mamba", "postprocess_mamba", "prefill_checkpoints", "NULL_BLOCK"],
    "mamba_align_jax.align.staging": ["AcceptedTokens", "postprocess_mamba_align_gpu"],
    "mamba_align_jax.metadata.kinds": ["RowKind", "row_kinds", "sort_rows"],
    "mamba_align_jax.metadata.tokens": ["TokenSplit", "split_tokens"],
    "mamba_align_jax.metadata.block_idx": ["BlockIdx", "block_idx", "interior_checkpoints"],
    "mamba_align_jax.metadata.attention": ["StepInputs", "step_inputs", "single_token_inputs"],
    "mamba_align_jax.models.checkpoint": ["read_config", "read_weights", "save_checkpoint"],
    "mamba_align_jax.engine.demo": ["MODES", "run_mode", "make_engine"],
    "mamba_align_jax.engine.device_drafting": ["DeviceDrafter", "NGramLookup", "SampledStep"],
    "mamba_align_jax.engine.mtp_drafting": ["MTPDrafter", "draft_with_head"],
    "mamba_align_jax.engine.block_size": ["BlockSizeWatch"],
}
SPEC = ma.AlignConfig(
    (ma.GroupSpec("gdn", 1, (ma.RecurrentState((1, 4, 4)),)),), 4, 1, max_num_seqs=2, max_model_len=16
)


def fresh_import(name):
    sys.modules.pop(name, None)
    return importlib.import_module(name)


def test_the_table_names_every_module_that_has_moved():
    assert MOVED.keys() == _deprecated.MODULES.keys()


@pytest.mark.parametrize("name", MOVED)
def test_an_old_module_forwards_its_names_and_warns(name):
    with pytest.warns(DeprecationWarning, match=f"module {name} is now mamba_align_jax"):
        module = fresh_import(name)
    for attribute in MOVED[name]:
        assert getattr(module, attribute) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        module.nothing  # noqa: B018


def test_an_old_module_gives_the_very_objects_of_the_new_one():
    with pytest.warns(DeprecationWarning, match="next release"):
        assert fresh_import("mamba_align_jax.spec").AlignConfig is ma.AlignConfig


def test_the_warning_names_the_line_that_imports():
    program = "import warnings; warnings.simplefilter('error')\nimport mamba_align_jax.spec\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert 'File "<string>", line 2' in done.stderr
    assert "mamba_align_jax.spec is now mamba_align_jax.align.config" in done.stderr


def test_old_host_modules_import_without_jax():
    program = (
        "import sys, warnings; warnings.simplefilter('ignore'); sys.modules['jax'] = None\n"
        "from mamba_align_jax.spec import AlignConfig\nfrom mamba_align_jax.align import host\n"
        "assert host.preprocess_mamba and host.prefill_checkpoints and 'jaxlib' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_old_fields_of_the_configuration():
    with pytest.warns(DeprecationWarning, match="AlignConfig: keyword 'max_num_reqs' is now 'max_num_seqs'"):
        spec = ma.AlignConfig(SPEC.groups, 4, max_num_reqs=3)
    assert spec.max_num_seqs == 3
    with pytest.warns(DeprecationWarning, match=r"AlignConfig\.max_num_reqs is now AlignConfig\.max_num_seqs"):
        assert spec.max_num_reqs == 3
    with pytest.warns(DeprecationWarning, match="next release"):
        assert dataclasses.replace(spec, max_num_reqs=5).max_num_seqs == 5


def test_old_fields_of_pytrees():
    with pytest.warns(DeprecationWarning, match="keyword 'state_idx' is now 'running_column'"):
        state = ma.AlignState(num_computed_tokens=1, num_accepted_tokens=2, state_idx=3)
    with pytest.warns(DeprecationWarning, match="next release"):
        assert state.state_idx == state.running_column == 3
    doubled = jax.tree.map(lambda x: 2 * x, state)
    assert doubled.running_column == 6
    with pytest.warns(DeprecationWarning, match="keyword 'conv_row' is now 'window_row'"):
        plan = ma.CopyPlan(recurrent_source=0, conv_source=0, conv_row=1, destination=2)
    assert plan.window_row == 1
    with pytest.warns(DeprecationWarning, match="next release"):
        additions = ma.Additions(slot=0, num_computed_tokens=0, state_idx=7)
    assert additions.running_column == 7


@pytest.mark.parametrize(
    "make",
    [
        lambda **row: ReadPlaces(1, 2, migration=None, **row),
        lambda **row: Migration(1, 2, destination=3, needed=True, **row),
    ],
)
def test_old_fields_of_tuples(make):
    with pytest.warns(DeprecationWarning, match="'conv_row' is now 'window_row'"):
        places = make(conv_row=5)
    assert places == make(window_row=5)
    with pytest.warns(DeprecationWarning, match="next release"):
        assert places.conv_row == 5


def test_is_prefilling_is_accepted_and_ignored():
    rows = SPEC, 3, [0, 1], [0, 2, 3], [1, -1]
    with pytest.warns(DeprecationWarning, match="'is_prefilling' has no use"):
        batch = ma.StepBatch.from_host(*rows, [False, True])
    for mine, theirs in zip(jax.tree.leaves(batch), jax.tree.leaves(ma.StepBatch.from_host(*rows)), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    with pytest.warns(DeprecationWarning, match="next release"):
        np.testing.assert_array_equal(batch.is_prefilling, [False, True, False])


def test_old_keywords_of_the_block_manager():
    old, new = ma.StateBlockManager(8, 4, 1), ma.StateBlockManager(8, 4, 1)
    with pytest.warns(DeprecationWarning, match=r"StateBlockManager\.allocate: keyword '\w+' is now"):
        entries = old.allocate("r", nc_lo=0, nc_hi=0, q=2, drafts=1)
    assert entries == new.allocate("r", min_computed=0, max_computed=0, num_tokens=2, num_drafts=1)


def test_old_keyword_of_load_model(tmp_path):
    from mamba_align_jax.models import load_model

    with (
        pytest.warns(DeprecationWarning, match="load_model: keyword 'advance' is now 'progress'"),
        pytest.raises(ValueError, match=r"must hold a config\.json"),
    ):
        load_model(tmp_path, advance=print)


def test_old_names_and_values_of_the_engine():
    from mamba_align_jax.engine import buckets, config, drafting, packing
    from mamba_align_jax.engine.drafting.prompt_lookup import PromptLookupDrafter

    with pytest.warns(DeprecationWarning, match="speculation='ngram' is now speculation='prompt_lookup'") as caught:
        assert ma.EngineConfig(speculation="ngram").speculation == "prompt_lookup"
    assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="PREFIX_CACHE_MODES"):
        assert config.MODES == config.PREFIX_CACHE_MODES
    with pytest.warns(DeprecationWarning, match="all_buckets is now mamba_align_jax.engine.buckets.all_buckets"):
        assert packing.all_buckets is buckets.all_buckets
    with pytest.warns(DeprecationWarning, match="PromptLookupDrafter"):
        assert drafting.NGramDrafter is PromptLookupDrafter
    with pytest.warns(DeprecationWarning, match="keyword 'most' is now 'max_drafts'"):
        assert PromptLookupDrafter(2, 1).draft("r", [1, 2, 1], most=2) == [2, 1]


def one_step(implementation=None):
    """A verify row of two tokens, and a prompt of three, over a page each."""
    batch = ma.StepBatch.from_host(SPEC, 2, [0, 1], [0, 2, 5], [1, -1])
    tables = ma.BlockTables(blocks=1 + jnp.arange(10, dtype=jnp.int32).reshape(1, 2, 5))
    _, indices = ma.begin_step(SPEC, ma.AlignState.create(SPEC), batch, tables)
    return step_inputs(
        batch, indices, num_decode_rows=1, page_tables=jnp.array([[1], [2]], jnp.int32), num_tokens=5, page_size=4,
        num_pages=3,
    )  # fmt: skip


def close(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "make",
    [
        lambda: GatedDeltaNet(8, 1, 1, 4, 4, 4, 1e-6, "float32", nnx.Rngs(0)),
        pytest.param(lambda: Mamba1Mixer(8, 8, 4, 2, 4, "float32", nnx.Rngs(0)), marks=pytest.mark.deep),
    ],
)
def test_recurrent_layers_take_the_arguments_that_they_had(make):
    layer, step = make(), one_step()
    x = jax.random.normal(jax.random.key(0), (5, 8))
    pools = [jnp.zeros((1, 12, *state.block_shape(1)), state.dtype) for state in layer.states("float32", "float32")]
    with pytest.warns(DeprecationWarning, match="are now \\(x, LayerStep, \\*pools\\)"):
        old = layer(x, step.rows, step.chunks, *pools, jnp.int32(0), group=0, num_decode_tokens=2)
    close(old, layer(x, step.layer(0), *pools))


def test_attention_takes_the_arguments_that_it_had():
    layer, step = Attention(8, 2, 1, 4, "float32", nnx.Rngs(0)), one_step()
    x, pages = jax.random.normal(jax.random.key(0), (5, 8)), jnp.zeros((1, 3, 4, 1, 4))
    with pytest.warns(DeprecationWarning, match="next release"):
        old = layer(x, step, pages, pages, jnp.int32(0))
    close(old, layer(x, step.layer(0), pages, pages))


def test_old_fields_of_step_inputs():
    step = one_step()
    for old, new in (
        ("split", step.rows),
        ("positions", step.pages.positions),
        ("page_table", step.pages.page_table),
        ("num_decode_tokens", 2),
    ):
        with pytest.warns(DeprecationWarning, match=f"StepInputs.{old} is now StepInputs"):
            assert np.array_equal(getattr(step, old), new) or getattr(step, old) is new
