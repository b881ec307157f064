"""Names a model and how an engine keeps its states, so that states move only between engines of equal models."""

import functools
import hashlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mamba_align_jax.engine.config import EngineConfig
from mamba_align_jax.engine.pool_entries import Forms
from mamba_align_jax.sharding import AXIS, Layout, columns

# The two sums mix differently, so that two changes don't cancel in both.
_SEEDS = (0x9E3779B9, 0x7F4A7C15)


def identity(config: EngineConfig, model_config: object, weights: bytes, pages: Forms, states: Forms) -> bytes:
    """Returns the name of a model and of the bytes that an engine keeps for it: 32 bytes.

    Args:
        config: The engine's configuration, of which the sizes of pages and blocks count.
        model_config: The model's configuration. Its `repr` must say all of it, as that of a dataclass does.
        weights: What `weights_digest` returned.
        pages: The forms of the arrays of pages.
        states: The forms of the arrays of state blocks, which depend on the largest number of drafts.
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
    ordered = layout.ordered_params if layout else (None,) * len(params)
    sums = []
    for array, order in zip(params, ordered, strict=True):
        axis, shape, place, counts = None, array.shape, np.uint32(0), np.uint32(1)
        if layout is not None and order is not None:
            axis, parts = order
            place = columns(parts, layout.mesh.shape[AXIS]).astype(np.uint32)
            shape = (*shape[:axis], sum(part.heads * part.dim for part in parts), *shape[axis + 1 :])
            # An element that is repeated counts once.
            counts = np.zeros(place.shape, np.uint32)
            counts[np.unique(place, return_index=True)[1]] = 1
        sums.append((shape, array.dtype.name, _sums(array, place, counts, axis, shape)))
    digest = hashlib.sha256()
    for shape, dtype, two in sums:
        digest.update(repr((shape, dtype)).encode() + np.asarray(two).tobytes())
    return digest.digest()


@functools.partial(jax.jit, static_argnames=("axis", "shape"))
def _sums(array: jax.Array, place: jax.Array, counts: jax.Array, axis: int | None, shape: tuple[int, ...]) -> jax.Array:
    """Returns the two sums of one parameter, uint32 [2].

    Args:
        array: The parameter.
        place: For each element along `axis` its place on one device. uint32
        counts: 1 for each element along `axis` that counts, 0 for repeated ones. uint32
        axis: The axis that is in another order; None if there is none.
        shape: The parameter's shape on one device.
    """
    bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}")).astype(jnp.uint32)
    index, stride = jnp.zeros(array.shape, jnp.uint32), 1
    for number in reversed(range(array.ndim)):
        along = jax.lax.broadcasted_iota(jnp.uint32, array.shape, number)
        if number == axis:
            wide = [1] * array.ndim
            wide[number] = -1
            along = jnp.broadcast_to(place.reshape(wide), array.shape)
            counts = counts.reshape(wide)
        index += along * jnp.uint32(stride % 2**32)
        stride *= shape[number]
    return jnp.stack(
        [jnp.sum(counts * _mixed(bits ^ _mixed(index + jnp.uint32(seed))), dtype=jnp.uint32) for seed in _SEEDS]
    )


def _mixed(x: jax.Array) -> jax.Array:
    """Mixes the bits of uint32 numbers by a one-to-one function, MurmurHash3's finalizer."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
