"""Variants of published families: what a configuration or the files change is followed, and not only what is usual."""

import jax
import numpy as np
import pytest
from fakes.driver import DATA
from fakes.model_directory import ModelDirectory
from flax import nnx

from mamba_align_jax.models import load_model, outline_model

pytestmark = pytest.mark.usefixtures("for_a_cpu_alone")


def parameters(model):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]


def same(ours, wanted):
    return all(np.array_equal(*pair) for pair in zip(parameters(ours), parameters(wanted), strict=True))


@pytest.mark.parametrize(
    ("change", "rotated"),
    [
        ({}, 8),
        ({"partial_rotary_factor": 1.0}, 8),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 8),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}, 4),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}, 16),
    ],
)
def test_bamba_rotates_the_share_of_a_head_that_its_rotation_names(tmp_path, change, rotated):
    directory = ModelDirectory(DATA / "bamba", tmp_path)
    directory.write_config(**change)
    attention = next(layer.self_attn for layer in load_model(tmp_path).layers if hasattr(layer, "self_attn"))
    assert attention.rotary_dim == rotated
    assert len(attention.rotation.frequencies) == rotated // 2


def test_lfm2_moe_may_have_no_bias_of_its_choice(tmp_path):
    directory = ModelDirectory(DATA / "lfm2_moe", tmp_path)
    biases = {name for name in directory.tensors if name.endswith("expert_bias")}
    assert biases
    directory.write_tensors(directory.tensors | {name: np.zeros_like(directory.tensors[name]) for name in biases})
    wanted = load_model(tmp_path)
    directory.write_tensors({name: value for name, value in directory.tensors.items() if name not in biases})
    with pytest.raises(ValueError, match=r"expert_bias' is missing"):
        load_model(tmp_path)
    directory.write_config(use_expert_bias=False)
    assert same(load_model(tmp_path), wanted)


# The layers of the tiny Zamba2 that hear a block. The first and the last one share a block.
HYBRID = (1, 3, 4)
HEAD = "lm_head.weight"


def zamba2(path):
    """A copy of the tiny Zamba2, and the tensors of another block in its last layer."""
    directory = ModelDirectory(DATA / "zamba2", path)
    first, last = (f"model.layers.{number}.shared_transformer." for number in (HYBRID[0], HYBRID[2]))
    block = {name: value for name, value in directory.tensors.items() if name.startswith(first)}
    other = {name.replace(first, last): value[::-1].copy() for name, value in block.items()}
    return directory, other


@pytest.mark.parametrize("tied", [True, False])
def test_copies_of_a_block_are_blocks_of_their_own(tmp_path, tied):
    """They may differ: transformers doesn't share what the files hold twice with different values."""
    directory, other = zamba2(tmp_path)
    head = {} if tied else {HEAD: directory.tensors["model.embed_tokens.weight"][::-1].copy()}
    tensors = directory.tensors | other | head
    directory.write_tensors(tensors)
    directory.write_config(tie_word_embeddings=tied)
    ours = load_model(tmp_path)
    assert len(ours.blocks) == len(outline_model(tmp_path).blocks) == 3
    # A model with three blocks has the same weights by the same names, but no adapters of other layers.
    needless = tuple(
        f"model.layers.{number}.shared_transformer.{projection}_adapter_list.{turn}."
        for own, number in enumerate(HYBRID)
        for turn in range(3)
        for projection in (
            "feed_forward.gate_up_proj",
            "self_attn.linear_q",
            "self_attn.linear_k",
            "self_attn.linear_v",
        )
        if turn != own
    )
    assert any(name.startswith(needless) for name in tensors)
    directory.write_tensors({name: value for name, value in tensors.items() if not name.startswith(needless)})
    directory.write_config(tie_word_embeddings=tied, num_mem_blocks=3)
    assert same(ours, load_model(tmp_path))


def test_part_of_a_copy_is_refused(tmp_path):
    directory, other = zamba2(tmp_path)
    name = "model.layers.4.shared_transformer.self_attn.q_proj.weight"
    directory.write_tensors(directory.tensors | {name: other[name]})
    with pytest.raises(ValueError, match=r"tensor 'model\.layers\.4\.shared_transformer\..*' is missing"):
        load_model(tmp_path)


def test_blocks_that_the_files_hold_once_are_shared_without_tied_embeddings(tmp_path):
    directory, _ = zamba2(tmp_path)
    directory.write_tensors(directory.tensors | {HEAD: directory.tensors["model.embed_tokens.weight"]})
    directory.write_config(tie_word_embeddings=False)
    ours, tied = load_model(tmp_path), load_model(DATA / "zamba2")
    assert len(ours.blocks) == 2
    for mine, theirs in zip(ours.blocks, tied.blocks, strict=True):
        assert same(mine, theirs)
