"""Deferred states as two Triton kernels: what keys, queries and gates say alone, and then states and values."""

from typing import Any

import jax

from pallas_kernels.gated_delta_rule.deferred.channel_weights import channel_weights
from pallas_kernels.gated_delta_rule.deferred.config import DeferredConfig, default_config
from pallas_kernels.gated_delta_rule.deferred.values import values
from pallas_kernels.gated_delta_rule.deferred.weights import sizes, weights


def gated_delta_rule_deferred(
    qkv: jax.Array,
    a: jax.Array,
    b: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    pool: jax.Array,
    ring_k: jax.Array,
    ring_u: jax.Array,
    ring_g: jax.Array,
    layer: jax.Array,
    query_start_loc: jax.Array,
    slot: jax.Array,
    base: jax.Array,
    position: jax.Array,
    read_block: jax.Array,
    fold_block: jax.Array,
    *,
    max_query_tokens: int,
    config: DeferredConfig | None = None,
    interpret: bool = False,
    **options: Any,
) -> tuple[jax.Array, ...]:
    """Launches the kernels. See api.py."""
    rows = layer, query_start_loc, slot, base, position
    given = (weights if a.ndim == 2 else channel_weights)(
        *(qkv, a, b, A_log, dt_bias, ring_k, ring_g, *rows, fold_block),
        vectors=sizes(max_query_tokens, ring_k.shape[3] // 2)[0],
        interpret=interpret,
        **options,
    )
    config = config or default_config(pool.dtype.itemsize)
    where = *rows, read_block, fold_block
    out, pool, ring_u = values(given, qkv, pool, ring_u, *where, config=config, interpret=interpret)
    return out, pool, given["ring_k"], ring_u, given["ring_g"]
