"""Checks of the fields that descriptions of states and of rings share."""

from typing import Any

import numpy as np

_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


def itemsize(dtype: str) -> int:
    """Returns the bytes of an element of a state.

    Raises:
        ValueError: No state has this dtype.
    """
    if dtype not in _SIZES:
        raise ValueError(f"dtype must be one of {sorted(_SIZES)}, got {dtype!r}")
    return _SIZES[dtype]


def set_fields(instance: Any, **fields: Any) -> None:
    """Sets fields of a frozen dataclass to the plain values that their checks returned."""
    for name, value in fields.items():
        object.__setattr__(instance, name, value)


def dtype_name(dtype: Any) -> str:
    """Returns the name of a dtype that is given as a name, a NumPy dtype or a JAX scalar type.

    Raises:
        ValueError: It is none of these.
    """
    if isinstance(dtype, str):
        return dtype
    try:
        # NumPy takes None for float64.
        return np.dtype("" if dtype is None else dtype).name
    except (TypeError, ValueError):
        raise ValueError(f"dtype must be the name of a dtype or a dtype, got {dtype!r}") from None
