"""The launches of the three prefill kernels, and the arrays between them."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels import device
from pallas_kernels._pallas_triton import Refs
from pallas_kernels.chunks import Chunks
from pallas_kernels.dispatch import Run
from pallas_kernels.gated_delta_rule._arguments import Options, Tokens
from pallas_kernels.gated_delta_rule.config import PrefillConfig, default_prefill_config
from pallas_kernels.gated_delta_rule.prefill.chunk_intra import (
    HeadChunk,
    decay_spans,
    last_block,
    products,
    products_per_channel,
)
from pallas_kernels.gated_delta_rule.prefill.chunk_states import states
from pallas_kernels.gated_delta_rule.prefill.solve_tril import inverse
from pallas_kernels.rows import Rows

CHUNK_SIZES = (16, 32, 64)


def _of_chunk(kernel: Callable[..., None], size: int, **options) -> Callable[[Refs], None]:
    """Make a kernel of `kernel`, with one program per head and chunk. The programs of empty chunks do nothing."""

    def body(refs):
        head, chunk = pt.program_id(0), pt.program_id(1)
        start, end = refs.cu_chunk_seqlens[chunk], refs.cu_chunk_seqlens[chunk + 1]
        pt.when(end > start)(lambda: kernel(refs, HeadChunk(head, chunk, start, end, size), **options))

    return body


def unsupported(chunk_size: int, key_dim: int) -> str | None:
    """Return the reason why the kernels cannot run chunks of this size and such keys, or None if they can."""
    if chunk_size not in CHUNK_SIZES:
        return f"chunk_size must be one of {CHUNK_SIZES}, got {chunk_size}"
    if key_dim > 128 and device.has_little_shared_memory():
        return f"keys must have at most 128 dims on a GPU with little shared memory, got {key_dim}"
    return None


def _in_terms(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    """Describe an operand of later kernels in terms [terms, ...]: bfloat16 terms, or one term in float32."""
    if dtype == jnp.bfloat16:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    return jax.ShapeDtypeStruct((1, *shape[1:]), jnp.float32)


def multiply(
    tokens: Tokens, chunks: Chunks, *, options: Options, config: PrefillConfig, interpret: bool = False
) -> dict[str, jax.Array]:
    """Launch the first kernel. Return its outputs by name, see chunk_intra.py."""
    q, k, _, g, beta = tokens
    size, num_chunks = chunks.chunk_size, chunks.seq_idx.shape[0]
    (key_heads, key_dim), value_heads, per_channel = k.shape[1:], g.shape[1], g.ndim == 3
    array, of_chunk = jax.ShapeDtypeStruct, (value_heads, num_chunks, size)
    outputs = dict(system=array((*of_chunk, size), jnp.float32), attention=_in_terms(k.dtype, 1, *of_chunk, size))
    if per_channel:
        decayed = _in_terms(k.dtype, config.pieces, *of_chunk, key_dim)
        outputs |= dict(q_before=_in_terms(k.dtype, 1, *of_chunk, key_dim), k_before=decayed, k_after=decayed)
        outputs |= dict(decay=array((value_heads, num_chunks, key_dim), jnp.float32))
    else:
        outputs |= dict(scales=array((3, *of_chunk), jnp.float32))
        outputs |= dict(decay=array((value_heads, num_chunks), jnp.float32))
    return pt.call(
        _of_chunk(products_per_channel if per_channel else products, size, options=options, interpret=interpret),
        name="gated_delta_rule_prefill_products",
        grid=(value_heads if per_channel else key_heads, num_chunks),
        inputs=dict(q=q, k=k, g=g, beta=beta, cu_chunk_seqlens=chunks.cu_chunk_seqlens)
        | (dict(spans=decay_spans(size, last_block(outputs["k_before"]))) if per_channel else {}),
        outputs=outputs,
        num_warps=config.products_warps,
        interpret=interpret,
    )


def invert(
    system: jax.Array, beta: jax.Array, chunks: Chunks, *, dtype: Any, terms: int, interpret: bool = False
) -> jax.Array:
    """Launch the second kernel. Return `solve`, the solved systems times beta, for inputs of `dtype`."""
    outputs = dict(solve=_in_terms(dtype, terms, *system.shape))
    return pt.call(
        _of_chunk(inverse, chunks.chunk_size, interpret=interpret),
        name="gated_delta_rule_prefill_inverse",
        grid=system.shape[:2],
        inputs=dict(beta=beta, cu_chunk_seqlens=chunks.cu_chunk_seqlens, system=system),
        outputs=outputs,
        num_warps=1,
        interpret=interpret,
    )["solve"]


def gated_delta_rule_prefill(
    tokens: Tokens, pool: jax.Array, rows: Rows, *, options: Options, run: Run
) -> tuple[jax.Array, jax.Array]:
    """Run the op that `gated_delta_rule_prefill` in api.py describes, by the Triton kernels."""
    q, k, v, g, beta = tokens
    chunks, interpret = rows.chunks, run.interpret
    size, key_dim, (value_heads, value_dim) = chunks.chunk_size, k.shape[2], v.shape[1:]
    values = value_heads * value_dim * rows.num_rows
    config = run.config or default_prefill_config(values, key_dim, k.dtype.itemsize, g.ndim == 3)
    multiplied = multiply(tokens, chunks, options=options, config=config, interpret=interpret)
    launch = dict(dtype=k.dtype, terms=config.pieces, interpret=interpret)
    multiplied["solve"] = invert(multiplied.pop("system"), beta, chunks, **launch)
    results = pt.call(
        functools.partial(states, size=size, config=config, layout=options.layout, interpret=interpret),
        name="gated_delta_rule_prefill_states",
        grid=(-(-value_dim // config.tile_value), value_heads, rows.num_rows),
        inputs=dict(
            q=q,
            k=k,
            v=v,
            layer=rows.layer,
            query_start_loc=rows.query_start_loc,
            cu_chunk_seqlens=chunks.cu_chunk_seqlens,
            first_chunk=chunks.first_chunk_indices,
            read_block=rows.read,
            write_block=rows.write[:, 0],
            **rows.checkpoint_inputs,
            scales=None,
        )
        | multiplied,
        outputs=dict(out=jax.ShapeDtypeStruct(v.shape, v.dtype)),
        updates=dict(pool=pool),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )
    return results["out"], results["pool"]
