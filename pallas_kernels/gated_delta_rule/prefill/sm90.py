"""The launches of the prefill kernels of Hopper GPUs."""

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta_rule._arguments import Options, Tokens
from pallas_kernels.gated_delta_rule.config import default_prefill_config
from pallas_kernels.gated_delta_rule.prefill.chunk_intra_per_channel_sm90 import products_per_channel
from pallas_kernels.gated_delta_rule.prefill.per_channel_sm90 import states
from pallas_kernels.gated_delta_rule.prefill.per_head_sm90 import prefill
from pallas_kernels.hopper.prefill_rows import TILE, prefill_inputs
from pallas_kernels.rows import Rows


def unsupported(inputs: Tokens, pool: jax.Array, rows: Rows, *, options: Options) -> str | None:
    """Return the reason why the kernels cannot run these arguments, or None if they can."""
    q, k, v, *_ = inputs
    key_dim, value_dim, chunk_size = k.shape[2], v.shape[2], rows.chunks.chunk_size
    if any(x.dtype != jnp.bfloat16 for x in (q, k, v)):
        return f"q, k and v must be bfloat16, got {q.dtype}, {k.dtype} and {v.dtype}"
    if chunk_size != TILE:
        return f"chunk_size must be {TILE}, got {chunk_size}"
    if key_dim not in (TILE, 2 * TILE) or value_dim % TILE:
        return f"key_dim must be 64 or 128 and value_dim a multiple of 64, got {key_dim} and {value_dim}"
    return None


def gated_delta_rule_prefill(
    tokens: Tokens, pool: jax.Array, rows: Rows, *, options: Options
) -> tuple[jax.Array, jax.Array]:
    """Run the op that `gated_delta_rule_prefill` in api.py describes. Decays per head have a launch of their own."""
    q, k, v, g, beta = tokens
    per_channel, values = g.ndim == 3, v.shape[1] * v.shape[2] * rows.num_rows
    config = default_prefill_config(values, k.shape[2], k.dtype.itemsize, per_channel)
    inputs = dict(q=q, k=k, v=v) | prefill_inputs(rows)
    if not per_channel:
        return prefill(inputs, g, beta, rows.chunks, pool, options=options, terms=config.pieces)
    inputs |= products_per_channel(q, k, g, beta, rows.chunks, options=options)
    return states(inputs, pool, layout=options.layout)
