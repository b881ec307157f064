"""The public function of ssd: its contract, checks and dispatch."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels._check import checked, require
from pallas_kernels._mosaic_available import unavailable
from pallas_kernels.chunks import Chunks, check_prefill
from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.ssd import pallas_triton, xla
from pallas_kernels.ssd.config import Config


@checked
def ssd(
    x: Float[Array, "tokens heads head_dim"],
    dt: Float[Array, "tokens heads"],
    A: Float[Array, " heads"],
    B: Float[Array, "tokens groups state_dim"],
    C: Float[Array, "tokens groups state_dim"],
    pool: Float[Array, "layers blocks heads head_dim state_dim"],
    layer: int | Int32[Array, ""],
    query_start_loc: Int32[Array, " rows_plus_1"],
    chunks: Chunks,
    read_block: Int32[Array, " rows"],
    write_block: Int32[Array, " rows"],
    checkpoint_offset: Int32[Array, "rows checkpoints"] | None = None,
    checkpoint_block: Int32[Array, "rows checkpoints"] | None = None,
    *,
    D: Float[Array, " heads"] | Float[Array, "heads head_dim"] | None = None,
    z: Float[Array, "tokens heads head_dim"] | None = None,
    dt_bias: Float[Array, " heads"] | None = None,
    dt_softplus: bool = True,
    implementation: Implementation | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "layers blocks heads head_dim state_dim"]]:
    """Runs Mamba-2's recurrence over rows of any length, chunk by chunk, and keeps each row's final state.

    The equations are those of `selective_state_update` with one A, dt and dt_bias per head. For a whole chunk, with the
    state S0 before it and the log decays g_m = A * dt_m, they are::

        y_i = exp(g_0 + .. + g_i) S0 C_i + sum_{j<=i} exp(g_{j+1} + .. + g_i) (C_i . B_j) dt_j x_j
        S   = exp(g_0 + .. + g_end) S0   + sum_j      exp(g_{j+1} + .. + g_end) dt_j x_j B_j^T

    Chunks end at multiples of `chunks.chunk_size` in the sequence's absolute position. With a float32 pool, states and
    outputs are the same bits, whether the tokens ran in one call, were split at the end of a chunk, or resumed from a
    block. A row's results do not depend on other rows. "xla" can be differentiated.

    Numerics: states, decays and sums are float32. Each decay is as exact as if its log decays were summed alone. "xla"
    multiplies at Precision.HIGHEST. If x, B and C are all bfloat16, "triton" multiplies them exactly with states and
    decayed inputs of 16 bits (two bfloat16 numbers), and so does "mosaic_gpu". Otherwise "triton" multiplies everything in
    three products of tf32.

    Source: Dao, Gu, "Transformers are SSMs" (2024).

    Args:
        x: Inputs of all rows, packed.
        dt: Raw step sizes, per head.
        A: -exp(A_log), per head.
        B: Input projections. Head h uses group h // (heads // groups).
        C: Output projections, in the same groups as B.
        pool: States of all layers and blocks. It is updated in place if the enclosing jit donates it, and copied
            otherwise.
        layer: The layer whose blocks are read and written.
        query_start_loc: Index of each row's first token; the last entry is the end of the last row. Padding rows repeat
            that entry.
        chunks: The result of `chunk_rows` for the same rows.
        read_block: The block that holds each row's initial state. NULL_BLOCK (0) reads as zeros.
        write_block: The block that receives each row's final state. NULL_BLOCK skips the write. It may be the row's own
            read block.
        checkpoint_offset: Numbers of tokens of the row after which the state is kept as well, in ascending order. Each
            must be the end of a chunk.
        checkpoint_block: The block that receives each checkpoint. NULL_BLOCK means no checkpoint, whatever its offset.
            It may be the row's own read block.
        D: Skip connection, per head or per channel, or None.
        z: Raw gate of the outputs, or None.
        dt_bias: Bias that is added to `dt` before the softplus, or None.
        dt_softplus: Whether a softplus is applied to `dt`. If not, `dt` must not be negative.
        implementation: "xla", "triton" or "mosaic_gpu". None selects the first of Mosaic GPU, if JAX's default device is
            a Hopper GPU, Triton, on any CUDA GPU, and XLA that can run the arguments.
        config: Launch configuration of the Triton kernel. None selects the default.
        interpret: Whether to run the Triton kernel's body as plain JAX, on any platform.

    Returns:
        The outputs in x's dtype, which are 0 for tokens after the last row, and the updated pool.

    Raises:
        ValueError: if a shape or dtype breaks the contract, if `chunks` was made for other rows, or if only one of the
            checkpoint arguments is given.
        UnsupportedError: if `implementation` is "triton" and the kernel cannot run these arguments, because the chunk
            size is not a power of two from 16 to 256, or because a chunk's tiles do not fit into a GPU's shared memory.
            If it is "mosaic_gpu", because x, B, C or z is not bfloat16, the chunk size is not 64, head_dim is not a multiple
            of 64, state_dim is not 64 or 128, a `config` is given, or JAX is too old.
    """
    require(
        B.shape[1] > 0 and x.shape[1] % B.shape[1] == 0,
        f"ssd: the number of groups of B must divide x's {x.shape[1]} heads, got {B.shape[1]}",
    )
    if x.shape[0] == 0 or read_block.shape[0] == 0:
        return jnp.zeros_like(x), pool
    checkpoints = check_prefill("ssd", x, read_block, chunks, checkpoint_offset, checkpoint_block)
    operands = (x, dt, A, B, C, pool, jnp.int32(layer), query_start_loc, chunks, read_block, write_block)
    operands += (*checkpoints, D, z, dt_bias)
    unsupported = pallas_triton.unsupported(x, B, C, read_block.shape[0], chunks.chunk_size, config)
    return _prefill(operands, dt_softplus, implementation, config, interpret, unsupported)


@functools.partial(jax.jit, static_argnames=("dt_softplus", "implementation", "config", "interpret", "unsupported"))
def _prefill(operands, dt_softplus, implementation, config, interpret, unsupported):
    return dispatch(
        "ssd",
        implementation,
        operands,
        xla=functools.partial(xla.ssd, dt_softplus=dt_softplus),
        triton=functools.partial(pallas_triton.ssd, dt_softplus=dt_softplus, config=config, interpret=interpret),
        unsupported=unsupported,
        mosaic_gpu=_mosaic_gpu(operands, dt_softplus, implementation, config, interpret),
    )


def _mosaic_gpu(operands, dt_softplus, implementation, config, interpret):
    """Returns the Mosaic GPU kernel, or the reason why it cannot run. It is imported only where it may run."""
    if reason := unavailable(implementation, config, interpret):
        return reason
    from pallas_kernels.ssd import sm90

    x, _, _, B, C, pool, _, _, chunks = operands[:9]
    z = operands[14]
    reason = sm90.unsupported(x, B, C, z, pool, chunks.chunk_size)
    return reason or functools.partial(sm90.ssd, dt_softplus=dt_softplus)
