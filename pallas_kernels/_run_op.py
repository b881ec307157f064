"""How a public op runs its implementations, once its arguments are checked."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels._mosaic_available import unavailable
from pallas_kernels.dispatch import Run, dispatch


def run_op(
    op: str,
    operands: tuple[Any, ...],
    run: Run,
    *,
    xla: Callable[..., Any],
    triton: Callable[..., Any],
    unsupported: str | None = None,
    sm90: str | None = None,
    **options: Any,
) -> Any:
    """Run an op in a jitted program, by the implementation that `dispatch` selects.

    Args:
        op: The op's name.
        operands: The arguments of all implementations: pytrees of arrays.
        run: How it runs. Triton's implementation gets it too.
        xla: The XLA implementation.
        triton: The Triton implementation.
        unsupported: The reason why the Triton implementation cannot run these arguments. None if it can.
        sm90: The name of a module of kernels for Hopper GPUs, which is imported only where they may run. It has a function
            of the op's name, and a function `unsupported` of the same arguments, which returns why it cannot run them.
        options: Static arguments of all implementations, by name.
    """
    return _program(op)(operands, run, xla, triton, unsupported, sm90, tuple(options.items()))


@functools.cache
def _program(op: str) -> Callable[..., Any]:
    """Return an op's jitted function. It has the op's name, which programs and profiles show."""

    def run_implementation(operands, run, xla, triton, unsupported, sm90, options):
        options = dict(options)
        mosaic_gpu = "the op has no such kernel" if sm90 is None else unavailable(run)
        if mosaic_gpu is None:
            module = importlib.import_module(sm90)
            mosaic_gpu = module.unsupported(*operands, **options) or functools.partial(getattr(module, op), **options)
        return dispatch(
            op,
            run.implementation,
            operands,
            xla=functools.partial(xla, **options),
            triton=functools.partial(triton, **options, run=run),
            unsupported=unsupported,
            mosaic_gpu=mosaic_gpu,
        )

    run_implementation.__name__ = op
    return jax.jit(run_implementation, static_argnums=tuple(range(1, 7)))
