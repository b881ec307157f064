"""The endpoint /v1/responses."""

import time
import uuid

from starlette.requests import Request
from starlette.responses import Response

from mamba_align_jax import _values as values
from mamba_align_jax.serve.api.responses.reading import NAMES, to_chat
from mamba_align_jax.serve.api.responses.writing import ResponseWriter
from mamba_align_jax.serve.api.service import Service
from mamba_align_jax.serve.api.written import answer, plan
from mamba_align_jax.serve.limits.clients import EventStream


async def create_response(service: Service, request: Request) -> Response | EventStream:
    """Answers a call, or raises a Refusal if it is malformed, asks for too much, or can't be run."""
    key, fields = await service.read(request)
    streams = fields.take("stream", values.flag) or False
    # What would hide the length of deltas from who watches the line is not added.
    fields.take("stream_options", lambda name, value: value)
    read = await fields.aside(to_chat, fields, service.settings.limits)
    planned = await plan(service, key, read.chat, NAMES)
    writer = ResponseWriter(service.settings.model_name, uuid.uuid4().hex, int(time.time()), read.shown)
    return await answer(service, request, planned, writer, streams=streams)
