"""Chained hashes of token blocks: a block's hash stands for everything up to its end."""

import hashlib
from array import array
from collections.abc import Sequence


class HashChain:
    """Hashes of the full blocks of a growing token list.

    SHA-256 over the parent's hash and the block's token ids, so two different prefixes never share a block: tokens are
    not compared besides, which would cost eight bytes for each cached one and find nothing. `salt` keeps tenants apart:
    prefixes under different salts never match.
    """

    def __init__(self, block_size: int, salt: bytes = b"") -> None:
        self.block_size = block_size
        self.salt = salt
        self._root = hashlib.sha256(b"mamba-align:" + salt).digest()
        self._hashes: list[bytes] = []

    def at(self, tokens: Sequence[int], end: int) -> bytes:
        """The hash of `tokens[:end]`, a multiple of `block_size`. `tokens` must extend what earlier calls were given."""
        for block in range(len(self._hashes), end // self.block_size):
            content = array("q", tokens[block * self.block_size : (block + 1) * self.block_size]).tobytes()
            parent = self._hashes[-1] if self._hashes else self._root
            self._hashes.append(hashlib.sha256(parent + content).digest())
        return self._hashes[end // self.block_size - 1]
