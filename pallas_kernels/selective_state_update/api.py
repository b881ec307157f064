"""The public function of selective_state_update: its contract, checks and dispatch."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels._check import checked, require
from pallas_kernels._mosaic_available import unavailable
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
    """Runs Mamba's recurrence over decode and verify rows, in one launch, and keeps the state after each token.

    The state after token t of row r is written to write_blocks[r, t]. For one head with its group of B and C, its state
    S
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
        layer: The layer whose blocks are read and written.
        query_start_loc: Index of each row's first token; the last entry is the end of the last row. Padding rows repeat
            that entry.
        read_block: The block that holds each row's initial state. NULL_BLOCK (0) reads as zeros.
        write_blocks: The block that receives the state after each of the row's tokens. NULL_BLOCK skips the write. A
            row has at most `window` tokens. A block may be the row's own read block.
        D: Skip connection, per head or per channel, or None.
        z: Raw gate of the outputs, or None.
        dt_bias: Bias that is added to `dt` before the softplus, per head or per channel, or None.
        dt_softplus: Whether a softplus is applied to `dt`.
        implementation: "xla", "triton" or "mosaic_gpu". None selects the first of Mosaic GPU, on a Hopper GPU, Triton,
            on any CUDA GPU, and XLA that can run the arguments.
        config: Launch configuration of the Triton kernel. None selects the default.
        interpret: Whether to run the Triton kernel's body as plain JAX, on any platform.

    Returns:
        The outputs in x's dtype, which are 0 for tokens after the last row, and the updated pool.

    Raises:
        ValueError: if a shape or dtype breaks the contract.
        UnsupportedError: if `implementation` names a kernel that cannot run these arguments. The one of "mosaic_gpu" takes
            arrays of 16 or 32 bits, parameters per head, as Mamba-2 has, head_dim in multiples of 64, 128, 256 or 512 bytes
            of state per channel, and no `config`, and needs JAX 0.11.2 or newer.
    """
    require(
        B.shape[1] > 0 and x.shape[1] % B.shape[1] == 0,
        f"selective_state_update: the number of groups of B must divide x's {x.shape[1]} heads, got {B.shape[1]}",
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
    return dispatch(
        "selective_state_update",
        implementation,
        operands,
        xla=xla_update,
        triton=triton,
        mosaic_gpu=_mosaic_gpu(operands, dt_softplus, implementation, config, interpret),
    )


def _mosaic_gpu(operands, dt_softplus, implementation, config, interpret):
    """Returns the Mosaic GPU kernel, or the reason why it cannot run. It is imported only where it may run."""
    if reason := unavailable(implementation, config, interpret):
        return reason
    from pallas_kernels.selective_state_update import sm90

    x, dt, A, B, C, pool, _, _, _, _, D, z, dt_bias = operands
    reason = sm90.unsupported(x, dt, A, B, C, pool, D, z, dt_bias)
    return reason or functools.partial(sm90.selective_state_update, dt_softplus=dt_softplus)
