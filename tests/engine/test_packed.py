"""A tree of arrays comes back from one array with the same bits, on the host and on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_align_jax.engine.device.packed import pack


def tree(xp):
    floats = xp.asarray(np.array([1.5, -0.0, np.inf, 1e-45, np.nan], np.float32))
    ints, none = xp.asarray(np.array([[1, -1, 2**31 - 1], [-(2**31), 0, 7]], np.int32)), None
    return {"floats": floats, "more": (ints, none, xp.asarray(np.array([True, False, True])), xp.asarray(np.int32(9)))}


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_host_packs_and_the_device_unpacks():
    packed = pack(tree(np))
    assert isinstance(packed.words, np.ndarray)
    assert (packed.words.dtype, packed.words.shape) == (np.int32, (5 + 6 + 3 + 1,))
    same(jax.jit(lambda packed: packed.unpack())(packed), tree(np))


def test_device_packs_and_the_host_unpacks():
    same(jax.device_get(jax.jit(lambda: pack(tree(jnp)))()).unpack(), tree(np))


def test_equal_trees_share_a_program():
    count = 0

    @jax.jit
    def run(packed):
        nonlocal count
        count += 1
        return packed.unpack()

    for _ in range(2):
        run(pack(tree(np)))
    assert count == 1
    run(pack(tree(np) | {"floats": np.zeros(4, np.float32)}))
    assert count == 2


def test_other_dtypes_raise():
    with pytest.raises(ValueError, match="pack: leaves must be int32, float32 or bool, got int64"):
        pack({"a": np.zeros(3, np.int64)})
