"""choose_experts in plain jax.numpy and as a Pallas kernel of one program per token, or as a part of another kernel."""

import functools
import operator
from collections.abc import Iterable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt

Scores = Literal["softmax", "sigmoid"]


class Rule(NamedTuple):
    """The static arguments of choose_experts: see api.py."""

    experts: int
    top_k: int
    scores: Scores
    groups: int
    top_groups: int
    renormalise: bool
    scale: float
    shared: int
    shared_gate: bool
    logits_dtype: jnp.dtype

    def total(self, shares: Iterable[jax.Array]) -> jax.Array:
        """Adds the shares of logits in float32 and rounds the total."""
        total = functools.reduce(operator.add, [share.astype(jnp.float32) for share in shares])
        return total.astype(self.logits_dtype).astype(jnp.float32)


def xla(logits, bias, valid, *, rule: Rule):
    """See api.py."""
    logits = rule.total(logits)
    logits, gate = logits[:, : rule.experts], jax.nn.sigmoid(logits[:, rule.experts :])
    scores = jax.nn.softmax(logits, axis=-1) if rule.scores == "softmax" else jax.nn.sigmoid(logits)
    choice = (scores if bias is None else scores + bias).reshape(scores.shape[0], rule.groups, -1)
    if rule.top_groups < rule.groups:
        group_scores = jnp.sum(jax.lax.top_k(choice, 2)[0], axis=-1)
        best = jax.lax.top_k(group_scores, rule.top_groups)[1]
        allowed = jnp.any(best[:, :, None] == jnp.arange(rule.groups, dtype=best.dtype), axis=1)
        choice = jnp.where(allowed[:, :, None], choice, -jnp.inf)
    chosen = jax.lax.top_k(choice.reshape(scores.shape), rule.top_k)[1]
    weights = jnp.take_along_axis(scores, chosen, axis=1)
    if rule.renormalise:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    shared = jnp.arange(rule.shared, dtype=jnp.int32) + rule.experts
    chosen = jnp.concatenate([chosen, jnp.broadcast_to(shared, (chosen.shape[0], rule.shared))], axis=1)
    ones = jnp.ones((chosen.shape[0], rule.shared), jnp.float32)
    weights = jnp.concatenate([weights * rule.scale, ones * gate if rule.shared_gate else ones], axis=1)
    return chosen if valid is None else jnp.where(valid[:, None], chosen, -1), weights


def _all(reduce, tile):
    """Reduces a tile of two axes to a scalar."""
    return reduce(reduce(tile, axis=1), axis=0)


