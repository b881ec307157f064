"""mixture_of_experts as a Pallas kernel that runs twice: tiles of pairs of one expert times that expert's weights."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels._dot import dot
from pallas_kernels.mixture_of_experts._activations import ACTIVATIONS
from pallas_kernels.mixture_of_experts._tiles import tiles
from pallas_kernels.mixture_of_experts.config import Config, Product, default_config
from pallas_kernels.mixture_of_experts.xla import weighted_sum

_BLOCK = 128  # pairs that a program looks at together while it finds its tile


def unsupported(x) -> str | None:
    """Returns why the kernels cannot run these arguments, or None if they can."""
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"x must be float32, bfloat16 or float16, got {x.dtype}"
    return None


class _Tile(NamedTuple):
    """The pairs of one program.

    Attributes:
        expert: Their expert.
        any_exists: Whether there are any.
        find: Returns the pairs' numbers [rows], and which of them exist. A pair that does not exist has a number that no
            pair has: interpreted, a masked store writes the old value, which would undo another lane's store.
    """

    expert: jax.Array
    any_exists: jax.Array
    find: Callable[[], tuple[jax.Array, jax.Array]]


def _own_tile(refs, rows: int, experts: int, is_single: bool) -> _Tile:
    """The tile that begins with the program's pair.

    A tile begins with every `rows`-th of an expert's pairs, so the programs of most pairs have none. With a single token,
    whose experts differ as a rule, each pair is a tile, and no program has to look at the others.
    """
    begin, num_pairs = pt.program_id(1), refs.chosen.shape[0]
    expert = refs.chosen[begin]

    def same(pair):
        """Whether each pair has the program's expert, as int32."""
        return (pt.load(refs.chosen.at[pair], mask=pair < num_pairs, other=-1) == expert).astype(jnp.int32)

    in_range = (expert >= 0) & (expert < experts)
    if is_single:
        lane, _ = pt.lanes(0, rows, rows)
        return _Tile(expert, in_range, lambda: (jnp.where(lane == 0, begin, num_pairs), lane == 0))

    every, _ = pt.lanes(0, pt.power_of_two(num_pairs), num_pairs)
    first = jnp.sum(jnp.where(every < begin, same(every), 0), axis=0)

    def find():
        lane, _ = pt.lanes(0, rows, rows)

        def search(block, carry):
            """Looks for the tile's pairs in a block of all pairs. Before it, `seen` pairs of the tile were found."""
            seen, found = carry
            pair, _ = pt.lanes(block, _BLOCK, num_pairs)
            own = jnp.where(pair >= begin, same(pair), 0)
            place = jnp.where(own == 1, seen + jnp.cumsum(own, axis=0) - 1, -1)
            numbers = jnp.max(jnp.where(place[None, :] == lane[:, None], pair[None, :] + 1, 0), axis=1)
            return seen + jnp.sum(own, axis=0), jnp.maximum(found, numbers)

        carry = jnp.int32(0), jnp.zeros((rows,), jnp.int32)
        blocks = jnp.int32(-(-num_pairs // _BLOCK))
        _, found = jax.lax.fori_loop(jax.lax.div(begin, jnp.int32(_BLOCK)), blocks, search, carry)
        return jnp.where(found > 0, found - 1, num_pairs), found > 0

    return _Tile(expert, in_range & (jax.lax.rem(first, jnp.int32(rows)) == 0), find)


def _sorted_tile(refs, rows: int) -> _Tile:
    """The tile that `tiles` has cut for the program."""
    number = pt.program_id(1)
    start, length = refs.start[number], refs.length[number]

    def find():
        lane, _ = pt.lanes(0, rows, rows)
        exists = lane < length
        return pt.load(refs.order.at[start + lane], mask=exists, other=refs.order.shape[0]), exists

    return _Tile(refs.expert[number], length > 0, find)


def _kernel(
    refs,
    *,
    rows: int,
    product: Product,
    is_single: bool,
    pairs_per_input: int,
    parts: int,
    activate: Callable[..., jax.Array],
    interpret: bool,
):
    """Multiplies a tile of pairs by `product.columns` outputs of each part of its expert's weights."""
    experts, outputs, inputs = refs.weights.shape
    outputs = outputs // parts
    depth = min(product.depth, max(16, pt.power_of_two(inputs)))
    tile = _own_tile(refs, rows, experts, is_single) if refs.order is None else _sorted_tile(refs, rows)
    column, is_column = pt.lanes(pt.program_id(0), product.columns, outputs)
    is_column = None if outputs % product.columns == 0 else is_column

    @pt.when(tile.any_exists)
    def _():
        pair, exists = tile.find()
        source = jax.lax.div(pair, jnp.int32(pairs_per_input))
        lane, _ = pt.lanes(0, depth, depth)

        def load(ref, index, inside, channel):
            """Loads a tile [indices, channels] of `ref`; None for `inside` means that all indices are."""
            mask = None if inside is None else inside[:, None]
            if inputs % depth:
                has_channel = (channel < inputs)[None, :]
                mask = has_channel if mask is None else mask & has_channel
            at = ref.at[(*index[:-1], index[-1][:, None], channel[None, :])]
            if mask is None:
                return pt.load(at)
            return pt.load(at, mask=jnp.broadcast_to(mask, (*index[-1].shape, depth)), other=0.0)

        def advance(turn, sums):
            channel = turn * depth + lane
            x = load(refs.x, (source,), exists, channel)
            return [
                sum_ + dot(x, load(refs.weights, (tile.expert, part * outputs + column), is_column, channel),
                           contract=(1, 1), interpret=interpret)
                for part, sum_ in enumerate(sums)
            ]  # fmt: skip

        sums = [jnp.zeros((rows, product.columns), jnp.float32)] * parts
        sums = jax.lax.fori_loop(jnp.int32(0), jnp.int32(-(-inputs // depth)), advance, sums)
        mask = exists[:, None] if is_column is None else exists[:, None] & is_column[None, :]
        mask = jnp.broadcast_to(mask, (rows, product.columns))
        out = activate(*sums).astype(refs.out.dtype)
        pt.store(refs.out.at[pair[:, None], column[None, :]], out, mask=mask)


def mixture_of_experts(
    x,
    up,
    down,
    chosen,
    weights,
    *,
    activation: str,
    out_dtype: str,
    config: Config | None = None,
    interpret: bool = False,
):
    """See api.py."""
    (experts, hidden, size), pairs = down.shape, chosen.size
    config = config or default_config(pairs, experts, x.dtype.itemsize)
    flat = chosen.reshape(-1)
    if pairs <= config.searched_pairs:
        where, slots = dict(chosen=flat, order=None), pairs
    else:
        cut = tiles(flat, experts, config.rows)
        where, slots = cut._asdict(), cut.start.shape[0]
    parts, activate = ACTIVATIONS[activation]
    shared = dict(is_single=chosen.shape[0] == 1, interpret=interpret)

    def multiply(name, x, weights, outputs, product, **options):
        return pt.call(
            functools.partial(_kernel, rows=config.rows, product=product, **shared, **options),
            name=f"mixture_of_experts_{name}",
            # The programs of one tile are neighbours, because they share its inputs.
            grid=(-(-outputs // product.columns), slots),
            inputs=dict(x=x, weights=weights) | where,
            outputs=dict(out=jax.ShapeDtypeStruct((pairs, outputs), x.dtype)),
            updates={},
            num_warps=product.num_warps,
            num_stages=product.num_stages,
            interpret=interpret,
        )["out"]

    middle = multiply("up", x, up, size, config.up, pairs_per_input=chosen.shape[1], parts=parts, activate=activate)
    out = multiply("down", middle, down, hidden, config.down, pairs_per_input=1, parts=1, activate=lambda sum_: sum_)
    return weighted_sum(out, chosen, weights, experts, out_dtype)
