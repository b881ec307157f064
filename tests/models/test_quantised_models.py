"""A model with quantised weights computes what it computes with the arrays that they mean."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fakes import delta_net_weights, weights
from fakes.draft_head_weights import write_with_head
from fakes.driver import ATOL, DATA, Driver
from flax import nnx
from models.quantised_files import PUBLISHED, compressed, quantise, write

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.engine.device.model_facts import facts_of
from mamba_align_jax.models import load_model, outline_model, qwen3_5, read_product
from mamba_align_jax.models.quantised import read_quantisation
from mamba_align_jax.models.weights import save_weights
from pallas_kernels import QuantizedWeight, quantize

pytestmark = pytest.mark.usefixtures("for_a_cpu_alone")

FAMILIES = (
    *("bamba", "falcon_h1", "kimi_linear", "lfm2", "lfm2_moe", "mamba", "mamba2", "nemotron_h", "olmo_hybrid"),
    *("qwen3_5_text", "qwen3_next", "zamba2"),
)


def quantised_names(model):
    """The parameters that are quantised, by their places."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, place)) for place, param in flat if isinstance(param.get_value(), QuantizedWeight)}


def expanded(model):
    """The same model with arrays."""
    graph, state = nnx.split(model)

    def array(param):
        value = param.get_value()
        return param.replace(value.dequantize()) if isinstance(value, QuantizedWeight) else param

    return nnx.merge(graph, jax.tree.map(array, state, is_leaf=lambda x: isinstance(x, nnx.Variable)))


def logits(model):
    """The logits of prompts, of decode rows and of a verify row."""
    driver = Driver(model, one_program=True)
    tokens = np.arange(40, dtype=np.int32) * 7 % model.config.vocab_size
    first = driver.step(prefill={0: tokens[:37], 1: tokens[:5]})
    second = driver.step(decode={0: tokens[37:38], 1: tokens[5:8]})
    return [np.asarray(each) for step in (first, second) for each in step.values()]


def assert_same(model, wanted):
    assert quantised_names(model)
    assert not quantised_names(wanted)
    for ours, theirs in zip(logits(model), logits(wanted), strict=True):
        # Every product has the same bits (kernels/test_quantized_products.py). XLA fuses what lies between them otherwise.
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=ATOL)


@pytest.mark.deep
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_quantised_weights_are_those_of_the_arrays(family):
    model = load_model(DATA / family, weights_dtype="fp8")
    assert_same(model, expanded(model))


def test_experts_beside_a_shared_one_give_the_logits_of_the_arrays(tmp_path):
    """Their sizes differ, and the files hold blocks of 128 x 128, so that a cut of the shared one is inside a block."""
    config, tensors = weights.write(tmp_path, delta_net_weights.qwen3_5_moe, fused=False)
    write(tmp_path, quantise(tensors, "block", "_scale_inv", (128, 128))[0], config, PUBLISHED)
    model = load_model(tmp_path, weights_dtype="file", activation_dtype="bfloat16")
    assert_same(model, load_model(tmp_path))
    assert {name.rpartition(".mlp.")[2] for name in quantised_names(model) if ".mlp." in name} == {
        "experts.up",
        "experts.down",
    }


def test_draft_head_gives_the_drafts_of_the_arrays(tmp_path):
    write_with_head(DATA / "qwen3_5_text", tmp_path)
    model = load_model(tmp_path, weights_dtype="fp8")
    names = quantised_names(model)
    assert {"mtp.layers.0.self_attn.qkv_proj.weight", "mtp.layers.0.mlp.down_proj.weight"} <= names
    assert not {"mtp.fc.weight", "lm_head.weight", "embed_tokens.embedding"} & names
    head, plain = model.mtp, expanded(model).mtp
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, model.config.hidden_size)), jnp.float32)
    mlp, wanted = (each.layers[0].mlp(each.join(x, 2 * x)) for each in (head, plain))
    np.testing.assert_array_equal(mlp, wanted)


