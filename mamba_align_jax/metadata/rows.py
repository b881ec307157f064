"""The two kinds of rows: decode and verify rows lead a batch, prefill rows follow; each kind has its own kernels."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mamba_align_jax._deprecated import renamed_fields
from mamba_align_jax.align.batch import StepBatch
from mamba_align_jax.align.step import StepIndices


@renamed_fields(conv_row="window_row")
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Rows:
    """Consecutive rows of one kind with their packed tokens, as the kernels take them: int32 throughout.

    Attributes:
        query_start_loc: [rows + 1], counted from the kind's own first token.
        num_computed_tokens: Position of each row's first token. [rows]
        recurrent_read: [groups, rows]
        conv_read: [groups, rows]
        window_row: [rows]
        write: [groups, rows, 1 + K]
    """

    query_start_loc: jax.Array
    num_computed_tokens: jax.Array
    recurrent_read: jax.Array
    conv_read: jax.Array
    window_row: jax.Array
    write: jax.Array

    @property
    def num_rows(self) -> int:
        """Rows, padding included."""
        return self.window_row.shape[0]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RowSplit:
    """A batch whose decode and verify rows lead. `first_prefill_token` is where the packed tokens of the others begin."""

    decode: Rows
    prefill: Rows
    first_prefill_token: jax.Array

    def apply(
        self,
        decode: Callable[..., tuple[jax.Array, ...]],
        prefill: Callable[..., tuple[jax.Array, ...]],
        tokens: tuple[jax.Array, ...],
        carry: tuple[jax.Array, ...],
        num_decode_tokens: int,
    ) -> tuple[jax.Array, ...]:
        """Runs each kind's function on its tokens: `f(rows, *tokens, *carry) -> (outputs, *carry)`.

        Outputs must be 0 for tokens behind a kind's last row, which every op here promises. A batch of one kind calls one
        function on all tokens, without a copy.

        Args:
            decode: For decode and verify rows.
            prefill: For the others.
            tokens: Arrays with the packed tokens in front.
            carry: What both thread through: pools.
            num_decode_tokens: Static bound on the tokens of decode and verify rows.

        Returns:
            The outputs of all tokens in packed order, then the carry.
        """
        num_tokens = tokens[0].shape[0]
        if self.prefill.num_rows == 0:
            return decode(self.decode, *tokens, *carry)
        if self.decode.num_rows == 0:
            return prefill(self.prefill, *tokens, *carry)
        out, *carry_ = decode(self.decode, *(x[:num_decode_tokens] for x in tokens), *carry)
        begin = self.first_prefill_token
        rest = [jax.lax.dynamic_slice_in_dim(x, begin, num_tokens - num_decode_tokens) for x in tokens]
        tail, *carry_ = prefill(self.prefill, *rest, *carry_)
        out = jnp.pad(out, ((0, num_tokens - num_decode_tokens), *((0, 0) for _ in out.shape[1:])))
        return jax.lax.dynamic_update_slice_in_dim(out, tail, begin, axis=0), *carry_


def split_rows(batch: StepBatch, indices: StepIndices, num_decode_rows: int) -> RowSplit:
    """Splits the rows at `num_decode_rows` (static): those before must be decode or verify rows or padding.

    Token arrays of a batch with both kinds must have num_decode_rows * (1 + K) tokens more than the prefill rows need.
    """

    def rows(begin: int, end: int | None) -> Rows:
        loc = batch.query_start_loc[begin : None if end is None else end + 1]
        return Rows(
            query_start_loc=loc - loc[0],
            num_computed_tokens=indices.num_computed_tokens[begin:end],
            recurrent_read=indices.recurrent_read[:, begin:end],
            conv_read=indices.conv_read[:, begin:end],
            window_row=indices.window_row[begin:end],
            write=indices.write[:, begin:end],
        )

    return RowSplit(
        decode=rows(0, num_decode_rows),
        prefill=rows(num_decode_rows, None),
        first_prefill_token=batch.query_start_loc[num_decode_rows],
    )
