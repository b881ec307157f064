"""Reads JSON files of a model directory, and checks the type and the range of their fields by name."""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mamba_align_jax.errors import FieldError

# Fields that architectures read besides those of their `Config`, here or nested: a published name means the same in
# every family.
_OTHER_TYPES: Mapping[str, Any] = types.MappingProxyType(
    {
        "attention_head_dim": int,
        "attn_layer_offset": int,
        "attn_layer_period": int,
        "block_ff_dim": int,
        "block_ffn_dim_multiplier": float,
        "block_multiple_of": int,
        "expand": float,
        "first_k_dense_replace": int,
        "full_attention_interval": int,
        "full_attn_idxs": tuple[int, ...],
        "full_attn_layers": tuple[int, ...],
        "gate_lower_bound": float,
        "head_dim": int,
        "ffn_hidden_size": int,
        "hybrid_override_pattern": str,
        "kda_layers": tuple[int, ...],
        "kda_safe_gate": bool,
        "layer_group_size": int,
        "layer_types": tuple[str, ...],
        "layers_block_type": tuple[str, ...],
        "linear_attn_config": dict,
        "mamba_conv_bias": bool,
        "mamba_d_conv": int,
        "mamba_d_ssm": int,
        "mamba_expand": float,
        "mamba_n_groups": int,
        "model_max_length": int,
        "n_group": int,
        "n_shared_experts": int,
        "norm_topk_prob": bool,
        "num_experts_per_tok": int,
        "num_heads": int,
        "num_local_experts": int,
        "original_max_position_embeddings": int,
        "partial_rotary_factor": float,
        "rope_parameters": dict,
        "rope_scaling": dict,
        "rope_theta": float,
        "rotary_dim": int,
        "short_conv_kernel_size": int,
        "theta": float,
        "tie_embedding": bool,
    }
)
# Fields of a rotation that is stretched.
SCALING_TYPES: Mapping[str, Any] = types.MappingProxyType(
    {
        "attention_factor": float,
        "beta_fast": float,
        "beta_slow": float,
        "factor": float,
        "high_freq_factor": float,
        "low_freq_factor": float,
        "mscale": float,
        "mscale_all_dim": float,
        "original_max_position_embeddings": int,
        "short_factor": tuple[float, ...],
        "truncate": bool,
    }
)
# Fields for which a configuration may say "auto", so that the architecture computes them.
_AUTOMATIC = ("mamba_d_head", "mamba_dt_rank", "time_step_rank")
# Integers that may be 0, besides those whose default is 0.
_MAY_BE_ZERO = (
    "attn_layer_indices",
    "attn_layer_offset",
    "eos_token_id",
    "expert_layer_offset",
    "first_k_dense_replace",
    "full_attn_idxs",
    "mlp_only_layers",
    "num_experts",
    "num_experts_per_tok",
    "num_experts_per_token",
    "num_local_experts",
)
# Sizes end far above those of any model, so that a wrong one can't fill the memory before a tensor is looked at.
_MAX_SIZE, _MAX_COUNT, _MAX_NUMBER = 2**24, 2**12, 2**31 - 1
_COUNTS = (
    "n_routed_experts",
    "num_attention_heads",
    "num_experts",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_local_experts",
    "num_shared_experts",
)
_NUMBERS = ("eos_token_id", "max_position_embeddings", "model_max_length", "original_max_position_embeddings")
_POSITIVE = (
    *("attention_factor", "beta_fast", "beta_slow", "expand", "factor", "high_freq_factor", "logits_scaling"),
    *("low_freq_factor", "mamba_expand", "rope_theta", "block_ffn_dim_multiplier", "theta"),
)


# Names of the limits of step sizes.
_STEP_LIMITS = ("dt_limit", "mamba_dt_limit", "time_step_limit")


def read_object(file: Path) -> dict[str, Any]:
    """Reads a file that holds one JSON object.

    Raises:
        ValueError: the file holds something else. It is named.
    """
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file.name} must hold a JSON object, got {error}, in {str(file.parent)!r}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file.name} must hold a JSON object, got {_short(found)}, in {str(file.parent)!r}")
    return found


def wrong(name: str, wanted: str, got: Any, *, must: str = "must be", file: str = "config.json") -> FieldError:
    """Returns the error for a field of a file: see `FieldError`. `got` is written as `str` writes it."""
    return FieldError(f"{file}: {name}", wanted, str(got), must)


def require(config: Mapping[str, Any], **supported: tuple[Any, ...]) -> None:
    """Checks that each option has one of its supported values, is null, or is left out.

    Raises:
        ValueError: an option has another value. The option is named.
    """
    for name, values in supported.items():
        got = config.get(name)
        if got is not None and got not in values:
            raise wrong(name, f"one of {values}", repr(got))


def agree(config: Mapping[str, Any], **derived: Any) -> None:
    """Checks that fields which follow from others say what these say, are null, or are left out.

    Raises:
        ValueError: a field says something else. It is named.
    """
    for name, wanted in derived.items():
        got = config.get(name)
        if got is not None and got != wanted:
            raise wrong(name, f"{_short(wanted)}, as other fields say", _short(got))


