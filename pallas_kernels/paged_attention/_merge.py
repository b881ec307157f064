"""The launch after the one that attends: it merges the shares of each token and writes zeros for padding tokens."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels.paged_attention._dims import dims_of, gated, mask_of
from pallas_kernels.paged_attention._shares import ceil
from pallas_kernels.paged_attention._tiles import keys_of_tokens
from pallas_kernels.rows import TokenRows


class Sums(NamedTuple):
    """The sums of some tokens over some of their keys.

    Attributes:
        top: The largest scores times log2(e). [..]
        total: The sums of the weights, which are 2 ** (score * log2(e) - top). [..]
        values: The sums of the weighted values, some dims each. [.., dims]
    """

    top: jax.Array
    total: jax.Array
    values: list[jax.Array]


_MERGED_ELEMENTS = 8192  # of a program's tile
LOW = -1e30  # below every score, and finite: a block that a token does not see leaves its sums as they are


def joined(first: Sums, second: Sums, interpret: bool) -> Sums:
    """Joins the sums over two shares. The result has the same bits in every compiled kernel."""
    top = jnp.maximum(first.top, second.top)
    factors = [pt.exp2(share.top - top, interpret) for share in (first, second)]

    def add(x, y):
        products = [pt.product(*each, interpret) for each in zip((x, y), factors, strict=True)]
        return products[0] + products[1]

    total = add(first.total, second.total)
    factors = [factor[..., None] for factor in factors]
    return Sums(top, total, [add(x, y) for x, y in zip(first.values, second.values, strict=True)])


def _kernel(refs, *, split: int, tokens_and_heads: int, has_couples: bool, interpret: bool):
    """Merges the shares of some pairs of a token and a head."""
    shares, _, heads, value_dim = refs.sums.shape
    index, exists = pt.lanes(pt.program_id(0), tokens_and_heads, refs.num_keys.shape[0] * heads)
    token = jax.lax.div(index, jnp.int32(heads))
    head = index - token * heads
    num_keys = pt.load(refs.num_keys.at[token], mask=exists, other=1)
    used = jnp.where(num_keys > split, jnp.minimum(ceil(num_keys, split), shares), 0)
    written = exists & ((num_keys > split) | (num_keys == 0))

    @pt.when(jnp.max(written.astype(jnp.int32)) > 0)
    def _():
        count = shares // (1 + has_couples)
        number, _ = pt.lanes(0, pt.power_of_two(count), count)
        place = token if refs.place is None else pt.load(refs.place.at[token], mask=exists, other=0)

        def sums_of(share, dims):
            live = share[:, None] < used[None, :]
            if refs.joins is not None:  # A couple that is joined already is stored as its first share.
                live &= ((share & 1) == 0)[:, None] | (refs.joins[...] == 0)
            stat = lambda ref, other: pt.load(
                ref.at[share[:, None], head[None, :], place[None, :]], mask=live, other=other
            )
            at = share[:, None, None], place[None, :, None], head[None, :, None], dims.index[None, None, :]
            mask = jnp.broadcast_to(live[:, :, None], (*live.shape, dims.index.shape[0]))
            mask = mask if dims.exists is None else mask & dims.exists[None, None, :]
            values = pt.load(refs.sums.at[at], mask=mask, other=0.0)
            return Sums(stat(refs.tops, LOW), stat(refs.totals, 0.0), [values])

        for dims in dims_of(0, value_dim):
            if has_couples:
                each = joined(sums_of(2 * number, dims), sums_of(2 * number + 1, dims), interpret)
            else:
                each = sums_of(number, dims)
            factors = pt.exp2(each.top - jnp.max(each.top, axis=0)[None, :], interpret)
            total = jnp.sum(pt.product(each.total, factors, interpret), axis=0)
            total = jnp.where(total > 0, total, 1.0)
            out = jnp.sum(pt.product(each.values[0], factors[:, :, None], interpret), axis=0) / total[:, None]
            out = gated(refs.gates, out, token, head, dims, mask_of(exists & (num_keys > split), dims), value_dim)
            at = refs.out.at[token[:, None], head[:, None], dims.index[None, :]]
            pt.store(at, out.astype(refs.out.dtype), mask=mask_of(written, dims))


def merge(
    attended: dict[str, jax.Array],
    rows: TokenRows,
    num_computed_tokens: jax.Array,
    gates: jax.Array | None,
    *,
    split: int,
    place: jax.Array | None = None,
    has_couples: bool = False,
    joins: jax.Array | None = None,
    interpret: bool,
) -> jax.Array:
    """Launches the kernel. Returns the attended values [tokens, heads, value_dim].

    Args:
        attended: `out`, the results of tokens whose keys are one split [tokens, heads, value_dim], and of the others and
            their shares `sums`, the weighted values [shares, places, heads, value_dim], `tops`, the largest scores times
            log2(e) [shares, heads, places], and `totals`, the sums of the weights, of the same shape.
        rows: The place of each token in its row.
        num_computed_tokens: Position of each row's first token. int32 [rows].
        gates: The gates of the results, or None.
        split: The number of positions of a split.
        place: The place of each token in `sums`, `tops` and `totals`; None if it is the token itself. int32 [tokens].
        has_couples: Whether shares 2 n and 2 n + 1 are `joined` before all of them are merged.
        joins: 1 if they are joined already, and stored as share 2 n, and 0 if not; None if they never are. int32 [].
        interpret: Whether to run the kernel's body as plain JAX.
    """
    shares, _, heads, value_dim = attended["sums"].shape
    tokens_and_heads = max(1, _MERGED_ELEMENTS // pt.power_of_two(shares // (1 + has_couples) * value_dim))
    inputs = {name: attended[name] for name in ("sums", "tops", "totals")}
    inputs |= dict(num_keys=keys_of_tokens(rows, num_computed_tokens), gates=gates, place=place, joins=joins)
    merged = pt.call(
        functools.partial(
            _kernel, split=split, tokens_and_heads=tokens_and_heads, has_couples=has_couples, interpret=interpret
        ),
        name="paged_attention_merge",
        grid=(-(-rows.row.shape[0] * heads // tokens_and_heads),),
        inputs=inputs,
        outputs={},
        updates=dict(out=attended["out"]),
        num_warps=4,
        interpret=interpret,
    )
    return merged["out"]