def choose(refs, token: jax.Array | int, rule: Rule) -> tuple[jax.Array, jax.Array]:
    """Chooses a token's experts inside a kernel.

    Args:
        refs: Has `logits` [shares, tokens, outputs], `bias` [experts] or None, and `valid` int32 [tokens] or None.
        token: The token.
        rule: The static arguments.

    Returns:
        The experts and their weights, padded to a power of two. [places]
    """
    num_experts = rule.experts
    size = num_experts // rule.groups
    group, is_group = pt.lanes(0, pt.power_of_two(rule.groups), rule.groups)
    of_group, is_of_group = pt.lanes(0, pt.power_of_two(size), size)
    exists = is_group[:, None] & is_of_group[None, :]
    expert = jnp.where(exists, group[:, None] * size + of_group[None, :], num_experts)

    def load(expert, exists):
        """Loads the logits of some experts."""
        shares = range(refs.logits.shape[0])
        return rule.total(pt.load(refs.logits.at[share, token, expert], mask=exists, other=0.0) for share in shares)

    logits = load(expert, exists)
    if rule.scores == "softmax":
        largest = _all(jnp.max, jnp.where(exists, logits, -jnp.inf))
        total = _all(jnp.sum, jnp.where(exists, jnp.exp(logits - largest), 0.0))
        score = lambda logits: jnp.exp(logits - largest) / total
    else:
        score = jax.nn.sigmoid
    choice = score(logits)
    if refs.bias is not None:
        choice = choice + pt.load(refs.bias.at[expert], mask=exists, other=0.0)
    choice = jnp.where(exists, choice, -jnp.inf)

    if rule.top_groups < rule.groups:
        best = jnp.max(choice, axis=1)
        place = jnp.min(jnp.where(choice == best[:, None], of_group[None, :], size), axis=1)
        second = jnp.max(jnp.where(of_group[None, :] == place[:, None], -jnp.inf, choice), axis=1)
        group_scores, allowed = jnp.where(is_group, best + second, -jnp.inf), jnp.zeros(group.shape, jnp.int32)
        for _ in range(rule.top_groups):
            chosen_group = jnp.min(jnp.where(group_scores == jnp.max(group_scores, axis=0), group, rule.groups), axis=0)
            allowed = jnp.where(group == chosen_group, 1, allowed)
            group_scores = jnp.where(group == chosen_group, -jnp.inf, group_scores)
        choice = jnp.where((allowed == 1)[:, None], choice, -jnp.inf)

    place, _ = pt.lanes(0, pt.power_of_two(rule.top_k + rule.shared), rule.top_k + rule.shared)
    chosen, choice = jnp.full(place.shape, num_experts, jnp.int32), choice.reshape(-1)
    number, _ = pt.lanes(0, choice.shape[0], choice.shape[0])
    padded = jnp.int32(of_group.shape[0])
    for turn in range(rule.top_k):
        # One reduction per turn: of the experts with the largest sum, it is the first.
        index = jnp.argmax(choice, axis=0).astype(jnp.int32)
        choice = jnp.where(number == index, -jnp.inf, choice)
        index = jax.lax.div(index, padded) * size + jax.lax.rem(index, padded)
        chosen = jnp.where(place == turn, index, chosen)
    is_routed = (place < rule.top_k) & (chosen < num_experts)
    weights = jnp.where(is_routed, score(load(jnp.where(is_routed, chosen, 0), is_routed)), 0.0)
    if rule.renormalise:
        weights = weights / (jnp.sum(weights, axis=0) + 1e-20)
    weights = weights * rule.scale
    if rule.shared:
        gate = 1.0
        if rule.shared_gate:
            gate = jax.nn.sigmoid(
                rule.total(refs.logits[share, token, num_experts] for share in range(refs.logits.shape[0]))
            )
        chosen = jnp.where(place < rule.top_k, chosen, num_experts + place - rule.top_k)
        weights = jnp.where(place < rule.top_k, weights, gate)
    if refs.valid is not None:
        chosen = jnp.where(refs.valid[token] > 0, chosen, -1)
    return chosen, weights


def _kernel(refs, *, rule: Rule):
    token = pt.program_id(0)
    chosen, weights = choose(refs, token, rule)
    place, is_place = pt.lanes(0, chosen.shape[0], rule.top_k + rule.shared)
    pt.store(refs.chosen.at[token, place], chosen, mask=is_place)
    pt.store(refs.weights.at[token, place], weights, mask=is_place)


def triton(logits, bias, valid, *, rule: Rule, interpret: bool = False):
    """See api.py."""
    # Memory of booleans is read differently by different versions of the lowering. A step converts the array once.
    valid = None if valid is None else valid.astype(jnp.int32)
    shape = (logits.shape[1], rule.top_k + rule.shared)
    found = pt.call(
        functools.partial(_kernel, rule=rule),
        name="choose_experts",
        grid=(shape[0],),
        inputs=dict(logits=logits, bias=bias, valid=valid),
        outputs=dict(chosen=jax.ShapeDtypeStruct(shape, jnp.int32), weights=jax.ShapeDtypeStruct(shape, jnp.float32)),
        updates={},
        num_warps=1,
        interpret=interpret,
    )
    return found["chosen"], found["weights"]
