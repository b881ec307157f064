"""Helpers of the kernel tests: packed rows, dirty pools, tolerances, and the options that run each implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Run

# "triton" compiles the kernel and needs a GPU. "interpret" runs the same kernel body as plain JAX anywhere.
IMPLEMENTATIONS = ["xla", "interpret", pytest.param("triton", marks=pytest.mark.gpu)]


# Mosaic GPU kernels cannot be interpreted: their products take operands from registers, or tokens that start anywhere.
MOSAIC_GPU = pytest.param("mosaic_gpu", marks=pytest.mark.gpu)


def skip_if_unavailable(implementation):
    """Skips a test of Mosaic GPU with a GPU or a JAX for which its kernels are not made."""
    if implementation == "mosaic_gpu":
        capability = getattr(jax.devices()[0], "compute_capability", None)
        if capability != "9.0" or jax.__version_info__ < (0, 11, 2):
            pytest.skip(f"compute capability {capability}, JAX {jax.__version__}")


# Pairs (window, implementation). A window of one has its own Triton kernel, but shares its XLA program with wider ones.
WINDOWS = [
    *((4, implementation) for implementation in ("xla", "interpret")),
    *(pytest.param(window, "triton", marks=pytest.mark.gpu) for window in (1, 4)),
]


def how(implementation):
    """Returns the op's options that run an entry of `IMPLEMENTATIONS`."""
    skip_if_unavailable(implementation)
    if implementation == "interpret":
        return dict(implementation="triton", interpret=True)
    return dict(implementation=implementation)


def run_by(implementation, config=None):
    """Returns how an op runs by an entry of `IMPLEMENTATIONS`."""
    return Run(config=config, **how(implementation))


def pack(lengths, padding_rows=0):
    """Returns query_start_loc, int32 [rows + padding_rows + 1], of rows of these lengths."""
    ends = np.cumsum([0, *lengths])
    return jnp.asarray(np.concatenate([ends, np.full(padding_rows, ends[-1])]), jnp.int32)


def mixed_rows(window):
    """Returns lengths, read blocks and write blocks of a mixed batch.

    It has verify rows, an empty row, a fresh row, rows whose read block is the first or last block that they write,
    skipped writes, and padding rows.
    """
    lengths = [1, window, 0, 1, min(2, window), window]
    read = [3, 4, 5, 0, 4, 5]
    write = np.zeros((8, window), np.int32)
    write[:6, 0] = [3, 6, 7, 8, 0, 9]
    write[1, 1:], write[5, 1:] = range(10, 10 + window - 1), range(13, 13 + window - 1)
    write[5, -1] = 5
    write[6:] = 20
    return lengths, read, write


def dirty_pool(rng, shape, dtype, clean=()):
    """Makes a pool that is NaN except for the blocks in `clean`, as the memory of a recycled pool may be."""
    pool = np.full(shape, np.nan, np.float32)
    for block in clean:
        pool[:, block] = rng.normal(size=pool[:, block].shape)
    return jnp.asarray(pool).astype(dtype)


def tolerance(dtype, terms):
    """Bounds the error of a sum of `terms` products of unit-scale numbers that is rounded to `dtype` at the end.

    The rounding errors of a sum add up like a random walk. The factor 8 covers the largest of some thousand samples,
    and the few roundings before the sum.
    """
    accumulated = 8 * float(jnp.finfo(jnp.float32).eps) * np.sqrt(terms)
    return accumulated + float(jnp.finfo(dtype).eps)


def assert_close(actual, wanted, dtype, terms, what):
    """Fails unless `actual` is finite and within the tolerance of `wanted`, in units of its largest value."""
    actual = np.asarray(actual, np.float64)
    limit = tolerance(dtype, terms) * max(1.0, float(np.abs(wanted).max(initial=0.0)))
    assert np.isfinite(actual).all(), f"{what}: not finite"
    error = np.abs(actual - wanted)
    assert error.max(initial=0.0) <= limit, (
        f"{what}: {error.max()} > {limit} at {np.argwhere(error > limit)[:4].tolist()}"
    )


def assert_untouched(before, after, written):
    """Fails unless every block except those in `written` holds the same bits before and after."""
    before, after = (np.asarray(x).view(np.uint8) for x in (before, after))
    kept = [block for block in range(before.shape[1]) if block not in set(written)]
    np.testing.assert_array_equal(before[:, kept], after[:, kept])
