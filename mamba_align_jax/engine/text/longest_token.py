"""How long a text can be that becomes few tokens, which is known before the text is read."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

# Parts that cut a text and leave none of it out.
_KEEPING = ("ByteLevel", "Digits", "Metaspace")
# The bytes that UTF-8 has.
_BYTES = sorted({*range(0xF5)} - {0xC0, 0xC1})


def longest_token(parts: Mapping[str, Any]) -> int | None:
    """Returns how many characters of a text become one token at most.

    Every character is at least one byte, and in the tokenizers that are looked at a token stands for at most as many bytes
    as its name has letters.

    Args:
        parts: What a tokenizer.json says.

    Returns:
        The number; None if it may be any number, or if it isn't known: a tokenizer may leave parts of a text out, join
        them, or make one token of all that it doesn't know.
    """
    model, added = parts["model"], parts["added_tokens"]
    if model.get("type") != "BPE" or any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    steps = _steps(parts.get("pre_tokenizer"), "pretokenizers")
    name = _letter if any(step["type"] == "ByteLevel" for step in steps) else "<0x{:02X}>".format
    names, contents = model["vocab"].keys(), {token["content"] for token in added}
    joined = [_most_joined(step) for step in _steps(parts.get("normalizer"), "normalizers")]
    is_whole = (
        all(name(byte) in names or chr(byte) in contents for byte in _BYTES)
        and all(step["type"] in _KEEPING or step.get("behavior", "Removed") != "Removed" for step in steps)
        and None not in joined
    )
    return max(map(len, [*names, *contents])) * math.prod(filter(None, joined)) if is_whole else None


def _steps(part: Mapping[str, Any] | None, members: str) -> Sequence[Mapping[str, Any]]:
    """Returns the parts that a part of a tokenizer is made of."""
    if part is None:
        return []
    return [one for each in part[members] for one in _steps(each, members)] if part["type"] == "Sequence" else [part]


def _most_joined(step: Mapping[str, Any]) -> int | None:
    """Returns how many characters a normalizer joins to one at most; None if that is not known."""
    match step:
        case {"type": "NFC"}:
            return 4  # No character of Unicode is composed of more.
        case {"type": "Prepend" | "NFD"}:
            return 1
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if len(new) >= len(old):
            return 1
    return None


def _letter(byte: int) -> str:
    """Returns the letter by which a tokenizer.json names a byte: its own if that can be seen, or one after the 256th."""
    unseen = [*range(33), *range(127, 161), 173]
    return chr(256 + unseen.index(byte)) if byte in unseen else chr(byte)
