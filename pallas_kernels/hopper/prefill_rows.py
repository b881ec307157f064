"""A row of a prefill kernel on Hopper GPUs: its chunks, its checkpoints, and zeros for the tokens after the last row."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import hopper as hp
from pallas_kernels.blocks import NULL_BLOCK
from pallas_kernels.hopper.partial_tiles import clear_rows
from pallas_kernels.rows import Rows

TILE = 64  # the tokens of a chunk
SHAPE = TILE, TILE


def prefill_inputs(rows: Rows) -> dict[str, jax.Array | None]:
    """Return the inputs of a kernel of `PrefillRow`s and their blocks, by name."""
    inputs = dict(layer=jnp.reshape(rows.layer, 1), query_start_loc=rows.query_start_loc)
    inputs |= dict(first_chunk=rows.chunks.first_chunk_indices, cu_chunk_seqlens=rows.chunks.cu_chunk_seqlens)
    return inputs | dict(read_block=rows.read, write_block=rows.write[:, 0]) | rows.checkpoint_inputs


@dataclass(frozen=True)
class PrefillRow:
    """A row of a prefill kernel, and how it is cut into chunks.

    Attributes:
        index: The row's index in the batch.
        rows: The number of rows.
        start: The row's first token.
        end: The token after its last one.
        total: The token after the last row.
        first_chunk: The number of chunks in earlier rows.
        first_length: The length of the row's first chunk, if that is not also the last one. Only a first chunk can start
            between two positions at which chunks are cut.
    """

    index: Any
    rows: int
    start: Any
    end: Any
    total: Any
    first_chunk: Any
    first_length: Any

    @classmethod
    def of(cls, refs: Any, index: jax.Array) -> "PrefillRow":
        """Read a row. `refs` has `query_start_loc`, `first_chunk`, `cu_chunk_seqlens` and `read_block`."""
        rows = refs.read_block.shape[0]
        start, end, total = refs.query_start_loc[index], refs.query_start_loc[index + 1], refs.query_start_loc[rows]
        first = refs.first_chunk[index]
        # A row without tokens has no chunk of its own, and there may be none after it.
        after = jnp.minimum(first + 1, refs.cu_chunk_seqlens.shape[0] - 1)
        return cls(index, rows, start, end, total, first, refs.cu_chunk_seqlens[after] - start)

    def chunks_up_to(self, length: Any) -> Any:
        """Return the number of chunks that hold the row's first `length` tokens."""
        later = jax.lax.div(length - self.first_length + TILE - 1, jnp.int32(TILE))
        return jnp.where(length > 0, 1 + later, 0)

    def tokens_of(self, chunk: Any) -> tuple[Any, Any]:
        """Return a chunk's first token and its number of tokens."""
        token = self.start + jnp.maximum(self.first_length + (chunk - 1) * TILE, 0)
        return token, jnp.minimum(self.start + self.first_length + chunk * TILE, self.end) - token

    def run(
        self,
        refs: Any,
        state: list[jax.Array],
        advance: Callable[[Any, Any, list[jax.Array]], list[jax.Array]],
        store: Callable[[jax.Array, list[jax.Array]], None],
    ) -> list[jax.Array]:
        """Run the row's chunks, and store its state after each checkpoint. Return its state at the end.

        Args:
            refs: Has `checkpoint_offset` and `checkpoint_block` if there are checkpoints.
            state: The state before the row.
            advance: Runs the chunks from the first argument up to the second one, and returns the new state.
            store: Stores the state in a block.
        """
        checkpoints = 0 if refs.checkpoint_block is None else refs.checkpoint_block.shape[1]

        def segment(n, carry):
            """Run the chunks up to checkpoint n, and store the state there. After the last one, run the rest."""
            chunk, state = carry
            is_rest, at = n == checkpoints, jnp.minimum(n, checkpoints - 1)
            offset, block = refs.checkpoint_offset[self.index, at], refs.checkpoint_block[self.index, at]
            offset = jnp.where(is_rest, length, jnp.minimum(offset, length))
            stop = jnp.maximum(chunk, self.chunks_up_to(offset))
            state = advance(chunk, stop, state)
            hp.when((block != NULL_BLOCK) & (offset > 0) & ~is_rest)(lambda: store(block, state))
            return stop, state

        length = self.end - self.start
        if not checkpoints:
            return advance(jnp.int32(0), self.chunks_up_to(length), state)
        return jax.lax.fori_loop(0, checkpoints + 1, segment, (jnp.int32(0), state))[1]

    def store_last(self, block: Any, state: list[jax.Array], store: Callable[[Any, list[jax.Array]], None]) -> None:
        """Store the row's state at its end in a block, unless the row has no tokens or the block is the null block."""
        hp.when((block != NULL_BLOCK) & (self.end > self.start))(lambda: store(block, state))

    def clear(self, tokens: int, tile_of: Callable[[Any], Any]) -> None:
        """Store zeros in every `rows`-th tile of the padding tokens, which follow the last row, from tile `index` on.

        Args:
            tokens: The number of tokens, padding included.
            tile_of: Returns the tile of outputs in GMEM from a token on.
        """
        tiles = jax.lax.div(tokens - self.total + TILE - 1, jnp.int32(TILE))

        @hp.loop(0, jax.lax.div(tiles - self.index + self.rows - 1, jnp.int32(self.rows)))
        def _(n):
            token = self.total + (self.index + n * self.rows) * TILE
            clear_rows(tile_of(token), jnp.minimum(tokens - token, TILE))
