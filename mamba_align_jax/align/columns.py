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


def blocks_per_request(block_size: int, num_speculative_tokens: int, steps_in_flight: int = 0) -> int:
    """Blocks that a running request holds at most, in align mode.

    Columns go a step after the one that left them. Until then a request holds those from the count before its last read
    result to the end of the new window; every step between the two may have advanced by 1 + K tokens.
    """
    window = 1 + num_speculative_tokens
    behind = (2 + steps_in_flight) * window - 1
    # A prefill chunk jumps columns, but still holds the one that it reads, and one more per step in flight.
    return window + max(1 + steps_in_flight, -(-behind // block_size))
