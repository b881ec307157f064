"""Every field of the published configuration classes is used, checked, or ignored for a reason.

`tests/data/config_fields.json` has the fields of transformers' classes. Below is what the loader does with each: a field is
checked, which means that a single value is supported, or ignored, or else it is used.
"""

import ast
import dataclasses
import functools
import json
import math
from pathlib import Path

import pytest
from fakes.driver import DATA
from fakes.kimi_weights import LING

import mamba_align_jax
from mamba_align_jax.models import ARCHITECTURES
from mamba_align_jax.models.config import ModelConfig
from mamba_align_jax.models.state_spaces import from_state_spaces

TYPES = json.loads((DATA / "config_fields.json").read_text())["types"]

WEIGHTS = "how random weights are drawn"
TRAINING = "training only"
SAME = "how transformers computes the same"
RESULTS = "what a call of transformers returns"
CLASSIFIERS = "classifiers only"
# What is ignored in every family, and why.
IGNORED = {
    "architectures": "the name of transformers' class: the other fields say what it computes",
    "attention_dropout": TRAINING,
    "bos_token_id": "prompts are tokens, and the tokenizer puts this one before them",
    "chunk_size": SAME,
    "chunk_size_feed_forward": SAME,
    "hidden_dropout": TRAINING,
    "id2label": CLASSIFIERS,
    "initializer_range": WEIGHTS,
    "label2id": CLASSIFIERS,
    "linear_a_log_max": WEIGHTS,
    "linear_a_log_min": WEIGHTS,
    "linear_dt_init_floor": WEIGHTS,
    "linear_dt_max": WEIGHTS,
    "linear_dt_min": WEIGHTS,
    "mamba_chunk_size": SAME,
    "mamba_ssm_cache_dtype": "EngineConfig.state_dtype says it",
    "moe_shared_expert_overlap": SAME,
    "mtp_layers_block_type": "the draft head is not loaded",
    "mtp_loss_scaling_factor": TRAINING,
    "num_logits_to_keep": RESULTS,
    "num_mtp_layers": "the draft head is not loaded",
    "num_nextn_predict_layers": "the draft head is not loaded",
    "output_hidden_states": RESULTS,
    "output_router_logits": RESULTS,
    "pad_token_id": "no prompt is padded",
    "pretraining_tp": TRAINING,
    "problem_type": CLASSIFIERS,
    "rescale_prenorm_residual": WEIGHTS,
    "return_dict": RESULTS,
    "router_aux_loss_coef": TRAINING,
    "time_step_floor": WEIGHTS,
    "time_step_init_scheme": WEIGHTS,
    "time_step_max": WEIGHTS,
    # transformers clamps the steps of prompts by it in Nemotron-H and Zamba2. The authors' own modules and vLLM don't.
    "time_step_min": WEIGHTS,
    "time_step_scale": WEIGHTS,
    "transformers_version": "who wrote the file",
    "use_associative_scan": SAME,
    "use_cache": RESULTS,
    "use_mamba_kernels": SAME,
    "use_mambapy": SAME,
    "use_mem_eff_path": SAME,
    "z_loss_coefficient": TRAINING,
}
# Fields that are used, but not in these families.
IGNORED_IN = {
    "mamba2": {"time_step_rank": "Mamba-2 has one step size per head and no product of low rank"},
    "nemotron_h": {"expand": "the number of heads and their size give the inner channels"},
}
# Fields of which one value is supported, with another one.
CHECKED_IN_ALL = {"is_encoder_decoder": True}
ACTIVATION, WINDOW, LIMIT = {"hidden_act": "relu"}, {"sliding_window": 64}, {"time_step_limit": [0.001, 0.1]}
CHECKED = {
    "bailing_hybrid": ACTIVATION | {"attention_bias": True, "num_key_value_heads": 4},
    "bamba": ACTIVATION | LIMIT | {"mlp_bias": True},
    "falcon_h1": ACTIVATION | LIMIT | {"mlp_bias": True},
    "falcon_mamba": ACTIVATION,
    "granitemoehybrid": ACTIVATION | LIMIT,
    "jamba": ACTIVATION,
    "kimi_linear": ACTIVATION | {"attention_bias": True, "num_key_value_heads": 4},
    "mamba": ACTIVATION,
    "mamba2": ACTIVATION | LIMIT | {"expand": 4},
    "nemotron_h": LIMIT | WINDOW | {
        "mamba_hidden_act": "gelu", "mamba_proj_bias": True, "mlp_hidden_act": "silu", "n_shared_experts": 2,
    },
    "olmo_hybrid": ACTIVATION | {"attention_bias": True},
    "qwen3_5_moe_text": ACTIVATION | {"attention_bias": True},
    "qwen3_5_text": ACTIVATION | {"attention_bias": True},
    "qwen3_next": ACTIVATION | {"attention_bias": True},
    "zamba2": {"hidden_act": "silu", "use_conv_bias": False, "use_long_context": True},
}  # fmt: skip
# What a configuration must say besides its class's defaults, so that every field has a use in it.
NEEDED = {
    "bailing_hybrid": {"num_key_value_heads": None},
    "falcon_h1": {"mamba_d_ssm": None},
    "granitemoehybrid": {"layer_types": ["mamba"] * 31 + ["attention"], "position_embedding_type": "rope"},
    "kimi_linear": {"num_key_value_heads": None},
    "lfm2": {"full_attn_idxs": [2]},
    "lfm2_moe": {"layer_types": ["conv"] * 31 + ["full_attention"]},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "mlp"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 27, "use_mem_rope": True},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 7.0, "original_max_position_embeddings": 64}
