"""The choice of an op's implementation: the caller's, or the platform's when the program is lowered."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

Implementation = Literal["xla", "triton", "mosaic_gpu"]
_LOG = logging.getLogger(__name__)


def _check_implementation(argument: str, value: Any) -> None:
    """Raise ValueError, in the name of an argument, unless `value` is the name of an implementation or None."""
    if value not in (*get_args(Implementation), None):
        raise ValueError(f"{argument} must be 'xla', 'triton', 'mosaic_gpu' or None, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class Run:
    """How an op runs. The default is the fastest implementation that can run the arguments.

    Attributes:
        implementation: "xla", "triton" or "mosaic_gpu". None selects XLA if the program is not lowered for CUDA, and
            otherwise the first of Mosaic GPU, Triton and XLA that can run the arguments.
        config: Launch configuration of the op's Triton kernel, which has a class of its own for each kernel. None selects
            the default.
        interpret: Whether to run the Triton kernel's body as plain JAX, on any platform.
    """

    implementation: Implementation | None = None
    config: Any = None
    interpret: bool = False

    def checked(self, op: str, config: type | None) -> "Run":
        """Return itself for op `op`, whose launch configurations are of the class `config`; None without configurations.

        Raises:
            ValueError: The configuration is of another class, or a field has another value than documented.
        """
        _check_implementation(f"{op}: run.implementation", self.implementation)
        if not isinstance(self.interpret, bool):
            raise ValueError(f"{op}: run.interpret must be bool, got {self.interpret!r}")
        if self.config is not None and not (config and isinstance(self.config, config)):
            wanted = f"{config.__name__} or None" if config else "None"
            raise ValueError(f"{op}: run.config must be {wanted}, got {self.config!r}")
        return self


class UnsupportedError(NotImplementedError):
    """Raised if the implementation that the caller named cannot run these arguments, or has no derivative."""


def _without_derivative(op: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return `kernel` unchanged, except that differentiating it raises an error that names the alternative.

    The operands are marked and not the kernel, because JAX cannot discharge a kernel's references within a custom_jvp.
    """
    mark = jax.custom_jvp(lambda x: x)

    @mark.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        raise UnsupportedError(f"{op}: its kernels have no derivative; only implementation='xla' can be differentiated")

    marked = lambda x: mark(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x
    return lambda *operands: kernel(*jax.tree.map(marked, operands))


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning, unless the same one has been logged before."""
    _LOG.warning(message)


def dispatch(
    op: str,
    implementation: Implementation | None,
    operands: tuple[Any, ...],
    *,
    xla: Callable[..., Any],
    triton: Callable[..., Any],
    unsupported: str | None = None,
    mosaic_gpu: Callable[..., Any] | str = "the op has no such kernel",
) -> Any:
    """Run an op by its "xla", its "triton" or its "mosaic_gpu" implementation.

    If no kernel can run the arguments, a GPU runs the XLA implementation instead, and a warning is logged once.

    Args:
        op: The op's name, for messages.
        implementation: "xla", "triton" or "mosaic_gpu". None selects XLA if the program is not lowered for CUDA. Otherwise
            it selects the first of Mosaic GPU, Triton and XLA that can run the arguments.
        operands: The arguments of all implementations: arrays, or None for optional ones that are left out.
        xla: The XLA implementation. It accepts all arguments.
        triton: The Triton implementation.
        unsupported: The reason why the Triton implementation cannot run these arguments. None if it can.
        mosaic_gpu: The Mosaic GPU implementation, or the reason why there is none, why it cannot run these arguments, or why
            it cannot run on the default device.

    Raises:
        UnsupportedError: if `implementation` names a kernel and there is a reason why it cannot run these arguments. Also
            when the call is differentiated, unless `implementation` is "xla": JAX would differentiate the kernels too.
        ValueError: if `implementation` is not a known name.
    """
    _check_implementation("implementation", implementation)
    reason = {"triton": unsupported, "mosaic_gpu": mosaic_gpu}.get(implementation or "xla")
    if isinstance(reason, str):
        raise UnsupportedError(f"{op}: implementation={implementation!r} cannot run these arguments: {reason}")
    triton = _without_derivative(op, triton)
    if callable(mosaic_gpu):
        mosaic_gpu = _without_derivative(op, mosaic_gpu)
    if implementation == "triton":
        return triton(*operands)
    if implementation == "mosaic_gpu" and callable(mosaic_gpu):
        return mosaic_gpu(*operands)
    if implementation is None and callable(mosaic_gpu):
        return jax.lax.platform_dependent(*operands, cuda=mosaic_gpu, default=xla)
    if unsupported and implementation is None and jax.default_backend() == "gpu":
        warn_once(f"{op} runs as XLA code, more slowly than the Triton kernel: {unsupported}")
    if implementation == "xla" or unsupported:
        return xla(*operands)
    return jax.lax.platform_dependent(*operands, cuda=triton, default=xla)
