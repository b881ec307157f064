"""least_kept: what `top_k` and `top_p` keep against the definitions and against sorting."""

import functools

import depth
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.common import IMPLEMENTATIONS, run_by

from pallas_kernels import least_kept
from pallas_kernels.least_kept.config import Config, default_config


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=depth.examples(60, 600), deadline=None)
@given(data=st.data())
def test_what_is_kept_follows_the_definitions(data, implementation):
    """Sums of these weights are exact, so that ties at either limit are decided as the definitions say."""
    numbers = st.sampled_from([0, 1, 2, 3, 5, 500, 501, 512])
    weights = np.array([*data.draw(st.lists(numbers, min_size=1, max_size=9)), 512], np.float64) / 512
    top_k, top_p = data.draw(st.integers(0, 12)), data.draw(st.integers(1, 64)) / 64
    given = np.zeros((2, 10), np.float32)  # The other row and the padding, which weighs nothing, change nothing.
    given[0, : len(weights)], given[1] = weights, data.draw(numbers)
    options = jnp.array([top_k, 1], jnp.int32), jnp.array([top_p, 1], jnp.float32)
    least = float(least_kept(jnp.asarray(given), *options, run=run_by(implementation))[0])
    left = np.array([own for own in weights if not top_k or (weights > own).sum() < top_k])
    for own in weights[weights > 0]:
        kept = own in left and (top_p == 1 or left[left > own].sum() < top_p * left.sum())
        assert (own >= least) == kept, (own, least)


def draw(rng, rows, tokens, scale):
    """Returns weights of a vocabulary, `top_k` and `top_p`, float32, int32 and float32."""
    logits = rng.normal(0, 1, (rows, tokens)) * scale
    weights = np.exp(np.float32(logits - logits.max(axis=1, keepdims=True))).astype(np.float32)
    top_k = np.resize(np.array([1, 50, 0, 0, 3000, 0], np.int32), rows)
    top_p = np.resize(np.array([1, 0.9, 0.5, 0.95, 1, 1], np.float32), rows)
    return weights, top_k, top_p


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("scale", "rows"), [(1e-30, 6), (0.01, 6), (1.0, 6), (30.0, 6), (1e30, 6), (3.0, 12)])
def test_large_vocabularies_are_cut_as_sorting_cuts_them(rng, scale, rows, implementation):
    """Weights from 1 to the smallest floats; no sum is near its limit. Few rows and many have kernels of their own."""
    weights, top_k, top_p = draw(rng, rows, 50_000, scale)
    found = np.asarray(least_kept(*map(jnp.asarray, (weights, top_k, top_p)), run=run_by(implementation)))
    for row, k, p, least in zip(weights.astype(np.float64), top_k, top_p, found, strict=True):
        left = np.sort(row)[::-1][: k or len(row)]
        before = np.cumsum(left) - left
        wanted = left[-1] if p == 1 else left[before < p * left.sum()][-1]
        # Sums of float32 decide between neighbours, whose weights differ by less than this.
        assert (row >= least).sum() == pytest.approx((row >= wanted).sum(), rel=1e-3)
        assert row.max() >= least


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("tokens", [1, 7, 1024, 1025, 5000])
def test_any_number_of_tokens_is_searched_to_its_last_one(rng, tokens, implementation):
    """The k-th weight is found exactly, and its token stands last, where a chunk may be all but empty."""
    weights = rng.permutation(np.linspace(0.25, 1, tokens).astype(np.float32))
    for top_k in {1, (tokens + 1) // 2, tokens}:
        wanted = np.sort(weights)[::-1][top_k - 1]
        weights[[-1, np.argmax(weights == wanted)]] = weights[[np.argmax(weights == wanted), -1]]
        arguments = jnp.asarray(weights[None]), jnp.array([top_k], jnp.int32), jnp.ones(1, jnp.float32)
        assert float(least_kept(*arguments, run=run_by(implementation))[0]) == wanted


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_do_not_influence_each_other(rng, implementation):
    weights, top_k, top_p = map(jnp.asarray, draw(rng, 4, 3000, 2.0))
    wanted = np.asarray(least_kept(weights, top_k, top_p, run=run_by(implementation)))
    others = least_kept(weights.at[1].set(jnp.nan), top_k, top_p.at[1].set(jnp.nan), run=run_by(implementation))
    np.testing.assert_array_equal(np.delete(wanted, 1), np.delete(np.asarray(others), 1))


@pytest.mark.parametrize("config", [Config(1, 64, 64, 1), Config(3, 4096, 256, 4), Config(6, 1024, 32, 2)], ids=str)
def test_no_configuration_changes_what_is_kept(rng, config):
    """The limits lie half a weight away from every sum, and the weights are a power of two."""
    weights = jnp.asarray(2.0 ** -rng.integers(0, 12, (3, 700)), jnp.float32)
    arguments = weights, jnp.array([0, 40, 5], jnp.int32), jnp.array([0.61, 1.0, 0.33], jnp.float32)
    wanted = least_kept(*arguments, run=run_by("xla"))
    found = least_kept(*arguments, run=run_by("interpret", config))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))


def test_default_configurations_fill_a_gpu_and_are_valid():
    for rows in (1, 2, 8, 9, 64, 256):
        for tokens in (1, 1000, 32_000, 248_320):
            config = default_config(rows, tokens)
            chunks = rows * -(-tokens // config.chunk)
            assert chunks >= 132 or config.chunk == 1024, (rows, tokens, config)


def test_xla_code_neither_sorts_nor_loops():
    arguments = (
        jax.ShapeDtypeStruct((4, 1000), jnp.float32),
        *(jax.ShapeDtypeStruct((4,), dtype) for dtype in ("int32", "float32")),
    )
    program = str(jax.make_jaxpr(functools.partial(least_kept, run=run_by("xla")))(*arguments))
    assert "reduce" in program
    for name in ("sort", "top_k", "while", "scan", "cond"):
        assert f" {name}[" not in program


def test_a_call_without_rows_returns_none():
    found = least_kept(jnp.zeros((0, 8)), jnp.zeros(0, jnp.int32), jnp.zeros(0))
    assert (found.shape, found.dtype) == ((0,), jnp.float32)


def test_errors_name_the_bad_argument():
    weights, top_k, top_p = jnp.ones((2, 8)), jnp.zeros(2, jnp.int32), jnp.ones(2)
    with pytest.raises(
        ValueError, match=r"least_kept: weights must be Float32\[rows tokens\], got jax bfloat16\[2, 8\]"
    ):
        least_kept(weights.astype(jnp.bfloat16), top_k, top_p)
    with pytest.raises(ValueError, match=r"least_kept: top_k must be Int32\[ ?rows\], got"):
        least_kept(weights, top_k[:1], top_p)
    with pytest.raises(ValueError, match=r"least_kept: top_p must be Float32\[ ?rows\], got"):
        least_kept(weights, top_k, top_k)
    with pytest.raises(ValueError, match="least_kept: weights must have at least one token, got none"):
        least_kept(weights[:, :0], top_k, top_p)
    with pytest.raises(ValueError, match=r"least_kept: config.bits must divide 30, got 4"):
        Config(bits=4, chunk=1024, lanes=128, num_warps=4)
    with pytest.raises(ValueError, match=r"least_kept: config.lanes must divide config.chunk = 1024, got 96"):
        Config(bits=3, chunk=1024, lanes=96, num_warps=4)
