"""Where a step finds the states that the last one left: the only place that knows the two policies apart.

A policy gets, per row, the running column before the step (`old`, negative for a fresh row), what was accepted last
step, and the step's own running column `current`. It says which column holds the recurrent state, which the conv window
and from which row, and which states must be copied first.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from mamba_align_jax._deprecated import renamed_fields
from mamba_align_jax.align.columns import choose


@renamed_fields(conv_row="window_row")
class Migration(NamedTuple):
    """Columns to copy before the step, per row: recurrent and conv source, first window row, destination."""

    recurrent_source: Any
    conv_source: Any
    window_row: Any
    destination: Any
    needed: Any


@renamed_fields(conv_row="window_row")
class ReadPlaces(NamedTuple):
    """Columns that hold each row's states when the model runs, and the copies that must come first (None: none)."""

    recurrent_column: Any
    conv_column: Any
    window_row: Any
    migration: Migration | None


def copy_free(old: Any, accepted: Any, current: Any) -> ReadPlaces:
    """Kernels read where the last step wrote and write where this one belongs: nothing moves (vLLM PR 42406)."""
    del current
    return ReadPlaces(old + accepted - 1, old, accepted - 1, None)


def pre_copy(old: Any, accepted: Any, current: Any) -> ReadPlaces:
    """States move to the new running column when it changes, and count as fully accepted there (vLLM 0.33)."""
    crosses = (old >= 0) & (old != current)
    migration = Migration(old + accepted - 1, old, accepted - 1, current, crosses)
    accepted = choose(crosses, 1, accepted)
    return ReadPlaces(current + accepted - 1, current, accepted - 1, migration)


Policy = Callable[[Any, Any, Any], ReadPlaces]
POLICIES: Mapping[str, Policy] = MappingProxyType({"copy_free": copy_free, "pre_copy": pre_copy})
