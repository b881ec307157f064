"""The two products of a single token's experts: programs of one warp, which compute a few outputs each by FMAs.

A tile for tensor cores has 16 rows and passes through SMEM. Here weights go from GMEM to the registers in which they are
multiplied, and all loads of an iteration are issued before its first multiplication: see `linear/_one_token.py`.
"""

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels.mixture_of_experts import _router
from pallas_kernels.mixture_of_experts._activations import ACTIVATIONS
from pallas_kernels.mixture_of_experts.config import Config, Product
from pallas_kernels.mixture_of_experts.routing import Routing


def _per_iteration(blocks: int, most: int) -> int:
    """Return the number of blocks, at most `most`, that an iteration loads. The last iteration may have fewer."""
    return -(-blocks // -(-blocks // most))


def _add_blocks(blocks: int, most: int, add: Callable[[Any, Any], Any], sums: Any) -> Any:
    """Add `blocks` blocks to `sums`. `add(indices, sums)` adds the blocks of one iteration, which it loads together."""
    each = _per_iteration(blocks, most)
    if each == blocks:
        return add(range(blocks), sums)
    advance = lambda i, sums: add([i * each + n for n in range(each)], sums)
    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(-(-blocks // each)), advance, sums)


def _load(ref: Any, mask: jax.Array | None, shape: tuple[int, ...]) -> jax.Array:
    """Load a tile. Without a mask, the load is not predicated, which saves an instruction."""
    return pt.load(ref) if mask is None else pt.load(ref, mask=jnp.broadcast_to(mask, shape), other=0.0)


def _up_kernel(
    refs, *, product: Product, routing: Routing | None, projections: int, activate: Callable[..., jax.Array]
):
    """Compute `product.columns` outputs of the program's expert in each projection, and `activate` of them.

    With `routing`, the program chooses its expert for itself, and one more program writes the choice for the second product.
    """
    experts, outputs, inputs = refs.weights.shape
    outputs, (num_pairs, _) = outputs // projections, refs.out.shape
    tile, slot = pt.program_id(0), pt.program_id(1)
    tiles = -(-outputs // product.columns)

    def run():
        if routing is None:
            pair, expert = slot, refs.chosen[slot]
        else:
            # The programs of shared experts come first, because their choice needs no logits.
            pair = jnp.where(slot < routing.shared, routing.top_k + slot, slot - routing.shared)
            expert = _router.choose_one(refs, 0, routing, pair)
        column, is_column = pt.lanes(tile, product.columns, outputs)
        shape = product.columns, product.depth
        blocks = -(-inputs // product.depth)
        per_iteration = product.depth * _per_iteration(blocks, product.num_stages)
        is_full = outputs % product.columns == 0 and inputs % per_iteration == 0

        def add(indices, sums):
            lanes = [pt.lanes(block, product.depth, inputs) for block in indices]
            weights = [
                [
                    _load(
                        refs.weights.at[expert, (projection * outputs + column)[:, None], index[None, :]],
                        None if is_full else is_column[:, None] & exists[None, :],
                        shape,
                    )
                    for index, exists in lanes
                ]
                for projection in range(projections)
            ]
            x = [_load(refs.x.at[0, index], None if is_full else exists, shape[1:]) for index, exists in lanes]
            x = [values.astype(jnp.float32)[None, :] for values in x]
            return [
                functools.reduce(
                    operator.add,
                    [tile.astype(jnp.float32) * values for tile, values in zip(tiles, x, strict=True)],
                    sum_,
                )
                for sum_, tiles in zip(sums, weights, strict=True)
            ]

        @pt.when((expert >= 0) & (expert < experts))
        def _():
            sums = [jnp.zeros(shape, jnp.float32)] * projections
            sums = _add_blocks(blocks, product.num_stages, add, sums)
            out = activate(*(jnp.sum(sum_, axis=1) for sum_ in sums))
            pt.store(refs.out.at[pair, column], out.astype(refs.out.dtype), mask=is_column)

    if routing is None:
        run()
        return
    pt.when(tile < tiles)(run)

    @pt.when((tile == tiles) & (slot == 0))
    def _():
        chosen, weigh = _router.choose(refs, 0, routing)
        pair, exists = pt.lanes(0, chosen.shape[0], num_pairs)
        pt.store(refs.chosen.at[pair], chosen, mask=exists)
        pt.store(refs.factors.at[pair], weigh(), mask=exists)


def _down_kernel(refs, *, product: Product):
    """Compute `product.columns` outputs of all the token's experts and add them up. A pair without an expert adds 0."""
    experts, outputs, inputs = refs.weights.shape
    num_pairs, per_pair = refs.x.shape[0], -(-inputs // product.depth)
    column, is_column = pt.lanes(pt.program_id(0), product.columns, outputs)
    is_full = outputs % product.columns == 0 and inputs % product.depth == 0
    shape = product.columns, product.depth

    def choice(pair):
        """Return the pair's index, clipped to the last pair, its expert, and whether both exist."""
        clipped = jnp.minimum(pair, num_pairs - 1)
        expert = refs.chosen[clipped]
        return clipped, expert, (pair < num_pairs) & (expert >= 0) & (expert < experts)

    def add(indices, sum_):
        if isinstance(indices, range):  # All blocks: a pair's expert is loaded once.
            choices = [choice(pair) for pair in range(num_pairs)]
            blocks = [(*choices[n // per_pair], n % per_pair) for n in indices]
        else:
            each = jnp.int32(per_pair)
            blocks = [(*choice(jax.lax.div(n, each)), jax.lax.rem(n, each)) for n in indices]
        weights, x = [], []
        for _, expert, exists, block in blocks:
            index, inside = pt.lanes(block, product.depth, inputs)
            mask = exists if is_full else (exists & is_column)[:, None] & inside[None, :]
            weights.append(_load(refs.weights.at[expert, column[:, None], index[None, :]], mask, shape))
        for pair, _, exists, block in blocks:
            index, inside = pt.lanes(block, product.depth, inputs)
            values = _load(refs.x.at[pair, index], exists if is_full else exists & inside, shape[1:])
            x.append(values.astype(jnp.float32) * jnp.where(exists, refs.factors[pair], 0.0))
        products = [tile.astype(jnp.float32) * values[None, :] for tile, values in zip(weights, x, strict=True)]
        return functools.reduce(operator.add, products, sum_)

    sum_ = _add_blocks(num_pairs * per_pair, product.num_stages, add, jnp.zeros(shape, jnp.float32))
    pt.store(refs.out.at[0, column], jnp.sum(sum_, axis=1).astype(refs.out.dtype), mask=is_column)


def one_token(
    x: jax.Array,
    up: jax.Array,
    down: jax.Array,
    choice: Mapping[str, jax.Array | None],
    num_pairs: int,
    *,
    routing: Routing | None,
    activation: str,
    out_dtype: Any,
    config: Config,
    interpret: bool,
) -> jax.Array:
    """Run both products of a single token [1, hidden], and return the weighted sum of its experts' outputs [1, hidden].

    `choice` has the token's experts `chosen` [pairs] and their routing weights `factors` [pairs]. With `routing`, the first
    product chooses the experts by this rule, and `choice` has the arguments `refs` of `_router.choose`.
    """
    (_, hidden, size), (projections, activate) = down.shape, ACTIVATIONS[activation]

    def launch(name, kernel, product, programs, inputs, outputs):
        return pt.call(
            functools.partial(kernel, product=product),
            name=f"mixture_of_experts_{name}",
            grid=programs,
            inputs=inputs,
            outputs=outputs,
            num_warps=product.num_warps,
            interpret=interpret,
        )

    outputs = dict(out=jax.ShapeDtypeStruct((num_pairs, size), x.dtype))
    if routing is not None:
        outputs |= dict(
            chosen=jax.ShapeDtypeStruct((num_pairs,), jnp.int32),
            factors=jax.ShapeDtypeStruct((num_pairs,), jnp.float32),
        )
    kernel = functools.partial(_up_kernel, routing=routing, projections=projections, activate=activate)
    programs = -(-size // config.up.columns) + (routing is not None), num_pairs
    given = choice if routing is not None else dict(chosen=choice["chosen"])
    found = launch("up", kernel, config.up, programs, dict(x=x, weights=up, **given), outputs)
    choice = choice if routing is None else dict(chosen=found["chosen"], factors=found["factors"])
    given = dict(x=found["out"], weights=down, **choice)
    outputs = dict(out=jax.ShapeDtypeStruct((1, hidden), jnp.dtype(out_dtype)))
    return launch("down", _down_kernel, config.down, (-(-hidden // config.down.columns),), given, outputs)["out"]
