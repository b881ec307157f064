"""The heads of rows that carry states on Hopper GPUs, and how programs take one after the other."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import hopper as hp


class Work(NamedTuple):
    """All that is carried in a launch, if it is carried in one form.

    Attributes:
        rows: The number of rows.
        value_heads: The number of value heads of each.
        parts: The number of parts of a head's value dims.
    """

    rows: int
    value_heads: int
    parts: int

    @property
    def of_row(self) -> int:
        """The number of parts of all heads of a row."""
        return self.value_heads * self.parts

    @property
    def total(self) -> int:
        """The number of parts of all heads of all rows."""
        return self.rows * self.of_row

    def place_of(self, number: Any) -> tuple[Any, Any, Any]:
        """Returns the row, the value head and the part that have a number. Neighbours share keys."""
        divide = lambda x, by: (jax.lax.div(x, jnp.int32(by)), jax.lax.rem(x, jnp.int32(by)))
        rest, part = divide(number, self.parts)
        return *divide(rest, self.value_heads), part


def tell(numbers: Any, told: Any, first: int) -> None:
    """Writes int32 numbers to an array in shared memory, from the `first` place on, by one warpgroup."""

    def body(told: Any, *numbers: Any) -> None:
        with hp.predicated(hp.thread_index_again() == 0):
            for n, number in enumerate(numbers, first):
                told[n] = number
        hp.warpgroup_barrier()

    hp.inline(body, (told, ()), *numbers)


def take_next(taken: Any, number: Any) -> None:
    """Takes the next number that no program has taken, by one warpgroup.

    Args:
        taken: How many have been taken: one of `hp.semaphores`.
        number: Receives the number as its first element. An int32 array in shared memory.
    """

    def body(taken: Any, number: Any) -> None:
        with hp.predicated(hp.thread_index_again() == 0):
            number[0] = hp.fetch_and_increment(taken)
        hp.warpgroup_barrier()

    hp.inline(body, (taken, ()), (number, ()))
