"""Holds the bundled byte-level model.

It was trained by examples/train_byte_model.py on text that ships with CPython.
"""

from pathlib import Path

BYTE_MODEL = Path(__file__).parent / "byte_model"


def encode(text: str) -> list[int]:
    """Encodes text for a byte-level model: the token ids are the text's UTF-8 bytes."""
    return list(text.encode())


def decode(tokens: tuple[int, ...]) -> str:
    """Decodes the tokens of a byte-level model. Invalid UTF-8 becomes replacement characters."""
    return bytes(tokens).decode(errors="replace")
