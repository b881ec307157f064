"""mixture_of_experts as a Pallas kernel that runs twice: tiles of pairs of one expert times the expert's weights."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels import _weight_tiles as weight_tiles
from pallas_kernels._check import require
from pallas_kernels.dispatch import Run
from pallas_kernels.mixture_of_experts import _router
from pallas_kernels.mixture_of_experts._activations import ACTIVATIONS
from pallas_kernels.mixture_of_experts._one_token import one_token
from pallas_kernels.mixture_of_experts._tiles import tiles_by_kernels
from pallas_kernels.mixture_of_experts.config import Config, Product, config_of_one_token, default_config
from pallas_kernels.mixture_of_experts.routing import Routing
from pallas_kernels.mixture_of_experts.xla import weighted_sum
from pallas_kernels.quantized import QuantizedWeight

_BLOCK = 128  # pairs per iteration of the search for a program's tile


def unsupported(x, up, down, activation: str) -> str | None:
    """Return why the kernels cannot run these arguments, or None if they can."""
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"x must be float32, bfloat16 or float16, got {x.dtype}"
    if len(weight_tiles.parts_of(down)) > 1:
        return "a quantised down must have one part"
    return weight_tiles.unsupported((up, ACTIVATIONS[activation].projections), (down, 1))


class _Tile(NamedTuple):
    """The pairs of one program.

    Attributes:
        expert: Their expert.
        any_exists: Whether the tile has pairs.
        find: Returns the pairs' indices [rows], and the mask of those that exist, given `rows`, the most pairs of the tile.
            A pair that does not exist gets an index out of range: interpreted, a masked store writes the old value, which
            would undo another lane's store.
        length: The number of pairs; None if it is not known.
    """

    expert: jax.Array
    any_exists: jax.Array
    find: Callable[[int], tuple[jax.Array, jax.Array]]
    length: jax.Array | None = None


def _own_tile(refs, rows: int, experts: int) -> _Tile:
    """Return the tile that begins with the program's pair.

    A tile begins with every `rows`-th of an expert's pairs, so the programs of most pairs have no tile.
    """
    begin, num_pairs = pt.program_id(1), refs.chosen.shape[0]
    expert = refs.chosen[begin]

    def same(pair):
        """Return 1 for each pair that has the program's expert, else 0, as int32."""
        return (pt.load(refs.chosen.at[pair], mask=pair < num_pairs, other=-1) == expert).astype(jnp.int32)

    every, _ = pt.lanes(0, pt.power_of_two(num_pairs), num_pairs)
    first = jnp.sum(jnp.where(every < begin, same(every), 0), axis=0, dtype=jnp.int32)

    def find(rows):
        lane, _ = pt.lanes(0, rows, rows)

        def search(block, carry):
            """Find the tile's pairs in a block of all pairs. `seen` is the number of its pairs before the block."""
            seen, found = carry
            pair, _ = pt.lanes(block, _BLOCK, num_pairs)
            own = jnp.where(pair >= begin, same(pair), 0)
            index = jnp.where(own == 1, seen + jnp.cumsum(own, axis=0, dtype=jnp.int32) - 1, -1)
            pairs = jnp.max(jnp.where(index[None, :] == lane[:, None], pair[None, :] + 1, 0), axis=1)
            return seen + jnp.sum(own, axis=0, dtype=jnp.int32), jnp.maximum(found, pairs)

        carry = jnp.int32(0), jnp.zeros((rows,), jnp.int32)
        blocks = jnp.int32(-(-num_pairs // _BLOCK))
        _, found = jax.lax.fori_loop(jax.lax.div(begin, jnp.int32(_BLOCK)), blocks, search, carry)
        return jnp.where(found > 0, found - 1, num_pairs), found > 0

    in_range = (expert >= 0) & (expert < experts)
    return _Tile(expert, in_range & (jax.lax.rem(first, jnp.int32(rows)) == 0), find)


def _sorted_tile(refs, experts: int) -> _Tile:
    """Return the program's tile of `tiles_by_kernels`."""
    own = pt.program_id(1)
    start, length = refs.start[own], refs.length[own]

    def find(rows):
        lane, _ = pt.lanes(0, rows, rows)
        exists = lane < length
        return pt.load(refs.order.at[start + lane], mask=exists, other=refs.order.shape[0]), exists

    return _Tile(refs.expert[own], (length > 0) & (refs.expert[own] < experts), find, length)


def _kernel(
    refs,
    *,
    columns: weight_tiles.Columns,
    config: Config,
    product: Product,
    pairs_per_input: int,
    activate: Callable[..., jax.Array],
    interpret: bool,
):
    """Compute `product.columns` outputs of a tile of pairs of one expert, in each of its projections.

    `refs.out` is [choices, pairs / choices, outputs]. With `refs.factors`, each pair's result is multiplied by its factor,
    and the result of a pair without an expert is 0.
    """
    experts, _, inputs = refs.values0.shape
    outputs, depth = columns.size, min(product.depth, max(16, pt.power_of_two(inputs)))
    is_sorted = refs.order is not None
    tile = _sorted_tile(refs, experts) if is_sorted else _own_tile(refs, config.rows, experts)
    column, is_column = pt.lanes(pt.program_id(0), product.columns, outputs)
    is_column = None if outputs % product.columns == 0 else is_column

    def indices_of(pair):
        """Return the first two indices of a pair's outputs."""
        choices = jnp.int32(refs.out.shape[0])
        return jax.lax.rem(pair, choices), jax.lax.div(pair, choices)

    if refs.factors is not None:
        # No searched tile has a pair without an expert, but the program of such a pair has no other work.
        own = pt.program_id(1)

        @pt.when((tile.expert < 0) | (tile.expert >= experts))
        def _():
            pair, exists = (own[None], jnp.full((1,), True)) if refs.order is None else tile.find(config.rows)
            choice, row = indices_of(pair)
            mask = exists[:, None] & (column < outputs)[None, :]
            zeros = jnp.zeros(mask.shape, refs.out.dtype)
            pt.store(refs.out.at[choice[:, None], row[:, None], column[None, :]], zeros, mask=mask)

    def run(rows):
        """Compute a tile of at most `rows` pairs."""
        pair, exists = tile.find(rows)
        source = jax.lax.div(pair, jnp.int32(pairs_per_input))
        lane, _ = pt.lanes(0, depth, depth)

        def load(ref, index, inside, channel):
            """Load a tile [indices, channels] of `ref`. `inside` is the mask of the indices; None if all exist."""
            mask = None if inside is None else inside[:, None]
            if inputs % depth:
                has_channel = (channel < inputs)[None, :]
                mask = has_channel if mask is None else mask & has_channel
            at = ref.at[(*index[:-1], index[-1][:, None], channel[None, :])]
            if mask is None:
                return pt.load(at)
            return pt.load(at, mask=jnp.broadcast_to(mask, (*index[-1].shape, depth)), other=0.0)

        def advance(block, sums):
            channel = block * depth + lane
            x = load(refs.x, (source,), exists, channel)
            found = []
            for sum_, place in zip(sums, columns.places, strict=True):
                row = place.first + column
                values = load(getattr(refs, f"values{place.part}"), (tile.expert, row), is_column, channel)
                scale = weight_tiles.scale_of(refs, place, row, (tile.expert,), is_column, block, depth)
                found.append(weight_tiles.add_product(sum_, x, values, scale, interpret))
            return found

        sums = [jnp.zeros((rows, product.columns), jnp.float32)] * len(columns.places)
        sums = jax.lax.fori_loop(jnp.int32(0), jnp.int32(-(-inputs // depth)), advance, sums)
        mask = exists[:, None] if is_column is None else exists[:, None] & is_column[None, :]
        mask = jnp.broadcast_to(mask, (rows, product.columns))
        out = activate(*sums)
        if refs.factors is not None:
            out = out * pt.load(refs.factors.at[pair], mask=exists, other=0.0)[:, None]
        choice, row = indices_of(pair)
        pt.store(refs.out.at[choice[:, None], row[:, None], column[None, :]], out.astype(refs.out.dtype), mask=mask)

    if tile.length is None or config.short_rows is None:
        pt.when(tile.any_exists)(functools.partial(run, config.rows))
    else:
        is_short = tile.length <= config.short_rows
        pt.when(tile.any_exists & is_short)(functools.partial(run, config.short_rows))
        pt.when(tile.any_exists & ~is_short)(functools.partial(run, config.rows))


def _multiply(
    name: str,
    x: jax.Array,
    weights: jax.Array | QuantizedWeight,
    product: Product,
    out: jax.ShapeDtypeStruct,
    *,
    projections: int,
    pairs: Mapping[str, jax.Array | None],
    slots: int,
    factors: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    """Launch a product. `pairs` describes the tiles, of which there are at most `slots`."""
    (columns,) = weight_tiles.runs(weights, projections)
    product = replace(product, depth=weight_tiles.depth(weights, product.depth))
    return pt.call(
        functools.partial(_kernel, columns=columns, product=product, **options),
        name=f"mixture_of_experts_{name}",
        # The programs of one tile are neighbours, because they share its inputs.
        grid=(-(-out.shape[2] // product.columns), slots),
        inputs=dict(x=x) | weight_tiles.operands(weights) | dict(factors=factors, **pairs),
        outputs=dict(out=out),
        num_warps=product.num_warps,
        num_stages=product.num_stages,
        interpret=options["interpret"],
    )["out"]


def _launch(
    x: jax.Array,
    up: jax.Array,
    down: jax.Array,
    chosen: jax.Array,
    factors: jax.Array | None,
    *,
    activation: str,
    config: Config,
    interpret: bool,
) -> jax.Array:
    """Run both products.

    Returns:
        The outputs of each pair, rounded to the dtype of `x`, [1, tokens * top_k, hidden]. With `factors`, float32
        [tokens, top_k], the outputs are multiplied by them before rounding, and are [top_k, tokens, hidden].
    """
    (experts, hidden, size), top_k, num_pairs = down.shape, chosen.shape[1], chosen.size
    flat = chosen.reshape(-1)
    if num_pairs <= config.searched_pairs:
        pairs, slots = dict(chosen=flat, order=None), num_pairs
    else:
        cut = tiles_by_kernels(flat, experts, config.rows, has_rest=factors is not None, interpret=interpret)
        pairs, slots = cut._asdict(), cut.start.shape[0]
    options = dict(pairs=pairs, slots=slots, config=config, interpret=interpret)
    projections, activate = ACTIVATIONS[activation]
    out = jax.ShapeDtypeStruct((1, num_pairs, size), x.dtype)
    of_up = dict(pairs_per_input=top_k, projections=projections, activate=activate)
    middle = _multiply("up", x, up, config.up, out, **of_up, **options)[0]
    choices, factors = (1, None) if factors is None else (top_k, factors.reshape(-1))
    out = jax.ShapeDtypeStruct((choices, num_pairs // choices, hidden), x.dtype)
    of_down = dict(pairs_per_input=1, projections=1, activate=lambda sum_: sum_, factors=factors)
    return _multiply("down", middle, down, config.down, out, **of_down, **options)


def _config(tokens: int, top_k: int, down: jax.Array | QuantizedWeight, activation: str) -> Config:
    """Return the default configuration for tokens that have `top_k` experts each."""
    itemsize = weight_tiles.itemsize(down)
    if tokens == 1 and not isinstance(down, QuantizedWeight):
        return config_of_one_token(itemsize, ACTIVATIONS[activation].projections)
    return default_config(tokens * top_k, down.shape[0], itemsize)


def _check(config: Config, *weights: jax.Array | QuantizedWeight) -> None:
    is_one = config.rows == 1 and any(isinstance(weight, QuantizedWeight) for weight in weights)
    require(not is_one, "mixture_of_experts: tiles of one row need arrays of weights")


def routed_experts_sums(
    x: jax.Array,
    logits: jax.Array,
    up: jax.Array,
    down: jax.Array,
    bias: jax.Array | None,
    valid: jax.Array | None,
    *,
    routing: Routing,
    activation: str,
    run: Run,
) -> jax.Array:
    """See api.py. There is a single token. The first product chooses its experts, and no kernel is launched for that."""
    config = run.config or _config(1, routing.chosen, down, activation)
    _check(config, up, down)
    if config.rows > 1:
        chosen, weights = _router.triton(logits, bias, valid, routing=routing, run=run)
        return mixture_of_experts_sums(x, up, down, chosen, weights, activation=activation, run=run)
    choice = dict(logits=logits, bias=bias, valid=None if valid is None else valid.astype(jnp.int32))
    options = dict(activation=activation, out_dtype="float32", config=config, interpret=run.interpret)
    return one_token(x, up, down, choice, routing.chosen, routing=routing, **options).reshape(1, *x.shape)


def mixture_of_experts(
    x,
    up,
    down,
    chosen,
    weights,
    *,
    activation: str,
    out_dtype: str,
    run: Run,
):
    """See api.py."""
    config = run.config or _config(x.shape[0], chosen.shape[1], down, activation)
    _check(config, up, down)
    options = dict(activation=activation, config=config, interpret=run.interpret)
    if x.shape[0] == config.rows == 1:
        choice = dict(chosen=chosen[0], factors=weights[0])
        return one_token(x, up, down, choice, chosen.size, routing=None, out_dtype=out_dtype, **options)
    out = _launch(x, up, down, chosen, None, **options)
    return weighted_sum(out[0], chosen, weights, down.shape[0], out_dtype)


def mixture_of_experts_sums(x, up, down, chosen, weights, *, activation: str, run: Run):
    """See api.py. There is a partial sum for each expert of a token, and only one for a single token."""
    if x.shape[0] == 1:
        options = dict(activation=activation, out_dtype="float32", run=run)
        return mixture_of_experts(x, up, down, chosen, weights, **options).reshape(1, *x.shape)
    config = run.config or _config(x.shape[0], chosen.shape[1], down, activation)
    return _launch(x, up, down, chosen, weights, activation=activation, config=config, interpret=run.interpret)
