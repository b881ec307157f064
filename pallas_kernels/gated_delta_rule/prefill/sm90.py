"""The launches of the prefill kernels of Hopper GPUs."""

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import StateLayout
from pallas_kernels.gated_delta_rule.config import default_prefill_config
from pallas_kernels.gated_delta_rule.prefill.chunk_intra_per_channel_sm90 import products_per_channel
from pallas_kernels.gated_delta_rule.prefill.per_channel_sm90 import states
from pallas_kernels.gated_delta_rule.prefill.per_head_sm90 import prefill
from pallas_kernels.rows import Rows


def gated_delta_rule_prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    pool: jax.Array,
    rows: Rows,
    *,
    scale: float,
    use_qk_l2norm: bool,
    layout: StateLayout,
) -> tuple[jax.Array, jax.Array]:
    """Run the op that `gated_delta_rule_prefill` in api.py describes. Decays per head have a launch of their own."""
    per_channel, chunks, values = g.ndim == 3, rows.chunks, v.shape[1] * v.shape[2] * rows.num_rows
    config = default_prefill_config(values, k.shape[2], k.dtype.itemsize, per_channel)
    options = dict(scale=scale, use_qk_l2norm=use_qk_l2norm)
    inputs = dict(q=q, k=k, v=v, layer=jnp.reshape(rows.layer, 1), query_start_loc=rows.query_start_loc)
    inputs |= dict(first_chunk=chunks.first_chunk_indices, cu_chunk_seqlens=chunks.cu_chunk_seqlens)
    inputs |= dict(read_block=rows.read, write_block=rows.write[:, 0])
    if rows.checkpoints is not None:
        inputs |= dict(checkpoint_offset=rows.checkpoints.offset, checkpoint_block=rows.checkpoints.block)
    if not per_channel:
        return prefill(inputs, g, beta, chunks, pool, **options, layout=layout, terms=config.pieces)
    inputs |= products_per_channel(q, k, g, beta, chunks, **options)
    return states(inputs, pool, layout=layout)
