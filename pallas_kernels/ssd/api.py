"""The public function of ssd: its contract, checks and dispatch."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels._check import checked
from pallas_kernels._run_op import run_op
from pallas_kernels._state_space import StateSpace
from pallas_kernels.chunks import check_chunks
from pallas_kernels.dispatch import Run
from pallas_kernels.rows import Rows
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
    rows: Rows,
    *,
    D: Float[Array, " heads"] | Float[Array, "heads head_dim"] | None = None,
    z: Float[Array, "tokens heads head_dim"] | None = None,
    dt_bias: Float[Array, " heads"] | None = None,
    dt_softplus: bool = True,
    run: Run = Run(),
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "layers blocks heads head_dim state_dim"]]:
    """Run Mamba-2's recurrence over rows of any length, chunk by chunk, and keep each row's final state.

    The equations are in `selective_state_update`, here with one A, dt and dt_bias per head. For a whole chunk, with the
    state S0 before it and the log decays g_m = A * dt_m, they are::

        y_i = exp(g_0 + .. + g_i) S0 C_i + sum_{j<=i} exp(g_{j+1} + .. + g_i) (C_i . B_j) dt_j x_j
        S   = exp(g_0 + .. + g_end) S0   + sum_j      exp(g_{j+1} + .. + g_end) dt_j x_j B_j^T

    Chunks end at multiples of `rows.chunks.chunk_size` in the sequence's absolute position. With a float32 pool, states and
    outputs are the same bits, whether the tokens ran in one call, were split at the end of a chunk, or resumed from a
    block. A row's results do not depend on other rows. "xla" can be differentiated.

    Numerics: states, decays and sums are float32. Each decay is as exact as if its log decays were summed alone. "xla"
    multiplies at Precision.HIGHEST. If x, B and C are all bfloat16, "triton" multiplies them exactly with states and
    decayed inputs of 16 bits (two bfloat16 terms), and so does "mosaic_gpu". Otherwise "triton" multiplies everything in
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
        rows: The rows, with `read`, `write` and `chunks`. `write[r, 0]` receives row r's final state. `checkpoints` may be
            given: after these numbers of tokens, each of which must be the end of a chunk, the state is kept as well.
        D: Skip connection, per head or per channel, or None.
        z: Raw gate of the outputs, or None.
        dt_bias: Bias that is added to `dt` before the softplus, or None.
        dt_softplus: Whether a softplus is applied to `dt`. If not, `dt` must not be negative.
        run: How it runs: by "xla", "triton" or "mosaic_gpu", with a `Config` for the Triton kernel. Mosaic GPU is selected
            if JAX's default device is a Hopper GPU.

    Returns:
        The outputs in x's dtype, which are 0 for tokens after the last row, and the updated pool.

    Raises:
        ValueError: if a shape or dtype breaks the contract, if `chunks` was made for other rows, or if the rows lack a
            field.
        UnsupportedError: if `run` names "triton" and the kernel cannot run these arguments, because the chunk size is not a
            power of two from 16 to 256, or because a chunk's tiles do not fit into a GPU's shared memory. If it names
            "mosaic_gpu", because x, B, C or z is not bfloat16, the chunk size is not 64, head_dim is not a multiple of 64,
            state_dim is not 64 or 128, a configuration is given, or JAX is too old.
    """
    name = "ssd"
    rows, run = rows.having(name, "read", "write", "chunks", optional=("checkpoints",)), run.checked(name, Config)
    inputs = StateSpace(x, dt, A, B, C, D, z, dt_bias).checked(name)
    if x.shape[0] == 0 or rows.num_rows == 0:
        return jnp.zeros_like(x), pool
    check_chunks(name, rows.chunks, rows.num_rows, x.shape[0])
    return run_op(
        name,
        (inputs, pool, rows),
        run,
        xla=xla.ssd,
        triton=pallas_triton.ssd,
        unsupported=pallas_triton.unsupported(inputs, rows, run.config),
        sm90="pallas_kernels.ssd.sm90",
        dt_softplus=dt_softplus,
    )
