"""The configuration of models published by state-spaces, the authors of Mamba, as fields of Mamba and Mamba-2 here.

Source: mamba_ssm's `MambaConfig`, and the defaults of its `Mamba`, `Mamba2` and `MixerModel`.
"""

from collections.abc import Mapping
from typing import Any

from mamba_align_jax.models.fields import check_field, refuse_step_limits, require

# By the kind of layer: our name of each option, its published name and its default.
_OPTIONS = {
    "Mamba1": (
        "mamba",
        {
            "state_size": ("d_state", 16),
            "conv_kernel": ("d_conv", 4),
            "expand": ("expand", 2),
            "time_step_rank": ("dt_rank", "auto"),
            "use_conv_bias": ("conv_bias", True),
            "use_bias": ("bias", False),
        },
    ),
    "Mamba2": (
        "mamba2",
        {
            "state_size": ("d_state", 128),
            "conv_kernel": ("d_conv", 4),
            "expand": ("expand", 2),
            "head_dim": ("headdim", 64),
            "n_groups": ("ngroups", 1),
            "use_conv_bias": ("conv_bias", True),
            "use_bias": ("bias", False),
        },
    ),
}


def is_state_spaces(config: Mapping[str, Any]) -> bool:
    """Returns whether the fields of a config.json are those of a model by state-spaces."""
    return "model_type" not in config and "d_model" in config and "n_layer" in config


def from_state_spaces(config: Mapping[str, Any]) -> dict[str, Any]:
    """Renames the fields of such a config.json as transformers has them, and fills in what it leaves to mamba_ssm.

    Raises:
        ValueError: a field has a wrong type or a value that is not supported. It is named.
    """
    require(config, rms_norm=(True,), d_intermediate=(0,), attn_layer_idx=([],))
    options = config.get("ssm_cfg") or {}
    check_field("ssm_cfg", options, dict)
    require(options, layer=tuple(_OPTIONS), rmsnorm=(True,), norm_before_gate=(False,), D_has_hdim=(False,), d_ssm=())
    require(options, activation=("silu", "swish"))
    refuse_step_limits(options)
    kind, names = _OPTIONS[options.get("layer") or "Mamba1"]
    for name in ("d_model", "n_layer", "vocab_size"):
        check_field(name, config.get(name), int)
    padding = config.get("pad_vocab_size_multiple", 8)
    check_field("pad_vocab_size_multiple", padding, int)
    fields = {ours: options.get(theirs, default) for ours, (theirs, default) in names.items()}
    if kind == "mamba2":
        for name in ("expand", "head_dim"):
            check_field(name, fields[name], float if name == "expand" else int)
        inner = int(fields["expand"] * config["d_model"])
        if inner % fields["head_dim"]:
            raise ValueError(
                f"config.json: expand * d_model = {inner} must be a multiple of headdim = {fields['head_dim']}"
            )
        fields["num_heads"] = inner // fields["head_dim"]
    shared = {
        name: config[name]
        for name in ("dtype", "torch_dtype", "eos_token_id", "quantization", "quantization_config")
        if name in config
    }
    return (
        shared
        | fields
        | {
            "model_type": kind,
            "hidden_size": config["d_model"],
            "num_hidden_layers": config["n_layer"],
            "vocab_size": -(-config["vocab_size"] // padding) * padding,
            "residual_in_fp32": config.get("residual_in_fp32", True),
            "tie_word_embeddings": config.get("tie_embeddings", True),
            "layer_norm_epsilon": config.get("norm_epsilon", 1e-5),
        }
    )
