"""Folds that run no token: the op of each kind of layer is called with rows that have none."""

import functools
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp

from mamba_align_jax.align.config import AlignConfig, RecurrentState
from mamba_align_jax.align.pool import StatePool
from mamba_align_jax.align.ring import DeltaRuleRing, Mamba2Ring
from pallas_kernels import Fold, Implementation, Rows, Run
from pallas_kernels.gated_delta_rule.deferred import DeltaRuleEntries, gated_delta_rule_deferred
from pallas_kernels.selective_state_update.deferred import Mamba2Entries, selective_state_deferred

Arrays = tuple[jax.Array, ...]


def fold(
    align: AlignConfig,
    pool: StatePool,
    slot: jax.Array,
    base: jax.Array,
    position: jax.Array,
    read: jax.Array,
    block: jax.Array,
    implementation: Implementation | None,
) -> StatePool:
    """Runs the op without tokens in every layer: the rows that have a `block` fold."""
    for number, group in enumerate(align.groups):
        if group.ring is None:
            continue
        index = next(i for i, kind in enumerate(group.states) if isinstance(kind, RecurrentState))
        states, arrays = list(pool.states[number]), (pool.states[number][index], *pool.ring(number))
        rows = Rows(
            query_start_loc=jnp.zeros(slot.shape[0] + 1, jnp.int32),
            num_computed_tokens=position,
            read=read[number],
            fold=Fold(slot=slot, base=base, block=block[number]),
            max_query_tokens=align.window,
        )
        one = functools.partial(_FOLDS[type(group.ring)], group.ring, rows, Run(implementation=implementation))
        states[index], *ring = jax.lax.fori_loop(0, group.num_layers, one, arrays)
        pool = pool.with_group(number, [*states, *ring])
    return pool


# Each of these folds in one layer. `rows` have no tokens. `arrays` are the states and the ring, and so is the result.


def _fold_delta_rule(ring: DeltaRuleRing, rows: Rows, run: Run, layer: jax.Array, arrays: Arrays) -> Arrays:
    heads = ring.value_heads
    qkv = jnp.zeros((0, 2 * ring.key_heads * ring.key_dim + heads * ring.value_dim), ring.dtype)
    gate, per_head = jnp.zeros((0, heads), ring.dtype), jnp.zeros(heads, jnp.float32)
    states, *entries = arrays
    operands = qkv, gate, gate, per_head, per_head, states, DeltaRuleEntries(*entries)
    _, states, entries = gated_delta_rule_deferred(*operands, replace(rows, layer=jnp.int32(layer)), run=run)
    return states, *entries.arrays


def _fold_mamba2(ring: Mamba2Ring, rows: Rows, run: Run, layer: jax.Array, arrays: Arrays) -> Arrays:
    xBC = jnp.zeros((0, ring.heads * ring.head_dim + 2 * ring.groups * ring.state_dim), ring.dtype)
    dt, A = jnp.zeros((0, ring.heads), ring.dtype), jnp.zeros(ring.heads, jnp.float32)
    states, *entries = arrays
    operands = xBC, dt, A, states, Mamba2Entries(*entries), replace(rows, layer=jnp.int32(layer))
    _, states, entries = selective_state_deferred(*operands, run=run)
    return states, *entries.arrays


_FOLDS: dict[type, Callable[..., Arrays]] = {DeltaRuleRing: _fold_delta_rule, Mamba2Ring: _fold_mamba2}
