"""The bundled model: byte-level, trained by examples/train_byte_model.py on text that ships with CPython."""

from pathlib import Path

BYTE_MODEL = Path(__file__).parent / "byte_model"


def encode(text: str) -> list[int]:
    """Token ids of a byte-level model: the text's UTF-8 bytes."""
    return list(text.encode())


def decode(tokens: tuple[int, ...]) -> str:
    """The text of byte tokens; broken sequences show as replacement characters."""
    return bytes(tokens).decode(errors="replace")
