"""Reads pages and state blocks out of the pools as bytes, and writes them back.

The bytes of an entry are those of its arrays, one after the other, each [layers, ...] as one device would hold it. So they
don't depend on the number of devices: a program puts channels and heads in order before they leave the device.
"""

import functools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mamba_align_jax.align.config import AlignConfig, ConvState
from mamba_align_jax.engine.program import DeviceState
from mamba_align_jax.sharding import AXIS, Layout, Part, columns

# About so many bytes are copied at a time.
_CHUNK_BYTES = 2**25


@dataclass(frozen=True)
class ArrayForm:
    """How the entries of one array of a pool look on one device, and how the array lies on several.

    Attributes:
        shape: The shape of an entry, [layers, ...].
        dtype: The name of its dtype.
        sharding: How the array lies on several devices; None on one.
        axis: The axis of an entry whose elements are in another order on several devices; None if there is none.
        parts: What lies side by side along that axis.
    """

    shape: tuple[int, ...]
    dtype: str
    sharding: NamedSharding | None = None
    axis: int | None = None
    parts: tuple[Part, ...] = ()

    @property
    def num_bytes(self) -> int:
        """The bytes of an entry."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    def order(self) -> np.ndarray:
        """Returns for each element along `axis` on the devices its place on one device, int32."""
        assert self.sharding is not None
        return columns(self.parts, self.sharding.mesh.shape[AXIS])


Forms = tuple[ArrayForm, ...]
Arrays = tuple[jax.Array, ...]


def forms_of(spec: AlignConfig, state: DeviceState, layout: Layout | None) -> tuple[Forms, Forms]:
    """Returns the forms of the arrays of pages and of those of state blocks, in the order of the pools' leaves.

    Args:
        spec: How states are kept.
        state: The pools.
        layout: How they lie on several devices; None for one.
    """
    arrays = page_arrays(state), state_arrays(state)
    shapes = [[((array.shape[0], *array.shape[2:]), array.dtype.name) for array in each] for each in arrays]
    if layout is None:
        pages, states = (tuple(ArrayForm(*form) for form in each) for each in shapes)
        return pages, states
    # The axes of a page are [layers, page_size, heads, dim].
    orders = [[(2, layout.kv_heads)] * 2, []]
    for group, window in zip(spec.groups, layout.windows, strict=True):
        for one in group.states:
            # Those of a window are [layers, window, channels], in the other layout [layers, channels, window].
            axis = 1 if isinstance(one, ConvState) and one.layout == "DS" else 2
            orders[1].append((axis, window if isinstance(one, ConvState) else ()))
    specs = jax.tree.leaves(layout.kv, is_leaf=_is_spec), jax.tree.leaves(layout.pool, is_leaf=_is_spec)
    pages, states = (
        tuple(
            _split_form(*form, NamedSharding(layout.mesh, spec), *order)
            for form, spec, order in zip(*each, strict=True)
        )
        for each in zip(shapes, specs, orders, strict=True)
    )
    return pages, states


def _is_spec(x: object) -> bool:
    return isinstance(x, P)


def _split_form(
    shape: tuple[int, ...], dtype: str, sharding: NamedSharding, axis: int, parts: tuple[Part, ...]
) -> ArrayForm:
    """Returns the form of an array of entries of `shape` on several devices."""
    form = ArrayForm(shape, dtype, sharding, axis, parts)
    if not parts or np.array_equal(form.order(), np.arange(shape[axis])):
        return ArrayForm(shape, dtype, sharding)
    size = sum(part.heads * part.dim for part in parts)
    return ArrayForm((*shape[:axis], size, *shape[axis + 1 :]), dtype, sharding, axis, parts)


def page_arrays(state: DeviceState) -> Arrays:
    """Returns the arrays of pages."""
    return state.kv.keys, state.kv.values


def state_arrays(state: DeviceState) -> Arrays:
    """Returns the arrays of state blocks."""
    return tuple(array for group in state.pool.states for array in group)


def entry_bytes(forms: Forms) -> int:
    """Returns the number of bytes of an entry."""
    return sum(form.num_bytes for form in forms)


def read_entries(arrays: Arrays, forms: Forms, ids: Sequence[int]) -> Iterator[np.ndarray]:
    """Yields the bytes of the pages or blocks `ids` in order, several at a time: uint8 [entries, bytes].

    They are read after the last step that was dispatched. The next ones are copied to the host meanwhile.
    """
    size, coming = entry_bytes(forms), deque[tuple[int, jax.Array]]()
    step = _entries_at_a_time(size)
    for start in range(0, len(ids), step):
        some = np.asarray(ids[start : start + step], np.int32)
        taken = _take(arrays, np.pad(some, (0, _padding(len(some))), mode="edge"), forms) if size else None
        if taken is None:
            yield np.zeros((len(some), 0), np.uint8)
            continue
        taken.copy_to_host_async()
        coming.append((len(some), taken))
        if len(coming) > 1:
            yield _on_host(*coming.popleft())
    while coming:
        yield _on_host(*coming.popleft())


def write_entries(arrays: Arrays, forms: Forms, ids: Sequence[int], entries: np.ndarray) -> Arrays:
    """Returns the arrays with the pages or blocks `ids` replaced by `entries`, uint8 [entries, bytes].

    The arrays are donated. At most `entries_per_write` entries may be written at once.
    """
    padding = _padding(len(ids))
    # An id after the last one is dropped.
    some = np.pad(np.asarray(ids, np.int32), (0, padding), constant_values=arrays[0].shape[1])
    return _put(arrays, some, np.pad(entries, ((0, padding), (0, 0))) if padding else entries, forms)


def entries_per_write(forms: Forms) -> int:
    """Returns the largest number of entries that `write_entries` takes at once."""
    return _entries_at_a_time(entry_bytes(forms))


def _on_host(count: int, taken: jax.Array) -> np.ndarray:
    return np.asarray(taken)[:count]


def _entries_at_a_time(size: int) -> int:
    """Returns a power of two, so that few programs are compiled."""
    return 2 ** max(_CHUNK_BYTES // max(size, 2**14), 1).bit_length() // 2


def _padding(count: int) -> int:
    return 2 ** (count - 1).bit_length() - count


def _flat(array: jax.Array) -> jax.Array:
    """Returns a pool with layers and entries as one axis: a scatter along the second axis might transpose the pool."""
    return array.reshape(-1, *array.shape[2:])


def _places(array: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns the places of entries along the first axis of `_flat`, int32 [entries, layers]; unknown ids are after it."""
    layers, count = array.shape[:2]
    places = ids[:, None] + count * jnp.arange(layers, dtype=jnp.int32)
    return jnp.where(ids[:, None] < count, places, layers * count)


