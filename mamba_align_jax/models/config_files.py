"""Reads the configuration files of a model directory: config.json and generation_config.json."""

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mamba_align_jax import _values as values
from mamba_align_jax.models.fields import check_field, read_object, wrong
from mamba_align_jax.models.state_spaces import from_state_spaces, is_state_spaces

_LOG = logging.getLogger(__name__)

# Where configurations of models for images or sound hold the fields of their text model.
_TEXT_FIELDS = ("text_config", "llm_config")
# Fields that a configuration with a nested text model may hold outside of the nested part.
_SHARED_FIELDS = (
    "model_type",
    "dtype",
    "torch_dtype",
    "eos_token_id",
    "tie_word_embeddings",
    "quantization",
    "quantization_config",
)
# By the names of `SamplingParams`, the fields of generation_config.json and their types.
_SAMPLING = MappingProxyType(
    {
        "temperature": ("temperature", float),
        "top_k": ("top_k", int),
        "top_p": ("top_p", float),
        "min_p": ("min_p", float),
        "repetition_penalty": ("repetition_penalty", float),
        "max_tokens": ("max_new_tokens", int),
    }
)
# Fields that change what is sampled and that the engine can't follow, with the values that change nothing.
_UNSUPPORTED = MappingProxyType(
    {
        "no_repeat_ngram_size": (0, None),
        "num_beams": (1, None),
        "typical_p": (1, None),
    }
)
_ADAPTER = "adapter_config.json"
# What is done with a PEFT adapter instead of loading it.
MERGE_ADAPTER = "can't be loaded: merge it into its model where PEFT is, with merge_and_unload(), and save that"
END_TOKENS = int | tuple[int, ...] | None


def read_config(path: str | Path) -> dict[str, Any]:
    """Reads the fields of the text model from a directory's config.json.

    If they are nested in `text_config` or `llm_config`, fields beside it fill in what it lacks, and its end tokens are
    those of both. Models by state-spaces have other names of the fields, which are translated.

    Raises:
        ValueError: the directory has no config.json, or that is no object, or a PEFT adapter is in the directory.
    """
    values.instance("path", path, str, Path)
    file = Path(path) / "config.json"
    if Path(path).suffix == ".gguf":
        raise ValueError(
            f"model directory must hold a config.json, got a GGUF file, which can't be loaded: {str(path)!r}"
        )
    if (Path(path) / _ADAPTER).is_file():
        raise ValueError(
            f"model directory must hold a whole model, got a PEFT adapter ({_ADAPTER}), which {MERGE_ADAPTER}: "
            f"{str(path)!r}"
        )
    if not file.is_file():
        raise ValueError(f"model directory must hold a config.json, got {str(path)!r}")
    config = _with_modelopt(read_object(file), Path(path) / "hf_quant_config.json")
    if is_state_spaces(config):
        return from_state_spaces(config)
    nested = next((name for name in _TEXT_FIELDS if config.get(name) is not None), None)
    if nested is None:
        return config
    text = config[nested]
    if not isinstance(text, dict):
        raise wrong(nested, "an object", f"{text!r}, in {str(path)!r}")
    # Null means the same as nothing, so it doesn't hide what stands outside.
    given = {name: value for name, value in text.items() if value is not None or name not in _SHARED_FIELDS}
    ends = end_tokens(config, text)
    shared = {name: config[name] for name in _SHARED_FIELDS if name in config}
    return shared | given | ({} if ends is None else {"eos_token_id": ends})


def _with_modelopt(config: dict[str, Any], file: Path) -> dict[str, Any]:
    """Adds the `quantization_config` that older versions of ModelOpt write to a file of its own, if there is one."""
    if config.get("quantization_config") is not None or not file.is_file():
        return config
    given = read_object(file).get("quantization")
    if not isinstance(given, dict):
        raise wrong("quantization", "an object", f"{given!r}, in {str(file.parent)!r}", file=file.name)
    return config | {"quantization_config": {"quant_method": "modelopt"} | given}


