"""Reads pages and state blocks out of the pools as bytes, and writes them back.

The bytes of an entry are those of its arrays, one after the other, each [layers, ...] as one device would hold it in the
default layout. So they depend neither on the number of devices nor on the layouts of the pools: a program puts channels,
heads and axes in order before they leave the device.
"""

import functools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mamba_align_jax.align.config import AlignConfig, ConvState
from mamba_align_jax.engine.device.program import DeviceState
from mamba_align_jax.sharding import AXIS, Layout, Part, columns

# About so many bytes are copied at a time.
_CHUNK_BYTES = 2**25


@dataclass(frozen=True)
class ArrayForm:
    """How the entries of one array of a pool look on one device, and how the array lies on several.

    Attributes:
        shape: The shape of an entry on one device, [layers, ...], in the default layout.
        dtype: The name of its dtype.
        is_swapped: Whether the array has the last two axes of `shape` in the other order: its layout is "DS" or "KV".
        sharding: How the array lies on several devices; None on one.
        axis: The axis of an entry in the array whose elements are in another order on several devices; None if there is
            none.
        parts: What lies side by side along that axis.
    """

    shape: tuple[int, ...]
    dtype: str
    is_swapped: bool = False
    sharding: NamedSharding | None = None
    axis: int | None = None
    parts: tuple[Part, ...] = ()

    @property
    def num_bytes(self) -> int:
        """The bytes of an entry."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    @property
    def split_axis(self) -> int | None:
        """The axis of several entries, [entries, layers, ...], that is divided among the devices; None if none is."""
        return self.sharding.spec.index(AXIS) if self.sharding and AXIS in self.sharding.spec else None

    def order(self) -> np.ndarray:
        """Returns for each element along `axis` on the devices its place on one device, int32."""
        assert self.sharding is not None
        return columns(self.parts, self.sharding.mesh.shape[AXIS])


Forms = tuple[ArrayForm, ...]
Arrays = tuple[jax.Array, ...]


def forms_of(align: AlignConfig, state: DeviceState, layout: Layout | None) -> tuple[Forms, Forms]:
    """Returns the forms of the arrays of pages and of those of state blocks, in the order of the pools' leaves.

    Args:
        align: How states are kept.
        state: The pools.
        layout: How they lie on several devices; None for one.
    """
    arrays = _arrays(state).values()
    swaps = [False, False], [one.layout in ("DS", "KV") for group in align.groups for one in group.states]
    shapes = [
        [((array.shape[0], *array.shape[2:]), array.dtype.name, swap) for array, swap in zip(*each, strict=True)]
        for each in zip(arrays, swaps, strict=True)
    ]
    if layout is None:
        pages, states = (tuple(_form(*form) for form in each) for each in shapes)
        return pages, states
    # The axes of a page are [layers, page_size, heads, dim].
    orders = [[(2, layout.kv_heads)] * 2, []]
    for group, window in zip(align.groups, layout.windows, strict=True):
        for one in group.states:
            # Those of a window are [layers, window, channels], in the other layout [layers, channels, window].
            axis = 1 if isinstance(one, ConvState) and one.layout == "DS" else 2
            orders[1].append((axis, window if isinstance(one, ConvState) else ()))
    specs = jax.tree.leaves(layout.kv, is_leaf=_is_spec), jax.tree.leaves(layout.pool.states, is_leaf=_is_spec)
    pages, states = (
        tuple(_form(*form, NamedSharding(layout.mesh, spec), *order) for form, spec, order in zip(*each, strict=True))
        for each in zip(shapes, specs, orders, strict=True)
    )
    return pages, states


def _is_spec(x: object) -> bool:
    return isinstance(x, P)


def _form(
    shape: tuple[int, ...],
    dtype: str,
    is_swapped: bool,
    sharding: NamedSharding | None = None,
    axis: int | None = None,
    parts: tuple[Part, ...] = (),
) -> ArrayForm:
    """Returns the form of an array whose entries have `shape` in the pools, those of all devices together."""
    if axis is not None and parts:
        form = ArrayForm(shape, dtype, is_swapped, sharding, axis, parts)
        if np.array_equal(form.order(), np.arange(shape[axis])):
            axis, parts = None, ()
        else:
            shape = *shape[:axis], sum(part.heads * part.dim for part in parts), *shape[axis + 1 :]
    else:
        axis = None
    if is_swapped:
        shape = *shape[:-2], shape[-1], shape[-2]
    return ArrayForm(shape, dtype, is_swapped, sharding, axis, parts)


def entry_bytes(forms: Forms) -> int:
    """Returns the number of bytes of an entry."""
    return sum(form.num_bytes for form in forms)


def take_entries(state: DeviceState, forms: Forms, kind: str, ids: Sequence[int]) -> jax.Array:
    """Starts reading the bytes of pages or state blocks, uint8 [entries, bytes], the same on all devices.

    There are more of them than `ids`, so that few programs are compiled. They are read after the last step that was
    dispatched.

    Args:
        state: The pools.
        forms: The forms of the arrays of `kind`.
        kind: "pages" or "states".
        ids: The pages or blocks.
    """
    some = np.asarray(ids, np.int32)
    return _take(_arrays(state)[kind], np.pad(some, (0, _padding(len(some))), mode="edge"), forms)


def put_entries(state: DeviceState, forms: Forms, kind: str, ids: Sequence[int], entries: np.ndarray) -> DeviceState:
    """Returns the pools with pages or state blocks replaced by `entries`, uint8 [entries, bytes]. `state` is donated.

    The other arguments are those of `take_entries`.
    """
    arrays, padding = _arrays(state)[kind], _padding(len(ids))
    # An id after the last one is dropped.
    some = np.pad(np.asarray(ids, np.int32), (0, padding), constant_values=arrays[0].shape[1])
    written = _put(arrays, some, np.pad(entries, ((0, padding), (0, 0))) if padding else entries, forms)
    old = state.kv if kind == "pages" else state.pool.states
    new: Any = jax.tree.unflatten(jax.tree.structure(old), written)
    return replace(state, kv=new) if kind == "pages" else replace(state, pool=replace(state.pool, states=new))


def read_entries(take: Callable[[Sequence[int]], jax.Array], size: int, ids: Sequence[int]) -> Iterator[np.ndarray]:
    """Yields the bytes of the pages or blocks `ids` in order, several at a time: uint8 [entries, size].

    The next ones are copied to the host meanwhile.

    Args:
        take: Starts reading some of them, as `take_entries` does.
        size: The bytes of an entry.
        ids: The pages or blocks.
    """
    if size == 0:
        yield np.zeros((len(ids), 0), np.uint8)
        return
    coming, step = deque[tuple[int, jax.Array]](), entries_at_a_time(size)
    for begin in range(0, len(ids), step):
        some = ids[begin : begin + step]
        coming.append((len(some), _to_host(take(some))))
        if len(coming) > 1:
            yield _on_host(*coming.popleft())
    while coming:
        yield _on_host(*coming.popleft())


def entries_at_a_time(size: int) -> int:
    """Returns how many entries of `size` bytes are copied at a time: a power of two, so that few programs are compiled."""
    return 2 ** max(_CHUNK_BYTES // max(size, 2**14), 1).bit_length() // 2


def _arrays(state: DeviceState) -> dict[str, Arrays]:
    states = tuple(array for group in state.pool.states for array in group)
    return {"pages": (state.kv.keys, state.kv.values), "states": states}


def _to_host(taken: jax.Array) -> jax.Array:
    """Starts copying an array that all devices have to the host, and returns the copy."""
    one = taken.addressable_data(0)
    if _has_pinned_memory(one):
        # JAX uses pinned memory again, and NumPy reads it in place. Other memory would be new each time, which is slow.
        return jax.device_put(one, one.sharding.with_memory_kind("pinned_host"))
    one.copy_to_host_async()
    return one


def _has_pinned_memory(array: jax.Array) -> bool:
    """Says whether an array's device copies into pinned memory. A CPU does not need to."""
    (device,) = array.devices()
    return device.platform != "cpu" and any(memory.kind == "pinned_host" for memory in device.addressable_memories())


