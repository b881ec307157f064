"""Which implementation of an op runs: named by the caller, or chosen by the platform at lowering."""

from collections.abc import Callable
from typing import Any, Literal

import jax

Implementation = Literal["xla", "triton"]


class UnsupportedError(NotImplementedError):
    """The implementation that was asked for by name can't run these arguments."""


def dispatch(
    implementation: Implementation | None,
    operands: tuple[Any, ...],
    *,
    xla: Callable[..., Any],
    triton: Callable[..., Any] | None,
    unsupported: str | None = None,
) -> Any:
    """Runs `xla` or `triton` on `operands`.

    Args:
        implementation: A name, or None: Triton where the program is lowered for CUDA, XLA elsewhere.
        operands: What both implementations take, as arrays.
        xla: Takes any arguments.
        triton: None where the op has no kernel.
        unsupported: Why Triton can't run these arguments; None if it can.

    Raises:
        UnsupportedError: "triton" was named and can't run these arguments.
        ValueError: `implementation` is no known name.
    """
    if implementation not in ("xla", "triton", None):
        raise ValueError(f"implementation must be 'xla', 'triton' or None, got {implementation!r}")
    if implementation == "triton":
        if triton is None or unsupported:
            raise UnsupportedError(f"implementation='triton': {unsupported or 'this op has no Triton kernel'}")
        return triton(*operands)
    if implementation == "xla" or triton is None or unsupported:
        return xla(*operands)
    return jax.lax.platform_dependent(*operands, cuda=triton, default=xla)
