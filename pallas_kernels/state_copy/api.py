"""Public function of state_copy: contract, checks, dispatch."""

import functools

import jax
from jaxtyping import Array, Float, Int32

from pallas_kernels._check import check_layout, checked
from pallas_kernels.blocks import WindowLayout
from pallas_kernels.dispatch import Implementation, dispatch
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
    implementation: Implementation | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "layers blocks *state"]:
    """Copies blocks of all layers inside one pool array, in one launch.

    pool[:, destination[r]] = pool[:, source[r]], or with `window_row`, for conv windows [window, channels]:
    pool[:, destination[r], i] = pool[:, source[r], i + window_row[r]] for i + window_row[r] < window; the window's last
    rows keep what they held. Windows [channels, window] shift along their last axis. Copies are exact to the bit. A shift
    within one block is memmove-safe.

    Outside a jit that donates `pool` the call copies the whole pool.

    Args:
        pool: One pool array, layers stacked in front. Donate it: updated in place.
        source: Block that each row reads; NULL_BLOCK (0) gives zeros.
        destination: Block that each row writes; NULL_BLOCK skips the row, and so does a copy onto itself. No row may
            read or write a block that another row writes (unchecked).
        window_row: First window row that is read, in [0, window); None copies whole blocks.
        layout: Of the windows that `window_row` shifts: "SD" [window, channels] or "DS" [channels, window].
        implementation: "xla" or "triton"; None is Triton on CUDA and XLA elsewhere.
        config: Launch configuration of the Triton kernel; None takes the tuned or heuristic one.
        interpret: Runs the Triton kernel's body as plain JAX, on any platform.

    Returns:
        The pool with only the destination blocks changed.

    Raises:
        ValueError: a shape or dtype breaks the annotations, or `window_row` comes with states that are no windows.
        UnsupportedError: `implementation` was named and can't run these arguments.
    """
    check_layout("state_copy", layout)
    if window_row is not None and pool.ndim != 4:
        raise ValueError(
            f"state_copy: window_row needs a pool [layers, blocks, window, channels] or transposed, got {list(pool.shape)}"
        )
    if pool.ndim < 4:
        raise ValueError(f"state_copy: pool must have at least two state axes, got {list(pool.shape)}")
    if source.shape[0] == 0:
        return pool
    return _state_copy(pool, source, destination, window_row, layout, implementation, config, interpret)


@functools.partial(jax.jit, static_argnames=("layout", "implementation", "config", "interpret"))
def _state_copy(pool, source, destination, window_row, layout, implementation, config, interpret):
    operands = (pool, source, destination) + (() if window_row is None else (window_row,))
    triton = functools.partial(pallas_triton.state_copy, layout=layout, config=config, interpret=interpret)
    return dispatch(
        "state_copy", implementation, operands, xla=functools.partial(xla.state_copy, layout=layout), triton=triton
    )
