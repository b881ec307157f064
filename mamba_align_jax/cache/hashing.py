"""Chained hashes of token blocks: the hash of a block identifies all tokens up to the end of that block."""

import hashlib
from array import array
from collections.abc import Sequence


class HashChain:
    """Computes the hashes of the full blocks of a growing token list.

    A hash is SHA-256 over the previous block's hash and the block's token ids. A collision is not to be expected, so
    the tokens themselves are not compared, which would cost 8 bytes for each cached token.
    """

    def __init__(self, block_size: int, salt: bytes = b"") -> None:
        """Creates a chain.

        Args:
            block_size: Tokens per block.
            salt: Separates tenants. Prefixes with different salts never match.
        """
        self.block_size = block_size
        self.salt = salt
        self._root = hashlib.sha256(b"mamba-align:" + salt).digest()
        self._hashes: list[bytes] = []

    def at(self, tokens: Sequence[int], end: int) -> bytes:
        """Returns the hash of `tokens[:end]`, 32 bytes.

        Args:
            tokens: Must begin with the tokens that earlier calls were given.
            end: A multiple of `block_size`, at least `block_size`.
        """
        for block in range(len(self._hashes), end // self.block_size):
            content = array("q", tokens[block * self.block_size : (block + 1) * self.block_size]).tobytes()
            parent = self._hashes[-1] if self._hashes else self._root
            self._hashes.append(hashlib.sha256(parent + content).digest())
        return self._hashes[end // self.block_size - 1]
