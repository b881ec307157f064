"""Chained hashes of token blocks: the hash of a block identifies all tokens up to the end of that block."""

import hashlib
from array import array
from collections.abc import Sequence

from mamba_align_jax import _values as values


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

        Raises:
            ValueError: `block_size` is no whole number from 1 on, or `salt` is no bytes.
        """
        self.block_size = values.integer("HashChain: block_size", block_size, 1)
        values.require(isinstance(salt, bytes), "HashChain: salt", "bytes", salt)
        self.salt = salt
        self._root = hashlib.sha256(b"mamba-align:" + salt).digest()
        self._hashes: list[bytes] = []

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
        if len(self._hashes) < end // self.block_size and len(tokens) < end:
            raise ValueError(f"at: tokens must be at least end = {end}, got {len(tokens)}")
        for block in range(len(self._hashes), end // self.block_size):
            own = tokens[block * self.block_size : (block + 1) * self.block_size]
            try:
                content = array("q", own).tobytes()
            except (TypeError, OverflowError) as error:
                raise ValueError(f"at: tokens must be whole numbers of 64 bits, got {own!s:.80}") from error
            parent = self._hashes[-1] if self._hashes else self._root
            self._hashes.append(hashlib.sha256(parent + content).digest())
        return self._hashes[end // self.block_size - 1]
