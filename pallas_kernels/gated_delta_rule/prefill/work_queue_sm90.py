"""The work queue of a launch, from which CTAs on Hopper GPUs take one entry after the other."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import hopper as hp


class Work(NamedTuple):
    """The work of a launch by one kernel variant: an entry is some value dims of a head of a row.

    Attributes:
        rows: The number of rows.
        value_heads: The number of value heads of each row.
        splits: The number of entries of a head, which have equally many value dims.
    """

    rows: int
    value_heads: int
    splits: int

    @property
    def of_row(self) -> int:
        """The number of entries of a row."""
        return self.value_heads * self.splits

    @property
    def total(self) -> int:
        """The number of entries of all rows."""
        return self.rows * self.of_row

    def indices_of(self, ticket: Any) -> tuple[Any, Any, Any]:
        """Return the row, the value head and the split of an entry, given its index. Neighbours have the same keys."""
        divide = lambda x, by: (jax.lax.div(x, jnp.int32(by)), jax.lax.rem(x, jnp.int32(by)))
        rest, split = divide(ticket, self.splits)
        return *divide(rest, self.value_heads), split


def store_entry(fields: Any, entry: Any, first: int) -> None:
    """Store int32 fields in an array in SMEM, from the index `first` on, by one warpgroup."""

    def body(entry: Any, *fields: Any) -> None:
        with hp.predicated(hp.thread_index_again() == 0):
            for n, field in enumerate(fields, first):
                entry[n] = field
        hp.warpgroup_barrier()

    hp.inline(body, (entry, ()), *fields)


def take(queue: Any, ticket: Any) -> None:
    """Take the next entry of a queue, by one warpgroup, and store its index in an int32 array in SMEM, as the first element.

    The queue is the number of entries that CTAs have taken: one of `hp.semaphores`.
    """

    def body(queue: Any, ticket: Any) -> None:
        with hp.predicated(hp.thread_index_again() == 0):
            ticket[0] = hp.fetch_and_increment(queue)
        hp.warpgroup_barrier()

    hp.inline(body, (queue, ()), (ticket, ()))
