"""The bytes in which cached pages and states leave an engine: how they are written, and how they are checked when read.

A bundle is a header, the keys of its pages and of its states, the bytes of its pages and of its states, and a checksum:

    magic, 8 bytes; version and kind, uint32; the model's name, 32 bytes; then as uint64 the number of pages, the number of
    states, the bytes of a page and the bytes of a state. Whole numbers are little-endian.
    32 bytes for each key, and the entries in the order of their keys.
    SHA-256 of header and keys, followed by the SHA-256 of each MiB of each entry.

Nothing in it is code, and reading it makes no objects but arrays of bytes. The checksum finds damage. It is no signature:
whoever can make bundles can put any states under any keys, so bundles must come from where weights might come from.
"""

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, NamedTuple

import numpy as np

from mamba_align_jax import _values as values

VERSION = 1
_MAGIC = b"mambapfx"
_KINDS = ("prefix", "cache")
_HEADER = struct.Struct("<8sII32sQQQQ")
_KEY_BYTES = _CHECKSUM_BYTES = 32
# Pieces of this size are hashed in several threads.
_PIECE_BYTES = 2**20


class Bundle(NamedTuple):
    """What a bundle holds. The arrays are views of its bytes.

    Attributes:
        kind: "prefix" for the entries of one prefix, or "cache" for those of a whole cache.
        model: The name of the model and of the forms of its entries: see `identity`.
        page_keys: The keys of the pages, in the order in which they are to be evicted.
        state_keys: The same for states. All of them are among `page_keys`.
        pages: uint8 [pages, bytes of a page]
        states: uint8 [states, bytes of a state]
    """

    kind: str
    model: bytes
    page_keys: list[bytes]
    state_keys: list[bytes]
    pages: np.ndarray
    states: np.ndarray


class Contents(NamedTuple):
    """The keys of a pool's entries that are written, the bytes of an entry, and all entries, several at a time."""

    keys: Sequence[bytes]
    entry_bytes: int
    entries: Iterable[np.ndarray]


def write_bundle(file: IO[bytes], kind: str, model: bytes, pages: Contents, states: Contents) -> None:
    """Writes a bundle to a file, without ever holding more than a few entries."""
    sizes = len(pages.keys), len(states.keys), pages.entry_bytes, states.entry_bytes
    head = _HEADER.pack(_MAGIC, VERSION, _KINDS.index(kind), model, *sizes)
    head += b"".join(pages.keys) + b"".join(states.keys)
    file.write(head)
    checksum = hashlib.sha256(head)
    with ThreadPoolExecutor() as threads:
        for contents in (pages, states):
            for entries in contents.entries:
                digests = threads.map(_sha256, _pieces(entries))
                file.write(np.ascontiguousarray(entries).data)
                checksum.update(b"".join(digests))
    file.write(checksum.digest())


def read_bundle(name: str, data: Any, kind: str) -> Bundle:
    """Reads a bundle and checks all of it.

    Args:
        name: What the caller calls it, for errors.
        data: Its bytes: `bytes`, or another buffer.
        kind: The kind that it must be of.

    Raises:
        ValueError: The bytes are no bundle, are cut off or damaged, or are of another version or kind.
    """
    values.instance(name, data, bytes, bytearray, memoryview)
    values.require(memoryview(data).c_contiguous, name, "contiguous", data)
    data, shortest = np.frombuffer(data, np.uint8), _HEADER.size + _CHECKSUM_BYTES
    values.require(data.size >= shortest, name, f"a bundle of at least {shortest} bytes", data.size)
    magic, version, number, model, *sizes = _HEADER.unpack(data[: _HEADER.size].tobytes())
    values.require(magic == _MAGIC, name, "a bundle that an engine has written", magic)
    values.require(version == VERSION, name, f"a bundle of version {VERSION}", version)
    found = _KINDS[number] if number < len(_KINDS) else number
    values.require(found == kind, name, f"a bundle of kind {kind!r}", found)
    num_pages, num_states, page_bytes, state_bytes = sizes
    keys_end = _HEADER.size + _KEY_BYTES * (num_pages + num_states)
    pages_end = keys_end + num_pages * page_bytes
    length = pages_end + num_states * state_bytes + _CHECKSUM_BYTES
    values.require(data.size == length, name, f"a bundle of {length} bytes, as its header says", data.size)
    pages = data[keys_end:pages_end].reshape(num_pages, page_bytes)
    states = data[pages_end:-_CHECKSUM_BYTES].reshape(num_states, state_bytes)
    checksum = hashlib.sha256(data[:keys_end].data)
    with ThreadPoolExecutor() as threads:
        for entries in (pages, states):
            for digest in threads.map(_sha256, _pieces(entries)):
                checksum.update(digest)
    own, given = (digest.hex() for digest in (checksum.digest(), data[-_CHECKSUM_BYTES:].tobytes()))
    values.require(own == given, name, f"a bundle whose checksum is {own}", given)
    keys = [data[at : at + _KEY_BYTES].tobytes() for at in range(_HEADER.size, keys_end, _KEY_BYTES)]
    page_keys, state_keys = keys[:num_pages], keys[num_pages:]
    is_sound = len({*page_keys}) == num_pages and len({*state_keys}) == num_states and {*state_keys} <= {*page_keys}
    values.require(is_sound, name, "a bundle of different keys, with a page for each state", len(keys))
    return Bundle(kind, model, page_keys, state_keys, pages, states)


def _pieces(entries: np.ndarray) -> Iterator[memoryview]:
    for entry in entries:
        for begin in range(0, entry.size, _PIECE_BYTES):
            yield np.ascontiguousarray(entry[begin : begin + _PIECE_BYTES]).data


def _sha256(piece: memoryview) -> bytes:
    return hashlib.sha256(piece).digest()
