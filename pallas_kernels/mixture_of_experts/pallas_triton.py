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
    """Computes `product.columns` outputs of a tile of pairs of one expert, in each part of the expert's weights.

    `refs.out` is [choices, pairs / choices, outputs]. With `refs.factors`, each pair's result is multiplied by its own, and
    the result of a pair without an expert is 0.
    """
    experts, outputs, inputs = refs.weights.shape
    outputs = outputs // parts
    depth = min(product.depth, max(16, pt.power_of_two(inputs)))
    tile = _own_tile(refs, rows, experts, is_single) if refs.order is None else _sorted_tile(refs, rows)
    column, is_column = pt.lanes(pt.program_id(0), product.columns, outputs)
    is_column = None if outputs % product.columns == 0 else is_column

    def place(pair):
        """The first two indices of a pair's outputs."""
        choices = jnp.int32(refs.out.shape[0])
        return jax.lax.rem(pair, choices), jax.lax.div(pair, choices)

    if refs.factors is not None:
        # No tile has a pair without an expert, but the program with its number has nothing else to do.
        own = place(pt.program_id(1))

        @pt.when((tile.expert < 0) | (tile.expert >= experts))
        def _():
            zeros = jnp.zeros((product.columns,), refs.out.dtype)
            pt.store(refs.out.at[(*own, column)], zeros, mask=column < outputs)

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
        out = activate(*sums)
        if refs.factors is not None:
            out = out * pt.load(refs.factors.at[pair], mask=exists, other=0.0)[:, None]
        choice, row = place(pair)
        pt.store(refs.out.at[choice[:, None], row[:, None], column[None, :]], out.astype(refs.out.dtype), mask=mask)


def _launch(
    x: jax.Array,
    up: jax.Array,
    down: jax.Array,
    chosen: jax.Array,
    factors: jax.Array | None,
    *,
    activation: str,
    config: Config | None,
    interpret: bool,
) -> jax.Array:
    """Runs both products. Pairs must not be more than `config.searched_pairs` if factors are given.

    Returns:
        The outputs of each pair, rounded to the dtype of `x`, [1, tokens * top_k, hidden]. With `factors`, float32
        [tokens, top_k], they are multiplied by them before that, and [top_k, tokens, hidden].
    """
    (experts, hidden, size), (tokens, top_k), pairs = down.shape, chosen.shape, chosen.size
    config = config or default_config(pairs, experts, x.dtype.itemsize)
    flat = chosen.reshape(-1)
    if pairs <= config.searched_pairs:
        where, slots = dict(chosen=flat, order=None), pairs
    else:
        cut = tiles(flat, experts, config.rows)
        where, slots = cut._asdict(), cut.start.shape[0]

    def multiply(name, x, weights, product, out, factors=None, **options):
        return pt.call(
            functools.partial(
                _kernel, rows=config.rows, product=product, is_single=tokens == 1, interpret=interpret, **options
            ),
            name=f"mixture_of_experts_{name}",
            # The programs of one tile are neighbours, because they share its inputs.
            grid=(-(-out.shape[2] // product.columns), slots),
            inputs=dict(x=x, weights=weights, factors=factors) | where,
            outputs=dict(out=out),
            updates={},
            num_warps=product.num_warps,
            num_stages=product.num_stages,
            interpret=interpret,
        )["out"]

    parts, activate = ACTIVATIONS[activation]
    middle = jax.ShapeDtypeStruct((1, pairs, size), x.dtype)
    middle = multiply("up", x, up, config.up, middle, pairs_per_input=top_k, parts=parts, activate=activate)[0]
    choices, factors = (1, None) if factors is None else (top_k, factors.reshape(-1))
    out = jax.ShapeDtypeStruct((choices, pairs // choices, hidden), x.dtype)
    options = dict(pairs_per_input=1, parts=1, activate=lambda sum_: sum_)
    return multiply("down", middle, down, config.down, out, factors, **options)


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
    out = _launch(x, up, down, chosen, None, activation=activation, config=config, interpret=interpret)
    return weighted_sum(out[0], chosen, weights, down.shape[0], out_dtype)


def mixture_of_experts_sums(
    x,
    up,
    down,
    chosen,
    weights,
    *,
    activation: str,
    config: Config | None = None,
    interpret: bool = False,
):
    """See api.py. There is a share for each expert of a token."""
    return _launch(x, up, down, chosen, weights, activation=activation, config=config, interpret=interpret)
