"""Public function of ssd: contract, checks, dispatch.

The recurrence of `selective_state_update` with one A, dt and dt_bias per head. For one head, its group of B and C, state S
[head_dim, state_dim] and token t:

    dt = softplus(dt + dt_bias)
    S = exp(A * dt) * S + (dt * x) B^T;  y = S C + D * x;  y = y * silu(z)

Over a chunk, from the state S0 before it, with log decays g_m = A * dt_m:

    y_i = exp(g_0 + .. + g_i) S0 C_i + sum_{j<=i} exp(g_{j+1} + .. + g_i) (C_i . B_j) dt_j x_j
    S   = exp(g_0 + .. + g_end) S0   + sum_j      exp(g_{j+1} + .. + g_end) dt_j x_j B_j^T

Source: Dao, Gu, "Transformers are SSMs" (2024).
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels._check import checked, require
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
    """Runs rows of any length in chunks that end at multiples of `chunks.chunk_size` in the sequence's absolute position.

    The equations stand at the top of this file. With a float32 pool, states and outputs are bit-identical whether the
    tokens ran whole, were split at a multiple of `chunks.chunk_size`, or resumed from a block; a row's results do not
    depend on other rows. "xla" differentiates.

    Numerics: states, decays and sums in float32, decays as exponentials of sums no longer than they need be. "xla"
    multiplies at Precision.HIGHEST. "triton" multiplies bfloat16 x, B and C exactly with states and decayed inputs of 16
    bits (two bfloat16 numbers); if any of them is wider, or float16, everything in three products of tf32. Outside a jit
    that donates `pool` the call copies the pool.

    Args:
        x: Inputs of all rows, packed.
        dt: Raw step sizes.
        A: -exp(A_log), negative.
        B: Input projections; head h uses group h // (heads // groups).
        C: Output projections, likewise.
        pool: States. Donate it: updated in place.
        layer: Layer whose blocks are read and written.
        query_start_loc: First token of each row; the last entry ends the last row. Padding repeats it.
        chunks: `chunk_rows` of the same rows.
        read_block: Block of each row's initial state; NULL_BLOCK (0) gives zeros.
        write_block: Where each row's final state goes; NULL_BLOCK skips. It may be the read block.
        checkpoint_offset: Tokens of the row after which the state is kept as well, ends of chunks, rising along a row.
        checkpoint_block: Where each checkpoint goes; NULL_BLOCK for none. It may be the row's read block.
        D: Skip connection, per head or per channel; None for none.
        z: Raw gate of the outputs; None for none.
        dt_bias: Added to `dt` before the softplus.
        dt_softplus: Whether `dt` goes through a softplus; if not, it is not negative.
        implementation: "xla" or "triton"; None is Triton on CUDA, where its tiles fit, and XLA elsewhere.
        config: Launch configuration of the Triton kernel; None takes the tuned or heuristic one.
        interpret: Runs the Triton kernel's body as plain JAX, on any platform.

    Returns:
        Outputs in x's dtype, 0 for tokens behind the last row, and the pool.

    Raises:
        ValueError: a shape or dtype breaks the contract, `chunks` is of other rows, or only one of the checkpoint arguments
            is given.
        UnsupportedError: `implementation` was named and can't run these arguments: chunks of a size that is no power of
            two from 16 to 256, or too large for a GPU's shared memory.
    """
    require(
        x.shape[1] % B.shape[1] == 0,
        f"ssd: B must have a number of groups that divides x's {x.shape[1]} heads, got {B.shape[1]}",
    )
    if x.shape[0] == 0 or read_block.shape[0] == 0:
        return jnp.zeros_like(x), pool
    check_prefill("ssd", x, read_block, chunks, checkpoint_offset, checkpoint_block)
    operands = (x, dt, A, B, C, pool, jnp.int32(layer), query_start_loc, chunks, read_block, write_block)
    operands += (checkpoint_offset, checkpoint_block, D, z, dt_bias)
    return _prefill(operands, dt_softplus, implementation, config, interpret)


@functools.partial(jax.jit, static_argnames=("dt_softplus", "implementation", "config", "interpret"))
def _prefill(operands, dt_softplus, implementation, config, interpret):
    x, _, _, B, C, *_ = operands
    return dispatch(
        "ssd",
        implementation,
        operands,
        xla=functools.partial(xla.ssd, dt_softplus=dt_softplus),
        triton=functools.partial(pallas_triton.ssd, dt_softplus=dt_softplus, config=config, interpret=interpret),
        unsupported=pallas_triton.unsupported(x, B, C, operands[9].shape[0], operands[8].chunk_size, config),
    )
