"""FP8 weights load as what they mean, whatever their scales are for; other quantised weights are refused by name."""

import json
import math
import re

import jax
import ml_dtypes
import numpy as np
import pytest
from fakes import delta_net_weights, weights
from fakes.draft_head_weights import write_with_head
from fakes.driver import DATA
from fakes.model_directory import ModelDirectory
from flax import nnx
from models.quantised_files import BLOCKS, PUBLISHED, compressed, quantise, scales_of, write
from safetensors.numpy import load_file, save_file

from mamba_align_jax.models import load_model
from pallas_kernels import QuantizedWeight

pytestmark = pytest.mark.usefixtures("for_a_cpu_alone")


def parameters(model):
    """All parameters as arrays."""
    values = [param.get_value() for _, param in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    return [np.asarray(each.dequantize() if isinstance(each, QuantizedWeight) else each, np.float32) for each in values]


def check(path, stored, meaning, config, quantization, dtype=None):
    """Loads FP8 weights as arrays and as they are, and float32 weights that are what they mean: all must be one model."""
    write(path, stored, config, quantization)
    ours, kept = load_model(path, dtype), load_model(path, dtype, weights_dtype="file")
    (path / "config.json").write_text(json.dumps(config))
    plain = {name: value for name, value in stored.items() if not name.endswith(("_scale", "_scale_inv"))}
    save_file(plain | {name: value.astype(np.float32) for name, value in meaning.items()}, path / "model.safetensors")
    wanted = load_model(path, dtype)
    assert ours.dtype == wanted.dtype
    leaves = jax.tree.leaves(nnx.state(kept))
    assert sum(leaf.dtype.itemsize == 1 for leaf in leaves) >= len({name.rpartition(".")[0] for name in meaning}) // 8
    for got, also, want in zip(*map(parameters, (ours, kept, wanted)), strict=True):
        assert np.array_equal(got, want)
        assert np.array_equal(also, want)


CASES = {
    "blocks": (BLOCKS, "block", "_scale_inv", {}),
    "blocks, scales in bfloat16": (BLOCKS, "block", "_scale_inv", dict(scale_dtype=ml_dtypes.bfloat16)),
    "blocks, scales in powers of two": (BLOCKS, "block", "_scale_inv", dict(scale_dtype=ml_dtypes.float8_e8m0fnu)),
    "blocks, e5m2": (BLOCKS, "block", "_scale_inv", dict(dtype=ml_dtypes.float8_e5m2)),
    "blocks larger than the matrices": (PUBLISHED, "block", "_scale_inv", dict(block=(128, 128))),
    "fp8 per tensor": (BLOCKS | {"weight_block_size": None}, "tensor", "_scale_inv", {}),
    "fp8 per expert": (BLOCKS | {"weight_block_size": None}, "expert", "_scale_inv", {}),
    "per channel": (compressed("channel"), "channel", "_scale", {}),
    "per tensor": (compressed("tensor", "naive-quantized"), "tensor", "_scale", {}),
    "compressed blocks": (compressed("block", block_structure=[16, 24]), "block", "_scale", {}),
    "groups": (compressed("group", group_size=24), "block", "_scale", dict(block=(1, 24))),
    "fp8 per tensor, as vLLM names scales": (BLOCKS | {"weight_block_size": None}, "tensor", "_scale", {}),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "modules_to_not_convert": [r"re:.*lm_head"]}, "channel", "_scale", {}),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "tensor", "_scale", {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("fused", [True, False])
def test_fp8_weights_load_as_what_they_mean(tmp_path, case, fused):
    """Experts are fused as transformers saves them, and apart as in published files."""
    quantization, part, suffix, options = CASES[case]
    config, tensors = weights.write(tmp_path, delta_net_weights.qwen3_5_moe, fused=fused)
    check(tmp_path, *quantise(tensors, part, suffix, **options), config, quantization)


def test_groups_of_layers_may_have_scales_for_different_parts(tmp_path):
    """One layer's scales are for channels, the next one's for blocks and another one's for other blocks."""
    config, tensors = weights.write(tmp_path, delta_net_weights.qwen3_5)
    stored, meaning = {}, {}
    for number, (part, block) in enumerate([("channel", None), ("block", (16, 24)), ("block", (1, 24))]):
        one = {name: value for name, value in tensors.items() if f"layers.{number}." in name}
        quantised = quantise(one, part, "_scale", block)
        stored, meaning = stored | quantised[0], meaning | quantised[1]
    groups = [compressed("channel"), compressed("block", block_structure=[16, 24]), compressed("group", group_size=24)]
    groups = {f"group_{n}": group["config_groups"]["group_0"] for n, group in enumerate(groups)}
    check(tmp_path, tensors | stored, meaning, config, compressed("channel") | {"config_groups": groups})


def test_modelopt_may_have_a_file_of_its_own(tmp_path):
    config, tensors = weights.write(tmp_path, delta_net_weights.qwen3_5)
    stored, meaning = quantise(tensors, "tensor", "_scale")
    own = tmp_path / "hf_quant_config.json"
    own.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}))
    check(tmp_path, stored, meaning, config, None)
    own.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    with pytest.raises(ValueError, match="got NVFP4"):
        load_model(tmp_path)
    own.write_text(json.dumps({"quantization": "FP8"}))
    with pytest.raises(ValueError, match=r"hf_quant_config\.json: quantization must be an object, got 'FP8'"):
        load_model(tmp_path)


