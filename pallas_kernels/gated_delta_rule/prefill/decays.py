"""The launch before the Mosaic GPU kernels for a decay per head: sums of log decays, decays and betas of all chunks."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels._pallas_triton import Refs
from pallas_kernels._tiles import iota
from pallas_kernels.chunks import Chunks
from pallas_kernels.gated_delta_rule.prefill.products import decay_of, sums_on_scaled_grid

_HEADS = 4  # of a program


class Factors(NamedTuple):
    """The vectors of a chunk and value head, one value per token, in the order in which `decays` writes them.

    Attributes:
        coarse: The running sums of the log decays' first parts. See `sums_on_scaled_grid`.
        fine: The running sums of their second parts, in log2.
        before: The decay from the start of the chunk to each token.
        after: The decay from each token to the end of the chunk.
        beta: The correction strengths, 0 for places without a token.
    """

    coarse: Any = 0
    fine: Any = 1
    before: Any = 2
    after: Any = 3
    beta: Any = 4


def decays(g: jax.Array, beta: jax.Array, chunks: Chunks, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """Returns the `Factors` [heads, chunks, factors, chunk_size], and the decay of each chunk [heads, chunks], float32."""
    heads, size, number = g.shape[1], chunks.chunk_size, chunks.seq_idx.shape[0]

    def kernel(refs: Refs) -> None:
        group, chunk = pt.program_id(0), pt.program_id(1)
        start, end = refs.cu_chunk_seqlens[chunk], refs.cu_chunk_seqlens[chunk + 1]
        shape = size, _HEADS
        lane, head = iota(shape, 0), group * _HEADS + iota(shape, 1)
        live = (lane < end - start) & (head < heads)
        take = lambda ref: pt.load(ref.at[start + lane, head], mask=live, other=0.0)
        (coarse, coarse_total), (fine, fine_total) = sums_on_scaled_grid(take(refs.g))
        before, after = decay_of(coarse, fine), decay_of(coarse_total - coarse, fine_total - fine)
        for n, values in enumerate(Factors(coarse, pt.LOG2_E * fine, before, after, take(refs.beta))):
            at = refs.factors.at[head, chunk, jnp.full(shape, n), lane]
            pt.store(at, values, mask=head < heads)
        head = group * _HEADS + iota((_HEADS,), 0)
        pt.store(refs.decay.at[head, chunk], decay_of(coarse_total, fine_total), mask=head < heads)

    array = jax.ShapeDtypeStruct
    outputs = dict(factors=array((heads, number, len(Factors()), size), jnp.float32))
    outputs |= dict(decay=array((heads, number), jnp.float32))
    results = pt.call(
        kernel,
        name="gated_delta_rule_prefill_decays",
        grid=(-(-heads // _HEADS), number),
        inputs=dict(g=g, beta=beta, cu_chunk_seqlens=chunks.cu_chunk_seqlens),
        outputs=outputs,
        updates={},
        num_warps=1,
        interpret=interpret,
    )
    return results["factors"], results["decay"]
