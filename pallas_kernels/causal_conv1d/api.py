"""Public functions of causal_conv1d: contract, checks, dispatch."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels._check import check_checkpoints, check_layout, checked, require
from pallas_kernels.blocks import WindowLayout
from pallas_kernels.causal_conv1d import pallas_triton, xla
from pallas_kernels.causal_conv1d.config import Config, PrefillConfig
from pallas_kernels.dispatch import Implementation, dispatch

Activation = Literal["silu"] | None
Pool = Float[Array, "layers blocks window channels"]
PoolDS = Float[Array, "layers blocks channels window"]


def _check(name: str, x: jax.Array, pool: jax.Array, width: int, activation: Activation, layout: WindowLayout) -> None:
    check_layout(name, layout)
    window, channels = pool.shape[2:] if layout == "SD" else pool.shape[:1:-1]
    require(channels == x.shape[1], f"{name}: pool must have {x.shape[1]} channels as {layout}, got {list(pool.shape)}")
    require(x.dtype == pool.dtype, f"{name}: x must have the pool's dtype {pool.dtype}, got {x.dtype}")
    require(2 <= width <= 5, f"{name}: weight must be 2 to 5 wide, got {width}")
    require(window >= width - 1, f"{name}: pool must hold at least {width - 1} window rows, got {window}")
    require(activation in ("silu", None), f"{name}: activation must be 'silu' or None, got {activation!r}")


@checked
def causal_conv1d_update(
    x: Float[Array, "tokens channels"],
    pool: Pool | PoolDS,
    layer: int | Int32[Array, ""],
    weight: Float[Array, "width channels"],
    bias: Float[Array, " channels"] | None,
    query_start_loc: Int32[Array, " rows_plus_1"],
    read_block: Int32[Array, " rows"],
    window_row: Int32[Array, " rows"],
    write_block: Int32[Array, " rows"],
    *,
    activation: Activation = "silu",
    layout: WindowLayout = "SD",
    implementation: Implementation | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "tokens channels"], Pool | PoolDS]:
    """Advances decode and verify rows, keeping every position that acceptance may fall back to.

    y[t] = act(bias + sum_j weight[j] * u[t - (width-1) + j]), u being the row's window followed by its tokens. The
    window is rows window_row .. window_row + width-2 of the read block. The new block holds window rows 1 .. width-2 and
    then all of the row's tokens, so that after accepting n of them the next read starts at row n - 1; the rows behind are
    unspecified.

    Numerics: products and sums in float32, tap by tap. Source: Dao-AILab/causal-conv1d `causal_conv1d_update` for the
    operation, vLLM's speculative window for the layout. Outside a jit that donates `pool` the call copies the pool.

    Args:
        x: Tokens of all rows, packed.
        pool: Windows, oldest input first, `window` >= width - 2 + the longest row, and best no more: the Triton kernel is
            unrolled over as many tokens as fit. Donate it: updated in place.
        layer: Layer whose blocks are read and written.
        weight: Taps, the last one for the current token.
        bias: Added before the activation.
        query_start_loc: First token of each row; the last entry ends the last row. Padding repeats it.
        read_block: Block that holds each row's window; NULL_BLOCK (0) gives zeros.
        window_row: First window row to read: accepted tokens of the last step, less one.
        write_block: Block that takes the new window; NULL_BLOCK skips. It may be the read block.
        activation: "silu" or None.
        layout: Of the pool's windows: "SD" [window, channels], or "DS" [channels, window], which has XLA alone.
        implementation: "xla" or "triton"; None is Triton on CUDA and XLA elsewhere.
        config: Launch configuration of the Triton kernel; None takes the tuned or heuristic one.
        interpret: Runs the Triton kernel's body as plain JAX, on any platform.

    Returns:
        Outputs in x's dtype, 0 for tokens behind the last row, and the pool.

    Raises:
        ValueError: a shape or dtype breaks the contract.
        UnsupportedError: `implementation` was named and can't run these arguments.
    """
    _check("causal_conv1d_update", x, pool, weight.shape[0], activation, layout)
    operands = (x, pool, jnp.int32(layer), weight, bias, query_start_loc, read_block, window_row, write_block)
    if x.shape[0] == 0 or read_block.shape[0] == 0:
        return jnp.zeros_like(x), pool
    return _update(operands, activation, layout, implementation, config, interpret)


@checked
def causal_conv1d_prefill(
    x: Float[Array, "tokens channels"],
    pool: Pool | PoolDS,
    layer: int | Int32[Array, ""],
    weight: Float[Array, "width channels"],
    bias: Float[Array, " channels"] | None,
    query_start_loc: Int32[Array, " rows_plus_1"],
    read_block: Int32[Array, " rows"],
    window_row: Int32[Array, " rows"],
    write_block: Int32[Array, " rows"],
    checkpoint_offset: Int32[Array, "rows checkpoints"] | None = None,
    checkpoint_block: Int32[Array, "rows checkpoints"] | None = None,
    *,
    activation: Activation = "silu",
    layout: WindowLayout = "SD",
    implementation: Implementation | None = None,
    config: PrefillConfig | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "tokens channels"], Pool | PoolDS]:
    """Runs rows of any length, and keeps each row's last width-1 inputs (history included) in window rows 0 .. width-2.

    The same equation as `causal_conv1d_update`. A row's outputs and window are bit-identical however its tokens were
    split over calls. "xla" differentiates. Outside a jit that donates `pool` the call copies the pool.

    Args:
        x: Tokens of all rows, packed.
        pool: Windows, oldest input first. Donate it: updated in place.
        layer: Layer whose blocks are read and written.
        weight: Taps, the last one for the current token.
        bias: Added before the activation.
        query_start_loc: First token of each row; the last entry ends the last row. Padding repeats it.
        read_block: Block that holds each row's window; NULL_BLOCK (0) gives zeros.
        window_row: First window row to read (a chunk may follow a verify step).
        write_block: Block that takes the new window; NULL_BLOCK skips. It may be the read block.
        checkpoint_offset: Tokens of the row after which the window is kept as well, rising along a row.
        checkpoint_block: Where each checkpoint goes; NULL_BLOCK for none. It may be the row's read block.
        activation: "silu" or None.
        layout: Of the pool's windows: "SD" [window, channels], or "DS" [channels, window], which has XLA alone.
        implementation: "xla" or "triton"; None is Triton on CUDA and XLA elsewhere.
        config: Launch configuration of the Triton kernel; None takes the heuristic one.
        interpret: Runs the Triton kernel's body as plain JAX, on any platform.

    Returns:
        Outputs in x's dtype, 0 for tokens behind the last row, and the pool.

    Raises:
        ValueError: a shape or dtype breaks the contract, or only one of the checkpoint arguments is given.
        UnsupportedError: `implementation` was named and can't run these arguments.
    """
    _check("causal_conv1d_prefill", x, pool, weight.shape[0], activation, layout)
    check_checkpoints("causal_conv1d_prefill", checkpoint_offset, checkpoint_block)
    operands = (x, pool, jnp.int32(layer), weight, bias, query_start_loc, read_block, window_row, write_block)
    if x.shape[0] == 0 or read_block.shape[0] == 0:
        return jnp.zeros_like(x), pool
    return _prefill(
        (*operands, checkpoint_offset, checkpoint_block), activation, layout, implementation, config, interpret
    )


def _unsupported(layout: WindowLayout) -> str | None:
    # A token's channels would lie `window` apart: no access of a warp could be one.
    return None if layout == "SD" else "windows must be [window, channels] (layout='SD')"


@functools.partial(jax.jit, static_argnames=("activation", "layout", "implementation", "config", "interpret"))
def _update(operands, activation, layout, implementation, config, interpret):
    triton = functools.partial(
        pallas_triton.causal_conv1d_update, activation=activation, config=config, interpret=interpret
    )
    xla_update = functools.partial(xla.causal_conv1d_update, activation=activation, layout=layout)
    return dispatch(
        "causal_conv1d_update",
        implementation,
        operands,
        xla=xla_update,
        triton=triton,
        unsupported=_unsupported(layout),
    )


@functools.partial(jax.jit, static_argnames=("activation", "layout", "implementation", "config", "interpret"))
def _prefill(operands, activation, layout, implementation, config, interpret):
    triton = functools.partial(
        pallas_triton.causal_conv1d_prefill, activation=activation, config=config, interpret=interpret
    )
    xla_prefill = functools.partial(xla.causal_conv1d_prefill, activation=activation, layout=layout)
    return dispatch(
        "causal_conv1d_prefill",
        implementation,
        operands,
        xla=xla_prefill,
        triton=triton,
        unsupported=_unsupported(layout),
    )
