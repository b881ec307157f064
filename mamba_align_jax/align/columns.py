"""The arithmetic of columns. Works on Python ints, NumPy and JAX arrays alike; floor division everywhere.

Column c of a request holds the state after exactly (c + 1) * block_size tokens, once committed.
"""

from typing import Any, NamedTuple

# `pallas_kernels.NULL_BLOCK` is the same number. Host modules use this one, because `pallas_kernels` imports JAX.
NULL_BLOCK = 0


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


def running_column(computed: Any, num_tokens: Any, block_size: int) -> Any:
    """First column that a step of `num_tokens`, drafts included, writes: the one that its last token falls into."""
    return column_of(computed + num_tokens, block_size)


def certain_tokens(computed: Any, num_tokens: Any, drafts: Any) -> Any:
    """Tokens whose states stay whatever is rejected. `drafts` is 0 for rows that are no verify rows."""
    return computed + num_tokens - drafts


def tokens_after(certain: Any, accepted: Any) -> Any:
    """Computed tokens after a step that accepted `accepted`, the bonus token included: it has no state yet."""
    return certain + accepted - 1


class BoundarySave(NamedTuple):
    """A boundary whose state a step leaves in its window: `offset` tokens behind the certain ones, due in `target`.

    The recurrent state is `offset` columns right of the running one, the conv window in the running one from row `offset`.
    """

    passed: Any
    offset: Any
    target: Any


def boundary_save(certain: Any, computed: Any, block_size: int) -> BoundarySave:
    """The last boundary of the `computed` tokens, and whether the step passed it behind the `certain` ones."""
    boundary = last_boundary(computed, block_size)
    offset = boundary - certain
    return BoundarySave(offset >= 0, offset, column_of(boundary, block_size))


def accepted_after_save(accepted: Any, saved: Any, target: Any, column: Any) -> Any:
    """1 where the state was saved onto the running column itself: it is where a fully accepted one would be."""
    return choose(saved & (target == column), 1, accepted)


def blocks_per_request(block_size: int, num_speculative_tokens: int, steps_in_flight: int = 0) -> int:
    """Blocks that a running request holds at most, in align mode.

    Columns go a step after the one that left them. Until then a request holds those from the count before its last read
    result to the end of the new window; every step between the two may have advanced by 1 + K tokens.
    """
    window = 1 + num_speculative_tokens
    behind = (2 + steps_in_flight) * window - 1
    # A prefill chunk jumps columns, but still holds the one that it reads, and one more per step in flight.
    return window + max(1 + steps_in_flight, -(-behind // block_size))
