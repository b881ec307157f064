"""The endpoint /v1/responses."""

import time
import uuid

from starlette.requests import Request
from starlette.responses import Response

from mamba_align_jax import _values as values
from mamba_align_jax.serve.api.chat_plan import plan_chat
from mamba_align_jax.serve.api.fields import Fields, as_it_came
from mamba_align_jax.serve.api.responses.reading import NAMES, to_chat
from mamba_align_jax.serve.api.responses.writing import ResponseWriter
from mamba_align_jax.serve.api.service import Service
from mamba_align_jax.serve.api.written import answer, own_names
from mamba_align_jax.serve.limits.clients import EventStream


async def create_response(service: Service, request: Request) -> Response | EventStream:
    """Answers a call, or raises a Refusal if it is malformed, asks for too much, or can't be run."""
    key, fields = await service.read(request)
    streams = fields.take("stream", values.flag) or False
    # What would hide the length of deltas from who watches the line is not added.
    fields.take("stream_options", as_it_came)
    read = await fields.aside(to_chat, fields, service.settings.limits)
    with own_names(NAMES):
        planned = await plan_chat(service, key, Fields("", read.chat))
    writer = ResponseWriter(service.settings.model_name, uuid.uuid4().hex, int(time.time()), read.shown)
    return await answer(service, request, planned, writer, NAMES, streams=streams)
