"""The launch that merges the partial results of each token's shards, and writes zeros for padding tokens."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels.paged_attention._dims import Dims, gated, mask_of
from pallas_kernels.paged_attention._shards import ceil
from pallas_kernels.rows import Rows, token_rows


class Sums(NamedTuple):
    """The partial sums of the softmax of some tokens over some of their keys.

    Attributes:
        top: The running maximum of the scores times log2(e). [..]
        total: The sum of the probabilities before normalisation, p = 2 ** (score * log2(e) - top). [..]
        values: The sum of p times value, in one array for each tile of dims. [.., dims]
    """

    top: jax.Array
    total: jax.Array
    values: list[jax.Array]


class _Tile(NamedTuple):
    """The tile of a shard or a group that a program reads: its elements in all, and its dims of a head.

    Neither size may depend on the number of tokens, because the order of sums depends on both.
    """

    elements: int
    dims: int


# Decode and verify rows have many shards and few tokens, so many programs must wait for memory at the same time.
_WITH_GROUPS, _WITHOUT_GROUPS = _Tile(1024, 128), _Tile(8192, 256)
LOW = -1e30  # below every score, and finite: a block that a token does not see leaves its sums as they are


def joined(first: Sums, second: Sums, interpret: bool) -> Sums:
    """Join the partial sums over two shards. The result has the same bits in every compiled kernel."""
    top = jnp.maximum(first.top, second.top)
    factors = [pt.exp2(shard.top - top, interpret) for shard in (first, second)]

    def add(x, y):
        products = [pt.product(*each, interpret) for each in zip((x, y), factors, strict=True)]
        return products[0] + products[1]

    total = add(first.total, second.total)
    factors = [factor[..., None] for factor in factors]
    return Sums(top, total, [add(x, y) for x, y in zip(first.values, second.values, strict=True)])


def _kernel(
    refs,
    *,
    split: int,
    shards: int,
    groups: tuple[int, ...],
    units: tuple[int, ...],
    tokens_and_heads: int,
    dims_of_program: int,
    interpret: bool,
):
    """Merge the shards of some pairs of a token and a head, in a tile of dims. See `merge`."""
    _, _, heads, value_dim = refs.sums.shape
    index, exists = pt.lanes(pt.program_id(0), tokens_and_heads, refs.num_keys.shape[0] * heads)
    dim, dim_exists = pt.lanes(pt.program_id(1), dims_of_program, value_dim)
    dims = Dims(dim, None if value_dim % dims_of_program == 0 else dim_exists)
    token = jax.lax.div(index, jnp.int32(heads))
    head = index - token * heads
    num_keys = pt.load(refs.num_keys.at[token], mask=exists, other=1)
    used = jnp.where(num_keys > split, jnp.minimum(ceil(num_keys, split), shards), 0)
    written = exists & ((num_keys > split) | (num_keys == 0))

    @pt.when(jnp.max(written.astype(jnp.int32)) > 0)
    def _():
        entry = token if refs.entry is None else pt.load(refs.entry.at[token], mask=exists, other=0)

        largest = max((1, *groups))
        count = shards // largest
        group, _ = pt.lanes(0, pt.power_of_two(count), count)

        def sums_of(shard):
            live, slot = shard[:, None] < used[None, :], shard // units[0]
            pair = slot[:, None], head[None, :], entry[None, :]
            stat = lambda ref, other: pt.load(ref.at[pair], mask=live, other=other)
            at = slot[:, None, None], entry[None, :, None], head[None, :, None], dims.index[None, None, :]
            mask = jnp.broadcast_to(live[:, :, None], (*live.shape, dims.index.shape[0]))
            mask = mask if dims.exists is None else mask & dims.exists[None, None, :]
            values = pt.load(refs.sums.at[at], mask=mask, other=0.0)
            return Sums(stat(refs.tops, LOW), stat(refs.totals, 0.0), [values])

        def finish(unit):
            """Join all shards, of which every `unit`-th one is stored, and store the results."""

            def total_of(first, size):
                if size == unit:
                    return sums_of(first)
                smaller = max(each for each in (1, *groups) if unit <= each < size)
                partial_sums = [total_of(first + n, smaller) for n in range(0, size, smaller)]
                return functools.reduce(functools.partial(joined, interpret=interpret), partial_sums)

            each = total_of(largest * group, largest)
            factors = pt.exp2(each.top - jnp.max(each.top, axis=0)[None, :], interpret)
            total = jnp.sum(pt.product(each.total, factors, interpret), axis=0)
            total = jnp.where(total > 0, total, 1.0)
            out = jnp.sum(pt.product(each.values[0], factors[:, :, None], interpret), axis=0) / total[:, None]
            out = gated(refs.gates, out, token, head, dims, mask_of(exists & (num_keys > split), dims), value_dim)
            at = refs.out.at[token[:, None], head[:, None], dims.index[None, :]]
            pt.store(at, out.astype(refs.out.dtype), mask=mask_of(written, dims))

        for unit in units:
            if len(units) == 1:
                finish(unit)
            else:
                pt.when(refs.unit[...] == unit)(functools.partial(finish, unit))


def merge(
    attended: dict[str, jax.Array],
    rows: Rows,
    gates: jax.Array | None,
    *,
    split: int,
    shards: int,
    entry: jax.Array | None = None,
    groups: tuple[int, ...] = (),
    units: tuple[int, ...] = (1,),
    unit: jax.Array | None = None,
    interpret: bool,
) -> jax.Array:
    """Launch the kernel. Returns the attended values [tokens, heads, value_dim].

    Args:
        attended: `out`, the results of tokens whose keys are one split [tokens, heads, value_dim], and for the other tokens
            the `Sums` of their shards: `sums`, the `Sums.values` [slots, entries, heads, value_dim], and `tops` and
            `totals` [slots, heads, entries]. A slot has the sums of as many neighbouring shards as the smallest of `units`.
        rows: The rows.
        gates: See api.py.
        split: The number of positions of a split.
        shards: The number of shards of a row.
        entry: The index of each token along the axis `entries`; None if it is the token's own index. int32 [tokens].
        groups: The sizes of groups of neighbouring shards, in the order in which they are `joined`: see `Config`.
        units: The possible numbers of neighbouring shards that are joined already, and stored as the first of them.
        unit: The one of `units` that was chosen on the device; None if `units` has one element. int32 [].
        interpret: Whether to run the kernel's body as plain JAX.
    """
    num_tokens, heads, value_dim = attended["out"].shape
    of_token = token_rows(rows.query_start_loc, num_tokens)
    # The number of keys that each token attends to, 0 for padding tokens.
    num_keys = jnp.where(of_token.valid, rows.num_computed_tokens[of_token.row] + of_token.offset + 1, 0)
    of_program = _WITH_GROUPS if groups else _WITHOUT_GROUPS
    dims_of_program = min(of_program.dims, max(16, pt.power_of_two(value_dim)))
    largest_groups = pt.power_of_two(shards // max((1, *groups)))
    tokens_and_heads = max(1, of_program.elements // (largest_groups * dims_of_program))
    inputs = {name: attended[name] for name in ("sums", "tops", "totals")}
    inputs |= dict(num_keys=num_keys, gates=gates, entry=entry, unit=unit)
    merged = pt.call(
        functools.partial(
            _kernel,
            split=split,
            shards=shards,
            groups=groups,
            units=units,
            tokens_and_heads=tokens_and_heads,
            dims_of_program=dims_of_program,
            interpret=interpret,
        ),
        name="paged_attention_merge",
        grid=(-(-num_tokens * heads // tokens_and_heads), -(-value_dim // dims_of_program)),
        inputs=inputs,
        updates=dict(out=attended["out"]),
        num_warps=4,
        interpret=interpret,
    )
    return merged["out"]
