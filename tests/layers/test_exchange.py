"""Parts of a split model's sums: how they are added up and gathered, on one simulated device."""

import jax
import jax.numpy as jnp
import numpy as np
from fakes.one_device import on_one_device

from mamba_align_jax.layers.exchange import Exchange, Partial
from mamba_align_jax.layers.norm import RMSNorm
from mamba_align_jax.layers.residual import Residual, total
from mamba_align_jax.sharding import AXIS


def test_a_part_crosses_jit_with_its_axis(rng):
    part = Partial(jnp.asarray(rng.normal(size=(2, 3, 4)), jnp.float32), AXIS)
    assert jax.jit(lambda part: part)(part).axis == AXIS
    assert len(jax.tree.leaves(part)) == 1


def test_the_residual_stream_takes_parts_with_and_without_an_exchange(rng):
    x, sums = rng.normal(size=(5, 8)).astype(np.float32), rng.normal(size=(2, 5, 8)).astype(np.float32)
    norm = RMSNorm(8, 1e-6)

    def run(boxes, x, sums):
        results = []
        for exchange in (None, Exchange(boxes, jnp.int32(1))):
            stream = Residual(x, exchange=exchange).add(Partial(sums, AXIS), 0.5)
            normed, after = stream.normed(norm)
            settled = Residual(x, exchange=exchange).add(Partial(sums, AXIS), 0.5).settled()
            results.append((normed, after.value, settled, total(Partial(sums, AXIS), jnp.float32)))
        return results

    wanted = x + 0.5 * sums.sum(0)
    for normed, value, settled, summed in on_one_device(run, x, sums):
        np.testing.assert_allclose(value, wanted, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(settled, wanted, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(summed, sums.sum(0), rtol=1e-6, atol=1e-6)
        scale = np.sqrt((wanted * wanted).mean(axis=1, keepdims=True) + 1e-6)
        np.testing.assert_allclose(normed, wanted / scale, rtol=1e-5, atol=1e-6)


def test_gather_returns_what_each_device_has(rng):
    x = rng.normal(size=(5, 2)).astype(np.float32)
    found = on_one_device(lambda boxes, x: Exchange(boxes, jnp.int32(1)).gather(x), x)
    np.testing.assert_array_equal(found, x[None])
