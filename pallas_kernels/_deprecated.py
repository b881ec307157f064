"""Old keywords of the ops, which keep working for one release with a DeprecationWarning.

To drop them in the next release, delete this file, its uses, and tests/kernels/test_deprecated.py.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def renamed_keywords(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function accept old keywords as well: `@renamed_keywords(old="new")`.

    The function raises a TypeError if a call gives both the old keyword and the new one.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> R:
            for old in names.keys() & kwargs.keys():
                new = names[old]
                if new in kwargs:
                    raise TypeError(f"{function.__name__}: {old!r} is the old name of {new!r}, got both")
                text = f"{function.__name__}: keyword {old!r} is now {new!r}; the old one goes in the next release"
                warnings.warn(text, DeprecationWarning, stacklevel=2)
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return wrapper

    return decorate
