"""The rotation by position, and its stretched kinds, are those of transformers."""

import json
import re

import numpy as np
import pytest
from fakes.driver import ATOL, DATA, Driver
from fakes.model_directory import ModelDirectory

from mamba_align_jax.layers.rotation import make_rotation
from mamba_align_jax.models import falcon_h1, load_model

FALCON = DATA / "falcon_h1"
# The fields with which tests/data/make_references.py computed the logits, in the form of older files and of newer ones.
SCALINGS = {
    "linear": dict(type="linear", factor=4.0),
    "dynamic": dict(rope_type="dynamic", factor=3.0),
    "llama3": dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
    "longrope": dict(
        rope_type="longrope", short_factor=[1.0, 1.1, 1.2, 1.5, 1.9, 2.0, 2.2, 2.5], original_max_position_embeddings=256,
        long_factor=[1.0, 1.3, 1.7, 2.0, 3.0, 4.0, 5.0, 6.0],
    ),
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=128),
    "yarn with factors": dict(
        type="yarn", factor=8.0, original_max_position_embeddings=64, beta_fast=16, beta_slow=2, mscale=0.7,
        mscale_all_dim=0.4,
    ),
    "yarn with attention_factor": dict(
        rope_type="yarn", factor=2.0, original_max_position_embeddings=256, attention_factor=1.3, truncate=False
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "form"), [*((kind, "rope_scaling") for kind in SCALINGS), ("yarn", "rope_parameters")]
)
def test_stretched_rotation_gives_the_logits_of_transformers(kind, form, tmp_path):
    directory = ModelDirectory(FALCON, tmp_path)
    rope = SCALINGS[kind] | ({} if form == "rope_scaling" else {"rope_theta": 1e4})
    directory.write_config(**({"rope_parameters": ..., "rope_theta": 1e4} | {form: rope}))
    arrays = np.load(FALCON / "reference.npz")
    tokens = arrays["tokens"][0].astype(np.int32)
    logits = Driver(load_model(tmp_path)).step(prefill={0: tokens})[0]
    np.testing.assert_allclose(logits, arrays[f"logits/{kind}"], atol=ATOL)
    if kind != "dynamic":
        assert np.abs(arrays["logits"] - arrays[f"logits/{kind}"]).max() > 100 * ATOL


def config(**change):
    return falcon_h1.Config.from_dict(json.loads((FALCON / "config.json").read_text()) | change)


def test_longest_sequence_is_that_for_which_the_rotation_is_right():
    """That of YaRN is stretched with the rotation. LongRoPE has other factors for longer sequences."""
    assert config().max_position_embeddings == 512
    assert config(rope_scaling=SCALINGS["yarn"]).max_position_embeddings == 512
    assert config(rope_scaling=SCALINGS["yarn"] | {"factor": 6.0}).max_position_embeddings == 768
    assert config(rope_scaling=SCALINGS["longrope"]).max_position_embeddings == 256
    assert config(rope_scaling=SCALINGS["dynamic"]).max_position_embeddings == 512
    assert config(rope_scaling=SCALINGS["dynamic"]).rope_scaling is None


def test_a_stretched_rotation_that_was_added_to_a_file_keeps_its_other_fields():
    own = {"rope_type": "default", "rope_theta": 1e7}
    found = config(rope_parameters=own, rope_scaling=SCALINGS["yarn"])
    assert found.rope_theta == 1e7
    assert found.rope_scaling["rope_type"] == "yarn"


def test_plain_rotation_turns_pairs_by_powers_of_theta():
    rotation = make_rotation(8, 100.0)
    np.testing.assert_allclose(rotation.frequencies, 100.0 ** (-np.arange(4) / 4), rtol=1e-6)
    assert rotation.scale == 1.0


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (
            {"rope_type": "su"},
            "rope_type must be one of ('default', 'linear', 'dynamic', 'llama3', 'longrope', 'yarn')",
        ),
        ({"rope_type": "linear"}, "a rotation of rope_type 'linear' must have 'factor'"),
        ({"type": "yarn"}, "a rotation of rope_type 'yarn' must have 'factor'"),
        ({"rope_type": "llama3", "factor": 8.0}, "a rotation of rope_type 'llama3' must have 'low_freq_factor'"),
        (SCALINGS["llama3"] | {"low_freq_factor": 4.0}, "low_freq_factor must be below high_freq_factor"),
        (SCALINGS["longrope"] | {"short_factor": [1.0]}, "short_factor must have 8 factors, got 1"),
        (SCALINGS["longrope"] | {"short_factor": "1"}, "short_factor must be a list of finite numbers, got"),
        (SCALINGS["longrope"] | {"short_factor": [0.0] * 8}, "short_factor must be positive numbers, got [0.0,"),
        (SCALINGS["longrope"] | {"short_factor": []}, "short_factor must have 8 factors, got 0"),
        (SCALINGS["yarn"] | {"rope_theta": 1}, "rope_theta must be above 1 for rope_type 'yarn', got 1"),
        (
            {"rope_type": "linear", "factor": 1e-300},
            "rope_theta and factor must give finite frequencies, got 10000.0 and",
        ),
        (SCALINGS["yarn"] | {"factor": 0}, "factor must be above 0, got 0"),
        (SCALINGS["yarn"] | {"factor": "4"}, "factor must be a finite number, got"),
        (SCALINGS["yarn"] | {"truncate": 1}, "truncate must be true or false, got 1"),
        (
            SCALINGS["yarn"] | {"original_max_position_embeddings": 0},
            "original_max_position_embeddings must be an integer",
        ),
    ],
)
def test_rotation_that_is_not_supported_is_refused(tmp_path, rope, message):
    directory = ModelDirectory(FALCON, tmp_path)
    directory.write_config(rope_scaling=rope)
    with pytest.raises(ValueError, match=re.escape(f"config.json: {message}")):
        load_model(tmp_path)


def test_odd_number_of_rotated_dims_is_refused():
    with pytest.raises(ValueError, match="the number of dims that are rotated must be even, got 7"):
        make_rotation(7, 100.0)