@pytest.mark.deep
@pytest.mark.parametrize("activation_dtype", ["bfloat16", "fp8"])
def test_engine_generates_from_quantised_weights(tmp_path, activation_dtype):
    """With drafts of its own head. Without rounded inputs, the tokens are those of the arrays."""
    write_with_head(DATA / "qwen3_5_text", tmp_path)
    dtypes = dict(weights_dtype="fp8", activation_dtype=activation_dtype)
    config = EngineConfig(max_num_seqs=2, max_prefill_rows=2, num_speculative_tokens=1, speculation="mtp")
    prompts, params = [[1, 2, 3], [5] * 40], SamplingParams(max_tokens=6, ignore_eos=True)
    found = Engine.from_pretrained(tmp_path, config, **dtypes).generate(prompts, params)
    assert [len(output.token_ids) for output in found] == [6, 6]
    if activation_dtype == "bfloat16":
        wanted = Engine(expanded(load_model(tmp_path, **dtypes)), config).generate(prompts, params)
        assert [output.token_ids for output in found] == [output.token_ids for output in wanted]


def test_delta_nets_keep_their_gates_beside_quantised_parts():
    """In one weight: queries, keys, values and gates of the outputs are FP8, and betas and decays are not."""
    weight = load_model(DATA / "qwen3_5_text", weights_dtype="fp8").layers[0].linear_attn.in_proj_qkvzba.weight[...]
    assert [part.scales is not None for part in weight.parts] == [True, True, False, False]
    assert [part.block for part in weight.parts] == [(128, 128), (128, 128), None, None]


@pytest.mark.parametrize("weights_dtype", ["file", "fp8", "bfloat16"])
def test_outline_has_the_shapes_of_the_loaded_weights(tmp_path, weights_dtype):
    config, tensors = weights.write(tmp_path, delta_net_weights.qwen3_5_moe, fused=False)
    some = {name: part for name, part in tensors.items() if "layers.0." in name}
    write(tmp_path, tensors | quantise(some, "block", "_scale_inv", (128, 128))[0], config, PUBLISHED)
    loaded, outline = (
        load_model(tmp_path, weights_dtype=weights_dtype),
        outline_model(tmp_path, weights_dtype=weights_dtype),
    )
    assert bool(quantised_names(loaded)) == (weights_dtype != "bfloat16")
    assert jax.tree.structure(nnx.state(loaded)) == jax.tree.structure(nnx.state(outline))
    for ours, theirs in zip(*(jax.tree.leaves(nnx.state(model)) for model in (loaded, outline)), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    assert facts_of(outline).weight_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(loaded)))


def test_experts_that_are_quantised_in_different_ways_become_arrays(tmp_path, caplog):
    config, tensors = weights.write(tmp_path, delta_net_weights.qwen3_5_moe, fused=False)
    some = {name: part for name, part in tensors.items() if "shared_expert." not in name}
    plain = {name: part for name, part in tensors.items() if "shared_expert." in name}
    write(
        tmp_path, plain | quantise(some, "block", "_scale_inv")[0], config, PUBLISHED | {"weight_block_size": [16, 24]}
    )
    model = load_model(tmp_path, weights_dtype="file")
    assert not any(".experts." in name for name in quantised_names(model))
    assert "some experts are quantised, and others are not" in caplog.text
    kept, arrays = (nnx.state(each, nnx.Param) for each in (expanded(model), load_model(tmp_path)))
    assert all(map(np.array_equal, jax.tree.leaves(kept), jax.tree.leaves(arrays)))


def test_saved_weights_are_loaded_as_they_were(tmp_path):
    model = load_model(DATA / "qwen3_5_text", weights_dtype="fp8")
    save_weights(model, qwen3_5, tmp_path)
    again = load_model(tmp_path, weights_dtype="file", activation_dtype="bfloat16")
    ours, theirs = (nnx.state(each, nnx.Param) for each in (model, again))
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    assert all(map(np.array_equal, jax.tree.leaves(ours), jax.tree.leaves(theirs)))
    listed = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert {"lm_head", "model.layers.0.linear_attn.in_proj_a"} <= set(listed)
    for layer, block in zip(model.layers[:2], [(16, 24), (8, 8)], strict=True):
        weight = layer.mlp.down_proj.weight
        weight.set_value(jax.tree.map(jnp.asarray, quantize(np.ones(weight.shape, np.float32), block)))
    with pytest.raises(ValueError, match=r"blocks of one size, got \[\(8, 8\), \(16, 24\), \(128, 128\)\]"):
        save_weights(model, qwen3_5, tmp_path)


