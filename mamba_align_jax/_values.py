"""Checks of the values that callers pass: each function returns the value as a plain Python value, or raises ValueError.

The error names the argument, says what was wanted, and shows what came. This module imports no JAX.
"""

import numbers
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

import numpy as np

# Sizes and ids must fit the device's int32.
INT32_MAX = 2**31 - 1
# The smallest and the largest number that float32 holds in full precision.
FLOAT32_MIN, FLOAT32_MAX = 2.0**-126, float(np.finfo(np.float32).max)


def require(condition: bool, name: str, wanted: str, got: object) -> None:
    """Raises ValueError unless `condition` is true."""
    if not condition:
        text = repr(got)
        raise ValueError(f"{name} must be {wanted}, got {text if len(text) <= 200 else text[:200] + '...'}")


def integer(name: str, value: Any, minimum: int | None = None, maximum: int | None = INT32_MAX) -> int:
    """Checks a whole number of Python or NumPy from `minimum` to `maximum`; None is no limit. True is no number."""
    wanted = "a whole number"
    if minimum is not None:
        wanted += f", at least {minimum}"
    require(is_integer(value), name, wanted, value)
    require(minimum is None or value >= minimum, name, f"at least {minimum}", value)
    require(maximum is None or value <= maximum, name, f"at most {maximum}", value)
    return int(value)


def optional_integer(name: str, value: Any, minimum: int) -> int | None:
    """Checks None or a whole number from `minimum` on."""
    if value is None:
        return None
    require(is_integer(value) and value >= minimum, name, f"None or at least {minimum}", value)
    return integer(name, value, minimum)


def number(name: str, value: Any, minimum: float, maximum: float, wanted: str) -> float:
    """Checks a number from `minimum` to `maximum`, which `wanted` says in words. NaN is no number."""
    require(isinstance(value, numbers.Real) and not isinstance(value, bool | np.bool_), name, wanted, value)
    require(bool(minimum <= value <= maximum), name, wanted, value)
    return float(value)


def flag(name: str, value: Any) -> bool:
    """Checks True or False."""
    require(isinstance(value, bool | np.bool_), name, "True or False", value)
    return bool(value)


def choice(name: str, value: Any, choices: Collection[str], note: str = "") -> str:
    """Checks a name that is one of `choices`. `note` is added to the error."""
    require(isinstance(value, str) and value in choices, name, f"one of {tuple(choices)}{note}", value)
    return value


def text(name: str, value: Any) -> str:
    """Checks a text that UTF-8 can encode. JSON may contain halves of characters, which it can't."""
    require(isinstance(value, str), name, "text", value)
    try:
        value.encode()
    except UnicodeEncodeError:
        require(False, name, "text without lone surrogates", value)
    return value


def integers(
    name: str, values: Any, minimum: int = 0, maximum: int = INT32_MAX, *, ordered: bool = True
) -> tuple[int, ...]:
    """Checks whole numbers from `minimum` to `maximum`.

    Args:
        name: The argument.
        values: A sequence, or an array of one axis.
        minimum: The smallest number that is allowed.
        maximum: The largest one.
        ordered: Whether a set is refused, because its order means nothing.

    Returns:
        The numbers, in order.
    """
    wanted = "a sequence of whole numbers"
    if hasattr(values, "__array__"):
        values = np.asarray(values)
        fits = values.ndim == 1 and (values.dtype.kind in "iu" or values.size == 0)
        require(fits, name, wanted, values)
        values = values.tolist()
    is_collection = isinstance(values, Sequence) or (isinstance(values, Set) and not ordered)
    is_text = isinstance(values, str | bytes | bytearray | memoryview)
    require(is_collection and not is_text and not isinstance(values, Mapping), name, wanted, values)
    found = tuple(values)
    # Long prompts are checked type by type and not token by token.
    if not {*map(type, found)} <= {int}:
        other = [value for value in found if not is_integer(value)]
        require(not other, name, wanted, other[:1] and other[0])
        found = tuple(map(int, found))
    if found and not minimum <= min(found) <= max(found) <= maximum:
        outside = next(value for value in found if not minimum <= value <= maximum)
        require(False, name, f"in [{minimum}, {maximum + 1})", outside)
    return found


def is_integer(value: Any) -> bool:
    """Whether a value is a whole number of Python or NumPy, and neither True nor False."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
