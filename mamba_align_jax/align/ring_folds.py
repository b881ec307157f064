"""Folds that run no token: the op of each kind of layer is called with rows that have none."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mamba_align_jax.align.config import AlignConfig, RecurrentState
from mamba_align_jax.align.pool import StatePool
from mamba_align_jax.align.ring import DeltaRuleRing, Mamba2Ring
from pallas_kernels import Implementation
from pallas_kernels.gated_delta_rule.deferred import gated_delta_rule_deferred
from pallas_kernels.selective_state_update.deferred import selective_state_deferred

Arrays = tuple[jax.Array, ...]


def fold(
    spec: AlignConfig,
    pool: StatePool,
    slot: jax.Array,
    base: jax.Array,
    position: jax.Array,
    read: jax.Array,
    block: jax.Array,
    implementation: Implementation | None,
) -> StatePool:
    """Runs the op without tokens in every layer: the rows that have a `block` fold."""
    for number, group in enumerate(spec.groups):
        if group.ring is None:
            continue
        index = next(i for i, kind in enumerate(group.states) if isinstance(kind, RecurrentState))
        states, arrays = list(pool.states[number]), (pool.states[number][index], *pool.ring(number))
        rows = jnp.zeros(slot.shape[0] + 1, jnp.int32), slot, base, position, read[number], block[number]
        options = dict(max_query_tokens=spec.window, implementation=implementation)
        one = functools.partial(_FOLDS[type(group.ring)], group.ring, rows, options)
        states[index], *ring = jax.lax.fori_loop(0, group.num_layers, one, arrays)
        pool = pool.with_group(number, [*states, *ring])
    return pool


# Each of these folds in one layer. `rows` are the op's arguments for rows without tokens, from `query_start_loc` on, and
# `options` its keywords. `arrays` are the states and the ring, and so is the result.


def _fold_delta_rule(
    ring: DeltaRuleRing, rows: Arrays, options: dict[str, Any], layer: jax.Array, arrays: Arrays
) -> Arrays:
    heads = ring.value_heads
    qkv = jnp.zeros((0, 2 * ring.key_heads * ring.key_dim + heads * ring.value_dim), ring.dtype)
    gate, per_head = jnp.zeros((0, heads), ring.dtype), jnp.zeros(heads, jnp.float32)
    operands = qkv, gate, gate, per_head, per_head, *arrays, jnp.int32(layer), *rows
    _, *folded = gated_delta_rule_deferred(*operands, **options)
    return tuple(folded)


def _fold_mamba2(ring: Mamba2Ring, rows: Arrays, options: dict[str, Any], layer: jax.Array, arrays: Arrays) -> Arrays:
    xBC = jnp.zeros((0, ring.heads * ring.head_dim + 2 * ring.groups * ring.state_dim), ring.dtype)
    dt, A = jnp.zeros((0, ring.heads), ring.dtype), jnp.zeros(ring.heads, jnp.float32)
    operands = xBC, dt, A, *arrays, jnp.int32(layer), *rows
    _, *folded = selective_state_deferred(*operands, **options)
    return tuple(folded)


_FOLDS: dict[type, Callable[..., Arrays]] = {DeltaRuleRing: _fold_delta_rule, Mamba2Ring: _fold_mamba2}
