"""Names a model and how an engine keeps its states, so that states move only between engines of equal models."""

import functools
import hashlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from mamba_align_jax.engine.config import EngineConfig
from mamba_align_jax.engine.device.pool_entries import Forms
from mamba_align_jax.sharding import AXIS, Layout

# The two sums mix differently, so that two changes don't cancel in both.
_SEEDS = (0x9E3779B9, 0x7F4A7C15)


def identity(
    config: EngineConfig,
    model_config: object,
    weights: bytes,
    pages: Forms,
    states: Forms,
) -> bytes:
    """Returns the name of a model and of the bytes that an engine keeps for it: 32 bytes.

    Args:
        config: The engine's configuration, of which the sizes of pages and blocks count.
        model_config: The model's configuration. Its `repr` must say all of it, as that of a dataclass does.
        weights: What `weights_digest` returned.
        pages: The forms of the arrays of pages.
        states: The forms of the arrays of state blocks, which depend on the largest number of drafts. Their layouts don't
            count, because entries leave the pools in the default one.
    """
    forms = [[(form.shape, form.dtype) for form in each] for each in (pages, states)]
    text = repr((model_config, forms, config.kv_page_size, config.block_size))
    return hashlib.sha256(text.encode() + weights).digest()


def weights_digest(params: Sequence[jax.Array], layout: Layout | None = None) -> bytes:
    """Returns a digest of all bits of all weights, 32 bytes. It is the same on any number of devices.

    For each parameter the device computes two sums, modulo 2**32, over its elements: each element's bits are mixed with its
    place by a one-to-one function (MurmurHash3's finalizer). The digest is the SHA-256 of these sums with the shapes and
    dtypes. A change of any one element always changes it. Changes of several elements go unnoticed with a probability of
    about 2**-64. The weights are read where they are. It is no protection against weights that were made to have an equal
    digest.

    Args:
        params: The parameters, in a fixed order.
        layout: How they lie on several devices; None for one.
    """
    sums = []
    for number, array in enumerate(params):
        spec = layout.params[number] if layout else PartitionSpec()
        axis = spec.index(AXIS) if AXIS in spec else None
        shape, place, counts = array.shape, None, None
        if layout is not None and axis is not None:
            place, order = np.arange(shape[axis], dtype=np.int32), layout.ordered_params[number]
            if order is not None:
                place, shape = order.places, (*shape[:axis], order.size, *shape[axis + 1 :])
            # An element that is repeated counts once.
            counts = np.zeros(place.shape, np.uint32)
            counts[np.unique(place, return_index=True)[1]] = 1
            place = place.astype(np.uint32)
        sums.append((shape, array.dtype.name, _sums(array, place, counts, axis, shape, layout)))
    digest = hashlib.sha256()
    for shape, dtype, two in sums:
        digest.update(repr((shape, dtype)).encode() + jax.device_get(two).tobytes())
    return digest.digest()


@functools.partial(jax.jit, static_argnames=("axis", "shape", "layout"))
def _sums(
    array: jax.Array,
    place: jax.Array | None,
    counts: jax.Array | None,
    axis: int | None,
    shape: tuple[int, ...],
    layout: Layout | None,
) -> jax.Array:
    """Returns the two sums of one parameter, uint32 [2].

    Args:
        array: The parameter.
        place: For each element along `axis` its place on one device. uint32
        counts: 1 for each element along `axis` that counts, 0 for repeated ones. uint32
        axis: The axis that is divided among the devices; None if there is none.
        shape: The parameter's shape on one device.
        layout: How it lies on several devices; None for one.
    """

    def sums(array: jax.Array, *along_axis: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}")).astype(jnp.uint32)
        index, stride, counted = jnp.zeros(array.shape, jnp.uint32), 1, jnp.uint32(1)
        for number in reversed(range(array.ndim)):
            along = jax.lax.broadcasted_iota(jnp.uint32, array.shape, number)
            if number == axis:
                wide = [1] * array.ndim
                wide[number] = -1
                begin = jax.lax.axis_index(AXIS) * array.shape[number]
                own = [jax.lax.dynamic_slice_in_dim(each, begin, array.shape[number]) for each in along_axis]
                along, counted = (each.reshape(wide) for each in own)
            index += along * jnp.uint32(stride % 2**32)
            stride *= shape[number]
        mixed = [_mixed(bits ^ _mixed(index + jnp.uint32(seed))) for seed in _SEEDS]
        found = jnp.stack([jnp.sum(counted * each, dtype=jnp.uint32) for each in mixed])
        return found if axis is None else jax.lax.psum(found, AXIS)

    if layout is None:
        return sums(array)
    every = PartitionSpec()
    if axis is None:
        return layout.run(sums, (every,), every)(array)
    return layout.run(sums, (PartitionSpec(*[None] * axis, AXIS), every, every), every)(array, place, counts)


def _mixed(x: jax.Array) -> jax.Array:
    """Mixes the bits of uint32 numbers by a one-to-one function, MurmurHash3's finalizer."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
