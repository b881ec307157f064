"""The public function of selective_state_update: its contract, checks and dispatch."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels._check import checked
from pallas_kernels._run_op import run_op
from pallas_kernels._state_space import StateSpace
from pallas_kernels.dispatch import Run
from pallas_kernels.rows import Rows
from pallas_kernels.selective_state_update import pallas_triton, xla
from pallas_kernels.selective_state_update.config import Config


@checked
def selective_state_update(
    x: Float[Array, "tokens heads head_dim"],
    dt: Float[Array, "tokens heads"] | Float[Array, "tokens heads head_dim"],
    A: Float[Array, " heads"] | Float[Array, "heads head_dim state_dim"],
    B: Float[Array, "tokens groups state_dim"],
    C: Float[Array, "tokens groups state_dim"],
    pool: Float[Array, "layers blocks heads head_dim state_dim"],
    rows: Rows,
    *,
    D: Float[Array, " heads"] | Float[Array, "heads head_dim"] | None = None,
    z: Float[Array, "tokens heads head_dim"] | None = None,
    dt_bias: Float[Array, " heads"] | Float[Array, "heads head_dim"] | None = None,
    dt_softplus: bool = True,
    run: Run = Run(),
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "layers blocks heads head_dim state_dim"]]:
    """Run Mamba's recurrence over decode and verify rows, in one launch, and keep the state after each token.

    The state after token t of row r is written to `rows.write[r, t]`. For one head with its group of B and C, its state S
    [head_dim, state_dim] and one token::

        dt = softplus(dt + dt_bias)
        S = exp(A * dt) * S + (dt * x) B^T;  y = S C + D * x;  y = y * silu(z)

    Mamba-2 has one A, D, dt and dt_bias per head. Mamba-1 has one head, A per channel and state, and D, dt and dt_bias
    per channel.

    Numerics: all arithmetic is float32, and a state is rounded to the pool's dtype only when it is stored. A row's
    results do not depend on other rows, to the bit.

    Sources: Gu, Dao, "Mamba" (2023); Dao, Gu, "Transformers are SSMs" (2024).

    Args:
        x: Inputs of all rows, packed.
        dt: Raw step sizes, per head or per channel.
        A: -exp(A_log), per head or per channel and state.
        B: Input projections. Head h uses group h // (heads // groups).
        C: Output projections, in the same groups as B.
        pool: States of all layers and blocks. It is updated in place if the enclosing jit donates it, and copied
            otherwise.
        rows: The rows, with `read` and `write`. A row has at most as many tokens as `write` has columns.
        D: Skip connection, per head or per channel, or None.
        z: Raw gate of the outputs, or None.
        dt_bias: Bias that is added to `dt` before the softplus, per head or per channel, or None.
        dt_softplus: Whether a softplus is applied to `dt`.
        run: How it runs: by "xla", "triton" or, on a Hopper GPU, "mosaic_gpu", with a `Config` for the Triton kernel.

    Returns:
        The outputs in x's dtype, which are 0 for tokens after the last row, and the updated pool.

    Raises:
        ValueError: if a shape or dtype breaks the contract, or if the rows lack a field.
        UnsupportedError: if `run` names a kernel that cannot run these arguments. The "mosaic_gpu" kernel takes arrays of
            16 or 32 bits, parameters per head, as Mamba-2 has, head_dim in multiples of 64, 128, 256 or 512 bytes of
            state per channel, and no configuration, and needs JAX 0.11.2 or newer.
    """
    name = "selective_state_update"
    rows, run = rows.having(name, "read", "write"), run.checked(name, Config)
    inputs = StateSpace(x, dt, A, B, C, D, z, dt_bias).checked(name)
    if x.shape[0] == 0 or rows.num_rows == 0:
        return jnp.zeros_like(x), pool
    return run_op(
        name,
        (inputs, pool, rows),
        run,
        xla=xla.selective_state_update,
        triton=pallas_triton.selective_state_update,
        sm90="pallas_kernels.selective_state_update.sm90",
        dt_softplus=dt_softplus,
    )
