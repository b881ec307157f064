"""The entries that a layer keeps for each slot under policy "deferred"."""

import math
from dataclasses import dataclass
from typing import Any

from mamba_align_jax import _values as values
from mamba_align_jax.align._fields import dtype_name, itemsize, set_fields


class Ring:
    """The entries that one layer keeps for each slot under policy "deferred". There is a class for each kind of layer."""

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The shape of the layer's recurrent state, whose layout is "VK"."""
        raise NotImplementedError

    def arrays(self, fold_length: int) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Returns the shape and dtype of one layer's arrays for one slot, each [heads, places, ...].

        Heads are split over devices. An entry of zeros adds nothing to a state.
        """
        raise NotImplementedError

    def bytes_per_slot(self, fold_length: int) -> int:
        """Returns the bytes of one layer's arrays for one slot."""
        return sum(math.prod(shape) * itemsize(dtype) for shape, dtype in self.arrays(fold_length))


def _check(ring: Any, *sizes: str) -> None:
    """Checks a ring's dtype and its fields `sizes`, which are positive numbers, and makes all of them plain values."""
    set_fields(ring, dtype=dtype_name(ring.dtype))
    itemsize(ring.dtype)
    for name in sizes:
        set_fields(ring, **{name: values.integer(f"{type(ring).__name__}: {name}", getattr(ring, name), 1)})


@dataclass(frozen=True)
class DeltaRuleRing(Ring):
    """The entries that one layer of the gated delta rule keeps for each slot under policy "deferred".

    Attributes:
        key_heads: Heads of the keys. They divide the value heads.
        key_dim: Dims of a key.
        value_heads: Heads of the states.
        value_dim: Dims of a value.
        dtype: The dtype of keys: "float32", "bfloat16" or "float16". Corrections and decays are float32.
    """

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        _check(self, "key_heads", "key_dim", "value_heads", "value_dim")
        wanted, heads = f"divide value_heads = {self.value_heads}", self.key_heads
        values.require(self.value_heads % heads == 0, "DeltaRuleRing: key_heads", wanted, heads, "must")

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """[value_heads, value_dim, key_dim]."""
        return self.value_heads, self.value_dim, self.key_dim

    def arrays(self, fold_length: int) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Returns the shape and dtype of one layer's arrays for one slot: keys, corrections and log decays."""
        places = 2 * fold_length
        return (
            ((self.key_heads, places, self.key_dim), self.dtype),
            ((self.value_heads, places, self.value_dim), "float32"),
            ((self.value_heads, places), "float32"),
        )


@dataclass(frozen=True)
class Mamba2Ring(Ring):
    """The entries that one layer of Mamba-2 keeps for each slot under policy "deferred".

    Attributes:
        heads: Heads of the states.
        head_dim: Channels of a head.
        groups: Groups of heads that share their B. They divide the heads.
        state_dim: Dims of B.
        dtype: The dtype of x and B: "float32", "bfloat16" or "float16". Step sizes and log decays are float32.
    """

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        _check(self, "heads", "head_dim", "groups", "state_dim")
        wanted = f"divide heads = {self.heads}"
        values.require(self.heads % self.groups == 0, "Mamba2Ring: groups", wanted, self.groups, "must")

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """[heads, head_dim, state_dim]."""
        return self.heads, self.head_dim, self.state_dim

    def arrays(self, fold_length: int) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Returns the shape and dtype of one layer's arrays for one slot: x, B, step sizes and log decays."""
        places = 2 * fold_length
        return (
            ((self.heads, places, self.head_dim), self.dtype),
            ((self.groups, places, self.state_dim), self.dtype),
            ((self.heads, places), "float32"),
            ((self.heads, places), "float32"),
        )
