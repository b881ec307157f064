"""Directories as their authors publish them load as the models that transformers makes of them."""

import json
import re

import jax
import ml_dtypes
import numpy as np
import pytest
from fakes.driver import DATA
from fakes.model_directory import ModelDirectory
from flax import nnx

from mamba_align_jax.models import ARCHITECTURES, lfm2, load_model


def parameters(model):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]


def same(ours, wanted):
    pairs = zip(parameters(load_model(ours)), parameters(load_model(wanted)), strict=True)
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


MAMBA1 = {
    "d_model": 64, "n_layer": 3, "vocab_size": 250, "ssm_cfg": {"d_state": 8, "dt_rank": 6}, "rms_norm": True,
    "residual_in_fp32": True, "fused_add_norm": True, "pad_vocab_size_multiple": 16, "tie_embeddings": False,
}  # fmt: skip
MAMBA2 = {
    "d_model": 64, "d_intermediate": 0, "n_layer": 3, "vocab_size": 256, "attn_layer_idx": [], "attn_cfg": {},
    "ssm_cfg": {"layer": "Mamba2", "d_state": 12, "headdim": 16, "ngroups": 2}, "rms_norm": True,
    "residual_in_fp32": True, "fused_add_norm": True, "tie_embeddings": False,
}  # fmt: skip


def state_spaces(name, path, **change):
    """Writes a model of tests/data as state-spaces publishes models."""
    directory = ModelDirectory(DATA / name, path)
    directory.write_json("config.json", (MAMBA1 if name == "mamba" else MAMBA2) | change)
    rename = lambda name: name.replace("backbone.embeddings.", "backbone.embedding.")
    directory.write_tensors({rename(name): value for name, value in directory.tensors.items()})
    return path


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_models_by_state_spaces_load(name, tmp_path):
    path = state_spaces(name, tmp_path)
    assert same(path, DATA / name)
    ours, wanted = load_model(path).config, load_model(DATA / name).config
    fields = ("intermediate_size", "layer_norm_epsilon", "residual_in_fp32", "state_size", "vocab_size", "dtype")
    assert [getattr(ours, field) for field in fields] == [getattr(wanted, field) for field in fields]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_layer_idx": [1]}, "attn_layer_idx must be one of ([],), got [1]"),
        ({"rms_norm": False}, "rms_norm must be one of (True,), got False"),
        ({"d_intermediate": 8}, "d_intermediate must be one of (0,), got 8"),
        ({"ssm_cfg": {"layer": "Mamba3"}}, "layer must be one of ('Mamba1', 'Mamba2'), got 'Mamba3'"),
        ({"ssm_cfg": [1]}, "ssm_cfg must be an object, got [1]"),
        (
            {"ssm_cfg": {"dt_limit": [0.01, 0.1]}},
            "dt_limit must be [0, Infinity] or null, because step sizes are not clamped, got [0.01, 0.1]",
        ),
        ({"ssm_cfg": {"activation": "gelu"}}, "activation must be one of ('silu', 'swish'), got 'gelu'"),
        ({"ssm_cfg": {"layer": "Mamba2", "headdim": 48}}, "must be a multiple of headdim = 48"),
        ({"ssm_cfg": {"layer": "Mamba2", "headdim": "16"}}, "head_dim must be an integer"),
        ({"ssm_cfg": {"layer": "Mamba2", "expand": None}}, "expand must be a finite number"),
        ({"d_model": "64"}, "d_model must be an integer"),
        ({"n_layer": None}, "n_layer must be an integer"),
        ({"vocab_size": 0}, "vocab_size must be an integer"),
        ({"pad_vocab_size_multiple": 0}, "pad_vocab_size_multiple must be an integer"),
    ],
)
def test_other_models_by_state_spaces_are_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=re.escape(f"{message}")):
        load_model(state_spaces("mamba2", tmp_path, **change))


@pytest.mark.parametrize(
    ("stored", "wanted"), [(np.float32, "float32"), (np.float16, "float16"), (ml_dtypes.bfloat16, "bfloat16")]
)
def test_model_without_a_dtype_has_that_of_its_weights(tmp_path, stored, wanted):
    directory = ModelDirectory(DATA / "mamba", tmp_path)
    directory.write_config(dtype=...)
    # Some tensors are often stored in float32 whatever the dtype of the model.
    tensors = {name: value if value.ndim < 2 else value.astype(stored) for name, value in directory.tensors.items()}
    directory.write_tensors(tensors)
    assert load_model(tmp_path).dtype == wanted
    assert load_model(tmp_path, "float32").dtype == "float32"


