"""The arithmetic of columns, for Python ints, NumPy arrays and JAX arrays alike. All divisions round down.

Column c of a request holds the state after exactly (c + 1) * block_size tokens, once that many tokens are computed.
"""

from typing import Any, NamedTuple

# The same number as `pallas_kernels.NULL_BLOCK`. Modules that import no JAX use this one.
NULL_BLOCK = 0


def choose(condition: Any, yes: Any, no: Any) -> Any:
    """Returns `yes` where `condition` is true and `no` elsewhere. Takes Python ints, NumPy or JAX integers."""
    flag = int(condition) if isinstance(condition, bool) else condition.astype("int32")
    return no + (yes - no) * flag


def column_of(num_tokens: Any, block_size: int) -> Any:
    """Returns the column of the state after `num_tokens` tokens. No tokens give -1, as the division rounds down."""
    return (num_tokens - 1) // block_size


def last_boundary(num_tokens: Any, block_size: int) -> Any:
    """Returns the largest multiple of `block_size` that is at most `num_tokens`."""
    return num_tokens // block_size * block_size


def fold_end(base: Any, fold_length: int) -> Any:
    """Returns the end of the fold group that `base` is in or begins: the first multiple of `fold_length` after it."""
    return (base // fold_length + 1) * fold_length


def running_column(computed: Any, num_tokens: Any, block_size: int) -> Any:
    """Returns the first column that a step of `num_tokens`, drafts included, writes: the column of its last token."""
    return column_of(computed + num_tokens, block_size)


def certain_tokens(computed: Any, num_tokens: Any, drafts: Any) -> Any:
    """Returns how many tokens stay computed if all drafts are rejected. `drafts` is 0 for a row without drafts."""
    return computed + num_tokens - drafts


def tokens_after(certain: Any, accepted: Any) -> Any:
    """Returns the computed tokens after a step. `accepted` includes the bonus token, which has no state yet."""
    return certain + accepted - 1


class BoundarySave(NamedTuple):
    """A block boundary whose state a step leaves in the columns that it writes.

    Attributes:
        passed: True if the step passed the boundary after its certain tokens, so that its state must be saved.
        offset: Tokens from the certain ones to the boundary. The recurrent state is `offset` columns to the right of
            the running column. The conv window is in the running column, from row `offset` on.
        target: The boundary's own column, to which the state is saved.
    """

    passed: Any
    offset: Any
    target: Any


def boundary_save(certain: Any, computed: Any, block_size: int) -> BoundarySave:
    """Finds the last boundary within the `computed` tokens, and whether the step passed it after the `certain` ones."""
    boundary = last_boundary(computed, block_size)
    offset = boundary - certain
    return BoundarySave(offset >= 0, offset, column_of(boundary, block_size))


def accepted_after_save(accepted: Any, saved: Any, target: Any, column: Any) -> Any:
    """Returns the accepted count after a save: 1 where the state was saved onto the running column, else `accepted`.

    After such a save the running column contains the newest state at its first window row, as after a step that
    accepted one token.
    """
    return choose(saved & (target == column), 1, accepted)


def blocks_per_request(
    block_size: int, num_speculative_tokens: int, steps_in_flight: int = 0, fold_length: int | None = None
) -> int:
    """Returns the largest number of blocks that a running request holds in align mode.

    A column is released one step after the step that moved past it. Until then a request holds all columns from the
    count before its last read result to the end of the new window. Each step in between may have advanced by 1 + K
    tokens.

    With `fold_length`, that is under policy "deferred", there are no columns for drafts, but the state at the base is
    held, which is up to a fold group before that count.
    """
    window = 1 + num_speculative_tokens
    if fold_length is not None:
        not_released = (2 + steps_in_flight) * window + fold_length - 1
        return 1 + max(1 + steps_in_flight, -(-not_released // block_size))
    not_released = (2 + steps_in_flight) * window - 1
    # A prefill chunk jumps over columns, but holds the one that it reads, and one more per step in flight.
    return window + max(1 + steps_in_flight, -(-not_released // block_size))
