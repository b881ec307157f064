"""The endpoints /v1/messages and /v1/messages/count_tokens."""

import uuid

from starlette.requests import Request
from starlette.responses import Response

from mamba_align_jax import _values as values
from mamba_align_jax.serve.api.anthropic.reading import NAMES, to_chat
from mamba_align_jax.serve.api.anthropic.writing import MessageWriter
from mamba_align_jax.serve.api.chat_plan import plan_chat, read_chat
from mamba_align_jax.serve.api.fields import Fields
from mamba_align_jax.serve.api.service import Service
from mamba_align_jax.serve.api.written import answer, own_names
from mamba_align_jax.serve.limits.clients import EventStream
from mamba_align_jax.serve.refusals import json_response


async def create_message(service: Service, request: Request) -> Response | EventStream:
    """Answers a call, or raises a Refusal if it is malformed, asks for too much, or can't be run."""
    key, fields = await service.read(request)
    streams = fields.take("stream", values.flag) or False
    chat = await fields.aside(to_chat, fields, service.settings.limits)
    with own_names(NAMES):
        planned = await plan_chat(service, key, Fields("", chat))
    writer = MessageWriter(service.settings.model_name, uuid.uuid4().hex)
    return await answer(service, request, planned, writer, NAMES, streams=streams)


async def count_tokens(service: Service, request: Request) -> Response:
    """Returns how many tokens the prompt of a call has. It is refused as the call would be."""
    key, fields = await service.read(request)
    fields.take("stream", values.flag)
    chat = await fields.aside(to_chat, fields, service.settings.limits, counts=True)
    with own_names(NAMES):
        read = await read_chat(service, key, Fields("", chat | {"max_tokens": 1}))
    return json_response({"input_tokens": len(read.prompt.tokens)})
