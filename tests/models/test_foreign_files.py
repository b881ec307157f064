"""Files of other programs are skipped if they belong to other parts of a model, and are else named as what they are."""

import re

import jax
import numpy as np
import pytest
from fakes.driver import DATA
from fakes.model_directory import INDEX, WEIGHTS, ModelDirectory
from flax import nnx

from mamba_align_jax.models import load_model, outline_model

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.fixture
def directory(tmp_path):
    return ModelDirectory(DATA / "mamba", tmp_path)


def refused(path, message):
    for load in (load_model, outline_model):
        with pytest.raises(ValueError, match=re.escape(message)):
            load(path)


def parameters(path):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(load_model(path), nnx.Param))]


TOWERS = ["visual", "vision_tower", "vision_model", "audio_tower", "multi_modal_projector", "sound_encoder"]


def test_towers_are_skipped_with_and_without_the_prefix_of_the_model(directory):
    names = [f"{outer}{tower}.blocks.0.weight" for tower in TOWERS for outer in ("", "model.")]
    directory.write_tensors(directory.tensors | {name: np.ones(2, np.float32) for name in names})
    assert all(map(np.array_equal, parameters(directory.path), parameters(DATA / "mamba")))
    for name in ("vision.weight", "model.visuals.weight", "layers.visual.weight"):
        directory.write_tensors(directory.tensors | {name: np.ones(2, np.float32)})
        refused(directory.path, f"tensor {name!r} has no place in a model of type 'mamba'")


MERGE = "can't be loaded: merge it into its model where PEFT is, with merge_and_unload()"
LORA = "base_model.model.backbone.layers.0.mixer.in_proj.lora_A.weight"


def test_peft_adapters_are_named_with_the_way_to_merge_them(directory):
    directory.write_tensors(directory.tensors | {LORA: np.ones((2, 64), np.float32)})
    refused(directory.path, f"tensor {LORA!r} is of a PEFT adapter, which {MERGE}")
    # A library that knows PEFT would load the adapter beside whole weights, too.
    directory.write_tensors(directory.tensors)
    directory.write_json("adapter_config.json", {"peft_type": "LORA", "base_model_name_or_path": "some/model"})
    message = f"must hold a whole model, got a PEFT adapter (adapter_config.json), which {MERGE}"
    refused(directory.path, message)
    (directory.path / WEIGHTS).rename(directory.path / "adapter_model.safetensors")
    (directory.path / "config.json").unlink()
    refused(directory.path, message)


MLX = {"group_size": 64, "bits": 4}


@pytest.mark.parametrize("names", [["quantization"], ["quantization", "quantization_config"], ["quantization_config"]])
@pytest.mark.parametrize("nested", [False, True])
def test_mlx_weights_of_few_bits_are_named(directory, names, nested):
    fields = dict.fromkeys(names, MLX | {"mode": "affine", "backbone.layers.0.mixer.in_proj": {"bits": 8}})
    if nested:
        directory.config = {"model_type": "mamba", "text_config": directory.config}
    directory.write_config(**fields)
    refused(directory.path, "got MLX (4 bits in groups of 64)")


def split(directory, listed):
    """Writes the tensors to two shards, and an index that lists the first `listed` of them; none without a number."""
    names = sorted(directory.tensors)
    parts = names[::2], names[1::2]
    (directory.path / WEIGHTS).unlink()
    for shard, part in zip(SHARDS, parts, strict=True):
        directory.write_tensors({name: directory.tensors[name] for name in part}, shard)
    if listed is not None:
        pairs = [(name, shard) for shard, part in list(zip(SHARDS, parts, strict=True))[:listed] for name in part]
        directory.write_json(INDEX, {"weight_map": dict(pairs)})


def test_shards_without_an_index_are_named(directory):
    split(directory, None)
    refused(directory.path, f"with 2 shards ({SHARDS[0]}) and without the index that says which tensors they hold")


def test_shards_that_the_index_lacks_are_named(directory):
    split(directory, 1)
    refused(directory.path, f"; {INDEX} names no tensor of {SHARDS[1]}, which is there")
    directory.write_config(num_hidden_layers=4)
    refused(directory.path, f"the files, 3, got 4; {INDEX} names no tensor of {SHARDS[1]}, which is there")


def test_shards_that_only_the_index_has_are_named(directory):
    split(directory, 2)
    assert len(parameters(directory.path)) == len(parameters(DATA / "mamba"))
    (directory.path / SHARDS[1]).unlink()
    refused(directory.path, f"model directory must hold {SHARDS[1]}, which {INDEX} names, got")


def test_other_files_beside_those_that_the_index_names_change_nothing(directory):
    split(directory, 2)
    directory.write_tensors({"captured": np.ones(2, np.float32)}, "captures.safetensors")
    assert all(map(np.array_equal, parameters(directory.path), parameters(DATA / "mamba")))
