"""Chooses the implementation of an op: the one that the caller names, or the platform's when the program is lowered."""

import functools
import logging
from collections.abc import Callable
from typing import Any, Literal

import jax

Implementation = Literal["xla", "triton"]
_LOG = logging.getLogger(__name__)


class UnsupportedError(NotImplementedError):
    """Raised if the implementation that the caller named cannot run these arguments."""


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
    """Runs an op by its "xla" or its "triton" implementation.

    If the Triton kernel cannot run the arguments, a GPU runs the XLA implementation instead, and a warning is logged
    once.

    Args:
        op: The op's name, for messages.
        implementation: "xla" or "triton". None selects Triton if the program is lowered for CUDA and the kernel can run
            the arguments, and XLA otherwise.
        operands: The arguments of both implementations: arrays, or None for optional ones that are left out.
        xla: The XLA implementation. It accepts all arguments.
        triton: The Triton implementation.
        unsupported: The reason why the Triton implementation cannot run these arguments. None if it can.

    Raises:
        UnsupportedError: if `implementation` is "triton" and `unsupported` gives a reason.
        ValueError: if `implementation` is not a known name.
    """
    if implementation not in ("xla", "triton", None):
        raise ValueError(f"implementation must be 'xla', 'triton' or None, got {implementation!r}")
    if implementation == "triton":
        if unsupported:
            raise UnsupportedError(f"{op}: implementation='triton' cannot run these arguments: {unsupported}")
        return triton(*operands)
    if unsupported and implementation is None and jax.default_backend() == "gpu":
        _say_once(f"{op} runs as XLA code, more slowly than the Triton kernel: {unsupported}")
    if implementation == "xla" or unsupported:
        return xla(*operands)
    return jax.lax.platform_dependent(*operands, cuda=triton, default=xla)
