"""The two products of a single token's experts: programs of one warp, which sum the products of a few outputs each.

A tile for tensor cores has 16 rows and passes through shared memory. Here weights go from memory to the registers in which
they are multiplied, and the loads of a program are on their way before it uses the first one: see `linear/_one_token.py`.
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


def _per_turn(blocks: int, most: int) -> int:
    """Returns how many blocks are loaded together, at most `most`. The last turn may have a rest."""
    return -(-blocks // -(-blocks // most))


def _in_turns(blocks: int, most: int, add: Callable[[Any, Any], Any], sums: Any) -> Any:
    """Adds `blocks` blocks to `sums`. `add(numbers, sums)` adds those of these numbers, which are loaded together."""
    each = _per_turn(blocks, most)
    if each == blocks:
        return add(range(blocks), sums)
    advance = lambda turn, sums: add([turn * each + number for number in range(each)], sums)
    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(-(-blocks // each)), advance, sums)


def _load(ref: Any, mask: jax.Array | None, shape: tuple[int, ...]) -> jax.Array:
    """Loads a tile, without a mask where that is None, because each mask is an instruction."""
    return pt.load(ref) if mask is None else pt.load(ref, mask=jnp.broadcast_to(mask, shape), other=0.0)


def _up_kernel(refs, *, product: Product, routing: Routing | None, parts: int, activate: Callable[..., jax.Array]):
    """Computes `product.columns` outputs of the program's expert, in each part of its weights, and `activate` of them.

    With `routing`, the program chooses its expert for itself, and one more program writes the choice for the second product.
    """
    experts, outputs, inputs = refs.weights.shape
    outputs, (num_pairs, _) = outputs // parts, refs.out.shape
    tile, slot = pt.program_id(0), pt.program_id(1)
    tiles = -(-outputs // product.columns)

    def run():
        if routing is None:
            pair, expert = slot, refs.chosen[slot]
        else:
            # The programs of shared experts come first, because they have nothing to wait for.
            pair = jnp.where(slot < routing.shared, routing.top_k + slot, slot - routing.shared)
            expert = _router.choose_one(refs, 0, routing, pair)
        column, is_column = pt.lanes(tile, product.columns, outputs)
        shape = product.columns, product.depth
        blocks = -(-inputs // product.depth)
        in_turn = product.depth * _per_turn(blocks, product.num_stages)
        is_full = outputs % product.columns == 0 and inputs % in_turn == 0

        def add(numbers, sums):
            places = [pt.lanes(number, product.depth, inputs) for number in numbers]
            weights = [
                [
                    _load(
                        refs.weights.at[expert, (part * outputs + column)[:, None], index[None, :]],
                        None if is_full else is_column[:, None] & exists[None, :],
                        shape,
                    )
                    for index, exists in places
                ]
                for part in range(parts)
            ]
            x = [_load(refs.x.at[0, index], None if is_full else exists, shape[1:]) for index, exists in places]
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
            sums = [jnp.zeros(shape, jnp.float32)] * parts
            sums = _in_turns(blocks, product.num_stages, add, sums)
            out = activate(*(jnp.sum(sum_, axis=1) for sum_ in sums))
            pt.store(refs.out.at[pair, column], out.astype(refs.out.dtype), mask=is_column)

    if routing is None:
        run()
        return
    pt.when(tile < tiles)(run)

    @pt.when((tile == tiles) & (slot == 0))
    def _():
        chosen, weigh = _router.choose(refs, 0, routing)
        place, is_place = pt.lanes(0, chosen.shape[0], num_pairs)
        pt.store(refs.chosen.at[place], chosen, mask=is_place)
        pt.store(refs.factors.at[place], weigh(), mask=is_place)


def _down_kernel(refs, *, product: Product):
    """Computes `product.columns` outputs of all the token's experts and adds them up. A pair without an expert gives 0."""
    experts, outputs, inputs = refs.weights.shape
    num_pairs, per_pair = refs.x.shape[0], -(-inputs // product.depth)
    column, is_column = pt.lanes(pt.program_id(0), product.columns, outputs)
    is_full = outputs % product.columns == 0 and inputs % product.depth == 0
    shape = product.columns, product.depth

    def choice(pair):
        """A pair's number, its expert, and whether it has one. The pair may not exist."""
        number = jnp.minimum(pair, num_pairs - 1)
        expert = refs.chosen[number]
        return number, expert, (pair < num_pairs) & (expert >= 0) & (expert < experts)

    def add(numbers, sum_):
        if isinstance(numbers, range):  # All blocks: a pair's expert is loaded once.
            choices = [choice(pair) for pair in range(num_pairs)]
            blocks = [(*choices[number // per_pair], number % per_pair) for number in numbers]
        else:
            each = jnp.int32(per_pair)
            blocks = [(*choice(jax.lax.div(number, each)), jax.lax.rem(number, each)) for number in numbers]
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

    sum_ = _in_turns(num_pairs * per_pair, product.num_stages, add, jnp.zeros(shape, jnp.float32))
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
    """Runs both products of a single token [1, hidden].

    Args:
        x: The token.
        up: See api.py.
        down: See api.py.
        choice: The token's experts `chosen` [pairs] and their weights `factors` [pairs]; or, with `routing`, what
            `_router.choose` reads.
        num_pairs: The number of the token's experts.
        routing: How the experts are to be chosen. None has them chosen already.
        activation: See api.py.
        out_dtype: Dtype of the result.
        config: The launch configuration.
        interpret: Whether to run the kernels' bodies as plain JAX.

    Returns:
        The weighted sum of the experts' outputs [1, hidden].
    """
    (_, hidden, size), (parts, activate) = down.shape, ACTIVATIONS[activation]

    def launch(name, kernel, product, programs, inputs, outputs):
        return pt.call(
            functools.partial(kernel, product=product),
            name=f"mixture_of_experts_{name}",
            grid=programs,
            inputs=inputs,
            outputs=outputs,
            updates={},
            num_warps=product.num_warps,
            interpret=interpret,
        )

    outputs = dict(out=jax.ShapeDtypeStruct((num_pairs, size), x.dtype))
    if routing is not None:
        outputs |= dict(
            chosen=jax.ShapeDtypeStruct((num_pairs,), jnp.int32),
            factors=jax.ShapeDtypeStruct((num_pairs,), jnp.float32),
        )
    kernel = functools.partial(_up_kernel, routing=routing, parts=parts, activate=activate)
    programs = -(-size // config.up.columns) + (routing is not None), num_pairs
    given = choice if routing is not None else dict(chosen=choice["chosen"])
    found = launch("up", kernel, config.up, programs, dict(x=x, weights=up, **given), outputs)
    choice = choice if routing is None else dict(chosen=found["chosen"], factors=found["factors"])
    given = dict(x=found["out"], weights=down, **choice)
    outputs = dict(out=jax.ShapeDtypeStruct((1, hidden), jnp.dtype(out_dtype)))
    return launch("down", _down_kernel, config.down, (-(-hidden // config.down.columns),), given, outputs)["out"]
