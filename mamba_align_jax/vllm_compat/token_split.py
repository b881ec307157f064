"""Separates the packed tokens of verify rows from all others, in batches whose rows are in any order."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.rows import token_rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TokenSplit:
    """The tokens of a batch's verify rows on one side, and those of its other rows ("non-spec" in vLLM) on the other.

    Each side keeps all rows in their places. Rows of the other side have no tokens there, so kernels skip them, and the
    step's indices need not be gathered. vLLM's `spec_query_start_loc` leaves these empty rows out.

    Attributes:
        verify_query_start_loc: Where each row starts among the tokens of the verify rows. int32 [rows + 1].
        other_query_start_loc: Where each row starts among the tokens of the other rows. int32 [rows + 1].
        verify_tokens: The packed position of each token of the verify rows, out of range after the last. int32 [bound].
        other_tokens: The packed position of each token of the other rows, out of range after the last. int32 [tokens].
        place: The position of each packed token on its side, out of range for padding tokens. int32 [tokens].
        is_verify: True if the packed token belongs to a verify row. bool [tokens].
    """

    verify_query_start_loc: jax.Array
    other_query_start_loc: jax.Array
    verify_tokens: jax.Array
    other_tokens: jax.Array
    place: jax.Array
    is_verify: jax.Array

    def take(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the verify rows' tokens and the other rows' tokens of `x`, [tokens, ...]. Zeros follow the last."""
        take = lambda tokens: x.at[tokens].get(mode="fill", fill_value=0)
        return take(self.verify_tokens), take(self.other_tokens)

    def merge(self, verify: jax.Array, other: jax.Array) -> jax.Array:
        """Returns the outputs of both sides in packed order, with 0 for padding tokens."""
        take = lambda x: x.at[self.place].get(mode="fill", fill_value=0)
        is_verify = self.is_verify.reshape(-1, *[1] * (verify.ndim - 1))
        return jnp.where(is_verify, take(verify), take(other))


def split_tokens(
    query_start_loc: jax.Array, num_drafts: jax.Array, num_tokens: int, num_verify_tokens: int | None = None
) -> TokenSplit:
    """Separates the tokens of verify rows from those of other rows, in a batch whose rows are in any order.

    It is meant for layers ported from vLLM that run such batches. If the prefill rows are at the end, `split_rows`
    needs only slices instead. Source: vLLM's `GDNAttentionMetadataBuilder`.

    Args:
        query_start_loc: The position of each row's first token, followed by the number of tokens. int32 [rows + 1].
        num_drafts: Draft tokens of a verify row, or -1 for any other row. int32 [rows].
        num_tokens: The number of packed tokens, padding included. Static.
        num_verify_tokens: An upper bound on the verify rows' tokens. None for `num_tokens`. Static.
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
