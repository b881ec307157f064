"""The rings in which deferred states keep an entry for each token: what all of them share."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self, cast

import jax

from pallas_kernels._check import Arguments


class RingEntries(Arguments):
    """The base of dataclasses whose fields are the arrays of a ring. Kernels name the array `x` of a ring `ring_x`."""

    @property
    def by_name(self) -> dict[str, jax.Array]:
        """The arrays by their names in kernels."""
        return {f"ring_{field.name}": getattr(self, field.name) for field in dataclasses.fields(cast(Any, self))}

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """The arrays in the order of the fields."""
        return tuple(self.by_name.values())

    @classmethod
    def of(cls, results: Mapping[str, jax.Array]) -> Self:
        """Take the arrays from a kernel's results by these names."""
        return cls(**{field.name: results[f"ring_{field.name}"] for field in dataclasses.fields(cast(Any, cls))})
