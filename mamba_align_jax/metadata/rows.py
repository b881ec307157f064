"""The rows of a step by kind: decode and verify rows come first, then prefill rows. Each kind has its own kernels."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from mamba_align_jax import _values as values
from mamba_align_jax.align.batch import StepBatch
from mamba_align_jax.align.step import StepIndices
from mamba_align_jax.metadata.interior import InteriorBoundaries
from pallas_kernels import CHUNK_SIZE, BoundaryWindow, Chunks, Fold, RowCheckpoints, Rows, chunk_rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RowSplit:
    """A batch split into decode and verify rows, which come first, and prefill rows.

    Attributes:
        decode: The decode and verify rows, with their blocks of every group.
        prefill: The prefill rows, with their blocks of every group.
        first_prefill_token: Index of the prefill rows' first token among the packed tokens. int32 scalar
        num_decode_tokens: Static bound on the tokens of the decode and verify rows, for arrays of tokens that have room for
            it beside the prefill rows: see `split_rows`. None if the arrays may end with the last row.
        chunk_size: The `chunk_size` with which prefill ops cut the prefill rows. Static.
    """

    decode: Rows
    prefill: Rows
    first_prefill_token: jax.Array
    num_decode_tokens: int | None = field(default=None, metadata=dict(static=True))
    chunk_size: int = field(default=CHUNK_SIZE, metadata=dict(static=True))

    @property
    def num_groups(self) -> int:
        """The number of groups of layers, which have blocks of their own."""
        return self.decode.read.shape[0]

    @property
    def max_decode_tokens(self) -> int:
        """The static bound on the tokens of the decode and verify rows: `num_decode_tokens`, or else 1 + K per row."""
        if self.num_decode_tokens is not None:
            return self.num_decode_tokens
        return self.decode.num_rows * self.decode.max_query_tokens

    def num_prefill_tokens(self, num_tokens: int) -> int:
        """Returns the static bound on the prefill rows' tokens in arrays of `num_tokens` tokens.

        Raises:
            ValueError: The arrays have fewer tokens than `num_decode_tokens`, beside prefill rows.
        """
        if self.num_decode_tokens is None or self.decode.num_rows == 0 or self.prefill.num_rows == 0:
            return num_tokens
        return values.integer("num_tokens", num_tokens, self.num_decode_tokens) - self.num_decode_tokens

    def apply(
        self,
        decode: Callable[..., tuple[jax.Array, ...]],
        prefill: Callable[..., tuple[jax.Array, ...]],
        tokens: tuple[jax.Array, ...],
        carry: tuple[jax.Array, ...],
    ) -> tuple[jax.Array, ...]:
        """Runs a function for each kind of rows: `f(rows, *tokens, *carry) -> (outputs, *carry)`, with `Rows`.

        A function must return 0 for padding tokens after its last row, which every op of `pallas_kernels` does. If the
        batch has rows of one kind only, that kind's function runs on all tokens without a copy.

        Args:
            decode: Runs the decode and verify rows.
            prefill: Runs the prefill rows.
            tokens: Arrays whose first axis is the packed tokens.
            carry: Arrays that both functions take and return, such as pools.

        Returns:
            The outputs of all tokens in packed order, followed by the carry.
        """
        num_tokens = tokens[0].shape[0]
        if self.prefill.num_rows == 0:
            return decode(self.decode, *tokens, *carry)
        if self.decode.num_rows == 0:
            return prefill(self.prefill, *tokens, *carry)
        begin, count = self.first_prefill_token, self.num_prefill_tokens(num_tokens)
        bound = min(self.max_decode_tokens, num_tokens)
        # The slice of the prefill rows may start anywhere in the first `bound` tokens, and must not reach beyond the end.
        padded = [_padded(x, bound + count) for x in tokens]
        out, *carry_ = decode(self.decode, *(x[:bound] for x in tokens), *carry)
        tail, *carry_ = prefill(self.prefill, *(jax.lax.dynamic_slice_in_dim(x, begin, count) for x in padded), *carry_)
        out = jax.lax.dynamic_update_slice_in_dim(_padded(out, bound + count), tail, begin, axis=0)
        return out[:num_tokens], *carry_

    def chunks(self, num_tokens: int) -> Chunks | None:
        """Cuts the prefill rows into chunks, once for all layers. Returns None if there are no prefill rows.

        `num_tokens` is the number of packed tokens of the whole batch, padding included.
        """
        rows = self.prefill
        if rows.num_rows == 0:
            return None
        count = self.num_prefill_tokens(num_tokens)
        return chunk_rows(rows.query_start_loc, rows.num_computed_tokens, count, self.chunk_size)


def _padded(x: jax.Array, length: int) -> jax.Array:
    """Adds zeros at the end of the first axis."""
    missing = length - x.shape[0]
    return jnp.pad(x, ((0, missing), *((0, 0) for _ in x.shape[1:]))) if missing else x


def split_rows(
    batch: StepBatch,
    indices: StepIndices,
    num_decode_rows: int,
    num_decode_tokens: int | None = None,
    interior: InteriorBoundaries | None = None,
) -> RowSplit:
    """Splits a batch's rows by kind.

    Args:
        batch: The step's rows. The first `num_decode_rows` must be decode, verify or padding rows, the others prefill
            or padding rows.
        indices: The result of `begin_step`.
        num_decode_rows: Number of decode and verify rows, padding rows among them included. Static.
        num_decode_tokens: Static bound on the tokens of the decode and verify rows. In a batch with both kinds of rows,
            arrays of tokens must then have at least as many entries as the prefill rows have tokens, plus this bound.
            None for arrays that may end with the last row: prefill ops then run over the tokens of all rows.
        interior: The boundaries inside the rows, of which prefill rows keep the states, in mode "all"; None to keep
            none.

    Raises:
        ValueError: `num_decode_rows` is not from 0 to the number of rows, or `num_decode_tokens` is negative.
    """
    num_rows = batch.idx_mapping.shape[0]
    num_decode_rows = values.integer("split_rows: num_decode_rows", num_decode_rows, 0, num_rows)
    num_decode_tokens = values.optional_integer("split_rows: num_decode_tokens", num_decode_tokens, 0)

    def rows(begin: int, end: int | None) -> Rows:
        loc, folds = batch.query_start_loc[begin : None if end is None else end + 1], indices.folds
        fold: Any = None
        boundary = None
        if folds is not None:
            fold = Fold(slot=folds.slot[begin:end], base=folds.base[begin:end], block=folds.block[:, begin:end])
            if folds.windows is not None:
                row, block = folds.windows.first_row[begin:end], folds.windows.block[:, begin:end]
                boundary = BoundaryWindow(row=row, block=block)
        return Rows(
            query_start_loc=loc - loc[0],
            num_computed_tokens=indices.num_computed_tokens[begin:end],
            read=indices.recurrent_read[:, begin:end],
            window_read=indices.conv_read[:, begin:end],
            window_row=indices.window_row[begin:end],
            write=indices.write[:, begin:end],
            boundary=boundary,
            fold=fold,
        )

    prefill, chunk_size = rows(num_decode_rows, None), CHUNK_SIZE
    if interior is not None:
        offset, block = interior.offset[num_decode_rows:], interior.block[:, num_decode_rows:]
        prefill = replace(prefill, checkpoints=RowCheckpoints(offset=offset, block=block))
        chunk_size = interior.chunk_size
    decode = rows(0, num_decode_rows)
    return RowSplit(
        decode=replace(decode, max_query_tokens=indices.write.shape[-1]),
        prefill=prefill,
        first_prefill_token=batch.query_start_loc[num_decode_rows],
        num_decode_tokens=num_decode_tokens,
        chunk_size=chunk_size,
    )
