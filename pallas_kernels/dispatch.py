"""Which implementation of an op runs: named by the caller, or chosen by the platform at lowering."""

import functools
import logging
from collections.abc import Callable
from typing import Any, Literal

import jax

Implementation = Literal["xla", "triton"]
_LOG = logging.getLogger(__name__)


class UnsupportedError(NotImplementedError):
    """The implementation that was asked for by name can't run these arguments."""


@functools.cache
def _say_once(message: str) -> None:
    _LOG.warning(message)


def dispatch(
    op: str,
    implementation: Implementation | None,
    operands: tuple[Any, ...],
    *,
    xla: Callable[..., Any],
    triton: Callable[..., Any],
    unsupported: str | None = None,
) -> Any:
    """Runs `xla` or `triton` on `operands`. Logs a warning, once, where a GPU gets XLA because Triton can't run them.

    Args:
        op: Its name, for messages.
        implementation: A name, or None: Triton where the program is lowered for CUDA, XLA elsewhere.
        operands: What both implementations take, as arrays.
        xla: Takes any arguments.
        triton: Takes what is not `unsupported`.
        unsupported: Why Triton can't run these arguments; None if it can.

    Raises:
        UnsupportedError: "triton" was named and can't run these arguments.
        ValueError: `implementation` is no known name.
    """
    if implementation not in ("xla", "triton", None):
        raise ValueError(f"implementation must be 'xla', 'triton' or None, got {implementation!r}")
    if implementation == "triton":
        if unsupported:
            raise UnsupportedError(f"{op}: implementation='triton': {unsupported}")
        return triton(*operands)
    if unsupported and implementation is None and jax.default_backend() == "gpu":
        _say_once(f"{op} runs as XLA's code, more slowly than the Triton kernel would: {unsupported}")
    if implementation == "xla" or unsupported:
        return xla(*operands)
    return jax.lax.platform_dependent(*operands, cuda=triton, default=xla)
