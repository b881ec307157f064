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
        """Returns the shape and dtype of one layer's arrays for one slot, each [heads, places, ...]."""
        raise NotImplementedError

    def parameters(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Returns the shape and dtype of the arrays that all slots share, each [heads, ...]: what folds need of a layer."""
        return ()

    @property
    def nothing(self) -> tuple[float, ...]:
        """What each of `arrays` holds for a token that adds nothing to a state."""
        return (0.0,) * len(self.arrays(1))

    @property
    def split_axes(self) -> tuple[int | None, ...]:
        """The axis of each of `arrays` and `parameters` that is split over devices. None if every device has the whole."""
        return (0,) * len(self.arrays(1) + self.parameters())

    def bytes_per_slot(self, fold_length: int) -> int:
        """Returns the bytes of one layer's arrays for one slot."""
        return _total_bytes(self.arrays(fold_length))

    @property
    def parameter_bytes(self) -> int:
        """The bytes of what all slots of one layer share."""
        return _total_bytes(self.parameters())


def _check(ring: Any, *sizes: str) -> None:
    """Checks a ring's dtype and its fields `sizes`, which are positive numbers, and makes all of them plain values."""
    set_fields(ring, dtype=dtype_name(ring.dtype))
    itemsize(ring.dtype)
    for name in sizes:
        set_fields(ring, **{name: values.integer(f"{type(ring).__name__}: {name}", getattr(ring, name), 1)})


def _total_bytes(arrays: tuple[tuple[tuple[int, ...], str], ...]) -> int:
    return sum(math.prod(shape) * itemsize(dtype) for shape, dtype in arrays)


@dataclass(frozen=True)
class DeltaRuleRing(Ring):
    """The entries that one layer of the gated delta rule keeps for each slot under policy "deferred".

    Attributes:
        key_heads: Heads of the keys. They divide the value heads.
        key_dim: Dims of a key.
        value_heads: Heads of the states.
        value_dim: Dims of a value.
        dtype: The dtype of keys: "float32", "bfloat16" or "float16". Corrections and decays are float32.
        per_channel: True if each key channel has a log decay, as in Kimi delta attention, and not each head only.
    """

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    dtype: str = "bfloat16"
    per_channel: bool = False

    def __post_init__(self) -> None:
        set_fields(self, per_channel=values.flag("DeltaRuleRing: per_channel", self.per_channel))
        _check(self, "key_heads", "key_dim", "value_heads", "value_dim")
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"DeltaRuleRing: key_heads must divide value_heads = {self.value_heads}, got {self.key_heads}"
            )

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
            ((self.value_heads, places, *[self.key_dim] * self.per_channel), "float32"),
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
        if self.heads % self.groups:
            raise ValueError(f"Mamba2Ring: groups must divide heads = {self.heads}, got {self.groups}")

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


@dataclass(frozen=True)
class Mamba1Ring(Ring):
    """The entries that one layer of Mamba-1 keeps for each slot under policy "deferred".

    A token's decay has as many numbers as a state, so entries have raw step sizes only. The decay rates and the bias of the
    step sizes are the layer's parameters. `fold_slots` and `settle` run without the model, so the layer also stores these
    parameters in the pool, in each step that stores entries.

    Attributes:
        channels: Channels of the layer.
        state_dim: Numbers in a channel's state, and in B.
        dtype: The dtype of x, B and raw step sizes: "float32", "bfloat16" or "float16".
    """

    channels: int
    state_dim: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        _check(self, "channels", "state_dim")

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """[1, channels, state_dim]."""
        return 1, self.channels, self.state_dim

    def arrays(self, fold_length: int) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Returns the shape and dtype of one layer's arrays for one slot: x, B and raw step sizes."""
        places = 2 * fold_length
        return (
            ((1, places, self.channels), self.dtype),
            ((1, places, self.state_dim), self.dtype),
            ((1, places, self.channels), self.dtype),
        )

    def parameters(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Returns the shape and dtype of the decay rates and of the bias of the step sizes."""
        return (self.state_shape, "float32"), ((1, self.channels), "float32")

    @property
    def nothing(self) -> tuple[float, ...]:
        """A step size of minus infinity is 0 after the softplus, and decays nothing."""
        return 0.0, 0.0, -math.inf

    @property
    def split_axes(self) -> tuple[int | None, ...]:
        """Channels are split. Every device has the whole of B."""
        return 2, None, 2, 1, 1
