"""Checks of the values that callers pass: each function returns the value as a plain Python value, or raises FieldError.

The error names the argument, says what was wanted, and shows what came. This module imports no JAX.
"""

import numbers
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Any, TypeVar

import numpy as np

from mamba_align_jax.errors import FieldError

T = TypeVar("T")

# Sizes and ids must fit the device's int32.
INT32_MAX = 2**31 - 1
# The smallest and the largest number that float32 holds in full precision.
FLOAT32_MIN, FLOAT32_MAX = 2.0**-126, float(np.finfo(np.float32).max)
_LONGEST_S = 86400.0  # a day
_NUMBERS = "a sequence of whole numbers"
_BRACKETS = {list: "[]", tuple: "()", set: "{}"}
_LONGEST_SHOWN = 200  # characters of what came, in an error


def require(condition: bool, name: str, wanted: str, got: object, must: str = "must be") -> None:
    """Raises FieldError unless `condition` is true."""
    if not condition:
        raise FieldError(name, wanted, shown(got), must)


def shown(value: object) -> str:
    """Returns a value as errors show it: as Python writes it, shortened, or by its type if Python can't write it.

    Of a long text, list or object only the beginning is written.
    """
    text = ""
    try:
        for part in _written(value):
            text += part
            if len(text) > _LONGEST_SHOWN:
                return text[:_LONGEST_SHOWN] + "..."
    except Exception:
        # It may be nested too deeply, or be a number with too many digits.
        return f"a value of type {type(value).__name__} that can't be written"
    return text


def _written(value: object) -> Iterator[str]:
    """Yields what `repr` writes, part by part. It need not be read to its end."""
    kind = type(value)
    if isinstance(value, str | bytes) and kind in (str, bytes):
        yield repr(value[: _LONGEST_SHOWN + 1])
    elif isinstance(value, dict) and kind is dict:
        yield "{"
        for number, (name, one) in enumerate(value.items()):
            yield ", " if number else ""
            yield from _written(name)
            yield ": "
            yield from _written(one)
        yield "}"
    elif isinstance(value, list | tuple | set) and kind in _BRACKETS and value != set():
        begin, end = _BRACKETS[kind]
        yield begin
        for number, one in enumerate(value):
            yield ", " if number else ""
            yield from _written(one)
        yield "," + end if kind is tuple and len(value) == 1 else end
    else:
        yield repr(value)


def integer(name: str, value: Any, minimum: int | None = None, maximum: int | None = INT32_MAX) -> int:
    """Checks a whole number of Python or NumPy from `minimum` to `maximum`; None is no limit. True is no number."""
    wanted = "a whole number"
    if minimum is not None:
        wanted += f", at least {minimum}"
    require(is_integer(value), name, wanted, value)
    require(minimum is None or value >= minimum, name, f"at least {minimum}", value)
    require(maximum is None or value <= maximum, name, f"at most {maximum}", value)
    return int(value)


def optional_integer(name: str, value: Any, minimum: int, maximum: int | None = INT32_MAX) -> int | None:
    """Checks None or a whole number from `minimum` to `maximum`."""
    if value is None:
        return None
    require(is_integer(value), name, f"None or a whole number, at least {minimum}", value)
    require(value >= minimum, name, f"None or at least {minimum}", value)
    return integer(name, value, minimum, maximum)


def number(name: str, value: Any, minimum: float, maximum: float, wanted: str) -> float:
    """Checks a number from `minimum` to `maximum`, which `wanted` says in words. NaN is no number."""
    require(isinstance(value, numbers.Real) and not isinstance(value, bool | np.bool_), name, wanted, value)
    require(bool(minimum <= value <= maximum), name, wanted, value)
    return float(value)


def time_limit(name: str, value: Any) -> float:
    """Returns a number of seconds, of which 0 would be no limit, and the system's timers don't go on for ever."""
    return number(
        name, value, FLOAT32_MIN, _LONGEST_S, f"a number of seconds, greater than 0 and at most {_LONGEST_S:g}"
    )


def flag(name: str, value: Any) -> bool:
    """Checks True or False."""
    require(isinstance(value, bool | np.bool_), name, "True or False", value)
    return bool(value)


def choice(name: str, value: Any, choices: Collection[str], note: str = "") -> str:
    """Checks a name that is one of `choices`. `note` is added to the error: chats say so that they take no tools."""
    require(isinstance(value, str) and value in choices, name, f"one of {tuple(choices)}{note}", value)
    return value


def optional_choice(name: str, value: Any, choices: Collection[str]) -> str | None:
    """Checks None or a name that is one of `choices`."""
    if value is None:
        return None
    require(isinstance(value, str) and value in choices, name, f"None or one of {tuple(choices)}", value)
    return value


def text(name: str, value: Any) -> str:
    """Checks a text that UTF-8 can encode. JSON may contain halves of characters, which it can't."""
    require(isinstance(value, str), name, "text", value)
    try:
        value.encode()
    except UnicodeEncodeError:
        require(False, name, "text without lone surrogates", value)
    return value


