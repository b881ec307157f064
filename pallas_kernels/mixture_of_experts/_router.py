"""choose_experts in plain jax.numpy, as a Pallas kernel of one program per token, and as a function for other kernels."""

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels.dispatch import Run
from pallas_kernels.mixture_of_experts.routing import Routing

_WARP = 32  # lanes of a warp
_TAKEN, _NO_EXPERT = -(2**31), 2**31 - 1  # the key of an expert that has been chosen, and an index above all experts


def xla(logits, bias, valid, *, routing: Routing):
    """See api.py."""
    experts, logits = routing.routed(logits), routing.total(logits)
    logits, gate = logits[:, :experts], jax.nn.sigmoid(logits[:, experts:])
    scores = jax.nn.softmax(logits, axis=-1) if routing.scores == "softmax" else jax.nn.sigmoid(logits)
    choice = (scores if bias is None else scores + bias[None]).reshape(scores.shape[0], routing.groups, -1)
    if routing.top_groups < routing.groups:
        group_scores = jnp.sum(jax.lax.top_k(choice, 2)[0], axis=-1)
        best = jax.lax.top_k(group_scores, routing.top_groups)[1]
        allowed = jnp.any(best[:, :, None] == jnp.arange(routing.groups, dtype=best.dtype)[None, None], axis=1)
        choice = jnp.where(allowed[:, :, None], choice, -jnp.inf)
    chosen = jax.lax.top_k(choice.reshape(scores.shape), routing.top_k)[1]
    weights = jnp.take_along_axis(scores, chosen, axis=1)
    if routing.renormalise:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    shared = jnp.arange(routing.shared, dtype=jnp.int32) + experts
    chosen = jnp.concatenate([chosen, jnp.broadcast_to(shared, (chosen.shape[0], routing.shared))], axis=1)
    ones = jnp.ones((chosen.shape[0], routing.shared), jnp.float32)
    weights = jnp.concatenate([weights * routing.scale, ones * gate if routing.shared_gate else ones], axis=1)
    return chosen if valid is None else jnp.where(valid[:, None], chosen, -1), weights


def _all(reduce, tile):
    """Reduce a tile of two axes to a scalar."""
    return reduce(reduce(tile, axis=1), axis=0)


class _Candidates(NamedTuple):
    """A token's experts and their keys, from which a program chooses.

    Attributes:
        experts: The indices of the experts, in tiles. int32 [lanes] each
        keys: The experts' scores + bias as integers of the same order, in the same tiles. int32 [lanes] each
        score: Computes scores from logits.
        load: Loads the logits of experts, given their indices and a mask of those that exist.
    """

    experts: list[jax.Array]
    keys: list[jax.Array]
    score: Callable[[jax.Array], jax.Array]
    load: Callable[[jax.Array, jax.Array], jax.Array]

    def take_best(self, keys: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        """Return the expert with the largest key, the first of equal ones, and the keys with its key taken out.

        A warp finds the largest integer of its lanes by one instruction, `redux.sync`.
        """
        largest = jnp.max(functools.reduce(jnp.maximum, keys), axis=0)
        pairs = [*zip(self.experts, keys, strict=True)]
        first = [jnp.where(key == largest, expert, _NO_EXPERT) for expert, key in pairs]
        best = jnp.min(functools.reduce(jnp.minimum, first), axis=0)
        return best, [jnp.where(expert == best, _TAKEN, key) for expert, key in pairs]


def _candidates(refs, token: jax.Array | int, routing: Routing) -> _Candidates:
    """Load a token's logits and compute the keys of its experts. The arguments are the same as of `choose`."""

    def load(expert, exists):
        splits = range(refs.logits.shape[0])
        return routing.total(pt.load(refs.logits.at[split, token, expert], mask=exists, other=0.0) for split in splits)

    num_experts = routing.routed(refs.logits)
    tiles = _tiles(routing, num_experts)
    logits = [load(expert, exists) for expert, exists in tiles]
    if routing.scores == "softmax":
        masked = [jnp.where(exists, tile, -jnp.inf) for (_, exists), tile in zip(tiles, logits, strict=True)]
        largest = _all(jnp.max, functools.reduce(jnp.maximum, masked))
        total = _all(jnp.sum, functools.reduce(operator.add, [jnp.exp(tile - largest) for tile in masked]))
        score = lambda logits: jnp.exp(logits - largest) / total
    else:
        score = jax.nn.sigmoid
    keys = []
    for (expert, exists), tile in zip(tiles, logits, strict=True):
        choice = score(tile)
        if refs.bias is not None:
            choice = choice + pt.load(refs.bias.at[expert], mask=exists, other=0.0)
        choice = jnp.where(exists, choice, -jnp.inf)
        if routing.top_groups < routing.groups:
            choice = _of_best_groups(choice, routing, num_experts)
        bits = jax.lax.bitcast_convert_type(choice.reshape(-1), jnp.int32)
        keys.append(jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits))
    return _Candidates([expert.reshape(-1) for expert, _ in tiles], keys, score, load)


