"""Writes replies as Anthropic's Messages API has them, in one piece or as events."""

import json
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from mamba_align_jax.serve.api.blocks import CALL, REASONING, Block, Blocks, Change
from mamba_align_jax.serve.replies.parts import Part

# By the engine's reasons, where no call and no stop string ended the reply.
_REASONS = {"stop": "end_turn", "length": "max_tokens"}


class MessageWriter:
    """One reply as it comes."""

    def __init__(self, model: str, id_: str) -> None:
        self._blocks, self._ids = Blocks(), dict[int, str]()
        self._head = {"id": f"msg_{id_}", "type": "message", "role": "assistant", "model": model}

    def begin(self, usage: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the events with which a stream begins."""
        empty = dict(
            content=[], stop_reason=None, stop_sequence=None, usage=written_usage({**usage, "completion_tokens": 0})
        )
        return [{"type": "message_start", "message": {**self._head, **empty}}]

    def add(self, parts: Iterable[Part]) -> list[dict[str, Any]]:
        """Takes new parts of the reply, and returns the events for them."""
        return [self._event(change) for change in self._blocks.add(parts)]

    def end(self, reason: str | None, stop: object, usage: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the events with which a stream ends."""
        closed = [self._event(change) for change in self._blocks.close()]
        delta = {"type": "message_delta", "delta": self._ending(reason, stop), "usage": written_usage(usage)}
        return [*closed, delta, {"type": "message_stop"}]

    def whole(self, reason: str | None, stop: object, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the reply in one piece."""
        content = [self._written(*numbered) for numbered in enumerate(self._blocks.blocks)]
        return {**self._head, "content": content, **self._ending(reason, stop), "usage": written_usage(usage)}

    def _ending(self, reason: str | None, stop: object) -> dict[str, Any]:
        if isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        calls = reason == "stop" and any(block.kind == CALL for block in self._blocks.blocks)
        return {"stop_reason": "tool_use" if calls else _REASONS.get(reason or "stop"), "stop_sequence": None}

    def _event(self, change: Change) -> dict[str, Any]:
        index, block = change.index, self._blocks.blocks[change.index]
        if change.kind == "opened":
            empty = Block(block.kind, name=block.name)
            return {"type": "content_block_start", "index": index, "content_block": self._written(index, empty)}
        if change.kind == "closed":
            return {"type": "content_block_stop", "index": index}
        kinds = {REASONING: ("thinking_delta", "thinking"), CALL: ("input_json_delta", "partial_json")}
        kind, field = kinds.get(block.kind, ("text_delta", "text"))
        return {"type": "content_block_delta", "index": index, "delta": {"type": kind, field: change.text}}

    def _written(self, index: int, block: Block) -> dict[str, Any]:
        if block.kind == REASONING:
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        if block.kind == CALL:
            identity = self._ids.setdefault(index, f"toolu_{uuid.uuid4().hex[:24]}")
            return {"type": "tool_use", "id": identity, "name": block.name, "input": json.loads(block.text or "{}")}
        return {"type": "text", "text": block.text}


def written_usage(usage: Mapping[str, Any]) -> dict[str, int]:
    """Returns what a call has used. Tokens from the cache are counted beside the others, not among them."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage["completion_tokens"],
    }
