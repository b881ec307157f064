"""Moves cached prefixes out of an engine and into another one, whose model is equal."""

import contextlib
import functools
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import jax
import numpy as np

from mamba_align_jax import _values as values
from mamba_align_jax.cache.hashing import HashChain
from mamba_align_jax.cache.moving import Admission, Entries, Entry, all_entries, entries_of_prefix
from mamba_align_jax.engine.device.identity import identity
from mamba_align_jax.engine.device.pool_entries import entries_at_a_time, entry_bytes, read_entries
from mamba_align_jax.engine.running.bundle import Bundle, Contents, new_bundle, read_bundle, write_bundle
from mamba_align_jax.engine.running.core import EngineCore

FILE_NAME = "prefix_cache.mamba-align"
_LEFT_S = 3600.0  # A file that is being written changes more often.


class Transfer:
    """Moves the cached prefixes of one engine. It keeps the digest of the engine's weights.

    Its methods are called while no other thread changes the engine: see `EngineCore.alone`. They first wait until all steps
    that were dispatched are launched. What is read from the pools are the arrays that the last one leaves, so all states and
    pages that are published are in them.
    """

    def __init__(self, core: EngineCore) -> None:
        """Makes one for an engine whose weights have not been read."""
        self._core = core
        self._weights: bytes | None = None

    def forget_weights(self) -> None:
        """Records that the weights may have been replaced."""
        self._weights = None

    def export_prefix(self, tokens: Sequence[int], salt: bytes) -> bytes:
        """Returns a bundle of what is cached of a prefix: see `Engine.export_prefix`."""
        self._core.check_launches()
        return new_bundle("prefix", *self._contents(entries_of_prefix(self._core.cache, tokens, salt)))

    def save(self, directory: Path) -> None:
        """Writes all that is cached to a file: see `Engine.save_cache`."""
        self._core.check_launches()
        directory.mkdir(parents=True, exist_ok=True)
        with new_file(directory / FILE_NAME) as file:
            write = functools.partial(_write_at, file.fileno())
            write_bundle(write, "cache", *self._contents(all_entries(self._core.cache)))

    def admit(self, name: str, bundle: Bundle) -> tuple[int, int]:
        """Puts a bundle's entries into the cache and the pools, as many as they can hold.

        Args:
            name: What the caller calls the bundle, for errors.
            bundle: The bundle.

        Returns:
            How many of its pages and of its states are cached now.

        Raises:
            ValueError: It is another model's, or that of another configuration. Nothing is changed.
        """
        core = self._core
        core.check_launches()
        own = self._identity()
        wanted = f"a bundle of this model, these weights and these sizes of blocks, {own.hex()[:16]}"
        values.require(bundle.model == own, name, wanted, bundle.model.hex()[:16])
        found = {"pages": bundle.pages.shape[1], "states": bundle.states.shape[1]}
        sizes = {kind: entry_bytes(forms) for kind, forms in core.runner.entry_forms.items()}
        values.require(found == sizes, name, f"a bundle of entries of these bytes: {sizes}", found)
        with core.changing:
            admission = Admission(core.cache, bundle.page_keys, bundle.state_keys, is_prefix=bundle.kind == "prefix")
            try:
                _fill(core, "pages", admission.pages, bundle.pages)
                _fill(core, "states", admission.states, bundle.states)
                # JAX may read the bundle in place, and its owner may use a writable buffer again after this call.
                jax.block_until_ready(core.runner.device_state)
            except BaseException:
                admission.withdraw()
                raise
            admission.publish()
            if core.config.checked:
                core.cache.check()
            core.reports.flush()
        return admission.length, admission.num_states

    def _contents(self, entries: Entries) -> tuple[bytes, Contents, Contents]:
        """Returns the name of the model, the pages and the states, for a bundle."""
        contents, runner = [], self._core.runner
        for place, forms in runner.entry_forms.items():
            found: list[Entry] = getattr(entries, place)
            size, take = entry_bytes(forms), functools.partial(runner.take_entries, place)
            content = read_entries(take, size, [number for _, number in found])
            contents.append(Contents([key for key, _ in found], size, content))
        pages, states = contents
        return self._identity(), pages, states

    def _identity(self) -> bytes:
        core = self._core
        if self._weights is None:
            self._weights = core.runner.digest_weights()
        return identity(core.config, core.model_config, self._weights, **core.runner.entry_forms)


def check_tokens(name: str, bundle: Bundle, page_size: int, tokens: Sequence[int], salt: bytes) -> None:
    """Checks that a bundle is of a prefix of `tokens` under a salt.

    Raises:
        ValueError: It is of other tokens, or was published under another salt.
    """
    chain, count = HashChain(page_size, salt), len(bundle.page_keys)
    keys = [chain.at(tokens, (number + 1) * page_size) for number in range(min(count, len(tokens) // page_size))]
    is_own = keys == bundle.page_keys[::-1]
    values.require(is_own, name, "a bundle of a prefix of tokens under this cache_salt", f"{count} pages of another")


def read_file(directory: Path) -> Bundle:
    """Reads what `Transfer.save` wrote.

    Raises:
        ValueError: The file is damaged, or no such file.
        OSError: It can't be read.
    """
    path = directory / FILE_NAME
    # An empty file can't be mapped.
    data = np.memmap(path, np.uint8, "r").data if path.stat().st_size else b""
    return read_bundle(str(path), data, "cache")


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """Opens a new file that replaces `path` when the context is left, or not at all if anything is raised.

    Only the user who runs the process may read it. What a process that was killed has left is removed after an hour.
    """
    for left in path.parent.glob(f".{path.name}.*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _LEFT_S:
                left.unlink()
    file = None
    try:
        # No `with`: an interrupt that comes while one is entered or left finds nothing that would close the file.
        file = tempfile.NamedTemporaryFile(prefix=f".{path.name}.", dir=path.parent, delete=False)  # noqa: SIM115
        yield file
        file.flush()
        os.fsync(file.fileno())
        file.close()
        os.replace(file.name, path)
    except BaseException:
        if file is not None:
            file.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file.name)
        raise


def _write_at(file: int, place: int, data: np.ndarray) -> None:
    """Writes bytes, uint8 [bytes], at a place of a file. Several threads may do so at once."""
    while data.size:
        written = os.pwrite(file, data.data, place)
        place, data = place + written, data[written:]


def _fill(core: EngineCore, kind: str, places: Sequence[tuple[int, int]], entries: np.ndarray) -> None:
    """Writes a bundle's entries to pages or state blocks: `places` are pairs of a row of `entries` and a page or block."""
    size = entries.shape[1]
    step = entries_at_a_time(size)
    for begin in range(0, len(places) if size else 0, step):
        rows, ids = zip(*places[begin : begin + step], strict=True)
        first, last = rows[0], rows[-1]
        # Rows that follow each other, as those of a prefix of which nothing was cached, need no copy.
        some = entries[first : last + 1] if last - first + 1 == len(rows) else entries[list(rows)]
        core.runner.put_entries(kind, ids, some)
    for _, block in places if kind == "states" else ():
        core.runner.wrote(block)
