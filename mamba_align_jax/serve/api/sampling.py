"""Turns the fields with which a call says how to sample into `SamplingParams`."""

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from mamba_align_jax import _values as values
from mamba_align_jax.engine.config import SamplingParams
from mamba_align_jax.engine.grammar import Grammar
from mamba_align_jax.errors import FieldError
from mamba_align_jax.serve.api.fields import Fields, as_it_came
from mamba_align_jax.serve.refusals import Refusal
from mamba_align_jax.serve.settings import Limits, Settings

# Fields that mean the same in the API and in `SamplingParams`, which checks them.
_SAME = (
    *("temperature", "top_p", "min_p", "min_tokens", "ignore_eos", "priority", "skip_special_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)

_ANY_OBJECT: Mapping[str, Any] = MappingProxyType({"type": "object"})


def take_sampling(fields: Fields, settings: Settings) -> dict[str, Any]:
    """Takes the fields that both endpoints have, and returns them as fields of `SamplingParams`.

    The call is refused if a field is malformed or exceeds a limit.
    """
    limits = settings.limits
    found: dict[str, Any] = {name: fields.take(name, as_it_came) for name in _SAME}
    top_k = fields.take("top_k", values.integer, -1)
    found["top_k"] = 0 if top_k == -1 else top_k
    found["seed"] = fields.take("seed", values.integer, None, None)
    found["stop"] = fields.take("stop", _stop, limits) or None
    found["stop_token_ids"] = fields.take("stop_token_ids", _stop_tokens, limits)
    found["logit_bias"] = fields.take("logit_bias", _logit_bias, limits) or None
    priority, smallest = found["priority"], settings.min_priority
    if values.is_integer(priority) and priority < smallest:
        raise Refusal(400, f"priority must be at least {smallest}, got {priority}", param="priority")
    # OpenAI's API draws tokens unless it is told otherwise.
    defaults = {"temperature": 1.0, **settings.sampling_defaults}
    return defaults | {name: value for name, value in found.items() if value is not None}


def make_params(found: Mapping[str, Any]) -> SamplingParams:
    """Makes the parameters of a call's first choice, or refuses the call if a field has a wrong value."""
    try:
        return SamplingParams(**found)
    except ValueError as error:
        raise wrong_value(error) from error


def wrong_value(error: ValueError, grammar_field: str = "response_format") -> Refusal:
    """Returns the refusal for a ValueError of the engine, with the API's name of the field that it is about.

    `grammar_field` is the field that a grammar comes from.
    """
    names = {"prompt_token_ids": "prompt", "grammar": grammar_field}
    param = names.get(error.field, error.field) if isinstance(error, FieldError) else None
    return Refusal(400, str(error), param=param)


def _stop(name: str, value: Any, limits: Limits) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    count, length = limits.stop_strings, limits.stop_length
    is_list = isinstance(strings, list) and len(strings) <= count
    values.require(is_list, name, f"a string, or a list of at most {count} strings", value)
    for text in strings:
        wanted = f"made of strings of 1 to {length} characters"
        values.require(isinstance(text, str) and 0 < len(text) <= length, name, wanted, text)
    return tuple(values.text(name, text) for text in strings)


def _stop_tokens(name: str, value: Any, limits: Limits) -> tuple[int, ...]:
    is_short = isinstance(value, list) and len(value) <= limits.stop_strings
    values.require(is_short, name, f"a list of at most {limits.stop_strings} tokens", value)
    return values.integers(name, value)


def _logit_bias(name: str, value: Any, limits: Limits) -> dict[int, float]:
    wanted = f"an object of at most {limits.logit_bias} tokens, each with a number from -100 to 100"
    values.require(isinstance(value, Mapping) and len(value) <= limits.logit_bias, name, wanted, value)
    bias = {}
    for token, number in value.items():
        is_token = token.isdecimal() and token.isascii() and len(token) < 11
        # "01" would be another name of token 1.
        values.require(is_token and str(int(token)) == token, name, wanted, token)
        bias[int(token)] = values.number(name, number, -100, 100, wanted)
    return bias


def take_grammar(fields: Fields, limits: Limits) -> tuple[str, Grammar | None]:
    """Takes what an answer must match, and returns the name of the field that says it, and the grammar, if there is any.

    `response_format` is OpenAI's, and `structured_outputs` is vLLM's. A format that is malformed, too large or unknown is
    refused, and so are both at once.
    """
    formatted, structured = fields.take("response_format", Fields), fields.take("structured_outputs", Fields)
    found = None if formatted is None else _formatted(formatted, limits)
    if structured is None:
        return "response_format", found
    if found is not None:
        message = "structured_outputs can't be given with response_format"
        raise Refusal(400, message, param="structured_outputs")
    return "structured_outputs", _structured(structured, limits)


def _formatted(wanted: Fields, limits: Limits) -> Grammar | None:
    kind, schema = wanted.need("type", values.choice, ("text", "json_object", "json_schema")), _ANY_OBJECT
    if kind == "json_schema":
        described = wanted.need("json_schema", Fields)
        described.need("name", values.text)
        described.take("description", values.text)
        described.take("strict", values.flag)
        schema = described.need("schema", _schema, limits)
        described.end()
    wanted.end()
    return None if kind == "text" else _json(schema)


def _json(schema: Mapping[str, Any]) -> Grammar:
    return Grammar("json_schema", json.dumps(dict(schema)))


def _structured(wanted: Fields, limits: Limits) -> Grammar:
    takers: Mapping[str, Callable[[str, Any, Limits], Grammar | None]] = {
        "json": lambda name, value, limits: _json(_schema(name, value, limits)),
        "json_object": lambda name, value, limits: _json(_ANY_OBJECT) if values.flag(name, value) else None,
        "regex": lambda name, value, limits: Grammar("regex", _grammar_text(name, value, limits)),
        "grammar": lambda name, value, limits: Grammar("lark", _grammar_text(name, value, limits)),
        "choice": _choice,
    }
    found = [wanted.take(name, take, limits) for name, take in takers.items()]
    for name in ("disable_any_whitespace", "disable_additional_properties"):
        wanted.refuse(name, (False,), "is not supported")
    wanted.end()
    grammars = [one for one in found if one is not None]
    if len(grammars) != 1:
        message = f"structured_outputs must have one of {', '.join(takers)}, got {len(grammars)} of them"
        raise Refusal(400, message, param="structured_outputs")
    return grammars[0]


def _choice(name: str, value: Any, limits: Limits) -> Grammar:
    texts = values.texts(name, value)
    values.require(bool(texts) and all(texts), name, "a list of texts, none of them empty", value)
    # The escapes of Lark's strings are those of JSON.
    return Grammar("lark", _grammar_text(name, "start: " + " | ".join(map(json.dumps, texts)), limits))


def _grammar_text(name: str, value: Any, limits: Limits) -> str:
    text, limit = values.text(name, value), limits.grammar_bytes
    values.require(0 < len(text) <= limit, name, f"1 to {limit} characters", len(text))
    return text


def _schema(name: str, value: Any, limits: Limits) -> Mapping[str, Any]:
    if isinstance(value, str):
        # vLLM takes a schema as JSON's text, too.
        value = json.loads(_grammar_text(name, value, limits))
    values.require(isinstance(value, Mapping), name, "a JSON object", type(value))
    size, limit = len(msgspec.json.encode(value)), limits.grammar_bytes
    values.require(size <= limit, name, f"at most {limit} bytes of JSON", size)
    return value
