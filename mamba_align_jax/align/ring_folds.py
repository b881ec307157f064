"""Folds without tokens: the op of each kind of layer, which is told that no row has a token."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from mamba_align_jax.align.config import AlignConfig, RecurrentState
from mamba_align_jax.align.pool import StatePool
from mamba_align_jax.align.ring import DeltaRuleRing, Mamba1Ring, Mamba2Ring
from pallas_kernels import Implementation
from pallas_kernels.gated_delta_rule.deferred import gated_delta_rule_deferred
from pallas_kernels.selective_scan.deferred import selective_scan_deferred
from pallas_kernels.selective_state_update.deferred import selective_state_deferred


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
        where = slot, base, position, read[number], block[number]
        states, arrays = list(pool.states[number]), (pool.states[number][index], *pool.ring(number))
        one = functools.partial(_FOLDS[type(group.ring)], group.ring, where, spec.window, implementation)
        states[index], *ring = jax.lax.fori_loop(0, group.num_layers, one, arrays)
        pool = pool.with_group(number, [*states, *ring])
    return pool


def _fold_delta_rule(
    ring: DeltaRuleRing,
    where: tuple[jax.Array, ...],
    window: int,
    implementation: Implementation | None,
    layer: jax.Array,
    arrays: tuple[jax.Array, ...],
) -> tuple[jax.Array, ...]:
    """Folds in one layer of the gated delta rule. `arrays` are the states and the ring, and so is the result."""
    heads, no_tokens = ring.value_heads, jnp.zeros(where[0].shape[0] + 1, jnp.int32)
    qkv = jnp.zeros((0, 2 * ring.key_heads * ring.key_dim + heads * ring.value_dim), ring.dtype)
    of_head, of_gate = (heads,), (heads, *arrays[3].shape[4:])
    _, *folded = gated_delta_rule_deferred(
        qkv,
        jnp.zeros((0, *of_gate), ring.dtype),
        jnp.zeros((0, *of_head), ring.dtype),
        jnp.zeros(of_head, jnp.float32),
        jnp.zeros(of_gate, jnp.float32),
        arrays[0],
        arrays[1],
        arrays[2],
        arrays[3],
        jnp.int32(layer),
        no_tokens,
        where[0],
        where[1],
        where[2],
        where[3],
        where[4],
        max_query_tokens=window,
        implementation=implementation,
    )
    return tuple(folded)


def _fold_mamba2(
    ring: Mamba2Ring,
    where: tuple[jax.Array, ...],
    window: int,
    implementation: Implementation | None,
    layer: jax.Array,
    arrays: tuple[jax.Array, ...],
) -> tuple[jax.Array, ...]:
    """Folds in one layer of Mamba-2. `arrays` are the states and the ring, and so is the result."""
    no_tokens = jnp.zeros(where[0].shape[0] + 1, jnp.int32)
    xBC = jnp.zeros((0, ring.heads * ring.head_dim + 2 * ring.groups * ring.state_dim), ring.dtype)
    dt, of_head = jnp.zeros((0, ring.heads), ring.dtype), jnp.zeros(ring.heads, jnp.float32)
    options = dict(max_query_tokens=window, implementation=implementation)
    operands = xBC, dt, of_head, *arrays, jnp.int32(layer), no_tokens, *where
    _, *folded = selective_state_deferred(*operands, **options)
    return tuple(folded)


def _fold_mamba1(
    ring: Mamba1Ring,
    where: tuple[jax.Array, ...],
    window: int,
    implementation: Implementation | None,
    layer: jax.Array,
    arrays: tuple[jax.Array, ...],
) -> tuple[jax.Array, ...]:
    """Folds in one layer of Mamba-1. `arrays` are the states and the ring, and so is the result."""
    *folding, rates, bias = arrays
    no_tokens = jnp.zeros(where[0].shape[0] + 1, jnp.int32)
    x, B = (jnp.zeros((0, 1, size), ring.dtype) for size in (ring.channels, ring.state_dim))
    options = dict(max_query_tokens=window, dt_bias=bias[layer], implementation=implementation)
    operands = x, x, rates[layer], B, B, *folding, jnp.int32(layer), no_tokens, *where
    _, *folded = selective_scan_deferred(*operands, **options)
    return *folded, rates, bias


_FOLDS: dict[type, Callable[..., tuple[jax.Array, ...]]] = {
    DeltaRuleRing: _fold_delta_rule,
    Mamba2Ring: _fold_mamba2,
    Mamba1Ring: _fold_mamba1,
}
