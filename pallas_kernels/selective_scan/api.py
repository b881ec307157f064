"""The public function of selective_scan: its contract, checks and dispatch."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels._check import checked, checkpoints_of, require
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
    """Runs Mamba-1's recurrence over rows of any length, in one launch, and keeps each row's final state.

    The equations are those of `selective_state_update`, with A per channel and state, and D, dt and dt_bias per
    channel.

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
        layer: The layer whose blocks are read and written.
        query_start_loc: Index of each row's first token, starting at 0; the last entry is the end of the last row.
            Padding rows repeat that entry.
        read_block: The block that holds each row's initial state. NULL_BLOCK (0) reads as zeros.
        write_block: The block that receives each row's final state. NULL_BLOCK skips the write. It may be the row's own
            read block.
        checkpoint_offset: Numbers of tokens of the row after which the state is kept as well, in ascending order.
        checkpoint_block: The block that receives each checkpoint. NULL_BLOCK means no checkpoint, whatever its offset.
            It may be the row's own read block.
        D: Skip connection, or None.
        z: Raw gate of the outputs, or None.
        dt_bias: Bias that is added to `dt` before the softplus, or None.
        dt_softplus: Whether a softplus is applied to `dt`.
        implementation: "xla" or "triton". None selects Triton if the program is lowered for CUDA and the kernel can run
            the arguments, and XLA otherwise.
        config: Launch configuration of the Triton kernel. None selects the default.
        interpret: Whether to run the Triton kernel's body as plain JAX, on any platform.

    Returns:
        The outputs in x's dtype, which are 0 for tokens after the last row, and the updated pool.

    Raises:
        ValueError: if a shape or dtype breaks the contract, or if only one of the checkpoint arguments is given.
        UnsupportedError: if `implementation` is "triton" and the kernel cannot run these arguments.
    """
    require(
        B.shape[1] > 0 and x.shape[1] % B.shape[1] == 0,
        f"selective_scan: the number of groups of B must divide x's {x.shape[1]} heads, got {B.shape[1]}",
    )
    checkpoints = checkpoints_of("selective_scan", checkpoint_offset, checkpoint_block)
    if x.shape[0] == 0 or read_block.shape[0] == 0:
        return jnp.zeros_like(x), pool
    operands = (x, dt, A, B, C, pool, jnp.int32(layer), query_start_loc, read_block, write_block)
    operands += (*checkpoints, D, z, dt_bias)
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
