"""The launch after the one that attends: it merges the shares of each token and writes zeros for padding tokens."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels.paged_attention._dims import Dims, gated, mask_of
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


class _Tile(NamedTuple):
    """What a program of the kernel reads of a share or a group: so many elements in all, of so many dims of a head.

    Neither may follow the number of tokens, because the order of sums depends on them.
    """

    elements: int
    dims: int


# Decode and verify rows have many shares and few tokens, so many programs must wait for memory at the same time.
_WITH_GROUPS, _WITHOUT_GROUPS = _Tile(1024, 128), _Tile(8192, 256)
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


def _kernel(
    refs,
    *,
    split: int,
    shares: int,
    groups: tuple[int, ...],
    units: tuple[int, ...],
    tokens_and_heads: int,
    dims_of_program: int,
    interpret: bool,
):
    """Merges the shares of some pairs of a token and a head, in some of their dims. See `merge`."""
    _, _, heads, value_dim = refs.sums.shape
    index, exists = pt.lanes(pt.program_id(0), tokens_and_heads, refs.num_keys.shape[0] * heads)
    dim, dim_exists = pt.lanes(pt.program_id(1), dims_of_program, value_dim)
    dims = Dims(dim, None if value_dim % dims_of_program == 0 else dim_exists)
    token = jax.lax.div(index, jnp.int32(heads))
    head = index - token * heads
    num_keys = pt.load(refs.num_keys.at[token], mask=exists, other=1)
    used = jnp.where(num_keys > split, jnp.minimum(ceil(num_keys, split), shares), 0)
    written = exists & ((num_keys > split) | (num_keys == 0))

    @pt.when(jnp.max(written.astype(jnp.int32)) > 0)
    def _():
        place = token if refs.place is None else pt.load(refs.place.at[token], mask=exists, other=0)

        largest = max((1, *groups))
        count = shares // largest
        number, _ = pt.lanes(0, pt.power_of_two(count), count)

        def sums_of(share):
            live, slot = share[:, None] < used[None, :], share // units[0]
            pair = slot[:, None], head[None, :], place[None, :]
            stat = lambda ref, other: pt.load(ref.at[pair], mask=live, other=other)
            at = slot[:, None, None], place[None, :, None], head[None, :, None], dims.index[None, None, :]
            mask = jnp.broadcast_to(live[:, :, None], (*live.shape, dims.index.shape[0]))
            mask = mask if dims.exists is None else mask & dims.exists[None, None, :]
            values = pt.load(refs.sums.at[at], mask=mask, other=0.0)
            return Sums(stat(refs.tops, LOW), stat(refs.totals, 0.0), [values])

        def finish(unit):
            """Joins all shares, of which every `unit`-th one is stored, and stores the results."""

            def total_of(first, size):
                if size == unit:
                    return sums_of(first)
                part = max(each for each in (1, *groups) if unit <= each < size)
                parts = [total_of(first + n, part) for n in range(0, size, part)]
                return functools.reduce(functools.partial(joined, interpret=interpret), parts)

            each = total_of(largest * number, largest)
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
    rows: TokenRows,
    num_computed_tokens: jax.Array,
    gates: jax.Array | None,
    *,
    split: int,
    shares: int,
    place: jax.Array | None = None,
    groups: tuple[int, ...] = (),
    units: tuple[int, ...] = (1,),
    unit: jax.Array | None = None,
    interpret: bool,
) -> jax.Array:
    """Launches the kernel. Returns the attended values [tokens, heads, value_dim].

    Args:
        attended: `out`, the results of tokens whose keys are one split [tokens, heads, value_dim], and of the others and
            their shares `sums`, the weighted values [slots, places, heads, value_dim], `tops`, the largest scores times
            log2(e) [slots, heads, places], and `totals`, the sums of the weights, of the same shape. Each slot is for as
            many neighbouring shares as the least of `units` has.
        rows: The place of each token in its row.
        num_computed_tokens: Position of each row's first token. int32 [rows].
        gates: The gates of the results, or None.
        split: The number of positions of a split.
        shares: The number of shares of a row.
        place: The place of each token in `sums`, `tops` and `totals`; None if it is the token itself. int32 [tokens].
        groups: The numbers of neighbouring shares that are `joined` first, and so on: see `Config`.
        units: How many shares may be joined already, and stored as the first one of them.
        unit: Which of `units` it is; None if there is one. int32 [].
        interpret: Whether to run the kernel's body as plain JAX.
    """
    _, _, heads, value_dim = attended["sums"].shape
    num_tokens = rows.row.shape[0]
    of_program = _WITH_GROUPS if groups else _WITHOUT_GROUPS
    dims_of_program = min(of_program.dims, max(16, pt.power_of_two(value_dim)))
    largest_groups = pt.power_of_two(shares // max((1, *groups)))
    tokens_and_heads = max(1, of_program.elements // (largest_groups * dims_of_program))
    inputs = {name: attended[name] for name in ("sums", "tops", "totals")}
    inputs |= dict(num_keys=keys_of_tokens(rows, num_computed_tokens), gates=gates, place=place, unit=unit)
    merged = pt.call(
        functools.partial(
            _kernel,
            split=split,
            shares=shares,
            groups=groups,
            units=units,
            tokens_and_heads=tokens_and_heads,
            dims_of_program=dims_of_program,
            interpret=interpret,
        ),
        name="paged_attention_merge",
        grid=(-(-num_tokens * heads // tokens_and_heads), -(-value_dim // dims_of_program)),
        inputs=inputs,
        outputs={},
        updates=dict(out=attended["out"]),
        num_warps=4,
        interpret=interpret,
    )
    return merged["out"]
