"""The public function of state_copy: its contract, checks and dispatch."""

from jaxtyping import Array, Float, Int32

from pallas_kernels._check import check_layout, checked
from pallas_kernels._run_op import run_op
from pallas_kernels.blocks import WindowLayout
from pallas_kernels.dispatch import Run
from pallas_kernels.state_copy import pallas_triton, xla
from pallas_kernels.state_copy.config import Config


@checked
def state_copy(
    pool: Float[Array, "layers blocks *state"],
    source: Int32[Array, " rows"],
    destination: Int32[Array, " rows"],
    window_row: Int32[Array, " rows"] | None = None,
    *,
    layout: WindowLayout = "SD",
    run: Run = Run(),
) -> Float[Array, "layers blocks *state"]:
    """Copy states from block to block inside one pool, for all layers at once, in one launch.

    Without `window_row`, row r of the batch copies a whole block: pool[:, destination[r]] = pool[:, source[r]].

    With `window_row`, the pool holds windows [window, channels], and row r copies the window from its row window_row[r]
    on: pool[:, destination[r], i] = pool[:, source[r], i + window_row[r]] for i + window_row[r] < window. The
    destination's last window_row[r] window rows keep their values. Windows [channels, window] are shifted along their
    last axis.

    Copies are exact to the bit. The source and destination of a shift may be the same block.

    Args:
        pool: States of all layers and blocks. It is updated in place if the enclosing jit donates it, and copied
            otherwise.
        source: The block that each row reads. NULL_BLOCK (0) reads as zeros.
        destination: The block that each row writes. NULL_BLOCK skips the row, and a copy of a block onto itself does
            nothing. No row may read or write a block that another row writes; this is not checked.
        window_row: The first window row that each row reads, in [0, window). None copies whole blocks.
        layout: The layout of the windows that `window_row` shifts: "SD" [window, channels] or "DS" [channels, window].
        run: How it runs: by "xla" or "triton", with a `Config` for the Triton kernel.

    Returns:
        The updated pool. Only the destination blocks have changed.

    Raises:
        ValueError: if a shape or dtype breaks the contract, or if `window_row` is given for states that are not
            windows.
        UnsupportedError: if `run` names "triton" and the kernel cannot run these arguments.
    """
    run = run.checked("state_copy", Config)
    check_layout("state_copy", layout, WindowLayout)
    if window_row is not None and pool.ndim != 4:
        raise ValueError(
            "state_copy: window_row needs a pool of windows, [layers, blocks, window, channels] or "
            f"[layers, blocks, channels, window], got {list(pool.shape)}"
        )
    if pool.ndim < 4:
        raise ValueError(f"state_copy: pool must have at least two state axes, got {list(pool.shape)}")
    if source.shape[0] == 0:
        return pool
    implementations = dict(xla=xla.state_copy, triton=pallas_triton.state_copy)
    return run_op("state_copy", (pool, source, destination, window_row), run, **implementations, layout=layout)
