"""What the kernel tests share: packed rows, dirty pools, tolerances, and how each implementation is run."""

import jax.numpy as jnp
import numpy as np
import pytest

# "triton" compiles and needs a GPU; "interpret" runs the same body as plain JAX anywhere.
IMPLEMENTATIONS = ["xla", "interpret", pytest.param("triton", marks=pytest.mark.gpu)]


# (window, implementation): a window of one is a kernel of its own, but the same XLA program as a wider one.
WINDOWS = [
    *((4, implementation) for implementation in ("xla", "interpret")),
    *(pytest.param(window, "triton", marks=pytest.mark.gpu) for window in (1, 4)),
]


def how(implementation):
    if implementation == "interpret":
        return dict(implementation="triton", interpret=True)
    return dict(implementation=implementation)


def pack(lengths, padding_rows=0):
    ends = np.cumsum([0, *lengths])
    return jnp.asarray(np.concatenate([ends, np.full(padding_rows, ends[-1])]), jnp.int32)


def dirty_pool(rng, shape, dtype, clean=()):
    """A pool of NaN whose blocks `clean` hold values: what a recycled pool may look like."""
    pool = np.full(shape, np.nan, np.float32)
    for block in clean:
        pool[:, block] = rng.normal(size=pool[:, block].shape)
    return jnp.asarray(pool).astype(dtype)


def tolerance(dtype, terms):
    """Error of a sum of `terms` products of unit-scale numbers, rounded to `dtype` at the end.

    Rounding errors of a sum add like a random walk; 8 covers the largest of some thousand samples and the few roundings
    on the way to it.
    """
    accumulated = 8 * float(jnp.finfo(jnp.float32).eps) * np.sqrt(terms)
    return accumulated + float(jnp.finfo(dtype).eps)


def assert_close(actual, wanted, dtype, terms, what):
    actual = np.asarray(actual, np.float64)
    limit = tolerance(dtype, terms) * max(1.0, float(np.abs(wanted).max(initial=0.0)))
    assert np.isfinite(actual).all(), f"{what}: not finite"
    error = np.abs(actual - wanted)
    assert error.max(initial=0.0) <= limit, (
        f"{what}: {error.max()} > {limit} at {np.argwhere(error > limit)[:4].tolist()}"
    )


def assert_untouched(before, after, written):
    """Every block but `written` holds the same bits."""
    before, after = (np.asarray(x).view(np.uint8) for x in (before, after))
    kept = [block for block in range(before.shape[1]) if block not in set(written)]
    np.testing.assert_array_equal(before[:, kept], after[:, kept])