TOWERS = {
    "vision_model.radio_model.model.blocks.0.attn.qkv.weight": np.ones((2, 2), np.float32),
    "mlp1.0.weight": np.ones(2, np.float32),
    "sound_encoder.encoder.layers.0.conv.weight": np.ones(2, np.float32),
    "sound_projection.linear1.weight": np.ones(2, np.float32),
    "multi_modal_projector.norm.weight": np.ones(2, np.float32),
    "audio_tower.layers.0.weight": np.ones(2, np.float32),
    "embed_audio.norm.weight": np.ones(2, np.float32),
}


@pytest.mark.parametrize("nested", ["llm_config", "text_config"])
@pytest.mark.parametrize("inner", ["nemotron_h", ...])
@pytest.mark.parametrize("outer", ["NemotronH_Nano_VL_V2", "NemotronH_Nano_Omni_Reasoning_V3", "nemotron_h_omni"])
def test_text_part_of_nemotron_for_images_and_sound_loads(tmp_path, outer, inner, nested):
    directory = ModelDirectory(DATA / "nemotron_h", tmp_path)
    text = {name: value for name, value in directory.config.items() if name not in ("model_type", "dtype")}
    text |= {} if inner is ... else {"model_type": inner}
    fields = {"model_type": outer, nested: text, "vision_config": {}, "sound_config": {}, "torch_dtype": "float32"}
    directory.write_json("config.json", fields)
    renamed = {f"language_model.{name}": value for name, value in directory.tensors.items()}
    directory.write_tensors(renamed | TOWERS)
    assert same(tmp_path, DATA / "nemotron_h")


def test_sizes_of_lfm2_are_rounded_up_unless_a_multiplier_of_null_says_not_to():
    fields = json.loads((DATA / "lfm2" / "config.json").read_text()) | {"intermediate_size": 100}
    sizes = [
        lfm2.Config.from_dict(fields | {"block_ffn_dim_multiplier": factor}).intermediate_size for factor in (1.0, None)
    ]
    del fields["block_ffn_dim_multiplier"]
    assert [*sizes, lfm2.Config.from_dict(fields).intermediate_size] == [72, 66, 72]
    assert not lfm2.Config.from_dict(fields | {"tie_embedding": None, "tie_word_embeddings": False}).tie_word_embeddings


# The defaults of transformers 5.23.0, which published files may leave out.
DEFAULTS = {
    "bailing_hybrid": {"rms_norm_eps": 1e-6, "rope_theta": 6e6, "routed_scaling_factor": 2.5},
    "falcon_h1": {"rms_norm_eps": 1e-5, "rope_theta": 1e4},
    "granitemoehybrid": {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "shared_intermediate_size": 1024},
    "jamba": {"rms_norm_eps": 1e-6, "num_experts": 16, "num_experts_per_tok": 2},
    "kimi_linear": {"rms_norm_eps": 1e-5, "routed_scaling_factor": 2.446, "moe_renormalize": True},
    "mamba": {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "residual_in_fp32": True, "state_size": 16},
    "mamba2": {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": False, "n_groups": 8, "state_size": 128},
    "nemotron_h": {"layer_norm_epsilon": 1e-5, "routed_scaling_factor": 1.0, "residual_in_fp32": False},
    "olmo_hybrid": {"rms_norm_eps": 1e-6, "rope_theta": 1e4},
    "qwen3_5_text": {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    "qwen3_next": {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
# The least that a configuration must say.
LEAST = dict(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
    head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, linear_num_heads=4, linear_head_dim=8,
    mamba_num_heads=4, mamba_head_dim=8, mamba_d_head=8, mamba_n_heads=4, ssm_state_size=8, n_groups=2, conv_kernel=4,
    hybrid_override_pattern="M*M-", short_conv_kernel_size=4,
)  # fmt: skip


@pytest.mark.parametrize("kind", DEFAULTS)
def test_defaults_are_those_of_transformers(kind):
    wanted = DEFAULTS[kind]
    config = ARCHITECTURES[kind].Config.from_dict({name: v for name, v in LEAST.items() if name not in wanted})
    assert {name: getattr(config, name) for name in wanted} == wanted
