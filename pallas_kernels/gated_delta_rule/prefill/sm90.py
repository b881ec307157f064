"""Launches the prefill kernels of Hopper GPUs one after the other."""

import jax

from pallas_kernels.blocks import StateLayout
from pallas_kernels.chunks import Chunks
from pallas_kernels.gated_delta_rule.config import default_prefill_config
from pallas_kernels.gated_delta_rule.prefill.chunk_intra_per_channel_sm90 import products_per_channel
from pallas_kernels.gated_delta_rule.prefill.per_channel_sm90 import states
from pallas_kernels.gated_delta_rule.prefill.per_head_sm90 import prefill


def gated_delta_rule_prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    query_start_loc: jax.Array,
    chunks: Chunks,
    read_block: jax.Array,
    write_block: jax.Array,
    checkpoint_offset: jax.Array | None = None,
    checkpoint_block: jax.Array | None = None,
    *,
    scale: float,
    use_qk_l2norm: bool,
    layout: StateLayout,
) -> tuple[jax.Array, jax.Array]:
    """Runs the op that `gated_delta_rule_prefill` in api.py describes. Decays per head have a launch of their own."""
    per_channel, rows = g.ndim == 3, read_block.shape[0]
    values = v.shape[1] * v.shape[2] * rows
    config = default_prefill_config(values, k.shape[2], k.dtype.itemsize, per_channel)
    options = dict(scale=scale, use_qk_l2norm=use_qk_l2norm)
    inputs = dict(q=q, k=k, v=v, layer=layer.reshape(1), query_start_loc=query_start_loc)
    inputs |= dict(first_chunk=chunks.first_chunk_indices, cu_chunk_seqlens=chunks.cu_chunk_seqlens)
    inputs |= dict(read_block=read_block, write_block=write_block)
    if checkpoint_offset is not None and checkpoint_block is not None and checkpoint_block.shape[1]:
        inputs |= dict(checkpoint_offset=checkpoint_offset, checkpoint_block=checkpoint_block)
    if not per_channel:
        return prefill(inputs, g, beta, chunks, pool, **options, layout=layout, pieces=config.pieces)
    inputs |= products_per_channel(q, k, g, beta, chunks, **options)
    return states(inputs, pool, layout=layout)