def read_generation_config(path: str | Path) -> dict[str, Any]:
    """Reads the fields of generation_config.json: a model's end tokens, and how its authors sample from it.

    Without such a file there are none.

    Raises:
        ValueError: the file is no object, or `eos_token_id` is neither a token nor a list of tokens.
    """
    values.instance("path", path, str, Path)
    file = Path(path) / "generation_config.json"
    if not file.is_file():
        return {}
    fields = read_object(file)
    check_field("eos_token_id", fields.get("eos_token_id"), END_TOKENS, file=file.name)
    return fields


def read_tokenizer_end(path: str | Path) -> dict[str, Any]:
    """Reads the end token of a directory's tokenizer as `eos_token_id`. tokenizer_config.json names it by its text.

    If the files of the tokenizer name none, or are not there, the result is empty.

    Raises:
        ValueError: tokenizer_config.json is no object.
    """
    values.instance("path", path, str, Path)
    file, every = Path(path) / "tokenizer_config.json", Path(path) / "tokenizer.json"
    fields = read_object(file) if file.is_file() else {}
    name = _text_of(fields.get("eos_token"))
    if name is None:
        return {}
    added = fields.get("added_tokens_decoder")
    found = [(int(token), one) for token, one in added.items() if token.isdecimal()] if isinstance(added, dict) else []
    if not found and every.is_file():
        # Newer files have the numbers of these tokens in tokenizer.json only. Whoever needs that file refuses a wrong one.
        with contextlib.suppress(ValueError, AttributeError, TypeError):
            found = [(one.get("id"), one) for one in read_object(every).get("added_tokens") or ()]
    return next(({"eos_token_id": token} for token, one in found if _text_of(one) == name), {})


def _text_of(token: Any) -> str | None:
    """Returns the text of a special token, which files have as it is or as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def end_tokens(*fields: Mapping[str, Any]) -> int | tuple[int, ...] | None:
    """Joins the `eos_token_id` of several files. Configurations of models for chats often name one that differs.

    The result is the token, if all files name the same one, or all of them; None if there are none.
    """
    found: dict[int, None] = {}
    for part in fields:
        tokens = part.get("eos_token_id")
        check_field("eos_token_id", tokens, END_TOKENS)
        found |= dict.fromkeys([tokens] if isinstance(tokens, int) else tokens or ())
    return tuple(found) if len(found) > 1 else next(iter(found), None)


def read_sampling_defaults(path: str | Path) -> dict[str, Any]:
    """Reads how a model's authors sample from it, from generation_config.json, as fields of `SamplingParams`.

    They are the fields that the file has, whatever it says of `do_sample`, as vLLM's server takes them. Without such a
    file there are none. A warning is logged for fields that change what is sampled and that the engine can't follow.

    Raises:
        ValueError: a field has a wrong type. It is named.
    """
    fields, name = read_generation_config(path), "generation_config.json"
    found = {}
    for ours, (theirs, wanted) in _SAMPLING.items():
        value = fields.get(theirs)
        if value is not None:
            check_field(theirs, value, wanted, may_be_zero=True, file=name)
            found[ours] = value
    left = [f"{field}={fields[field]!r}" for field, neutral in _UNSUPPORTED.items() if fields.get(field) not in neutral]
    if left:
        _LOG.warning("%s: the engine has no such options and leaves them out: %s", name, ", ".join(left))
    return found


def read_do_sample(path: str | Path) -> bool:
    """Returns whether a model's authors draw tokens, as generation_config.json says; they don't if it says nothing.

    Raises:
        ValueError: the directory has no such file, or the field is neither true nor false.
    """
    values.instance("path", path, str, Path)
    name = "generation_config.json"
    if not (Path(path) / name).is_file():
        raise ValueError(f"model directory must hold a {name}, got {str(path)!r}")
    do_sample = read_generation_config(path).get("do_sample")
    check_field("do_sample", do_sample, bool | None, file=name)
    return bool(do_sample)