# Other values of fields for which a multiple or the opposite means nothing.
OTHERS = {
    "attn_layer_indices": [[3]],
    "dtype": ["float16"],
    "full_attn_idxs": [[1]],
    "layer_types": [["full_attention"] + ["linear_attention"] * 31, ["conv"] * 32],
    "layers_block_type": [["mamba"] * 4, ["mamba"] * 54],
    "linear_key_head_dim": [64],
    "linear_num_key_heads": [15, 8],
    "linear_num_value_heads": [60],
    "linear_value_head_dim": [64],
    "mamba_d_head": [64, 32],
    "mamba_d_ssm": [4096],
    "mlp_layer_types": [["dense"] * 27, ["dense"] * 42],
    "mlp_multipliers": [[0.5, 2.0]],
    "mlp_only_layers": [[3]],
    "moe_latent_size": [64],
    "position_embedding_type": ["nope"],
    "q_lora_rank": [64],
    "rope_parameters": [YARN, {"rope_type": "default", "rope_theta": 7.0}],
    "ssm_multipliers": [[0.5, 1.0, 1.0, 1.0, 1.0]],
    "time_step_rank": [7],
    "mamba_dt_rank": [7],
}
PACKAGE = Path(mamba_align_jax.__file__).parent


def base(kind):
    """The class's defaults."""
    defaults = {name: value for name, value in TYPES[kind]["fields"].items() if value is not None}
    return defaults | NEEDED.get(kind, {}) | {"model_type": kind}


def parsed(kind, fields):
    return ARCHITECTURES[kind].Config.from_dict(fields)


def ignored(kind):
    return (IGNORED | IGNORED_IN.get(kind, {})).keys() & TYPES[kind]["fields"].keys() - CHECKED.get(kind, {}).keys()


def checked(kind):
    return CHECKED_IN_ALL | CHECKED.get(kind, {})


def used(kind):
    return sorted(TYPES[kind]["fields"].keys() - ignored(kind) - checked(kind).keys())