def _on_host(count: int, copied: jax.Array) -> np.ndarray:
    return np.ascontiguousarray(jax.device_get(copied)[:count])


def _padding(count: int) -> int:
    return 2 ** (count - 1).bit_length() - count


@functools.partial(jax.jit, static_argnames="forms")
def _take(arrays: Arrays, ids: jax.Array, forms: Forms) -> jax.Array:
    """Returns the bytes of entries, uint8 [entries, bytes], the same on all devices."""

    def take(arrays: Arrays, ids: jax.Array) -> jax.Array:
        found = []
        for array, form in zip(arrays, forms, strict=True):
            entries = jnp.take(_flat(array), _places(array, ids), axis=0, mode="clip")
            if form.split_axis is not None:
                entries = jax.lax.all_gather(entries, AXIS, axis=form.split_axis, tiled=True)
            if form.axis is not None:
                _, first = np.unique(form.order(), return_index=True)
                entries = jnp.take(entries, first.astype(np.int32), axis=form.axis + 1, mode="clip")
            if form.is_swapped:
                entries = jnp.swapaxes(entries, -2, -1)
            found.append(jax.lax.bitcast_convert_type(entries, jnp.uint8).reshape(ids.shape[0], form.num_bytes))
        return jnp.concatenate(found, axis=1)

    arrays, forms = _not_empty(arrays, forms)
    return _everywhere(take, forms, gives_arrays=False)(arrays, ids)


