"""The endpoints /tokenize and /detokenize: what the tokenizer makes of a text or a chat, and of tokens."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mamba_align_jax import _values as values
from mamba_align_jax.serve.api.field_table import CHAT, fields_at
from mamba_align_jax.serve.api.messages import take_prompt
from mamba_align_jax.serve.api.service import Service
from mamba_align_jax.serve.long_answers import SlicedResponse, json_slices
from mamba_align_jax.serve.refusals import json_response

_SLICE = 2**16


async def tokenize(service: Service, request: Request) -> Response:
    """Returns the tokens of a text, or of a chat as the model reads it.

    A malformed call is refused, and so is one that needs a tokenizer or a chat template that the model lacks.
    """
    _, fields = await service.read(request)
    text = await fields.aside(fields.take, "prompt", values.text)
    if text is None:
        tokens = (await take_prompt(service, fields)).tokens
    else:
        special = fields.take("add_special_tokens", values.flag)
        tokens = await service.encode(text, "prompt", add_special_tokens=special is not False)
    fields.end(fields_at(CHAT))
    content = {"count": len(tokens), "max_model_len": service.max_model_len, "tokens": list(tokens)}
    return SlicedResponse([*json_slices(content)])


async def detokenize(service: Service, request: Request) -> Response:
    """Returns the text of tokens, special ones too. A malformed call is refused, and any without a tokenizer."""
    _, fields = await service.read(request)
    vocab_size = service.serving.engine.model_config.vocab_size
    tokens = await fields.aside(fields.need, "tokens", _tokens, vocab_size)
    fields.end()
    return json_response({"prompt": await service.decode(tokens, "tokens")})


def _tokens(name: str, value: Any, vocab_size: int) -> list[int]:
    """Checks tokens, of which there may be millions, in slices, between which other threads run."""
    values.require(isinstance(value, list), name, "a sequence of whole numbers", value)
    for start in range(0, len(value), _SLICE):
        values.integers(name, value[start : start + _SLICE], 0, vocab_size - 1)
    return value
