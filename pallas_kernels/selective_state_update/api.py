"""Public function of selective_state_update: contract, checks, dispatch.

For one head, its channels p, group g of B and C, state S [head_dim, state_dim] and token t:

    dt = softplus(dt + dt_bias)
    S = exp(A * dt) * S + (dt * x) B^T;  y = S C + D * x;  y = y * silu(z)

Mamba-2 has one A, D, dt and dt_bias per head. Mamba-1 has one head: A per channel and state, the rest per channel.

Sources: Gu, Dao, "Mamba" (2023); Dao, Gu, "Transformers are SSMs" (2024).
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels._check import checked, require
from pallas_kernels.dispatch import Implementation, dispatch
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
    layer: int | Int32[Array, ""],
    query_start_loc: Int32[Array, " rows_plus_1"],
    read_block: Int32[Array, " rows"],
    write_blocks: Int32[Array, "rows window"],
    *,
    D: Float[Array, " heads"] | Float[Array, "heads head_dim"] | None = None,
    z: Float[Array, "tokens heads head_dim"] | None = None,
    dt_bias: Float[Array, " heads"] | Float[Array, "heads head_dim"] | None = None,
    dt_softplus: bool = True,
    implementation: Implementation | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "layers blocks heads head_dim state_dim"]]:
    """Advances decode and verify rows token by token, in one launch. The equations stand at the top of this file.

    The state after token t of row r goes to write_blocks[r, t].

    Numerics: float32 throughout, the state rounded to the pool's dtype at each store only. A row's results do not depend
    on other rows, bit for bit. Outside a jit that donates `pool` the call copies the pool.

    Args:
        x: Inputs of all rows, packed.
        dt: Raw step sizes, per head or per channel.
        A: -exp(A_log), per head or per channel and state.
        B: Input projections; head h uses group h // (heads // groups).
        C: Output projections, likewise.
        pool: States. Donate it: updated in place.
        layer: Layer whose blocks are read and written.
        query_start_loc: First token of each row; the last entry ends the last row. Padding repeats it.
        read_block: Block of each row's state; NULL_BLOCK (0) gives zeros.
        write_blocks: Where the state after each of the row's tokens goes; NULL_BLOCK skips. No row may be longer than
            `window`. A block may be the row's own read block.
        D: Skip connection, per head or per channel; None for none.
        z: Raw gate of the outputs; None for none.
        dt_bias: Added to `dt` before the softplus, per head or per channel.
        dt_softplus: Whether `dt` goes through a softplus.
        implementation: "xla" or "triton"; None is Triton on CUDA and XLA elsewhere.
        config: Launch configuration of the Triton kernel; None takes the tuned or heuristic one.
        interpret: Runs the Triton kernel's body as plain JAX, on any platform.

    Returns:
        Outputs in x's dtype, 0 for tokens behind the last row, and the pool.

    Raises:
        ValueError: a shape or dtype breaks the contract.
        UnsupportedError: `implementation` was named and can't run these arguments.
    """
    require(
        x.shape[1] % B.shape[1] == 0,
        f"selective_state_update: B must have a number of groups that divides x's {x.shape[1]} heads, got {B.shape[1]}",
    )
    if x.shape[0] == 0 or read_block.shape[0] == 0:
        return jnp.zeros_like(x), pool
    operands = (x, dt, A, B, C, pool, jnp.int32(layer), query_start_loc, read_block, write_blocks, D, z, dt_bias)
    return _update(operands, dt_softplus, implementation, config, interpret)


@functools.partial(jax.jit, static_argnames=("dt_softplus", "implementation", "config", "interpret"))
def _update(operands, dt_softplus, implementation, config, interpret):
    triton = functools.partial(
        pallas_triton.selective_state_update, dt_softplus=dt_softplus, config=config, interpret=interpret
    )
    xla_update = functools.partial(xla.selective_state_update, dt_softplus=dt_softplus)
    return dispatch("selective_state_update", implementation, operands, xla=xla_update, triton=triton)
