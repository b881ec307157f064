"""The bytes in which cached pages and states leave an engine: how they are written, and how they are checked when read.

A bundle is a header, the keys of its pages and of its states, the bytes of its pages and of its states, and a checksum:

    magic, 8 bytes; version and kind, uint32; the model's name, 32 bytes; then as uint64 the number of pages, the number of
    states, the bytes of a page and the bytes of a state. Whole numbers are little-endian.
    32 bytes for each key, and the entries in the order of their keys.
    SHA-256 of header and keys, followed by the SHA-256 of each MiB of each entry.

Nothing in it is code, and reading it makes no objects but arrays of bytes. The checksum finds damage. It is no signature:
whoever can make bundles can put any states under any keys, so bundles must come from where weights might come from.
"""

import functools
import hashlib
import io
import itertools
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from mamba_align_jax import _values as values

VERSION = 1
_MAGIC = b"mambapfx"
_KINDS = ("prefix", "cache")
_HEADER = struct.Struct("<8sII32sQQQQ")
_KEY_BYTES = _CHECKSUM_BYTES = 32
# Pieces of this size are hashed one by one, so that several threads can do it.
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


def new_bundle(kind: str, model: bytes, pages: Contents, states: Contents) -> bytes:
    """Returns a bundle. The arguments are those of `write_bundle`."""
    file = io.BytesIO(bytes(_num_bytes(pages, states)))
    write_bundle(functools.partial(_copy, np.frombuffer(file.getbuffer(), np.uint8)), kind, model, pages, states)
    # No view of the file is left, so its bytes are returned without a copy.
    return file.getvalue()


def write_bundle(
    write: Callable[[int, np.ndarray], None], kind: str, model: bytes, pages: Contents, states: Contents
) -> None:
    """Writes a bundle, without ever holding more than a few entries.

    Args:
        write: Writes bytes, uint8 [bytes], at a place of the bundle. Several threads call it, each for other places.
        kind: "prefix" or "cache".
        model: The name of the model: see `identity`.
        pages: The pages.
        states: The states.
    """
    sizes = len(pages.keys), len(states.keys), pages.entry_bytes, states.entry_bytes
    head = _HEADER.pack(_MAGIC, VERSION, _KINDS.index(kind), model, *sizes)
    head += b"".join(pages.keys) + b"".join(states.keys)
    write(0, np.frombuffer(head, np.uint8))
    checksum, begin = hashlib.sha256(head), len(head)
    before: Iterator[bytes] = iter(())

    def put(place: int, pieces: np.ndarray) -> bytes:
        write(place, pieces.reshape(-1))
        return _sha256(pieces)

    with ThreadPoolExecutor() as threads:
        for entries in itertools.chain(pages.entries, states.entries):
            places, parts = _parts(begin, entries)
            written = threads.map(put, places, parts)
            # Threads work on these entries while the next ones come. No more than that are held.
            checksum.update(b"".join(before))
            begin, before = begin + entries.size, written
        checksum.update(b"".join(before))
    write(begin, np.frombuffer(checksum.digest(), np.uint8))


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
            for digests in threads.map(_sha256, _parts(0, entries)[1]):
                checksum.update(digests)
    own, given = (digest.hex() for digest in (checksum.digest(), data[-_CHECKSUM_BYTES:].tobytes()))
    values.require(own == given, name, f"a bundle whose checksum is {own}", given)
    keys = [data[at : at + _KEY_BYTES].tobytes() for at in range(_HEADER.size, keys_end, _KEY_BYTES)]
    page_keys, state_keys = keys[:num_pages], keys[num_pages:]
    is_sound = len({*page_keys}) == num_pages and len({*state_keys}) == num_states and {*state_keys} <= {*page_keys}
    values.require(is_sound, name, "a bundle of different keys, with a page for each state", len(keys))
    return Bundle(kind, model, page_keys, state_keys, pages, states)


def _copy(whole: np.ndarray, place: int, data: np.ndarray) -> None:
    whole[place : place + data.size] = data


def _num_bytes(pages: Contents, states: Contents) -> int:
    """Returns the length of a bundle."""
    each = sum(len(contents.keys) * (_KEY_BYTES + contents.entry_bytes) for contents in (pages, states))
    return _HEADER.size + each + _CHECKSUM_BYTES


def _parts(begin: int, entries: np.ndarray) -> tuple[list[int], list[np.ndarray]]:
    """Divides entries into parts of about a MiB, of which threads take one after the other.

    Args:
        begin: The place of the first entry in a bundle.
        entries: uint8 [entries, bytes]

    Returns:
        The places of the parts, and each part's pieces, uint8 [pieces, bytes].
    """
    count, size = entries.shape
    if size == 0:
        return [], []
    # A part is a piece of one entry, or several whole entries that are a piece each.
    together = max(_PIECE_BYTES // size, 1)
    cuts = [(entry, at) for entry in range(0, count, together) for at in range(0, size, _PIECE_BYTES)]
    parts = [entries[entry : entry + together, at : at + _PIECE_BYTES] for entry, at in cuts]
    return [begin + entry * size + at for entry, at in cuts], parts


def _sha256(pieces: np.ndarray) -> bytes:
    """Returns the SHA-256 digests of the pieces, joined in order."""
    return b"".join(hashlib.sha256(piece).digest() for piece in pieces)