def texts(name: str, values: Any) -> tuple[str, ...]:
    """Checks a text or several, none of them empty, and returns them in order."""
    found = (values,) if isinstance(values, str) else values
    is_collection = isinstance(found, Sequence | Set) and not isinstance(found, bytes | bytearray | memoryview)
    require(is_collection, name, "a text or a sequence of texts", values)
    for value in found:
        require(text(name, value) != "", name, "texts that are not empty", values)
    return tuple(found)


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
    values = _numbers(name, values, ordered)
    if isinstance(values, range) and values:
        # A range may have more members than the memory can hold. Its ends are its smallest and its largest.
        for end in (values[0], values[-1]):
            require(minimum <= end <= maximum, name, f"in [{minimum}, {maximum + 1})", end)
    found = tuple(values.tolist() if isinstance(values, np.ndarray) else values)
    # Long prompts are checked type by type and not token by token.
    if not {*map(type, found)} <= {int}:
        other = [value for value in found if not is_integer(value)]
        require(not other, name, _NUMBERS, other[:1] and other[0])
        found = tuple(map(int, found))
    if found and not minimum <= min(found) <= max(found) <= maximum:
        outside = next(value for value in found if not minimum <= value <= maximum)
        require(False, name, f"in [{minimum}, {maximum + 1})", outside)
    return found


def count(name: str, values: Any) -> int:
    """Returns how many numbers there are in what `integers` would take, without looking at them or copying them."""
    found = _numbers(name, values, ordered=True)
    try:
        return len(found)
    except OverflowError:
        return sys.maxsize  # a range, which may be as long as one likes


def _numbers(name: str, values: Any, ordered: bool) -> Any:
    """Checks that values are an array of numbers or a collection, and returns it."""
    if hasattr(values, "__array__"):
        values = np.asarray(values)
        fits = values.ndim == 1 and (values.dtype.kind in "iu" or values.size == 0)
        require(fits, name, _NUMBERS, values)
        return values
    is_collection = isinstance(values, Sequence) or (isinstance(values, Set) and not ordered)
    is_text = isinstance(values, str | bytes | bytearray | memoryview)
    require(is_collection and not is_text and not isinstance(values, Mapping), name, _NUMBERS, values)
    return values


def members(name: str, given: Any, wanted: str = "a sequence") -> tuple[Any, ...]:
    """Checks a sequence, or an array of one axis or more, and returns its members. Text, bytes and ranges are none."""
    is_text = isinstance(given, str | bytes | bytearray | memoryview | range)
    is_array = hasattr(given, "__array__") and getattr(given, "ndim", 0) > 0
    require((isinstance(given, Sequence) or is_array) and not is_text, name, wanted, given)
    return tuple(given)


def rows(name: str, given: Any, width: int) -> list[tuple[int, ...]]:
    """Checks a sequence of rows, each of `width` whole numbers of 32 bits."""
    wanted = f"a sequence of rows of {width} whole numbers each"
    found = members(name, given, wanted)
    # Entries are checked in every step, so rows of plain numbers are looked at together.
    if all(type(row) is tuple and len(row) == width for row in found):
        numbers = [number for row in found for number in row]
        if {*map(type, numbers)} <= {int} and (not numbers or -INT32_MAX <= min(numbers) <= max(numbers) <= INT32_MAX):
            return list(found)
    found = tuple(integers(name, row, -INT32_MAX) for row in found)
    other = [row for row in found if len(row) != width]
    require(not other, name, wanted, other[:1] and other[0])
    return list(found)


def tokens(name: str, given: Any) -> None:
    """Checks that token ids are a sequence or an array of one axis. The ids themselves are not looked at."""
    if type(given) is list or type(given) is tuple:
        return
    is_text = isinstance(given, str | bytes | bytearray | memoryview)
    is_array = hasattr(given, "__array__") and getattr(given, "ndim", 0) == 1
    require((isinstance(given, Sequence) or is_array) and not is_text, name, "a sequence of tokens", given)


def known(requests: Mapping[Any, T], request: Any, name: str = "request") -> T | None:
    """Returns what is kept for a request, or None. A name that can't be a key of a dict is refused."""
    try:
        return requests.get(request)
    except TypeError:
        raise FieldError(name, "a hashable name", shown(request)) from None


def instance(name: str, value: Any, *classes: type, optional: bool = False) -> None:
    """Checks that a value is of one of the classes, or perhaps None."""
    wanted = " or ".join([*(each.__name__ for each in classes), *(["None"] if optional else [])])
    require(isinstance(value, classes) or (optional and value is None), name, wanted, value)


def instances(owner: str, **given: tuple[Any, type]) -> None:
    """Checks that arguments of `owner`, given by name with the class that each must have, are of these classes."""
    for name, (value, wanted) in given.items():
        instance(f"{owner}: {name}", value, wanted)


def is_integer(value: Any) -> bool:
    """Whether a value is a whole number of Python or NumPy, and neither True nor False."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
