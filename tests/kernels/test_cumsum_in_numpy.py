"""The sums of log decays of the Mosaic GPU kernels, run in NumPy for all threads."""

from types import SimpleNamespace

import numpy as np
import pytest
from kernels import threads_in_numpy
from kernels.threads_in_numpy import Ref, Threads

from pallas_kernels.gated_delta_rule.prefill import cumsum_sm90
from pallas_kernels.gated_delta_rule.prefill.cumsum_sm90 import SIZE, Factors
from pallas_kernels.hopper import control


@pytest.mark.parametrize("warpgroup", [0, 1, 2])
def test_threads_are_counted_within_their_warpgroup(monkeypatch, warpgroup):
    """Code of single threads may run in any of a program's warpgroups, here and in all other Mosaic GPU kernels."""
    threads = np.arange(128)
    monkeypatch.setattr(control, "mosaic", SimpleNamespace(thread_idx=lambda: 128 * warpgroup + threads))
    monkeypatch.setattr(control, "Register", np.asarray)
    np.testing.assert_array_equal(control.thread_index(), threads)


@pytest.mark.parametrize("count", [1, 31, 33, 64])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_sums_of_log_decays_are_those_of_float64(rng, monkeypatch, scale, count):
    """Differences of sums lose no digits, even if one token's decay is much smaller than that of all the others."""
    start, heads, size = 3, (4, 1), (3 + count, 5)
    g, beta = (-0.1 * np.abs(rng.normal(size=size))).astype(np.float32), rng.uniform(size=size).astype(np.float32)
    g[start + count // 2] *= scale
    empty = lambda *shape: Ref(np.full(shape, np.nan, np.float32))
    per_row, per_column, scales = empty(2, len(Factors()), SIZE), empty(2, 2, SIZE), empty(2, 4, SIZE)
    threads, norms = Threads(), Ref(rng.uniform(1, 2, size=(2, SIZE)).astype(np.float32))
    threads_in_numpy.install(monkeypatch, threads, threads_in_numpy.fake(threads), [cumsum_sm90])
    gates = cumsum_sm90.load_gates(Ref(g), Ref(beta), start, count, heads)
    cumsum_sm90.sum_log_decays(*gates, per_row, per_column, empty(3, 4))
    cumsum_sm90.scale_tokens(per_row, norms, scales)

    np.testing.assert_array_equal(per_column.array, per_row.array[:, :2])
    for half, head in enumerate(heads):
        padded = lambda x, head=head: np.concatenate([x[start:, head], np.zeros(SIZE - count)])
        found = Factors(*per_row.array[half].astype(np.float64))
        np.testing.assert_array_equal(found.beta, padded(beta))
        exact = np.cumsum(padded(g))
        log2 = np.log2(np.e)
        np.testing.assert_allclose(found.before, log2 * exact, rtol=1e-6)
        np.testing.assert_allclose(found.after, log2 * (exact[-1] - exact), rtol=1e-6)
        np.testing.assert_allclose(found.total, np.full(SIZE, log2 * exact[-1]), rtol=1e-6)
        of_key, of_query = norms.array.astype(np.float64)
        before, after, total = np.exp(exact), np.exp(exact[-1] - exact), np.full(SIZE, np.exp(exact[-1]))
        wanted = -before * of_key, before * of_query, after * of_key, total
        # The exponents have a relative error of 1e-6.
        np.testing.assert_allclose(scales.array[half], wanted, rtol=1e-6 * (1 + np.abs(exact[-1])), atol=1e-37)
        apart = found.coarse[:, None] - found.coarse, found.fine[:, None] - found.fine
        wanted, is_later = exact[:, None] - exact, np.tri(SIZE, k=-1, dtype=bool)
        np.testing.assert_allclose(
            (log2 * apart[0] + apart[1])[is_later], log2 * wanted[is_later], rtol=1e-6, atol=1e-12
        )
