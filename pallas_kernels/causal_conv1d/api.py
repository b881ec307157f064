"""The public functions of causal_conv1d: their contracts, checks and dispatch."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels._check import check_layout, check_together, checked, checkpoints_of, require, sizes_of
from pallas_kernels.blocks import WindowLayout
from pallas_kernels.causal_conv1d import pallas_triton, xla
from pallas_kernels.causal_conv1d.config import Config, PrefillConfig
from pallas_kernels.dispatch import Implementation, dispatch

Activation = Literal["silu"] | None
Pool = Float[Array, "layers blocks window channels"]
PoolDS = Float[Array, "layers blocks channels window"]


def check(
    name: str,
    x: jax.Array | jax.ShapeDtypeStruct,
    pool: jax.Array,
    weight: jax.Array,
    activation: Activation,
    layout: WindowLayout,
) -> None:
    """Checks what all convolutions have. `x` are the inputs, [tokens, channels]."""
    check_layout(name, layout, WindowLayout)
    width, wanted = weight.shape
    is_pool = pool.ndim == 4 and pool.shape[3 if layout == "SD" else 2] == wanted
    require(is_pool, f"{name}: pool must have {wanted} channels as {layout}, got {list(pool.shape)}")
    window = pool.shape[2 if layout == "SD" else 3]
    require(x.dtype == pool.dtype, f"{name}: x must have the pool's dtype {pool.dtype}, got {x.dtype}")
    require(2 <= width <= 5, f"{name}: weight must have 2 to 5 taps, got {width}")
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
    boundary_row: Int32[Array, " rows"] | None = None,
    boundary_block: Int32[Array, " rows"] | None = None,
    *,
    activation: Activation = "silu",
    parts: tuple[int, ...] | None = None,
    layout: WindowLayout = "SD",
    implementation: Implementation | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[Any, Pool | PoolDS]:
    """Convolves the tokens of decode and verify rows causally, and keeps windows for every number of accepted tokens.

    y[t] = act(bias + sum_j weight[j] * u[t - (width-1) + j]), where u is the row's window followed by its tokens. The
    window is rows window_row .. window_row + width-2 of the read block. The new block holds rows 1 .. width-2 of that
    window and then all of the row's tokens. After n of them have been accepted, the next step therefore reads from
    window row n - 1. The rows of the new block after the last token are unspecified.

    A row may also keep an older window, that of a boundary which it has passed: rows boundary_row .. boundary_row +
    width-2 of the read block go to rows 0 .. width-2 of `boundary_block`, whose other rows are unspecified. A row keeps
    it even if it has no tokens. All other rows without tokens take no part.

    Numerics: products and sums are float32, tap by tap.

    Sources: Dao-AILab/causal-conv1d's `causal_conv1d_update` for the operation, vLLM's speculative window for the
    layout.

    Args:
        x: Inputs of all rows, packed.
        pool: Windows of all layers and blocks, the oldest input first. It is updated in place if the enclosing jit
            donates it, and copied otherwise. `window` is at least width - 2 + the length of the longest row. It is best
            not larger, because the Triton kernel is unrolled over as many tokens as fit.
        layer: The layer whose blocks are read and written.
        weight: Taps; the last one is for the current token.
        bias: Bias that is added before the activation, or None.
        query_start_loc: Index of each row's first token; the last entry is the end of the last row. Padding rows repeat
            that entry.
        read_block: The block that holds each row's window. NULL_BLOCK (0) reads as zeros.
        window_row: The first window row that each row reads: the number of tokens accepted in the last step, minus one.
        write_block: The block that receives each row's new window. NULL_BLOCK skips the write. It may be the row's own
            read block.
        boundary_row: The first row of each row's boundary window in the read block, at most window - (width-1).
        boundary_block: The block that receives that window. NULL_BLOCK means no boundary, whatever `boundary_row` is. It
            may be the row's own read block, and must not be its write block.
        activation: The activation function, "silu" or None.
        parts: Sizes of the outputs, into which the channels are cut. None returns one array, which is no tuple.
        layout: The layout of the windows: "SD" [window, channels] or "DS" [channels, window].
        implementation: "xla" or "triton". None selects Triton if the program is lowered for CUDA and the kernel can run
            the arguments, and XLA otherwise.
        config: Launch configuration of the Triton kernel. None selects the default.
        interpret: Whether to run the Triton kernel's body as plain JAX, on any platform.

    Returns:
        The outputs in x's dtype, one array or a tuple of one for each of `parts`, which are 0 for tokens after the last
        row; and the updated pool.

    Raises:
        ValueError: if a shape or dtype breaks the contract, if `parts` are not all channels, or if only one of the
            boundary arguments is given.
        UnsupportedError: if `implementation` is "triton" and the kernel cannot run these arguments.
    """
    name = "causal_conv1d_update"
    check(name, x, pool, weight, activation, layout)
    check_together(name, boundary_row=boundary_row, boundary_block=boundary_block)
    sizes = sizes_of(name, parts, x.shape[1])
    has_rows, has_tokens = read_block.shape[0] > 0, x.shape[0] > 0
    outs = None
    if has_rows and (has_tokens or boundary_block is not None):
        # Kernels have no arrays of no tokens. A token after the last row changes nothing.
        inputs = x if has_tokens else jnp.zeros((1, x.shape[1]), x.dtype)
        operands = (inputs, pool, jnp.int32(layer), weight, bias, query_start_loc, read_block, window_row, write_block)
        operands += boundary_row, boundary_block
        outs, pool = _update(operands, activation, sizes, layout, implementation, config, interpret)
    if outs is None or not has_tokens:
        outs = tuple(jnp.zeros((x.shape[0], size), x.dtype) for size in sizes)
    return (outs[0] if parts is None else outs), pool


@checked
def causal_conv1d_prefill(
    x: Float[Array, "tokens wide"],
    pool: Float[Array, "layers blocks *state"],
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
    parts: tuple[int, ...] | None = None,
    layout: WindowLayout = "SD",
    implementation: Implementation | None = None,
    config: PrefillConfig | None = None,
    interpret: bool = False,
) -> tuple[Any, Float[Array, "layers blocks *state"]]:
    """Convolves rows of any length causally, and keeps each row's last width-1 inputs as its window.

    The equation is that of `causal_conv1d_update`. The new window is in window rows 0 .. width-2; if the row has fewer
    than width-1 tokens, the window starts with inputs from the old one. A row's outputs and window are the same bits,
    however its tokens were split over calls. "xla" can be differentiated.

    Args:
        x: Inputs of all rows, packed. Channels after those of `weight` are ignored, so that a part of a wider product
            need not be copied out of it.
        pool: Windows of all layers and blocks in `layout`, the oldest input first. It is updated in place if the enclosing
            jit donates it, and copied otherwise.
        layer: The layer whose blocks are read and written.
        weight: Taps; the last one is for the current token.
        bias: Bias that is added before the activation, or None.
        query_start_loc: Index of each row's first token; the last entry is the end of the last row. Padding rows repeat
            that entry.
        read_block: The block that holds each row's window. NULL_BLOCK (0) reads as zeros.
        window_row: The first window row that each row reads. It is not 0 if the chunk follows a verify step.
        write_block: The block that receives each row's new window. NULL_BLOCK skips the write. It may be the row's own
            read block.
        checkpoint_offset: Numbers of tokens of the row after which the window is kept as well, in ascending order.
        checkpoint_block: The block that receives each checkpoint. NULL_BLOCK means no checkpoint, whatever its offset.
            It may be the row's own read block.
        activation: The activation function, "silu" or None.
        parts: Sizes of the outputs, into which the channels are cut. None returns one array, which is no tuple.
        layout: The layout of the windows: "SD" [window, channels] or "DS" [channels, window].
        implementation: "xla" or "triton". None selects Triton if the program is lowered for CUDA and the kernel can run
            the arguments, and XLA otherwise.
        config: Launch configuration of the Triton kernel. None selects the default.
        interpret: Whether to run the Triton kernel's body as plain JAX, on any platform.

    Returns:
        The outputs in x's dtype, one array or a tuple of one for each of `parts`, which are 0 for tokens after the last
        row; and the updated pool.

    Raises:
        ValueError: if a shape or dtype breaks the contract, if `parts` are not all channels, or if only one of the
            checkpoint arguments is given.
        UnsupportedError: if `implementation` is "triton" and the kernel cannot run these arguments.
    """
    name, channels = "causal_conv1d_prefill", weight.shape[1]
    check(name, x, pool, weight, activation, layout)
    checkpoints = checkpoints_of(name, checkpoint_offset, checkpoint_block)
    require(x.shape[1] >= channels, f"{name}: x must have at least weight's {channels} channels, got {x.shape[1]}")
    sizes = sizes_of(name, parts, channels)
    if x.shape[0] == 0 or read_block.shape[0] == 0:
        outs = tuple(jnp.zeros((x.shape[0], size), x.dtype) for size in sizes)
    else:
        operands = (x, pool, jnp.int32(layer), weight, bias, query_start_loc, read_block, window_row, write_block)
        operands += checkpoints
        outs, pool = _prefill(operands, activation, sizes, layout, implementation, config, interpret)
    return (outs[0] if parts is None else outs), pool


@functools.partial(jax.jit, static_argnames=("activation", "parts", "layout", "implementation", "config", "interpret"))
def _update(operands, activation, parts, layout, implementation, config, interpret):
    options = dict(activation=activation, parts=parts, layout=layout)
    return dispatch(
        "causal_conv1d_update",
        implementation,
        operands,
        xla=functools.partial(xla.causal_conv1d_update, **options),
        triton=functools.partial(pallas_triton.causal_conv1d_update, **options, config=config, interpret=interpret),
    )


@functools.partial(jax.jit, static_argnames=("activation", "parts", "layout", "implementation", "config", "interpret"))
def _prefill(operands, activation, parts, layout, implementation, config, interpret):
    options = dict(activation=activation, parts=parts, layout=layout)
    return dispatch(
        "causal_conv1d_prefill",
        implementation,
        operands,
        xla=functools.partial(xla.causal_conv1d_prefill, **options),
        triton=functools.partial(pallas_triton.causal_conv1d_prefill, **options, config=config, interpret=interpret),
    )
