"""The work of a program of the prefill kernels that run all chunks at once."""

from typing import NamedTuple

import jax


class HeadChunk(NamedTuple):
    """One chunk of one head.

    Attributes:
        head: The head: a key head, which stands for all of its value heads, or a value head.
        chunk: The chunk, which is not empty.
        start: Index of the chunk's first token.
        end: Index after the chunk's last token.
        size: The chunk size.
    """

    head: jax.Array
    chunk: jax.Array
    start: jax.Array
    end: jax.Array
    size: int
