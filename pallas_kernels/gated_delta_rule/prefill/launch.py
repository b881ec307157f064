"""Launches the three prefill kernels one after the other, with the arrays that pass from one to the next."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels._pallas_triton import Refs
from pallas_kernels.blocks import StateLayout
from pallas_kernels.chunks import Chunks
from pallas_kernels.gated_delta_rule.config import PrefillConfig, default_prefill_config
from pallas_kernels.gated_delta_rule.prefill.inverse import inverse
from pallas_kernels.gated_delta_rule.prefill.products import decay_spans, last_block, products, products_per_channel
from pallas_kernels.gated_delta_rule.prefill.states import states

CHUNK_SIZES = (16, 32, 64)


def _of_chunk(kernel: Callable[..., None], **options) -> Callable[[Refs], None]:
    """Makes a kernel of `kernel`, with one program per head and chunk. The programs of empty chunks do nothing."""

    def body(refs):
        head, chunk = pt.program_id(0), pt.program_id(1)
        start, end = refs.cu_chunk_seqlens[chunk], refs.cu_chunk_seqlens[chunk + 1]
        pt.when(end > start)(lambda: kernel(refs, head, chunk, start, end, **options))

    return body


def unsupported(chunk_size: int) -> str | None:
    """Returns the reason why the kernels cannot run chunks of this size, or None if they can."""
    return None if chunk_size in CHUNK_SIZES else f"chunk_size must be one of {CHUNK_SIZES}, got {chunk_size}"


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
    config: PrefillConfig | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Runs the op that `gated_delta_rule_prefill` in api.py describes, by the Triton kernels."""
    size, number = chunks.chunk_size, chunks.seq_idx.shape[0]
    (key_heads, key_dim), (value_heads, value_dim), rows = k.shape[1:], v.shape[1:], read_block.shape[0]
    per_channel = g.ndim == 3
    config = config or default_prefill_config(value_heads * value_dim * rows, key_dim, k.dtype.itemsize, per_channel)
    array = jax.ShapeDtypeStruct

    def in_pieces(count: int, *shape: int) -> jax.ShapeDtypeStruct:
        """Describes an array per chunk and head that later kernels multiply: in bfloat16 pieces, or in float32."""
        if k.dtype == jnp.bfloat16:
            return array((count, value_heads, number, size, *shape), jnp.bfloat16)
        return array((1, value_heads, number, size, *shape), jnp.float32)

    outputs = dict(system=array((value_heads, number, size, size), jnp.float32), attention=in_pieces(1, size))
    if per_channel:
        decayed = in_pieces(config.pieces, key_dim)
        outputs |= dict(q_before=in_pieces(1, key_dim), k_before=decayed, k_after=decayed)
        outputs |= dict(decay=array((value_heads, number, key_dim), jnp.float32))
    else:
        outputs |= dict(scales=array((3, value_heads, number, size), jnp.float32))
        outputs |= dict(decay=array((value_heads, number), jnp.float32))
    multiplied = pt.call(
        _of_chunk(
            products_per_channel if per_channel else products,
            size=size,
            scale=scale,
            use_qk_l2norm=use_qk_l2norm,
            interpret=interpret,
        ),
        name="gated_delta_rule_prefill_products",
        grid=(value_heads if per_channel else key_heads, number),
        inputs=dict(q=q, k=k, g=g, beta=beta, cu_chunk_seqlens=chunks.cu_chunk_seqlens)
        | (dict(spans=decay_spans(size, last_block(outputs["k_before"]))) if per_channel else {}),
        outputs=outputs,
        updates={},
        num_warps=config.products_warps,
        interpret=interpret,
    )
    inverted = pt.call(
        _of_chunk(inverse, size=size, interpret=interpret),
        name="gated_delta_rule_prefill_inverse",
        grid=(value_heads, number),
        inputs=dict(beta=beta, cu_chunk_seqlens=chunks.cu_chunk_seqlens, system=multiplied.pop("system")),
        outputs=dict(solve=in_pieces(config.pieces, size)),
        updates={},
        num_warps=1,
        interpret=interpret,
    )
    results = pt.call(
        functools.partial(states, size=size, config=config, layout=layout, interpret=interpret),
        name="gated_delta_rule_prefill_states",
        grid=(-(-value_dim // config.tile_value), value_heads, rows),
        inputs=dict(
            q=q,
            k=k,
            v=v,
            layer=layer,
            query_start_loc=query_start_loc,
            cu_chunk_seqlens=chunks.cu_chunk_seqlens,
            first_chunk=chunks.first_chunk_indices,
            read_block=read_block,
            write_block=write_block,
            checkpoint_offset=checkpoint_offset,
            checkpoint_block=checkpoint_block,
            scales=None,
        )
        | inverted
        | multiplied,
        outputs=dict(out=array(v.shape, v.dtype)),
        updates=dict(pool=pool),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )
    return results["out"], results["pool"]
