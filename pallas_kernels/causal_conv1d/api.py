"""The public functions of causal_conv1d: their contracts, checks and dispatch."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels._check import check_layout, checked, require, sizes_of
from pallas_kernels._run_op import run_op
from pallas_kernels.blocks import WindowLayout
from pallas_kernels.causal_conv1d import pallas_triton, xla
from pallas_kernels.causal_conv1d.config import Config, Options, PrefillConfig
from pallas_kernels.dispatch import Run
from pallas_kernels.rows import Rows

Activation = Literal["silu"] | None
Pool = Float[Array, "layers blocks window channels"]
PoolDS = Float[Array, "layers blocks channels window"]
_FIELDS = ("window_read", "window_row", "write")


def check(
    name: str,
    x: jax.Array | jax.ShapeDtypeStruct,
    pool: jax.Array,
    weight: jax.Array,
    activation: Activation,
    layout: WindowLayout,
) -> None:
    """Check the arguments that all convolutions have. `x` are the inputs, [tokens, channels]."""
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
    weight: Float[Array, "width channels"],
    bias: Float[Array, " channels"] | None,
    rows: Rows,
    *,
    activation: Activation = "silu",
    parts: tuple[int, ...] | None = None,
    layout: WindowLayout = "SD",
    run: Run = Run(),
) -> tuple[Any, Pool | PoolDS]:
    """Convolve the tokens of decode and verify rows causally, and keep windows for every number of accepted tokens.

    y[t] = act(bias + sum_j weight[j] * u[t - (width-1) + j]), where u is the row's window followed by its tokens. The
    window is rows window_row .. window_row + width-2 of the block `window_read`. The new block holds rows 1 .. width-2 of
    that window and then all of the row's tokens. After n of them have been accepted, the next step therefore reads from
    window row n - 1. The rows of the new block after the last token are unspecified.

    A row may also keep an older window, at a boundary which it has passed: rows `boundary.row` .. `boundary.row` +
    width-2 of the block `window_read` go to rows 0 .. width-2 of `boundary.block`, whose other rows are unspecified. A row
    keeps it even if it has no tokens. All other rows without tokens take no part.

    Numerics: products and sums are float32, tap by tap.

    Sources: Dao-AILab/causal-conv1d's `causal_conv1d_update` for the operation, vLLM's speculative window for the
    layout.

    Args:
        x: Inputs of all rows, packed.
        pool: Windows of all layers and blocks, the oldest input first. It is updated in place if the enclosing jit
            donates it, and copied otherwise. `window` is at least width - 2 + the length of the longest row. It is best
            not larger, because the Triton kernel is unrolled over as many tokens as fit.
        weight: Taps; the last one is for the current token.
        bias: Bias that is added before the activation, or None.
        rows: The rows, with `window_read`, `window_row` and `write`. `window_row` is the number of tokens accepted in the
            last step, minus one. `write[r, 0]` receives row r's new window. `boundary` may be given: its rows are at most
            window - (width-1).
        activation: The activation function, "silu" or None.
        parts: Sizes of the outputs, into which the channels are cut. None returns one array, which is no tuple.
        layout: The layout of the windows: "SD" [window, channels] or "DS" [channels, window].
        run: How it runs: by "xla" or "triton", with a `Config` for the Triton kernel.

    Returns:
        The outputs in x's dtype, one array or a tuple of one for each of `parts`, which are 0 for tokens after the last
        row; and the updated pool.

    Raises:
        ValueError: if a shape or dtype breaks the contract, if `parts` are not all channels, or if the rows lack a field.
        UnsupportedError: if `run` names "triton" and the kernel cannot run these arguments.
    """
    name = "causal_conv1d_update"
    check(name, x, pool, weight, activation, layout)
    rows, run = rows.having(name, *_FIELDS, optional=("boundary",)), run.checked(name, Config)
    sizes = sizes_of(name, parts, x.shape[1])
    has_tokens = x.shape[0] > 0
    outs = None
    if rows.num_rows and (has_tokens or rows.boundary is not None):
        # No array of a kernel may be empty. A token after the last row changes nothing.
        inputs = x if has_tokens else jnp.zeros((1, x.shape[1]), x.dtype)
        outs, pool = run_op(
            name,
            (inputs, pool, weight, bias, rows),
            run,
            xla=xla.causal_conv1d_update,
            triton=pallas_triton.causal_conv1d_update,
            options=Options(activation, sizes, layout),
        )
    if outs is None or not has_tokens:
        outs = tuple(jnp.zeros((x.shape[0], size), x.dtype) for size in sizes)
    return (outs[0] if parts is None else outs), pool


@checked
def causal_conv1d_prefill(
    x: Float[Array, "tokens wide"],
    pool: Float[Array, "layers blocks *state"],
    weight: Float[Array, "width channels"],
    bias: Float[Array, " channels"] | None,
    rows: Rows,
    *,
    activation: Activation = "silu",
    parts: tuple[int, ...] | None = None,
    layout: WindowLayout = "SD",
    run: Run = Run(),
) -> tuple[Any, Float[Array, "layers blocks *state"]]:
    """Convolve rows of any length causally, and keep each row's last width-1 inputs as its window.

    The equation is in `causal_conv1d_update`. The new window is in window rows 0 .. width-2; if the row has fewer
    than width-1 tokens, the window starts with inputs from the old one. A row's outputs and window are the same bits,
    however its tokens were split over calls. "xla" can be differentiated.

    Args:
        x: Inputs of all rows, packed. Channels after the channels of `weight` are ignored, so that the first columns
            of a wider product need not be copied out of it.
        pool: Windows of all layers and blocks in `layout`, the oldest input first. It is updated in place if the enclosing
            jit donates it, and copied otherwise.
        weight: Taps; the last one is for the current token.
        bias: Bias that is added before the activation, or None.
        rows: The rows, with `window_read`, `window_row` and `write`. `window_row` is not 0 if the chunk follows a verify
            step. `write[r, 0]` receives row r's new window. `checkpoints` may be given: after these numbers of tokens the
            window is kept as well.
        activation: The activation function, "silu" or None.
        parts: Sizes of the outputs, into which the channels are cut. None returns one array, which is no tuple.
        layout: The layout of the windows: "SD" [window, channels] or "DS" [channels, window].
        run: How it runs: by "xla" or "triton", with a `PrefillConfig` for the Triton kernel.

    Returns:
        The outputs in x's dtype, one array or a tuple of one for each of `parts`, which are 0 for tokens after the last
        row; and the updated pool.

    Raises:
        ValueError: if a shape or dtype breaks the contract, if `parts` are not all channels, or if the rows lack a field.
        UnsupportedError: if `run` names "triton" and the kernel cannot run these arguments.
    """
    name, channels = "causal_conv1d_prefill", weight.shape[1]
    check(name, x, pool, weight, activation, layout)
    rows, run = rows.having(name, *_FIELDS, optional=("checkpoints",)), run.checked(name, PrefillConfig)
    require(x.shape[1] >= channels, f"{name}: x must have at least weight's {channels} channels, got {x.shape[1]}")
    sizes = sizes_of(name, parts, channels)
    if x.shape[0] == 0 or rows.num_rows == 0:
        outs = tuple(jnp.zeros((x.shape[0], size), x.dtype) for size in sizes)
    else:
        outs, pool = run_op(
            name,
            (x, pool, weight, bias, rows),
            run,
            xla=xla.causal_conv1d_prefill,
            triton=pallas_triton.causal_conv1d_prefill,
            options=Options(activation, sizes, layout),
        )
    return (outs[0] if parts is None else outs), pool
