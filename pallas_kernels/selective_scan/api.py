"""Public function of selective_scan: contract, checks, dispatch.

The equations are selective_state_update's, with A per channel and state, and the rest per channel.

Source: Gu, Dao, "Mamba" (2023).
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels._check import check_checkpoints, checked, require
from pallas_kernels.dispatch import Implementation, dispatch
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
    layer: int | Int32[Array, ""],
    query_start_loc: Int32[Array, " rows_plus_1"],
    read_block: Int32[Array, " rows"],
    write_block: Int32[Array, " rows"],
    checkpoint_offset: Int32[Array, "rows checkpoints"] | None = None,
    checkpoint_block: Int32[Array, "rows checkpoints"] | None = None,
    *,
    D: Float[Array, "heads head_dim"] | None = None,
    z: Float[Array, "tokens heads head_dim"] | None = None,
    dt_bias: Float[Array, "heads head_dim"] | None = None,
    dt_softplus: bool = True,
    implementation: Implementation | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "tokens heads head_dim"], Float[Array, "layers blocks heads head_dim state_dim"]]:
    """Runs rows of any length token by token, in one launch, and keeps each row's final state.

    Numerics: float32 throughout, the state rounded to the pool's dtype at each store only. With a float32 pool, states
    and outputs are bit-identical however a row's tokens were split over calls; a row's results do not depend on other
    rows. "xla" differentiates. Outside a jit that donates `pool` the call copies the pool.

    Args:
        x: Inputs of all rows, packed.
        dt: Raw step sizes.
        A: -exp(A_log).
        B: Input projections; head h uses group h // (heads // groups).
        C: Output projections, likewise.
        pool: States. Donate it: updated in place.
        layer: Layer whose blocks are read and written.
        query_start_loc: First token of each row, from 0 on; the last entry ends the last row. Padding repeats it.
        read_block: Block of each row's initial state; NULL_BLOCK (0) gives zeros.
        write_block: Where each row's final state goes; NULL_BLOCK skips. It may be the read block.
        checkpoint_offset: Tokens of the row after which the state is kept as well, rising along a row.
        checkpoint_block: Where each checkpoint goes; NULL_BLOCK for none. It may be the row's read block.
        D: Skip connection; None for none.
        z: Raw gate of the outputs; None for none.
        dt_bias: Added to `dt` before the softplus.
        dt_softplus: Whether `dt` goes through a softplus.
        implementation: "xla" or "triton"; None is Triton on CUDA and XLA elsewhere.
        config: Launch configuration of the Triton kernel; None takes the heuristic one.
        interpret: Runs the Triton kernel's body as plain JAX, on any platform.

    Returns:
        Outputs in x's dtype, 0 for tokens behind the last row, and the pool.

    Raises:
        ValueError: a shape or dtype breaks the contract, or only one of the checkpoint arguments is given.
        UnsupportedError: `implementation` was named and can't run these arguments.
    """
    require(
        x.shape[1] % B.shape[1] == 0,
        f"selective_scan: B must have a number of groups that divides x's {x.shape[1]} heads, got {B.shape[1]}",
    )
    check_checkpoints("selective_scan", checkpoint_offset, checkpoint_block)
    if x.shape[0] == 0 or read_block.shape[0] == 0:
        return jnp.zeros_like(x), pool
    operands = (x, dt, A, B, C, pool, jnp.int32(layer), query_start_loc, read_block, write_block)
    operands += (checkpoint_offset, checkpoint_block, D, z, dt_bias)
    return _scan(operands, dt_softplus, implementation, config, interpret)


@functools.partial(jax.jit, static_argnames=("dt_softplus", "implementation", "config", "interpret"))
def _scan(operands, dt_softplus, implementation, config, interpret):
    triton = functools.partial(
        pallas_triton.selective_scan, dt_softplus=dt_softplus, config=config, interpret=interpret
    )
    return dispatch(
        "selective_scan",
        implementation,
        operands,
        xla=functools.partial(xla.selective_scan, dt_softplus=dt_softplus),
        triton=triton,
    )