def test_small_projections_stay_as_they_are():
    """Published FP8 files leave out gates and what is of low rank."""
    names = {name.split(".")[-2] for name in quantised_names(outline_model(DATA / "kimi_linear", weights_dtype="fp8"))}
    assert {"o_proj", "gate_up_proj", "experts"} <= names
    assert not {"kv_b_proj", "f_b_proj", "g_b_proj", "b_proj", "lm_head", "gate"} & names


@pytest.mark.parametrize(
    ("quantization", "wanted"),
    [
        (PUBLISHED, "fp8"),
        (PUBLISHED | {"activation_scheme": None}, "bfloat16"),
        (compressed("block", block_structure=[128, 128]), "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
    ],
)
def test_inputs_of_products_are_rounded_as_the_files_say(tmp_path, quantization, wanted):
    own = compressed("block", block_structure=[128, 128])
    own["config_groups"]["group_0"]["input_activations"] = None
    assert read_quantisation({"quantization_config": own}).activation_dtype == "bfloat16"
    assert read_quantisation({"quantization_config": quantization}).activation_dtype == wanted
    write(tmp_path, {"a.weight": np.ones((3, 4), np.float32)}, {}, quantization)
    read = lambda **options: read_product(tmp_path, ["a.weight"], "float32", weights_dtype="fp8", **options)
    assert read().activation_dtype == wanted
    assert read(activation_dtype="bfloat16").activation_dtype == "bfloat16"


def test_a_product_is_read_part_by_part(tmp_path):
    stored = {"a.weight": np.full((3, 4), 2.0, np.float32), "b.weight": np.ones((2, 4), ml_dtypes.float8_e4m3fn)}
    stored["b.weight_scale_inv"] = np.full((1, 1), 0.5, np.float32)
    write(tmp_path, stored, {}, PUBLISHED)
    weight = read_product(tmp_path, ["a.weight", "b.weight"], "bfloat16")
    assert weight.sizes == (3, 2)
    np.testing.assert_array_equal(weight.dequantize("float32"), [[2.0] * 4] * 3 + [[0.5] * 4] * 2)
    assert read_product(tmp_path, ["a.weight"], "float16").dtype == jnp.float16
    for names, message in (
        (["c.weight"], r"tensor 'c\.weight' is missing"),
        ("a.weight", "names must be a list of names of tensors, got 'a.weight'"),
        ([], r"names must be a list of names of tensors, got \[\]"),
    ):
        with pytest.raises(ValueError, match=message):
            read_product(tmp_path, names, "float32")
    with pytest.raises(ValueError, match=r"activation_dtype must be None or one of \('bfloat16', 'fp8'\), got 'int8'"):
        read_product(tmp_path, ["a.weight"], "float32", activation_dtype="int8")


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
@pytest.mark.parametrize("weights_dtype", ["file", "bfloat16"])
def test_scales_that_are_not_positive_are_refused_by_name(tmp_path, weights_dtype, value):
    stored = {"a.weight": np.ones((3, 200), ml_dtypes.float8_e4m3fn)}
    stored["a.weight_scale_inv"] = np.array([[1.0, value]], np.float32)
    write(tmp_path, stored, {}, PUBLISHED)
    said = rf"tensor 'a\.weight_scale_inv' must hold positive finite scales, got 1 others, for instance {value:g}"
    with pytest.raises(ValueError, match=said):
        read_product(tmp_path, ["a.weight"], "float32", weights_dtype=weights_dtype)


def test_not_a_number_is_refused_by_the_name_of_its_tensor(tmp_path):
    stored = {"a.weight": np.ones((3, 200), ml_dtypes.float8_e4m3fn), "b.weight": np.ones((3, 200), np.float32)}
    stored["a.weight"].view(np.uint8)[1, 150] = 0xFF
    stored["a.weight_scale_inv"] = np.ones((1, 2), np.float32)
    write(tmp_path, stored, {}, PUBLISHED)
    with pytest.raises(ValueError, match=r"tensor 'a\.weight' must hold finite values of dtype bfloat16, got 1 others"):
        read_product(tmp_path, ["b.weight", "a.weight"], "bfloat16")


def test_other_kinds_of_weights_are_refused_by_name():
    with pytest.raises(ValueError, match=r"weights_dtype must be one of \('file', 'bfloat16', 'fp8'\), got 'int4'"):
        load_model(DATA / "mamba", weights_dtype="int4")
    with pytest.raises(ValueError, match=r"weights_dtype must be one of .*, got None"):
        outline_model(DATA / "mamba", weights_dtype=None)
