"""The launch before ssd's Mosaic GPU kernel: decays and step sizes of the tokens of all chunks."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels._pallas_triton import Refs
from pallas_kernels._state_space import StateSpace, step_size
from pallas_kernels.chunks import Chunks


class Factors(NamedTuple):
    """The vectors of a chunk and head, one value per token, in the order in which `decays` writes them.

    Attributes:
        from_state: The decay from the start of the chunk to each token.
        to_end: The decay from each token to the end of the chunk, times its step size.
        whole: The running sums of the log2 decays' hi terms. See `sums_on_fixed_grid`.
        rest: The running sums of their lo terms.
        dt: The step sizes.
        end: The decay of the whole chunk, the same for all tokens.
    """

    from_state: Any = 0
    to_end: Any = 1
    whole: Any = 2
    rest: Any = 3
    dt: Any = 4
    end: Any = 5


def sums_on_fixed_grid(g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sum the log2 decays `g` [chunk] (at most 0) up to each token, so that differences of sums lose no digits.

    Returns the running sums of two terms of `g`: multiples of a unit (2^-10 for chunks of 64 tokens), and the rests.
    The hi terms add up exactly, and the rests add up to less than chunk^2 * 2^-16. A difference of two sums is
    therefore off by at most 2^-27 for chunks of 64 tokens and 2^-23 for chunks of 256. Values below -256 are set to
    -256, because 2^-256 is 0 in float32.

    gated_delta_rule's prefill cuts its sums on a grid that scales with their total. That needs values loaded from
    memory, and `g` is a product that the compiler may fuse with other operations.
    """
    unit = 2**16 // g.shape[0]
    g = jnp.maximum(g, -256.0)
    whole = (g * float(unit)).astype(jnp.int32).astype(jnp.float32) * (1.0 / unit)
    return jax.lax.cumsum(whole), jax.lax.cumsum(g - whole)


def decays(inputs: StateSpace, chunks: Chunks, *, dt_softplus: bool, interpret: bool = False) -> jax.Array:
    """Return the `Factors` of all chunks and heads, float32 [heads, chunks, factors, chunk_size]."""
    heads, size, num_chunks = inputs.dt.shape[1], chunks.chunk_size, chunks.seq_idx.shape[0]

    def kernel(refs: Refs) -> None:
        head, chunk = pt.program_id(0), pt.program_id(1)
        lane, _ = pt.lanes(0, size, size)
        start, end = refs.cu_chunk_seqlens[chunk], refs.cu_chunk_seqlens[chunk + 1]
        live = lane < end - start
        rate = refs.A[head].astype(jnp.float32) * pt.LOG2_E
        raw = pt.load(refs.dt.at[start + lane, head], mask=live, other=0.0).astype(jnp.float32)
        bias = None if refs.dt_bias is None else refs.dt_bias[head]
        step = jnp.where(live, step_size(raw, bias, dt_softplus), 0.0)
        whole, rest = sums_on_fixed_grid(rate * step)
        last = lane == size - 1
        whole_end, rest_end = (jnp.sum(jnp.where(last, x, 0.0)) for x in (whole, rest))
        to_end = jnp.exp2((whole_end - whole) + (rest_end - rest))
        all_ = jnp.exp2(jnp.zeros((size,), jnp.float32) + (whole_end + rest_end))
        values = Factors(jnp.exp2(whole + rest), to_end * step, whole, rest, step, all_)
        for n, value in enumerate(values):
            pt.store(refs.factors.at[head, chunk, jnp.int32(n), lane], value)

    return pt.call(
        kernel,
        name="ssd_decays",
        grid=(heads, num_chunks),
        inputs=dict(dt=inputs.dt, A=inputs.A, dt_bias=inputs.dt_bias, cu_chunk_seqlens=chunks.cu_chunk_seqlens),
        outputs=dict(factors=jax.ShapeDtypeStruct((heads, num_chunks, len(Factors()), size), jnp.float32)),
        num_warps=1,
        interpret=interpret,
    )["factors"]