@functools.partial(jax.jit, static_argnames="forms")
def _take(arrays: Arrays, ids: jax.Array, forms: Forms) -> jax.Array:
    """Returns the bytes of entries, uint8 [entries, bytes], the same on all devices."""
    found = []
    for array, form in zip(arrays, forms, strict=True):
        if not form.num_bytes:
            continue
        entries = jnp.take(_flat(array), _places(array, ids), axis=0, mode="clip")
        if form.axis is not None:
            _, first = np.unique(form.order(), return_index=True)
            entries = jnp.take(entries, first.astype(np.int32), axis=form.axis + 1, mode="clip")
        found.append(jax.lax.bitcast_convert_type(entries, jnp.uint8).reshape(ids.shape[0], form.num_bytes))
    taken = jnp.concatenate(found, axis=1)
    sharding = forms[0].sharding
    if sharding is None:
        return taken
    return jax.lax.with_sharding_constraint(taken, NamedSharding(sharding.mesh, P()))


@functools.partial(jax.jit, static_argnames="forms", donate_argnames="arrays")
def _put(arrays: Arrays, ids: jax.Array, entries: jax.Array, forms: Forms) -> Arrays:
    """Writes the bytes of entries: the inverse of `_take`."""
    found, begin = [], 0
    for array, form in zip(arrays, forms, strict=True):
        if form.num_bytes:
            own = entries[:, begin : begin + form.num_bytes]
            own = own.reshape(ids.shape[0], *form.shape, array.dtype.itemsize)
            own = jax.lax.bitcast_convert_type(own, array.dtype)
            if form.axis is not None:
                own = jnp.take(own, form.order(), axis=form.axis + 1, mode="clip")
            array = _flat(array).at[_places(array, ids)].set(own, mode="drop").reshape(array.shape)
            if form.sharding is not None:
                array = jax.lax.with_sharding_constraint(array, form.sharding)
        found.append(array)
        begin += form.num_bytes
    return tuple(found)
