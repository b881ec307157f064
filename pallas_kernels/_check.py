"""Checks shapes and dtypes of arguments against their jaxtyping annotations, and raises ValueError if they differ."""

import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
from jaxtyping import AbstractArray, jaxtyped

P = ParamSpec("P")
R = TypeVar("R")


def _members(annotation: Any) -> tuple[Any, ...]:
    is_union = isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
    return typing.get_args(annotation) if is_union else (annotation,)


def _describe(value: object) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{type(value).__module__.split('.')[0]} {value.dtype}{list(value.shape)}"
    return repr(value)


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Makes `function` check its array arguments against their jaxtyping annotations.

    An axis name means the same size in all arguments of one call. The check reads shapes and dtypes only, so it works
    on tracers, and a jitted caller pays for it at trace time only.

    Raises:
        ValueError: from a call, if an argument breaks its annotation. The text names the argument, what the annotation
            wants, and what came.
    """
    signature = inspect.signature(function)
    contracts = {}
    for name, parameter in signature.parameters.items():
        members = _members(parameter.annotation)
        arrays = tuple(m for m in members if isinstance(m, type) and issubclass(m, AbstractArray))
        if arrays:
            others = tuple(m for m in members if isinstance(m, type) and m not in arrays)
            contracts[name] = arrays, others

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = signature.bind(*args, **kwargs)
        with jaxtyped("context"):
            for name, value in bound.arguments.items():
                arrays, others = contracts.get(name, ((), ()))
                if not arrays or (others and isinstance(value, others)) or isinstance(value, arrays):
                    continue
                wanted = " or ".join(f"{a.dtype.__name__}[{a.dim_str}]" for a in arrays)
                raise ValueError(f"{function.__name__}: {name} must be {wanted}, got {_describe(value)}")
        return function(*args, **kwargs)

    return wrapper


def require(condition: bool, message: str) -> None:
    """Raises ValueError(message) unless `condition` is true. For relations that an annotation cannot express."""
    if not condition:
        raise ValueError(message)


def check_layout(name: str, layout: str) -> None:
    """Raises ValueError, in the name of op `name`, unless `layout` is a `WindowLayout`."""
    require(layout in ("SD", "DS"), f"{name}: layout must be 'SD' or 'DS', got {layout!r}")


def check_checkpoints(name: str, checkpoint_offset: jax.Array | None, checkpoint_block: jax.Array | None) -> None:
    """Raises ValueError, in the name of op `name`, if only one of the two checkpoint arguments is given."""
    given = "checkpoint_block" if checkpoint_offset is None else "checkpoint_offset"
    require(
        (checkpoint_offset is None) == (checkpoint_block is None),
        f"{name}: checkpoint_offset and checkpoint_block must be given together, got only {given}",
    )