def choose(refs, token: jax.Array | int, routing: Routing) -> tuple[jax.Array, Callable[[], jax.Array]]:
    """Choose a token's experts inside a kernel.

    Args:
        refs: Has `logits` [splits, tokens, outputs], `bias` [experts] or None, and `valid` int32 [tokens] or None.
        token: The token's index.
        routing: The rule of the choice.

    Returns:
        The experts, padded to a power of two, int32 [size], and a function that returns their weights, float32 [size].
    """
    num_experts, found = routing.routed(refs.logits), _candidates(refs, token, routing)
    size = pt.power_of_two(routing.chosen)
    rank, _ = pt.lanes(0, size, size)
    chosen, keys = jnp.full((size,), num_experts, jnp.int32), found.keys
    for n in range(routing.top_k):
        best, keys = found.take_best(keys)
        chosen = jnp.where(rank == n, best, chosen)
    is_routed = (rank < routing.top_k) & (chosen < num_experts)

    def weigh():
        logits = found.load(jnp.where(is_routed, chosen, 0), is_routed)
        weights = jnp.where(is_routed, found.score(logits), 0.0)
        if routing.renormalise:
            weights = weights / (jnp.sum(weights, axis=0) + 1e-20)
        weights = weights * routing.scale
        gate = 1.0
        if routing.shared_gate:
            splits = range(refs.logits.shape[0])
            gate = jax.nn.sigmoid(routing.total(refs.logits[split, token, num_experts] for split in splits))
        return jnp.where(rank < routing.top_k, weights, gate)

    experts = jnp.where(rank < routing.top_k, chosen, num_experts + rank - routing.top_k)
    return experts if refs.valid is None else jnp.where(refs.valid[token] > 0, experts, -1), weigh


def choose_one(refs, token: jax.Array | int, routing: Routing, rank: jax.Array) -> jax.Array:
    """Return element `rank` of the experts that `choose` returns.

    It takes rank + 1 iterations. A shared expert takes none and needs no logits.
    """
    num_experts = routing.routed(refs.logits)

    def routed():
        found = _candidates(refs, token, routing)
        advance = lambda _, carry: found.take_best(carry[1])
        return jax.lax.fori_loop(jnp.int32(0), rank + 1, advance, (jnp.int32(num_experts), found.keys))[0]

    shared = num_experts + rank - routing.top_k
    expert = jax.lax.cond(rank < routing.top_k, routed, lambda: shared) if routing.shared else routed()
    return expert if refs.valid is None else jnp.where(refs.valid[token] > 0, expert, -1)


def _tiles(routing: Routing, num_experts: int) -> list[pt.Lanes]:
    """Return the indices of the experts, in one or several tiles of two axes, and the mask of those that exist.

    A tile with groups is [groups, experts of a group]. Without groups each tile has an expert per lane of a warp, so that
    every warp holds all of them, and no reduction has to wait for other warps.
    """
    if routing.top_groups < routing.groups:
        size = num_experts // routing.groups
        group, is_group = pt.lanes(0, pt.power_of_two(routing.groups), routing.groups)
        of_group, is_of_group = pt.lanes(0, pt.power_of_two(size), size)
        exists = is_group[:, None] & is_of_group[None, :]
        return [(jnp.where(exists, group[:, None] * size + of_group[None, :], num_experts), exists)]
    lane, _ = pt.lanes(0, _WARP, _WARP)
    experts = [(n * _WARP + lane)[None, :] for n in range(-(-num_experts // _WARP))]
    return [(expert, expert < num_experts) for expert in experts]


def _of_best_groups(choice: jax.Array, routing: Routing, num_experts: int) -> jax.Array:
    """Return score + bias, [groups, experts of a group], with -inf outside the best groups."""
    size = num_experts // routing.groups
    group, is_group = pt.lanes(0, choice.shape[0], routing.groups)
    of_group, _ = pt.lanes(0, choice.shape[1], size)
    best = jnp.max(choice, axis=1)
    first = jnp.min(jnp.where(choice == best[:, None], of_group[None, :], size), axis=1)
    second = jnp.max(jnp.where(of_group[None, :] == first[:, None], -jnp.inf, choice), axis=1)
    group_scores, allowed = jnp.where(is_group, best + second, -jnp.inf), jnp.zeros(group.shape, jnp.int32)
    for _ in range(routing.top_groups):
        chosen_group = jnp.min(jnp.where(group_scores == jnp.max(group_scores, axis=0), group, routing.groups), axis=0)
        allowed = jnp.where(group == chosen_group, 1, allowed)
        group_scores = jnp.where(group == chosen_group, -jnp.inf, group_scores)
    return jnp.where((allowed == 1)[:, None], choice, -jnp.inf)


def _kernel(refs, *, routing: Routing):
    token = pt.program_id(0)
    chosen, weigh = choose(refs, token, routing)
    rank, exists = pt.lanes(0, chosen.shape[0], routing.chosen)
    pt.store(refs.chosen.at[token, rank], chosen, mask=exists)
    pt.store(refs.weights.at[token, rank], weigh(), mask=exists)


def triton(logits, bias, valid, *, routing: Routing, run: Run):
    """See api.py."""
    # Memory of booleans is read differently by different versions of the lowering. A step converts the array once.
    valid = None if valid is None else valid.astype(jnp.int32)
    shape = (logits.shape[1], routing.chosen)
    found = pt.call(
        functools.partial(_kernel, routing=routing),
        name="choose_experts",
        grid=(shape[0],),
        inputs=dict(logits=logits, bias=bias, valid=valid),
        outputs=dict(chosen=jax.ShapeDtypeStruct(shape, jnp.int32), weights=jax.ShapeDtypeStruct(shape, jnp.float32)),
        num_warps=1,
        interpret=run.interpret,
    )
    return found["chosen"], found["weights"]
