"""Cache events as bytes: vLLM's messages for pages of keys and values, and messages of the same kind for states.

A batch is `[time, events, data_parallel_rank]`, and each event is a map whose field `type` names its kind, as vLLM has
written them since June 2026. Decoders that are generated from vLLM's types raise for a kind that they do not know, so a
stream for them leaves out the events of states. The other stream has all events, in one order.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from mamba_align_jax.cache import events as cache

MEDIUM = "GPU"


class _Event(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class BlockStored(_Event):
    """Pages that follow one another can be found. The names of the fields are vLLM's."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(_Event):
    """Pages can't be found any more."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(_Event):
    """Nothing can be found."""


class StateStored(_Event):
    """The state after `num_tokens` tokens can be found. `block_hash` is that of the page that ends there."""

    block_hash: int
    num_tokens: int
    medium: str | None


class StateRemoved(_Event):
    """A state can't be found any more. Its page may still be cached."""

    block_hash: int
    medium: str | None


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    """Events in their order, with the time in seconds since 1970."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared | StateStored | StateRemoved]
    data_parallel_rank: int | None = None


_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Batch)


def encode(time: float, events: Iterable[cache.CacheEvent], *, states: bool) -> bytes | None:
    """Returns a batch of events in their order as bytes, or None if it would be empty.

    `time` is when it happened, in seconds since 1970. `states` says whether the events of states are written, and those
    of imported pages, whose tokens are not known.
    """
    written: list[Any] = []
    for event in events:
        last = written[-1] if written else None
        match event:
            case cache.PageStored() if isinstance(last, BlockStored) and _continues(event, last):
                last.block_hashes.append(event.block_hash)
                last.token_ids.extend(event.tokens)
                if last.extra_keys is not None:
                    last.extra_keys.append(None)
            case cache.PageStored() if event.tokens or states:
                written.append(_block_stored(event))
            case cache.PageRemoved() if isinstance(last, BlockRemoved):
                last.block_hashes.append(event.block_hash)
            case cache.PageRemoved():
                written.append(BlockRemoved([event.block_hash], MEDIUM, 0))
            case cache.StateStored() if states:
                written.append(StateStored(event.block_hash, event.num_tokens, MEDIUM))
            case cache.StateRemoved() if states:
                written.append(StateRemoved(event.block_hash, MEDIUM))
            case cache.CacheCleared():
                written.append(AllBlocksCleared())
    return _ENCODER.encode(Batch(time, written, 0)) if written else None


def decode(payload: bytes) -> tuple[float, tuple[cache.CacheEvent, ...]]:
    """Returns the time and the events of a batch that `encode` or vLLM has written. The salts of pages are left out.

    Raises:
        ValueError: The bytes are no such batch.
    """
    try:
        batch = _DECODER.decode(payload)
    except msgspec.MsgspecError as error:
        raise ValueError(f"decode: payload must be a batch of cache events, and it is not: {error}") from error
    return batch.ts, tuple(event for written in batch.events for event in _events(written))


def _continues(page: cache.PageStored, last: BlockStored) -> bool:
    """Whether a page can be told together with those before it. An imported page has no tokens, unlike the others."""
    return last.block_hashes[-1] == page.parent and last.block_size == len(page.tokens)


def _block_stored(page: cache.PageStored) -> BlockStored:
    # The salt is told with the first page of a prefix, as vLLM does, and all later hashes depend on it.
    is_salted = page.salt and page.parent is None
    return BlockStored(
        block_hashes=[page.block_hash],
        parent_block_hash=page.parent,
        token_ids=list(page.tokens),
        block_size=len(page.tokens),
        lora_id=None,
        medium=MEDIUM,
        lora_name=None,
        extra_keys=[(page.salt.decode(errors="backslashreplace"),)] if is_salted else None,
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )


def _events(written: Any) -> Iterator[cache.CacheEvent]:
    match written:
        case BlockStored():
            parent, size = written.parent_block_hash, written.block_size
            for number, name in enumerate(written.block_hashes):
                yield cache.PageStored(name, parent, tuple(written.token_ids[number * size : (number + 1) * size]))
                parent = name
        case BlockRemoved():
            yield from map(cache.PageRemoved, written.block_hashes)
        case StateStored():
            yield cache.StateStored(written.block_hash, written.num_tokens)
        case StateRemoved():
            yield cache.StateRemoved(written.block_hash)
        case _:
            yield cache.CacheCleared()
