"""Packed tokens apart by kind, wherever their rows stand: the index split of vLLM's gated delta net."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.rows import token_rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TokenSplit:
    """A batch's verify rows, and its others ("non-spec"). int32 throughout.

    Each side keeps all rows in their places, those of the other side without tokens: kernels skip them, and the step's
    indices need no gathering. vLLM's `spec_query_start_loc` is the same without the empty rows.

    Attributes:
        verify_query_start_loc: Of the verify rows, in their own tokens. [rows + 1]
        other_query_start_loc: Of the others, likewise.
        verify_tokens: Packed place of each token of the verify rows; out of range behind the last. [bound]
        other_tokens: Of the others, likewise. [tokens]
        place: Where each packed token is on its side; out of range for padding tokens. [tokens]
        is_verify: Which side that is. bool [tokens]
    """

    verify_query_start_loc: jax.Array
    other_query_start_loc: jax.Array
    verify_tokens: jax.Array
    other_tokens: jax.Array
    place: jax.Array
    is_verify: jax.Array

    def take(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The verify rows' tokens and the others' of an array with the packed tokens in front; 0 behind the last."""
        take = lambda tokens: x.at[tokens].get(mode="fill", fill_value=0)
        return take(self.verify_tokens), take(self.other_tokens)

    def merge(self, verify: jax.Array, other: jax.Array) -> jax.Array:
        """Outputs of both sides in packed order; 0 for padding tokens."""
        take = lambda x: x.at[self.place].get(mode="fill", fill_value=0)
        is_verify = self.is_verify.reshape(-1, *[1] * (verify.ndim - 1))
        return jnp.where(is_verify, take(verify), take(other))


def split_tokens(
    query_start_loc: jax.Array, num_drafts: jax.Array, num_tokens: int, num_verify_tokens: int | None = None
) -> TokenSplit:
    """Tells the tokens of verify rows from the others', in a batch whose rows are in no particular order.

    For layers ported from vLLM that run such batches; where decode and verify rows lead, `split_rows` slices instead.
    Source: vLLM's `GDNAttentionMetadataBuilder`.

    Args:
        query_start_loc: First packed token of each row, then the end of the last.
        num_drafts: Draft tokens of a verify row; -1 for a row that is none. [rows]
        num_tokens: Packed tokens, padding included.
        num_verify_tokens: Static bound on the verify rows' tokens; None is all.
    """
    rows, length = token_rows(query_start_loc, num_tokens), jnp.diff(query_start_loc)
    is_verify_row = num_drafts >= 0
    is_verify = rows.valid & is_verify_row[rows.row]
    is_other = rows.valid & ~is_verify_row[rows.row]
    starts = lambda mask: jnp.pad(jnp.cumsum(jnp.where(mask, length, 0), dtype=jnp.int32), (1, 0))
    find = lambda mask, size: jnp.nonzero(mask, size=size, fill_value=num_tokens)[0].astype(jnp.int32)
    place = jnp.where(is_verify, jnp.cumsum(is_verify, dtype=jnp.int32), jnp.cumsum(is_other, dtype=jnp.int32)) - 1
    return TokenSplit(
        verify_query_start_loc=starts(is_verify_row),
        other_query_start_loc=starts(~is_verify_row),
        verify_tokens=find(is_verify, num_tokens if num_verify_tokens is None else num_verify_tokens),
        other_tokens=find(is_other, num_tokens),
        place=jnp.where(rows.valid, place, num_tokens),
        is_verify=is_verify,
    )
