"""Arrays of integers for rows and slots: which values are some, and how what rows set is written to their slots."""

from typing import Any

import jax
import jax.numpy as jnp


def has_integers(value: Any) -> bool:
    """Whether a value is an array of integers, which may be traced."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and hasattr(value, "shape") and jnp.issubdtype(dtype, jnp.integer)


def set_slots(array: jax.Array, slot: jax.Array, values: jax.Array | int) -> jax.Array:
    """Returns an array like `array` in which each row's slot holds the row's values. A jitted caller may donate `array`.

    It compares all slots with all rows, because XLA does that for several arrays in one launch. Scatters are a launch each.

    Args:
        array: What the slots hold. int32 [slots, ...]
        slot: The slot of each row. A row whose slot is negative or too large is skipped. No two rows may have the same slot.
            int32 [rows]
        values: What each row sets, or what broadcasts to that. int32 [rows, ...]
    """
    if not slot.shape[0]:
        return array
    rows, slots = (jnp.arange(size, dtype=jnp.int32) for size in (slot.shape[0], array.shape[0]))
    row = jnp.max(jnp.where(slot[None] == slots[:, None], rows, -1), axis=1)
    found = jnp.broadcast_to(values, (slot.shape[0], *array.shape[1:]))[jnp.maximum(row, 0)]
    return jnp.where((row >= 0).reshape(-1, *[1] * (array.ndim - 1)), found, array)
