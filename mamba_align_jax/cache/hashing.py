"""Chained hashes of token blocks: the hash of a block identifies all tokens up to the end of that block."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence

from mamba_align_jax import _values as values

_TOKEN_BYTES = array("q").itemsize
# Blocks whose hashes are remembered together.
_GROUP = 32


class HashMemo:
    """Remembers hashes, because the prompts of many requests begin alike: one hash finds those of 32 blocks.

    It forgets what was used least recently.
    """

    def __init__(self, groups: int = 4096) -> None:
        """Makes one that remembers nothing yet. `groups` is how many times 32 hashes it holds, with about 2 KB each."""
        self._size = values.integer("HashMemo: groups", groups, 1)
        self._groups: OrderedDict[bytes, list[bytes]] = OrderedDict()

    def hashes(self, parent: bytes, content: bytes, size: int) -> list[bytes]:
        """Returns the hashes of 32 blocks of `size` bytes, which follow the block whose hash is `parent`."""
        key = hashlib.sha256(parent + content).digest()
        found = self._groups.pop(key, None) or _hashes(parent, content, size)
        self._groups[key] = found
        if len(self._groups) > self._size:
            self._groups.popitem(last=False)
        return found


def _hashes(parent: bytes, content: bytes, size: int) -> list[bytes]:
    """Returns the hashes of blocks of `size` bytes."""
    hashes = []
    for at in range(0, len(content), size):
        parent = hashlib.sha256(parent + content[at : at + size]).digest()
        hashes.append(parent)
    return hashes


class HashChain:
    """Computes the hashes of the full blocks of a growing token list.

    A hash is SHA-256 over the previous block's hash and the block's token ids. A collision is not to be expected, so
    the tokens themselves are not compared, which would cost 8 bytes for each cached token.
    """

    def __init__(self, block_size: int, salt: bytes = b"", memo: HashMemo | None = None) -> None:
        """Creates a chain.

        Args:
            block_size: Tokens per block.
            salt: Separates tenants. Prefixes with different salts never match.
            memo: Remembers the hashes, for other chains that share it; None remembers nothing.

        Raises:
            ValueError: `block_size` is no whole number from 1 on, `salt` is no bytes, or `memo` no HashMemo.
        """
        self.block_size = values.integer("HashChain: block_size", block_size, 1)
        values.require(isinstance(salt, bytes), "HashChain: salt", "bytes", salt)
        values.instance("HashChain: memo", memo, HashMemo, optional=True)
        self.salt, self._memo = salt, memo
        self._root = hashlib.sha256(b"mamba-align:" + salt).digest()
        self._hashes: list[bytes] = []
        self._owner: tuple[Hashable, ...] = ()

    def owned_by(self, request: Hashable, length: int) -> "HashChain":
        """Returns the chain that a request continues with its own tokens, of which `length` are those of this chain.

        That is this chain itself for the first request that asks, and a new one for each other request, because several
        requests may enter on one lookup.

        Args:
            request: The request's name.
            length: A multiple of `block_size`.
        """
        if self._owner in ((), (request,)):
            self._owner = (request,)
            return self
        chain = HashChain(self.block_size, self.salt, self._memo)
        chain._hashes, chain._owner = self._hashes[: length // self.block_size], (request,)
        return chain

    def at(self, tokens: Sequence[int], end: int) -> bytes:
        """Returns the hash of `tokens[:end]`, 32 bytes.

        Args:
            tokens: Must begin with the tokens that earlier calls were given.
            end: A multiple of `block_size`, at least `block_size`.

        Raises:
            ValueError: `end` is something else, or there are fewer tokens.
        """
        if type(end) is not int or end < self.block_size or end % self.block_size:
            raise ValueError(f"at: end must be a positive multiple of block_size = {self.block_size}, got {end!r}")
        self._extend("at", tokens, end)
        return self._hashes[end // self.block_size - 1]

    def between(self, tokens: Sequence[int], begin: int, end: int) -> list[bytes]:
        """Returns the hashes of the blocks of `tokens[begin:end]`, in order: those that `at` returns one by one.

        Args:
            tokens: Must begin with the tokens that earlier calls were given.
            begin: A multiple of `block_size`, at least 0.
            end: A multiple of `block_size`, at least `begin`.

        Raises:
            ValueError: `begin` or `end` is something else, or there are fewer tokens than `end`.
        """
        size = self.block_size
        if not type(begin) is type(end) is int or not 0 <= begin <= end or begin % size or end % size:
            raise ValueError(
                f"between: begin and end must be multiples of block_size = {size} with 0 <= begin <= end, "
                f"got {begin!r} and {end!r}"
            )
        self._extend("between", tokens, end)
        return self._hashes[begin // size : end // size]

    def _extend(self, method: str, tokens: Sequence[int], end: int) -> None:
        """Computes the hashes up to the end of `tokens[:end]` that are not there yet."""
        begin = len(self._hashes) * self.block_size
        if end <= begin:
            return
        if len(tokens) < end:
            raise ValueError(f"{method}: tokens must be at least end = {end}, got {len(tokens)}")
        own = tokens[begin:end]
        try:
            if isinstance(own, bytes | bytearray):
                raise TypeError("an array would take them for the memory of its numbers")
            content = array("q", own).tobytes()
        except (TypeError, OverflowError) as error:
            raise ValueError(f"{method}: tokens must be whole numbers of 64 bits, got {own!s:.80}") from error
        at, size = 0, _TOKEN_BYTES * self.block_size
        while at < len(content):
            parent = self._hashes[-1] if self._hashes else self._root
            # Groups begin at the same places in all chains, so that one chain finds what another one has hashed.
            part = content[at : at + size * (_GROUP - len(self._hashes) % _GROUP)]
            if self._memo is not None and len(part) == size * _GROUP:
                self._hashes += self._memo.hashes(parent, part, size)
            else:
                self._hashes += _hashes(parent, part, size)
            at += len(part)
