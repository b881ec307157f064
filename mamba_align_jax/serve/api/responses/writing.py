"""Writes replies as OpenAI's Responses API has them, in one piece or as events."""

import itertools
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from mamba_align_jax.serve.api.blocks import CALL, REASONING, Block, Blocks, Change
from mamba_align_jax.serve.replies.parts import Part

_PREFIXES = {REASONING: "rs", CALL: "fc"}


class ResponseWriter:
    """One reply as it comes."""

    def __init__(self, model: str, id_: str, created: int, shown: Mapping[str, Any]) -> None:
        """Begins a reply. `shown` is what the response repeats of the call."""
        self._blocks, self._ids, self._numbers = Blocks(), dict[int, tuple[str, str]](), itertools.count()
        self._head = {"id": f"resp_{id_}", "object": "response", "created_at": created, "model": model, **shown}
        self._head |= {"error": None, "previous_response_id": None, "truncation": "disabled", "store": False}

    def begin(self, usage: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the events with which a stream begins."""
        response = {**self._head, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        return [self._numbered(f"response.{kind}", response=response) for kind in ("created", "in_progress")]

    def add(self, parts: Iterable[Part]) -> list[dict[str, Any]]:
        """Takes new parts of the reply, and returns the events for them."""
        return [event for change in self._blocks.add(parts) for event in self._events(change)]

    def end(self, reason: str | None, stop: object, usage: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the events with which a stream ends."""
        closed = [event for change in self._blocks.close() for event in self._events(change)]
        response = self.whole(reason, stop, usage)
        return [*closed, self._numbered(f"response.{response['status']}", response=response)]

    def whole(self, reason: str | None, stop: object, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the reply in one piece."""
        ended = {"status": "completed", "incomplete_details": None}
        if reason == "length":
            ended = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        items = [self._item(index, block, "completed") for index, block in enumerate(self._blocks.blocks)]
        return {**self._head, **ended, "output": items, "usage": _usage(usage)}

    def _numbered(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "sequence_number": next(self._numbers), **fields}

    def _events(self, change: Change) -> list[dict[str, Any]]:
        index, block = change.index, self._blocks.blocks[change.index]
        place = {"item_id": self._ids_of(index, block)[0], "output_index": index}
        if change.kind == "opened":
            empty = self._item(index, Block(block.kind, name=block.name), "in_progress")
            added = [self._numbered("response.output_item.added", output_index=index, item=empty)]
            if block.kind == CALL:
                return added
            part = _part(Block(block.kind))
            return [*added, self._numbered("response.content_part.added", **place, content_index=0, part=part)]
        kind, inner = _kind(block), {} if block.kind == CALL else {"content_index": 0}
        logprobs = {"logprobs": []} if kind == "output_text" else {}
        if change.kind == "grown":
            return [self._numbered(f"response.{kind}.delta", **place, **inner, delta=change.text, **logprobs)]
        said = {"arguments": block.text, "name": block.name} if block.kind == CALL else {"text": block.text}
        done = [self._numbered(f"response.{kind}.done", **place, **inner, **said, **logprobs)]
        if block.kind != CALL:
            done.append(self._numbered("response.content_part.done", **place, content_index=0, part=_part(block)))
        item = self._item(index, block, "completed")
        return [*done, self._numbered("response.output_item.done", output_index=index, item=item)]

    def _ids_of(self, index: int, block: Block) -> tuple[str, str]:
        """Returns the name of an item, and that of its call."""
        new = f"{_PREFIXES.get(block.kind, 'msg')}_{uuid.uuid4().hex}", f"call_{uuid.uuid4().hex[:24]}"
        return self._ids.setdefault(index, new)

    def _item(self, index: int, block: Block, status: str) -> dict[str, Any]:
        identity, call = self._ids_of(index, block)
        if block.kind == CALL:
            named = {"call_id": call, "name": block.name, "arguments": block.text}
            return {"type": "function_call", "id": identity, "status": status, **named}
        content = [_part(block)] if status == "completed" else []
        if block.kind == REASONING:
            return {"type": "reasoning", "id": identity, "status": status, "summary": [], "content": content}
        return {"type": "message", "id": identity, "status": status, "role": "assistant", "content": content}


def _kind(block: Block) -> str:
    return {REASONING: "reasoning_text", CALL: "function_call_arguments"}.get(block.kind, "output_text")


def _part(block: Block) -> dict[str, Any]:
    if block.kind == REASONING:
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a call has used, by this API's names."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        "total_tokens": usage["total_tokens"],
    }