def test_draft_head_may_be_quantised(tmp_path):
    write_with_head(DATA / "qwen3_5_text", tmp_path)
    directory = ModelDirectory(tmp_path, tmp_path)
    config, tensors = directory.config, directory.tensors
    stored, meaning = quantise(tensors, "block", "_scale_inv")
    assert any(name.startswith("mtp.") for name in meaning)
    check(tmp_path, stored, meaning, config, BLOCKS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_fp8_weights_are_rounded_once(tmp_path, dtype):
    config, tensors = weights.write(tmp_path, delta_net_weights.qwen3_5)
    check(tmp_path, *quantise(tensors, "channel", "_scale"), config, compressed("channel"), dtype)


def test_nested_configuration_may_hold_the_quantisation_outside(tmp_path):
    directory = ModelDirectory(DATA / "qwen3_5_text", tmp_path)
    stored, meaning = quantise(directory.tensors, "block", "_scale_inv", (128, 128))
    directory.write_tensors({name.replace("model.", "model.language_model.", 1): part for name, part in stored.items()})
    text = directory.config | {"quantization_config": None}
    nested = {"model_type": "qwen3_5", "text_config": text, "quantization_config": PUBLISHED}
    directory.write_json("config.json", nested)
    ours = load_model(tmp_path)
    directory.write_tensors(directory.tensors | {name: value.astype(np.float32) for name, value in meaning.items()})
    directory.write_config()
    assert all(map(np.array_equal, parameters(ours), parameters(load_model(tmp_path))))


def test_scales_of_activations_are_left_out(tmp_path):
    directory = ModelDirectory(DATA / "qwen3_5_text", tmp_path)
    stored, _ = quantise(directory.tensors, "tensor", "_scale")
    one = np.ones((), np.float32)
    unused = {name.replace("weight", "input_scale"): one for name in directory.tensors if name.endswith("proj.weight")}
    unused |= {f"model.layers.3.self_attn.{part}_scale": one for part in "kv"}
    directory.write_tensors(stored | unused)
    directory.write_config(quantization_config=compressed("tensor"))
    load_model(tmp_path)


def test_fp8_that_means_nan_is_refused_by_name(tmp_path):
    directory = ModelDirectory(DATA / "qwen3_5_text", tmp_path)
    stored, _ = quantise(directory.tensors, "tensor", "_scale")
    name = "model.layers.1.mlp.up_proj.weight"
    stored[name].view(np.uint8)[3, 4] = 0x7F
    directory.write_tensors(stored)
    directory.write_config(quantization_config=compressed("tensor"))
    with pytest.raises(ValueError, match=re.escape(f"tensor {name!r} must hold finite values of dtype float32")):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("quantization", "change", "message"),
    [
        (None, {}, "must not be FP8 without a quantization_config in config.json"),
        (BLOCKS, None, "_scale_inv', the scales of FP8 tensor 'model.layers."),
        (BLOCKS, {"_scale_inv": np.ones((2, 3), np.float32)}, "must have one scale for tensor"),
        (BLOCKS | {"weight_block_size": None}, {}, "must have one scale for tensor"),
        (BLOCKS | {"weight_block_size": [16, 0]}, {}, "weight_block_size must be two positive integers, got [16, 0]"),
        (BLOCKS | {"weight_block_size": 16}, {}, "weight_block_size must be two positive integers, got 16"),
        (compressed("channel"), {}, "_scale', the scales of FP8 tensor 'model.layers."),
        (BLOCKS, {"_scale_inv": np.ones((8, 8), np.int8)}, "must have a dtype of"),
    ],
)
def test_fp8_without_fitting_scales_is_refused(tmp_path, quantization, change, message):
    directory = ModelDirectory(DATA / "qwen3_5_text", tmp_path)
    stored, _ = quantise(directory.tensors, "block", "_scale_inv")
    name = "model.layers.0.mlp.down_proj.weight"
    if change is None:
        del stored[f"{name}_scale_inv"]
    else:
        stored |= {name + suffix: value for suffix, value in change.items()}
    directory.write_tensors(stored)
    directory.write_config(quantization_config=quantization)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("quantization", "kind"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "GPTQ"),
        ({"quant_method": "awq", "bits": 4}, "AWQ"),
        ({"quant_method": "gguf"}, "GGUF"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_4bit": False, "load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
        (compressed("tensor_group", "nvfp4-pack-quantized", num_bits=4), "NVFP4"),
        (compressed("group", "mxfp4-pack-quantized", num_bits=4), "MXFP4"),
        ({"quant_method": "mxfp4"}, "MXFP4"),
        (compressed("group", "pack-quantized", num_bits=4, type="int"), "compressed-tensors"),
        (compressed("channel", "int-quantized", type="int"), "compressed-tensors"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": None}}, "compressed-tensors"),
        (compressed("channel") | {"transform_config": {"config_groups": {}}}, r"compressed-tensors \(transform_config"),
        ({"quant_method": "torchao"}, "torchao"),
        ({"quant_method": 8}, "8"),
        ({}, "none"),
    ],
)
def test_other_quantised_weights_are_refused_by_name_before_their_tensors(tmp_path, quantization, kind):
    directory = ModelDirectory(DATA / "mamba", tmp_path)
    directory.write_config(quantization_config=quantization)
    directory.write_tensors({"backbone.layers.0.mixer.in_proj.qweight": np.ones((2, 2), np.int32)})
    with pytest.raises(ValueError, match=r"config\.json: quantization_config must (be|have)") as error:
        load_model(tmp_path)
    assert re.search(rf"(got|have) {kind}", str(error.value))


def test_gguf_is_refused_by_name(tmp_path):
    directory = ModelDirectory(DATA / "mamba", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-q4_k.gguf")
    with pytest.raises(ValueError, match="GGUF file, which can't be loaded"):
        load_model(directory.path)
    with pytest.raises(ValueError, match="GGUF file, which can't be loaded"):
        load_model(tmp_path / "model-q4_k.gguf")


def test_fake_scales_are_one_for_each_block():
    value = np.random.default_rng(0).normal(size=(3, 40, 50))
    scales = scales_of(value, "block", (16, 24))
    assert scales.shape == (3, math.ceil(40 / 16), math.ceil(50 / 24))
    assert scales[1, 2, 1] == np.abs(value[1, 32:40, 24:48]).max() / 448


def test_published_directories_load_without_quantisation(tmp_path):
    """A null field is no quantisation."""
    directory = ModelDirectory(DATA / "mamba", tmp_path)
    directory.write_config(quantization_config=None)
    got, wanted = (parameters(load_model(path)) for path in (tmp_path, DATA / "mamba"))
    assert all(map(np.array_equal, got, wanted))
    assert load_file(tmp_path / "model.safetensors").keys() == directory.tensors.keys()
