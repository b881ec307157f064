"""add_rms_norm: the residual stream and its norm against float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from kernels.common import IMPLEMENTATIONS, assert_close, run_by
from oracles.ops import add_rms_norm as oracle

from pallas_kernels import UnsupportedError, add_rms_norm
from pallas_kernels.rms_norm.config import Config

DTYPES = [
    ("float32", "float32", None),
    ("bfloat16", "float32", None),
    ("float32", "bfloat16", "bfloat16"),
    ("float16",) * 3,
]


def draw(rng, tokens, channels, splits, dtype="float32", addend_dtype="float32"):
    x, addend = rng.normal(size=(tokens, channels)), rng.normal(size=(splits, tokens, channels))
    return jnp.asarray(x, dtype), jnp.asarray(addend, addend_dtype), jnp.asarray(rng.normal(size=channels), jnp.float32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("dtype", "addend_dtype", "out_dtype"), DTYPES)
@pytest.mark.parametrize("shape", [(1, 7, 1), (3, 64, 2), (5, 1000, 4)], ids=str)
def test_sum_and_norm_match_the_oracle(rng, shape, dtype, addend_dtype, out_dtype, implementation):
    arguments = draw(rng, *shape, dtype, addend_dtype)
    for options in (dict(epsilon=1e-6), dict(epsilon=0.1, offset=1.0, scale=0.22)):
        total, normed = add_rms_norm(*arguments, **options, out_dtype=out_dtype, run=run_by(implementation))
        assert (total.dtype, normed.dtype) == (dtype, out_dtype or dtype)
        wanted, _ = oracle(*arguments, **options)
        assert_close(total, wanted, total.dtype, shape[2], "total")
        # The total is rounded before it is normalised.
        _, wanted = oracle(total, jnp.zeros_like(arguments[1]), arguments[2], **options)
        assert_close(normed, wanted, normed.dtype, shape[1], "normed")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tokens_do_not_influence_each_other(rng, implementation):
    x, addend, weight = draw(rng, 6, 100, 2)
    results = add_rms_norm(x, addend, weight, epsilon=1e-6, run=run_by(implementation))
    others = add_rms_norm(x.at[2].set(jnp.nan), addend, weight, epsilon=1e-6, run=run_by(implementation))
    kept = np.array([0, 1, 3, 4, 5])
    for a, b in zip(results, others, strict=True):
        np.testing.assert_array_equal(np.asarray(a[kept]), np.asarray(b[kept]))
        assert np.isnan(np.asarray(b[2])).all()


def test_number_of_warps_changes_nothing(rng):
    arguments = draw(rng, 3, 300, 2)
    wanted = add_rms_norm(*arguments, epsilon=1e-6, run=run_by("interpret"))
    found = add_rms_norm(*arguments, epsilon=1e-6, run=run_by("interpret", Config(num_warps=1)))
    for a, b in zip(wanted, found, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_call_without_tokens_returns_none():
    total, normed = add_rms_norm(
        jnp.zeros((0, 8)), jnp.zeros((2, 0, 8)), jnp.ones(8), epsilon=1e-6, out_dtype="bfloat16"
    )
    assert (total.shape, normed.shape, normed.dtype) == ((0, 8), (0, 8), jnp.bfloat16)


def test_errors_name_the_bad_argument():
    x, addend, weight = jnp.zeros((2, 8)), jnp.zeros((1, 2, 8)), jnp.ones(8)
    with pytest.raises(ValueError, match=r"add_rms_norm: addend must be Float\[splits tokens channels\], got"):
        add_rms_norm(x, x, weight, epsilon=1e-6)
    with pytest.raises(ValueError, match=r"add_rms_norm: weight must be Float\[ ?channels\], got"):
        add_rms_norm(x, addend, weight[:7], epsilon=1e-6)
    with pytest.raises(ValueError, match="add_rms_norm: addend must have at least one partial sum, got none"):
        add_rms_norm(x, addend[:0], weight, epsilon=1e-6)
    wide = jnp.zeros((1, 40000))
    with pytest.raises(UnsupportedError, match="x must have at most 32768 channels, got 40000"):
        add_rms_norm(wide, wide[None], wide[0], epsilon=1e-6, run=run_by("triton"))
