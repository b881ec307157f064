"""The public function of selective_scan: its contract, checks and dispatch."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels._check import checked
from pallas_kernels._run_op import run_op
from pallas_kernels._state_space import StateSpace
from pallas_kernels.dispatch import Run
from pallas_kernels.rows import Rows
from pallas_kernels.selective_scan import pallas_triton, xla
from pallas_kernels.selective_scan.config import Config


@checked
def selective_scan(
    x: Float[Array, "tokens heads head_dim"],
    dt: Float[Array, "tokens heads head_dim"],
    A: Float[Array, "heads head_dim state_dim"],
    B: Float[Array, "tokens groups state_dim"],
    C: Float[Array, "tokens groups state_dim"],
    pool: Float[Array, "layers blocks heads head_dim state_dim"],
    rows: Rows,
    *,
    D: Float[Array, "heads head_dim"] | None = None,
    z: Float[Array, "tokens heads head_dim"] | None = None,
    dt_bias: Float[Array, "heads head_dim"] | None = None,
    dt_softplus: bool = True,
    run: Run = Run(),
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "layers blocks heads head_dim state_dim"]]:
    """Run Mamba-1's recurrence over rows of any length, in one launch, and keep each row's final state.

    The equations are in `selective_state_update`, here with A per channel and state, and D, dt and dt_bias per channel.

    Numerics: all arithmetic is float32, and a state is rounded to the pool's dtype only when it is stored. With a
    float32 pool, states and outputs are the same bits, however a row's tokens were split over calls. A row's results do
    not depend on other rows. "xla" can be differentiated.

    Source: Gu, Dao, "Mamba" (2023).

    Args:
        x: Inputs of all rows, packed.
        dt: Raw step sizes, per channel.
        A: -exp(A_log), per channel and state.
        B: Input projections. Head h uses group h // (heads // groups).
        C: Output projections, in the same groups as B.
        pool: States of all layers and blocks. It is updated in place if the enclosing jit donates it, and copied
            otherwise.
        rows: The rows, with `read` and `write`. `query_start_loc` starts at 0. `write[r, 0]` receives row r's final state.
            `checkpoints` may be given: after these numbers of tokens the state is kept as well.
        D: Skip connection, or None.
        z: Raw gate of the outputs, or None.
        dt_bias: Bias that is added to `dt` before the softplus, or None.
        dt_softplus: Whether a softplus is applied to `dt`.
        run: How it runs: by "xla" or "triton", with a `Config` for the Triton kernel.

    Returns:
        The outputs in x's dtype, which are 0 for tokens after the last row, and the updated pool.

    Raises:
        ValueError: if a shape or dtype breaks the contract, or if the rows lack a field.
        UnsupportedError: if `run` names "triton" and the kernel cannot run these arguments.
    """
    name = "selective_scan"
    rows, run = rows.having(name, "read", "write", optional=("checkpoints",)), run.checked(name, Config)
    inputs = StateSpace(x, dt, A, B, C, D, z, dt_bias).checked(name)
    if x.shape[0] == 0 or rows.num_rows == 0:
        return jnp.zeros_like(x), pool
    implementations = dict(xla=xla.selective_scan, triton=pallas_triton.selective_scan)
    return run_op(name, (inputs, pool, rows), run, **implementations, dt_softplus=dt_softplus)
