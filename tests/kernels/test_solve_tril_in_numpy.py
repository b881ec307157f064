"""The inverse of the Mosaic GPU kernels, run in NumPy for all threads."""

import jax.numpy as jnp
import numpy as np
import pytest
from kernels import threads_in_numpy
from kernels.threads_in_numpy import Ref, Threads, tiled, untiled

from pallas_kernels.gated_delta_rule.prefill import solve_tril_sm90

SIZE = solve_tril_sm90.SIZE


@pytest.mark.parametrize("count", [1, 2])
def test_two_systems_are_solve_triled(rng, monkeypatch, count):
    """What is not below the diagonal of a system may be anything."""
    system = np.tril(0.3 * rng.normal(size=(2, SIZE, SIZE)), -1).astype(np.float32)
    beta = rng.uniform(size=(2, SIZE)).astype(np.float32)
    below = np.where(np.tri(SIZE, k=-1), system, np.float32(np.nan))
    solution = Ref(tiled(np.full((2, count, SIZE, SIZE), np.nan, jnp.bfloat16)))
    threads = Threads()
    threads_in_numpy.install(monkeypatch, threads, threads_in_numpy.fake(threads), [solve_tril_sm90])
    solve_tril_sm90.solve_tril(Ref(tiled(below)), Ref(beta), solution)

    found = untiled(solution.array).astype(np.float64).swapaxes(-1, -2)
    wanted = np.linalg.inv(np.eye(SIZE) - system.astype(np.float64)) * beta[:, None]
    # So many pieces have a relative error of 2^-8 each.
    np.testing.assert_allclose(found.sum(axis=1), wanted, rtol=2.0 ** (-8 * count), atol=1e-5 * np.abs(wanted).max())
    assert not np.triu(found.sum(axis=1), 1).any()
