"""The arithmetic of columns. Works on Python ints, NumPy and JAX arrays alike; floor division everywhere.

Column c of a request holds the state after exactly (c + 1) * block_size tokens, once committed.
"""

from typing import Any


def choose(condition: Any, yes: Any, no: Any) -> Any:
    """`yes` where `condition`, else `no`, for integers of any kind."""
    flag = int(condition) if isinstance(condition, bool) else condition.astype("int32")
    return no + (yes - no) * flag


def column_of(num_tokens: Any, block_size: int) -> Any:
    """Column of the state after `num_tokens`; -1 for no tokens, which truncating division would make 0."""
    return (num_tokens - 1) // block_size


def last_boundary(num_tokens: Any, block_size: int) -> Any:
    """The largest multiple of `block_size` that is at most `num_tokens`."""
    return num_tokens // block_size * block_size
