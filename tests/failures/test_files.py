"""Model files that other loaders misread, in silence or with a traceback, load as what they mean or are refused by name."""

import json
import re

import jax
import numpy as np
import pytest
from fakes import delta_net_weights, weights
from fakes.driver import DATA
from fakes.model_directory import INDEX, WEIGHTS, ModelDirectory
from flax import nnx
from safetensors.numpy import load_file, save_file

from mamba_align_jax import EngineConfig
from mamba_align_jax.models import load_model, nemotron_h


def same(path, wanted):
    ours, theirs = (jax.tree.leaves(nnx.state(load_model(each), nnx.Param)) for each in (path, wanted))
    return all(np.array_equal(*pair) for pair in zip(ours, theirs, strict=True))


def refused(path, *words):
    with pytest.raises(ValueError, match=".*".join(map(re.escape, words))):
        load_model(path)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("mamba", "backbone.layers.0.mixer.conv1d.weight"),
        ("qwen3_5_text", "model.layers.0.linear_attn.conv1d.weight"),
    ],
)
def test_taps_in_the_order_of_mlx_are_refused(name, tensor, tmp_path):
    """MLX keeps [channels, width, 1]; published files have [channels, 1, width]."""
    directory = ModelDirectory(DATA / name, tmp_path)
    taps = directory.tensors[tensor]
    directory.write_tensors(directory.tensors | {tensor: np.ascontiguousarray(taps.swapaxes(1, 2))})
    refused(tmp_path, tensor, str(list(taps.shape)), str(list(taps.swapaxes(1, 2).shape)))


@pytest.mark.parametrize("name", ["mamba2", "falcon_h1", "qwen3_5_text"])
def test_a_head_that_is_neither_tied_nor_in_the_files_is_refused(name, tmp_path):
    directory = ModelDirectory(DATA / name, tmp_path)
    tensors = dict(directory.tensors)
    del tensors["lm_head.weight"]
    directory.write_tensors(tensors)
    refused(tmp_path, "tensor 'lm_head.weight' is missing")


@pytest.mark.parametrize("count", [2, 99])
def test_the_pattern_of_nemotron_says_how_many_layers_there_are(count):
    fields = json.loads((DATA / "nemotron_h" / "config.json").read_text())
    make = nemotron_h.Config.from_dict
    wanted = make(fields)
    del fields["layers_block_type"]
    assert make(fields | dict(hybrid_override_pattern="MEM*-", num_hidden_layers=count)) == wanted


def test_experts_of_lfm2_load_from_one_tensor_as_from_many(tmp_path):
    directory = ModelDirectory(DATA / "lfm2_moe", tmp_path)
    one = re.compile(r"(.*\.experts)\.(\d+)\.(w[123])\.weight")
    found = {match[0]: match for match in map(one.fullmatch, directory.tensors) if match}
    packed = {name: value for name, value in directory.tensors.items() if name not in found}
    for place in sorted({match[1] for match in found.values()}):
        count = sum(match[1] == place for match in found.values()) // 3
        read = lambda expert, name, place=place: directory.tensors[f"{place}.{expert}.{name}.weight"]
        up = [np.concatenate([read(expert, "w1"), read(expert, "w3")]) for expert in range(count)]
        packed |= {
            f"{place}.gate_up_proj": np.stack(up),
            f"{place}.down_proj": np.stack([read(expert, "w2") for expert in range(count)]),
        }
    directory.write_tensors(packed)
    assert same(tmp_path, DATA / "lfm2_moe")


def test_experts_by_the_name_of_a_server_are_refused(tmp_path):
    """vLLM's own name for the experts' first product. A loader that skipped it would run without them."""
    weights.write(tmp_path, delta_net_weights.qwen3_5_moe)
    tensors = load_file(tmp_path / WEIGHTS)
    rename = lambda name: name.replace("experts.gate_up_proj", "experts.w13_weight")
    save_file({rename(name): value for name, value in tensors.items()}, tmp_path / WEIGHTS)
    refused(tmp_path, "model.layers.0.mlp.experts.", "is missing")


def test_square_experts_in_the_other_order_are_refused(tmp_path):
    """The first product has the same shape in both orders, so only the second one can show the order."""

    def square():
        config, shapes = delta_net_weights.qwen3_5_moe(fused=False)
        size = weights.HIDDEN // 2
        experts = {
            "experts.gate_up_proj": (7, 2 * size, weights.HIDDEN),
            "experts.down_proj": (7, weights.HIDDEN, size),
        }
        shapes = [{name: shape for name, shape in part.items() if ".experts." not in name} for part in shapes]
        shapes += [weights.under(f"model.layers.{n}.mlp", experts) for n in range(2)]
        return config | dict(moe_intermediate_size=size), shapes

    weights.write(tmp_path, square)
    load_model(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    turned = {
        name: np.ascontiguousarray(value.swapaxes(1, 2)) for name, value in tensors.items() if ".experts." in name
    }
    assert any(value.shape == tensors[name].shape for name, value in turned.items())
    save_file(tensors | turned, tmp_path / WEIGHTS)
    refused(tmp_path, "experts.down_proj", "must make an array of shape")


def test_an_index_of_shards_that_are_not_there_is_refused(tmp_path):
    directory = ModelDirectory(DATA / "mamba", tmp_path)
    shard = "model-00001-of-00002.safetensors"
    directory.write_json(INDEX, {"weight_map": dict.fromkeys(directory.tensors, shard)})
    refused(tmp_path, shard)


def test_tensors_that_a_user_has_saved_beside_the_weights_are_not_read(tmp_path):
    directory = ModelDirectory(DATA / "mamba", tmp_path)
    directory.write_tensors({"activations": np.ones((2, 2), np.float32)}, "captured.safetensors")
    assert same(tmp_path, DATA / "mamba")


@pytest.mark.parametrize("field", ["mamba_ssm_dtype", "mamba_ssm_cache_dtype"])
def test_the_dtype_of_states_is_the_engines_whatever_the_files_say(field, tmp_path):
    directory = ModelDirectory(DATA / "nemotron_h", tmp_path)
    directory.write_config(**{field: "float16"})
    (group,) = load_model(tmp_path).state_groups(EngineConfig().state_dtype)
    assert group.states[1].dtype == "float32"
