"""The launch after the one that attends: it merges the shares of each token and writes zeros for padding tokens."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels.paged_attention._dims import dims_of, gated, mask_of
from pallas_kernels.paged_attention._shares import ceil
from pallas_kernels.paged_attention._tiles import keys_of_tokens
from pallas_kernels.rows import TokenRows

_MERGED_ELEMENTS = 8192  # of a program's tile
LOW = -1e30  # below every score, and finite: a block that a token does not see leaves its sums as they are


def _kernel(refs, *, split: int, pairs: int, interpret: bool):
    """Runs `pairs` pairs of a token and a head."""
    shares, _, heads, value_dim = refs.sums.shape
    pair, exists = pt.lanes(pt.program_id(0), pairs, refs.num_keys.shape[0] * heads)
    token = jax.lax.div(pair, jnp.int32(heads))
    head = pair - token * heads
    num_keys = pt.load(refs.num_keys.at[token], mask=exists, other=1)
    used = jnp.where(num_keys > split, jnp.minimum(ceil(num_keys, split), shares), 0)
    written = exists & ((num_keys > split) | (num_keys == 0))

    @pt.when(jnp.max(written.astype(jnp.int32)) > 0)
    def _():
        share, _ = pt.lanes(0, pt.power_of_two(shares), shares)
        live = share[:, None] < used[None, :]
        place = token if refs.place is None else pt.load(refs.place.at[token], mask=exists, other=0)
        stat = lambda ref, other: pt.load(ref.at[share[:, None], head[None, :], place[None, :]], mask=live, other=other)
        tops, totals = stat(refs.tops, LOW), stat(refs.totals, 0.0)
        factors = pt.exp2(tops - jnp.max(tops, axis=0)[None, :], interpret)
        total = jnp.sum(factors * totals, axis=0)
        total = jnp.where(total > 0, total, 1.0)
        for dims in dims_of(0, value_dim):
            at = share[:, None, None], place[None, :, None], head[None, :, None], dims.index[None, None, :]
            mask = live[:, :, None]
            mask = jnp.broadcast_to(mask, (*live.shape, dims.index.shape[0]))
            mask = mask if dims.exists is None else mask & dims.exists[None, None, :]
            sums = pt.load(refs.sums.at[at], mask=mask, other=0.0)
            out = jnp.sum(sums * factors[:, :, None], axis=0) / total[:, None]
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
        interpret: Whether to run the kernel's body as plain JAX.
    """
    shares, _, heads, value_dim = attended["sums"].shape
    pairs = max(1, _MERGED_ELEMENTS // pt.power_of_two(shares * value_dim))
    inputs = {name: attended[name] for name in ("sums", "tops", "totals")}
    inputs |= dict(num_keys=keys_of_tokens(rows, num_computed_tokens), gates=gates, place=place)
    merged = pt.call(
        functools.partial(_kernel, split=split, pairs=pairs, interpret=interpret),
        name="paged_attention_merge",
        grid=(-(-rows.row.shape[0] * heads // pairs),),
        inputs=inputs,
        outputs={},
        updates=dict(out=attended["out"]),
        num_warps=4,
        interpret=interpret,
    )
    return merged["out"]
