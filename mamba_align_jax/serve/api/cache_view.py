"""The endpoint /cache: what is cached of a prompt, for the page and for operators who ask why a prompt missed."""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mamba_align_jax import _values as values
from mamba_align_jax.serve.api.completions import text_or_tokens
from mamba_align_jax.serve.api.field_table import CHAT, fields_at
from mamba_align_jax.serve.api.messages import take_prompt
from mamba_align_jax.serve.api.sampling import wrong_value
from mamba_align_jax.serve.api.service import Service
from mamba_align_jax.serve.keys import cache_salt
from mamba_align_jax.serve.refusals import json_response


async def view_cache(service: Service, request: Request) -> Response:
    """Returns what is cached of a chat or a prompt under the caller's key and salt. Nothing is computed or changed.

    A malformed call is refused, and so is one that needs a tokenizer or a chat template that the model lacks.
    """
    key, fields = await service.read(request)
    text = await fields.aside(fields.take, "prompt", text_or_tokens, service)
    param = "messages" if text is None else "prompt"
    salt = cache_salt(key, fields.take("cache_salt", values.text) or "")
    if text is None:
        tokens = (await take_prompt(service, fields)).tokens
    else:
        tokens = await service.encode(text, "prompt") if isinstance(text, str) else text
    fields.end(fields_at(CHAT))
    service.check_length(len(tokens), 0, param)
    engine = service.serving.engine
    # It waits for the step that runs.
    try:
        found = await asyncio.to_thread(engine.cached_prefix, tokens, salt)
    except ValueError as error:
        raise wrong_value(error) from error
    return json_response(
        {
            "object": "cache_view",
            "num_tokens": len(tokens),
            "num_cached_tokens": found.num_tokens,
            "num_paged_tokens": found.num_paged_tokens,
            "boundaries": list(found.boundaries),
            "cache_miss": found.miss,
            "block_size": engine.config.block_size,
            "kv_page_size": engine.config.kv_page_size,
            "state_blocks": _pool(engine.cache.states.pool),
            "kv_pages": _pool(engine.cache.kv.pool),
        }
    )


def _pool(pool: Any) -> dict[str, int]:
    return {"total": pool.num_blocks - 1, "used": pool.num_held, "kept": pool.num_cached}