def refuse_step_limits(config: Mapping[str, Any]) -> None:
    """Checks that step sizes have no limit, because no layer clamps them.

    Infinity may be written as JSON's `Infinity`, as text, as transformers' `{"__float__": "Infinity"}`, or as null.

    Raises:
        ValueError: a limit clamps some step sizes, or is no pair of numbers. Its name is in the text.
    """
    for name in _STEP_LIMITS:
        limit = config.get(name)
        if limit is None:
            continue
        pair = limit if isinstance(limit, list | tuple) and len(limit) == 2 else (math.nan, math.nan)
        low, high = map(_limit, pair, (-math.inf, math.inf))
        # All step sizes are positive.
        if not (low <= 0 and high == math.inf):
            raise wrong(name, "[0, Infinity] or null, because step sizes are not clamped", _short(limit))


def _limit(value: Any, unlimited: float) -> float:
    """Returns a limit of step sizes as a number; NaN if it is none."""
    if value is None:
        return unlimited
    number: Any = value.get("__float__") if isinstance(value, dict) else value
    try:
        return math.nan if isinstance(number, bool) else float(number)
    except (OverflowError, TypeError, ValueError):
        return math.nan


def check_given(config: Mapping[str, Any], cls: Any) -> None:
    """Checks the fields that an architecture's `Config` reads, before it computes with them. Null is left out.

    Raises:
        ValueError: a field has a wrong type or is out of range. The field is named.
    """
    wanted = {**_OTHER_TYPES} | {field.name: field.type for field in dataclasses.fields(cls)}
    for name in sorted(config.keys() & wanted.keys()):
        value = config[name]
        if value is None or (value == "auto" and name in _AUTOMATIC):
            continue
        default = getattr(cls, name, None)
        if isinstance(value, dict) and dict in _options(wanted[name]):
            check_given({key: part for key, part in value.items() if key in _OTHER_TYPES}, cls)
        else:
            check_field(name, value, wanted[name], may_be_zero=default == 0 and default is not False)


def check_field(name: str, value: Any, wanted: Any, *, may_be_zero: bool = False, file: str = "config.json") -> None:
    """Checks one field of a file. Its type is `wanted`, as a dataclass annotates it.

    With `may_be_zero` a number that must be positive otherwise may be 0.

    Raises:
        ValueError: the value has another type or is out of range. The field is named.
    """
    least = 0 if may_be_zero or name in _MAY_BE_ZERO else 1
    most = _MAX_NUMBER if name in _NUMBERS else _MAX_COUNT if name in _COUNTS else _MAX_SIZE
    limits = range(least, most + 1)
    if not _fits(value, wanted, limits):
        raise wrong(name, _words(wanted, limits), _short(value), file=file)
    if name == "partial_rotary_factor" and not 0 < value <= 1:
        raise wrong(name, "above 0 and at most 1", repr(value), file=file)
    is_epsilon = name.endswith(("_eps", "epsilon"))
    is_off = may_be_zero and value == 0
    if value is not None and (is_epsilon or name in _POSITIVE) and value <= 0 and not is_off:
        raise wrong(name, "above 0", repr(value), file=file)


def _options(wanted: Any) -> tuple[Any, ...]:
    """Returns the types of a union, or the type itself."""
    return typing.get_args(wanted) if isinstance(wanted, types.UnionType) else (wanted,)


def _fits(value: Any, wanted: Any, limits: range) -> bool:
    return any(_fits_one(value, option, limits) for option in _options(wanted))


def _fits_one(value: Any, wanted: Any, limits: range) -> bool:
    if wanted is types.NoneType:
        return value is None
    if wanted is int:
        return isinstance(value, int) and not isinstance(value, bool) and value in limits
    if wanted is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)
    if typing.get_origin(wanted) is tuple:
        each = typing.get_args(wanted)
        if not isinstance(value, list | tuple):
            return False
        if each[-1] is Ellipsis:
            return all(_fits(part, each[0], limits) for part in value)
        return len(value) == len(each) and all(_fits(*pair, limits) for pair in zip(value, each, strict=True))
    return isinstance(value, wanted)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # An integer beyond the largest float.
        return False


def _words(wanted: Any, limits: range) -> str:
    words = {
        int: f"an integer from {limits[0]} to {limits[-1]}",
        float: "a finite number",
        bool: "true or false",
        str: "a string",
        dict: "an object",
        types.NoneType: "null",
    }
    several = {int: f"integers from {limits[0]} to {limits[-1]}", float: "finite numbers", str: "strings"}

    def one(option: Any) -> str:
        if typing.get_origin(option) is not tuple:
            return words[option]
        each = typing.get_args(option)
        return f"a list of {several[each[0]] if each[-1] is Ellipsis else f'{len(each)} {several[each[0]]}'}"

    return " or ".join(one(option) for option in _options(wanted) if option is not types.NoneType)


def _short(value: Any) -> str:
    """Returns a value as JSON writes it, cut to one short line."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