def others(name, value):
    """Other values of a field."""
    if name in OTHERS:
        return OTHERS[name]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, float):
        return [2 * value + 1, value - 1]
    return [2 * value, value // 2, value + 1, 1] if isinstance(value, int) else [3]


def changes(kind, fields, name):
    """The fields of `Config` that change with a field of a configuration; its name if another value is refused by it."""
    found = set()
    for value in others(name, fields.get(name)):
        try:
            changed = parsed(kind, fields | {name: value})
        except ValueError as error:
            found |= {name} if name in str(error) else set()
            continue
        pairs = zip(dataclasses.asdict(parsed(kind, fields)).items(), dataclasses.asdict(changed).values(), strict=True)
        found |= {ours for (ours, before), after in pairs if before != after}
    return found


@functools.cache
def attributes():
    """The names of all attributes that models and engine read."""
    trees = [ast.parse(path.read_text()) for part in ("models", "engine") for path in (PACKAGE / part).glob("*.py")]
    return {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("kind", TYPES)
def test_every_field_that_is_not_listed_as_checked_or_ignored_changes_what_the_model_reads(kind):
    unused = {name for name in used(kind) if not changes(kind, base(kind), name) & attributes()}
    assert not unused


@pytest.mark.parametrize("kind", TYPES)
def test_other_values_of_checked_fields_are_refused_by_name(kind):
    for name, value in checked(kind).items():
        assert name in TYPES[kind]["fields"]
        with pytest.raises(ValueError, match=rf"config\.json: {name} must"):
            parsed(kind, base(kind) | {name: value})


@pytest.mark.parametrize("kind", TYPES)
def test_ignored_fields_change_nothing(kind):
    fields = base(kind)
    for name in ignored(kind):
        given = [3, None, True] if fields.get(name) is None else others(name, fields[name])
        assert {parsed(kind, fields | {name: value}) for value in given} == {parsed(kind, fields)}, name


def test_the_lists_name_no_field_that_no_class_has():
    every = {name for kind in TYPES for name in TYPES[kind]["fields"]}
    assert set(IGNORED) <= every
    assert all(set(IGNORED_IN[kind]) <= set(TYPES[kind]["fields"]) for kind in IGNORED_IN)


@pytest.mark.parametrize("kind", TYPES)
def test_a_field_may_have_the_other_name_under_which_the_class_takes_it(kind):
    """transformers saves a field under one of its names, and reads both."""
    pairs = TYPES[kind]["other_names"].items()
    for theirs, ours in [*pairs, *((ours, theirs) for theirs, ours in pairs)]:
        fields = base(kind)
        if theirs in fields or ours not in fields or ours in ignored(kind):
            continue
        renamed = {name: value for name, value in fields.items() if name != ours} | {theirs: fields[ours]}
        assert parsed(kind, renamed) == parsed(kind, fields), (theirs, ours)


# All families, with the spellings of limits that clamp some step size, and of those that clamp none.
CLAMPS = [[0.001, math.inf], [0.0, 0.1], [0, {"__float__": "1.0"}], [0.0, "5"], [0.1], "Infinity", [True, math.inf]]
FREE = [None, [0.0, math.inf], [0, {"__float__": "Infinity"}], [0.0, None], [0.0, "inf"], [-math.inf, math.inf]]


@pytest.mark.parametrize("name", ["time_step_limit", "mamba_dt_limit", "dt_limit"])
@pytest.mark.parametrize("kind", TYPES)
def test_limits_that_clamp_step_sizes_are_refused_by_name_in_every_family(kind, name):
    fields = base(kind)
    for limit in FREE:
        parsed(kind, fields | {name: limit})
    for limit in CLAMPS:
        with pytest.raises(ValueError, match=rf"config\.json: {name} must be \[0, Infinity\] or null, because"):
            parsed(kind, fields | {name: limit})


WHOLE = ["falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe", "olmo_hybrid", "zamba2"]


@pytest.mark.parametrize("kind", WHOLE)
def test_families_that_rotate_whole_heads_refuse_a_share_of_them(kind):
    rope = {"rope_type": "default", "rope_theta": 7.0, "partial_rotary_factor": 0.5}
    with pytest.raises(ValueError, match=r"config\.json: partial_rotary_factor must be one of \(1,\), got 0\.5"):
        parsed(kind, base(kind) | {"rope_parameters": rope})
    parsed(kind, base(kind) | {"rope_parameters": rope | {"partial_rotary_factor": 1.0}})


# Fields that are in files, but in no class, or no longer.
FOREIGN = {
    "bailing_hybrid": {
        "gated_attention_proj_granularity_type": "element_wise", "no_kda_lora": False, "qk_head_dim": 3,
        "rope_interleave": False, "use_bias": True, "use_kda": False, "use_kda_lora": True, "use_qkv_bias": True,
    },
    "bamba": {"layer_types": ["full_attention"] * 32, "mamba_expand": 4},
    "falcon_h1": {"layer_types": ["full_attention"] * 32, "mamba_use_mlp": False},
    "granitemoehybrid": {"normalization_function": "layernorm"},
    "jamba": {"mamba_inner_layernorms": False},
    "kimi_linear": {"mla_use_nope": False, "moe_layer_freq": 2, "num_nextn_predict_layers": 1, "qk_head_dim": 3},
    "lfm2": {"block_norm_eps": 0.1, "block_use_swiglu": False, "conv_dim": 3, "hidden_act": "relu", "use_pos_enc": False},
    "mamba": {"layer_types": ["full_attention"] * 32},
    "mamba2": {"layer_types": ["full_attention"] * 64, "rms_norm": False},
    "zamba2": {
        "attention_head_dim": 3, "attention_hidden_size": 3, "head_dim": 3, "hybrid_layer_ids": [1], "mamba_headdim": 3,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", FOREIGN)
def test_fields_of_files_that_would_change_the_model_are_refused_by_name(kind):
    for name, value in FOREIGN[kind].items():
        fields = base(kind) | ({"mamba_d_head": 64} if name == "mamba_expand" else {})
        with pytest.raises(ValueError, match=rf"config\.json: {name} must"):
            parsed(kind, fields | {name: value})


@pytest.mark.parametrize("kind", TYPES)
def test_windows_and_encoders_are_refused_in_every_family(kind):
    for name, value in {"sliding_window": 64, "use_sliding_window": True, "add_cross_attention": True}.items():
        with pytest.raises(ValueError, match=rf"config\.json: {name} must"):
            parsed(kind, base(kind) | {name: value})
    parsed(kind, base(kind) | {"sliding_window": 64, "use_sliding_window": False})


# What Ling 2.5's configuration has besides sizes (inclusionAI/Ring-V2.5, configuration_bailing_moe_v2_5.py).
LIGHTNING = {
    "group_norm_size": 4, "linear_silu": False, "max_window_layers": 20, "moe_router_enable_expert_bias": True,
    "num_key_value_heads": 1, "partial_rotary_factor": 0.5, "rope_interleave": True, "score_function": "sigmoid",
    "use_bias": False, "use_qk_norm": True, "use_qkv_bias": False,
}  # fmt: skip


def test_ling_2_5_under_the_name_of_ling_3_is_refused_as_lightning_attention():
    fields = {name: value for name, value in LING.items() if not name.startswith(("kda_", "short_conv"))}
    message = r"'bailing_hybrid' without short_conv_kernel_size, as in Ling 2\.5, has lightning attention"
    for more in ({}, LIGHTNING, LIGHTNING | {"use_kda": False}, {"short_conv_kernel_size": None}):
        with pytest.raises(ValueError, match=message):
            parsed("bailing_hybrid", fields | more)
    # Ling 3 has some of these fields, too.
    published = {"group_norm_size": 1, "linear_silu": True, "use_qk_norm": True, "no_kda_lora": True}
    assert parsed("bailing_hybrid", LING | published) == parsed("bailing_hybrid", LING)


# The arguments of mamba_ssm 2's `MambaConfig`, `Mamba` and `Mamba2` that change nothing in a model that is loaded.
MAMBA_SSM = {
    "attn_cfg": SAME, "fused_add_norm": SAME,
    **dict.fromkeys(("A_init_range", "conv_init", "dt_init", "dt_init_floor", "dt_max", "dt_min", "dt_scale"), WEIGHTS),
    **dict.fromkeys(("chunk_size", "use_fast_path", "use_mem_eff_path"), SAME),
}  # fmt: skip
MAMBA_SSM_USED = {
    "d_model": 128, "n_layer": 3, "norm_epsilon": 1e-3, "pad_vocab_size_multiple": 100, "residual_in_fp32": False,
    "tie_embeddings": False, "vocab_size": 512, "bias": True, "conv_bias": False, "d_conv": 3, "d_state": 32,
    "dt_rank": 6, "expand": 4, "headdim": 32, "layer": None, "ngroups": 2,
}  # fmt: skip


@pytest.mark.parametrize("layer", ["Mamba1", "Mamba2"])
def test_options_of_mamba_ssm_are_used_or_change_nothing(layer):
    outer = ("attn_cfg", "fused_add_norm", *list(MAMBA_SSM_USED)[:7])
    other = {"layer": "Mamba2" if layer == "Mamba1" else "Mamba1"}

    def read(**change):
        inside = {name: value for name, value in change.items() if name not in outer}
        fields = {"d_model": 64, "n_layer": 2, "vocab_size": 256, "ssm_cfg": {"layer": layer} | inside}
        found = from_state_spaces(fields | {name: value for name, value in change.items() if name in outer})
        return found["model_type"], parsed(found["model_type"], found)

    assert all(read(**{name: 3}) == read() for name in MAMBA_SSM)
    only = {"dt_rank": "Mamba1", "headdim": "Mamba2", "ngroups": "Mamba2"}
    for name, value in (MAMBA_SSM_USED | other).items():
        assert (read(**{name: value}) == read()) == (only.get(name, layer) != layer), name


def test_every_config_has_only_fields_that_models_or_engine_read():
    # LFM2's adjustment is done when a configuration is read, and must not be done again when it is written.
    written = {"block_auto_adjust_ff_dim", "model_type", "num_hidden_layers"}
    for kind in TYPES:
        config = ARCHITECTURES[kind].Config
        assert issubclass(config, ModelConfig)
        assert {field.name for field in dataclasses.fields(config)} <= attributes() | written
