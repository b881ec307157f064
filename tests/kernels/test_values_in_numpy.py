"""Values and outputs that threads transpose in the delta rule's prefill on Hopper GPUs, run in NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from kernels import threads_in_numpy
from kernels.threads_in_numpy import Ref, Threads, held_tile, tiled, untiled

from pallas_kernels.gated_delta_rule.prefill import head_sm90


@pytest.fixture(autouse=True)
def in_numpy(monkeypatch):
    threads = Threads()
    threads_in_numpy.install(monkeypatch, threads, threads_in_numpy.fake(threads), [head_sm90])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_values_are_transposed(rng, dtype):
    values = rng.normal(size=(64, 64)).astype(dtype)
    found, wanted = head_sm90.load_values(Ref(tiled(values))), held_tile(values.T)
    for x, y in zip(found.registers, wanted.registers, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_outputs_are_transposed(rng, dtype):
    outputs, pieces = rng.normal(size=(64, 64)).astype(dtype), tiled(np.zeros((64, 64), dtype))
    head_sm90.store_values(Ref(pieces), held_tile(outputs))
    np.testing.assert_array_equal(untiled(pieces), outputs.T)
