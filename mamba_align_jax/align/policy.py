"""The two policies, "copy_free" and "pre_copy": where a step reads the states that the last one left.

A policy is a function of three integers per row: `old`, the running column before the step, which is negative for a
fresh row; `accepted`, the tokens accepted in the last step; and `current`, the running column of this step. It returns
the columns that hold the row's states, and the copies that must be made first.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from mamba_align_jax._deprecated import renamed_fields
from mamba_align_jax.align.columns import choose


@renamed_fields(conv_row="window_row")
class Migration(NamedTuple):
    """The copies to make before the step, per row.

    Attributes:
        recurrent_source: The column from which the recurrent state is copied.
        conv_source: The column from which the conv window is copied.
        window_row: The first row of the window to copy.
        destination: The column to which both are copied.
        needed: True for the rows that need the copy.
    """

    recurrent_source: Any
    conv_source: Any
    window_row: Any
    destination: Any
    needed: Any


@renamed_fields(conv_row="window_row")
class ReadPlaces(NamedTuple):
    """Where the model reads each row's states.

    Attributes:
        recurrent_column: The column of the recurrent state.
        conv_column: The column of the conv window.
        window_row: The first window row to read.
        migration: The copies to make first, or None if the policy has none.
    """

    recurrent_column: Any
    conv_column: Any
    window_row: Any
    migration: Migration | None


def copy_free(old: Any, accepted: Any, current: Any) -> ReadPlaces:
    """Kernels read where the last step wrote and write to the new running column. Nothing is copied (vLLM PR 42406)."""
    del current
    return ReadPlaces(old + accepted - 1, old, accepted - 1, None)


def pre_copy(old: Any, accepted: Any, current: Any) -> ReadPlaces:
    """States are copied to the running column when it changes, and read there as after one token (vLLM 0.33)."""
    crosses = (old >= 0) & (old != current)
    migration = Migration(old + accepted - 1, old, accepted - 1, current, crosses)
    accepted = choose(crosses, 1, accepted)
    return ReadPlaces(current + accepted - 1, current, accepted - 1, migration)


Policy = Callable[[Any, Any, Any], ReadPlaces]
POLICIES: Mapping[str, Policy] = MappingProxyType({"copy_free": copy_free, "pre_copy": pre_copy})
