"""A bundle's bytes are those that its docstring describes, whatever the sizes, and nothing is copied twice."""

import functools
import hashlib
import os
import struct
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest

from mamba_align_jax.engine.device import pool_entries
from mamba_align_jax.engine.device.pool_entries import read_entries
from mamba_align_jax.engine.running import transfer
from mamba_align_jax.engine.running.bundle import Contents, new_bundle, read_bundle, write_bundle

MIB = 2**20
MODEL = b"m" * 32
RNG = np.random.default_rng(3)


def random_entries(count, size):
    """The keys and the bytes of some entries."""
    return [RNG.bytes(32) for _ in range(count)], RNG.integers(0, 256, (count, size), np.uint8)


def contents(keys, entries, at_a_time=3):
    """The same for `write_bundle`, several entries at a time."""
    begins = range(0, max(len(keys), 1), at_a_time)
    return Contents(keys, entries.shape[1], iter([entries[begin : begin + at_a_time] for begin in begins]))


def described(pages, states):
    """A bundle, from the words of the module's docstring."""
    both = pages, states
    head = struct.pack("<8sII", b"mambapfx", 1, 0) + MODEL
    head += struct.pack("<QQQQ", *(len(keys) for keys, _ in both), *(entries.shape[1] for _, entries in both))
    head += b"".join(key for keys, _ in both for key in keys)
    rows = [entry.tobytes() for _, entries in both for entry in entries]
    pieces = [row[begin : begin + MIB] for row in rows for begin in range(0, len(row), MIB)]
    checksum = hashlib.sha256(head + b"".join(hashlib.sha256(piece).digest() for piece in pieces))
    return head + b"".join(rows) + checksum.digest()


@pytest.mark.parametrize(("page_bytes", "state_bytes"), [(0, 5), (4096, MIB), (MIB // 3, MIB + 1), (12, 2 * MIB + 7)])
@pytest.mark.parametrize("counts", [(0, 0), (1, 1), (11, 4)])
def test_a_bundle_has_the_bytes_that_are_described(tmp_path, page_bytes, state_bytes, counts):
    pages, states = random_entries(counts[0], page_bytes), random_entries(counts[1], state_bytes)
    # Each state has a page with its key.
    states = pages[0][: counts[1]], states[1]
    wanted = described(pages, states)
    assert new_bundle("prefix", MODEL, contents(*pages), contents(*states)) == wanted
    with open(tmp_path / "bundle", "wb") as file:
        write = functools.partial(transfer._write_at, file.fileno())
        write_bundle(write, "prefix", MODEL, contents(*pages), contents(*states))
    assert (tmp_path / "bundle").read_bytes() == wanted
    found = read_bundle("data", wanted, "prefix")
    assert (found.model, found.page_keys, found.state_keys) == (MODEL, pages[0], states[0])
    np.testing.assert_array_equal(found.pages, pages[1])
    np.testing.assert_array_equal(found.states, states[1])


def test_a_bundle_is_made_in_place():
    """Its bytes are allocated once, and returned as they were written."""
    pages, states = random_entries(64, MIB // 2), random_entries(1, 100)
    states = pages[0][:1], states[1]
    tracemalloc.start()
    try:
        data = new_bundle("prefix", MODEL, contents(*pages), contents(*states))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(data) > 32 * MIB
    assert peak < len(data) + 2 * MIB


def test_a_file_takes_what_is_written_in_parts_and_says_when_it_is_full(tmp_path, monkeypatch):
    pages, write = random_entries(5, 3000), os.pwrite
    nothing = contents([], np.zeros((0, 1), np.uint8))
    with open(tmp_path / "bundle", "wb") as file:
        monkeypatch.setattr(transfer.os, "pwrite", lambda number, data, place: write(number, data[:700], place))
        write_bundle(functools.partial(transfer._write_at, file.fileno()), "prefix", MODEL, contents(*pages), nothing)
        assert (tmp_path / "bundle").read_bytes() == described(pages, ([], np.zeros((0, 1), np.uint8)))

        def full(number, data, place):
            raise OSError("no space left")

        monkeypatch.setattr(transfer.os, "pwrite", full)
        with pytest.raises(OSError, match="no space left"):
            write_bundle(
                functools.partial(transfer._write_at, file.fileno()), "prefix", MODEL, contents(*pages), nothing
            )


@pytest.mark.parametrize("is_pinned", [False, True])
def test_entries_come_to_the_host_in_order(monkeypatch, is_pinned):
    """Those of a GPU come by pinned memory, which a CPU has too if it is asked."""
    monkeypatch.setattr(pool_entries, "_has_pinned_memory", lambda array: is_pinned)
    monkeypatch.setattr(pool_entries, "entries_at_a_time", lambda size: 4)
    pool = RNG.integers(0, 256, (30, 1000), np.uint8)
    ids = RNG.permutation(30)[:18].tolist()
    # As in a pool, one more entry comes than was asked for.
    found = [*read_entries(lambda some: jnp.asarray(pool[[*some, 0]]), 1000, ids)]
    assert [len(entries) for entries in found] == [4, 4, 4, 4, 2]
    np.testing.assert_array_equal(np.concatenate(found), pool[ids])
