"""What an engine's caller may do with the prefix cache as a whole: move prefixes to other engines, and keep it on a disk."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mamba_align_jax import _values as values
from mamba_align_jax.engine.running.bundle import read_bundle
from mamba_align_jax.engine.running.core import EngineCore
from mamba_align_jax.engine.running.transfer import Transfer, check_tokens, read_file


class PortableCore(EngineCore):
    """The parts of an engine, with methods that move what is cached. `Engine` inherits them.

    One of these calls takes as long as copying the states and pages between the device and the host. No step is made
    meanwhile.
    """

    def __init__(self, *parts: Any) -> None:
        """Makes the parts: see `Engine`."""
        super().__init__(*parts)
        self._transfer = Transfer()

    def export_prefix(self, tokens: Sequence[int], *, cache_salt: str = "") -> bytes:
        """Returns what is cached of a prefix as bytes, which `import_prefix` of another engine takes.

        They hold the states at all of its boundaries that are cached, the pages up to the last of these, their keys, and a
        checksum; neither the tokens nor the salt. If nothing is cached, they hold nothing. What the bytes mean does not
        depend on the number of devices.

        Args:
            tokens: The prefix: a sequence of whole numbers, or an array of one axis. A state after all of its tokens
                counts as well.
            cache_salt: What is cached under this salt: see `SamplingParams`.

        Raises:
            ValueError: The prefix is no sequence of the model's tokens, or `prefix_cache` is "none".
        """
        found = values.integers("tokens", tokens, 0, self.model_config.vocab_size - 1)
        salt = values.text("cache_salt", cache_salt).encode()
        self._check_cache()
        return self._alone(self._transfer.export_prefix, self, found, salt)

    def import_prefix(self, data: bytes, tokens: Sequence[int] | None = None, *, cache_salt: str = "") -> int:
        """Puts what `export_prefix` returned into the prefix cache, as if a request had computed it here.

        The states and pages are then cached under the salt with which they were exported, and held by no request. Those
        that were cached before stay as they are. Others are evicted as usual. If the pools can't hold the whole prefix,
        its longest beginning that fits is taken.

        Args:
            data: The bytes, from an engine with an equal model, `block_size`, `kv_page_size`, `state_dtype` and
                `num_speculative_tokens`. It may run on another number of devices. There is no signature, so they must
                come from an engine that you trust. A writable buffer may be used again when the call returns.
            tokens: Refuses bytes that are not of a beginning of these tokens; None takes any.
            cache_salt: With `tokens`, refuses bytes that were exported under another salt.

        Returns:
            How many of the prefix's tokens are cached now: a request that continues them starts from there.

        Raises:
            ValueError: The bytes are no bundle, are damaged or cut off, or are of another version, model, configuration,
                prefix or salt, or `prefix_cache` is "none". Nothing is changed.
        """
        self._check_cache()
        salt = values.text("cache_salt", cache_salt).encode()
        bundle, page_size = read_bundle("data", data, "prefix"), self.config.kv_page_size
        if tokens is not None:
            found = values.integers("tokens", tokens, 0, self.model_config.vocab_size - 1)
            check_tokens("data", bundle, page_size, found, salt)
        num_pages, _ = self._alone(self._transfer.admit, self, "data", bundle)
        return num_pages * page_size

    def save_cache(self, directory: str | Path) -> None:
        """Writes everything that is cached to a file in a directory, for `load_cache` after a restart.

        A file from before is replaced once the new one is complete. Prefixes of all salts are in it, so it is readable
        only for the user who runs the process.

        Raises:
            ValueError: `prefix_cache` is "none", or the directory is neither text nor a path.
            OSError: The file can't be written.
        """
        self._check_cache()
        self._alone(self._transfer.save, self, _directory(directory))

    def load_cache(self, directory: str | Path) -> int:
        """Puts what `save_cache` wrote into the prefix cache. If the pools are smaller, what was used last is taken.

        Returns:
            How many of the file's states are cached now.

        Raises:
            ValueError: The file is no such file, is damaged, or is of another version, model or configuration, or
                `prefix_cache` is "none". Nothing is changed.
            OSError: There is no file, or it can't be read.
        """
        self._check_cache()
        bundle = read_file(_directory(directory))
        _, num_states = self._alone(self._transfer.admit, self, str(directory), bundle)
        return num_states

    def _check_cache(self) -> None:
        mode = self.config.prefix_cache
        values.require(mode != "none", "prefix_cache", "'align' or 'all' to move what is cached", mode)

    def _reset_prefix_cache(self) -> None:
        # The weights may have been replaced.
        self._transfer.forget_weights()
        super()._reset_prefix_cache()


def _directory(given: str | Path) -> Path:
    values.instance("directory", given, str, Path)
    return Path(given)