@functools.partial(jax.jit, static_argnames="forms", donate_argnames="arrays")
def _put(arrays: Arrays, ids: jax.Array, entries: jax.Array, forms: Forms) -> Arrays:
    """Writes the bytes of entries: the inverse of `_take`."""

    def put(arrays: Arrays, ids: jax.Array, entries: jax.Array) -> Arrays:
        found, begin = [], 0
        for array, form in zip(arrays, forms, strict=True):
            own = entries[:, begin : begin + form.num_bytes]
            own = own.reshape(ids.shape[0], *form.shape, array.dtype.itemsize)
            own = jax.lax.bitcast_convert_type(own, array.dtype)
            if form.is_swapped:
                own = jnp.swapaxes(own, -2, -1)
            if form.axis is not None:
                own = jnp.take(own, form.order(), axis=form.axis + 1, mode="clip")
            if (axis := form.split_axis) is not None:
                size = array.shape[axis]
                own = jax.lax.dynamic_slice_in_dim(own, jax.lax.axis_index(AXIS) * size, size, axis)
            found.append(_flat(array).at[_places(array, ids)].set(own, mode="drop").reshape(array.shape))
            begin += form.num_bytes
        return tuple(found)

    used, forms = _not_empty(arrays, forms)
    written = iter(_everywhere(put, forms, gives_arrays=True)(used, ids, entries))
    return tuple(next(written) if array.size else array for array in arrays)


def _not_empty(arrays: Arrays, forms: Forms) -> tuple[Arrays, Forms]:
    """Leaves out arrays without elements."""
    pairs = [(array, form) for array, form in zip(arrays, forms, strict=True) if form.num_bytes]
    return tuple(array for array, _ in pairs), tuple(form for _, form in pairs)


def _everywhere(function: Callable[..., Any], forms: Forms, *, gives_arrays: bool) -> Callable[..., Any]:
    """Returns a function that runs `function` on every device, over its shares of the arrays, its first argument."""
    if forms[0].sharding is None:
        return function
    specs = tuple(form.sharding.spec for form in forms if form.sharding)
    others = () if gives_arrays is False else (P(),)
    return jax.shard_map(
        function,
        mesh=forms[0].sharding.mesh,
        in_specs=(specs, P(), *others),
        out_specs=specs if gives_arrays else P(),
        check_vma=False,
    )


def _flat(array: jax.Array) -> jax.Array:
    """Returns a pool with layers and entries as one axis: a scatter along the second axis might transpose the pool."""
    return array.reshape(-1, *array.shape[2:])


def _places(array: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns the places of entries along the first axis of `_flat`, int32 [entries, layers]; unknown ids are after it."""
    layers, count = array.shape[:2]
    places = ids[:, None] + count * jnp.arange(layers, dtype=jnp.int32)[None]
    return jnp.where(ids[:, None] < count, places, layers * count)
