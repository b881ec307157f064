"""linear and linear_sums: products of few and of many tokens against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.common import IMPLEMENTATIONS, assert_close, run_by
from kernels.lowered_cases import on
from oracles.ops import linear as oracle

from pallas_kernels import linear, linear_sums
from pallas_kernels.linear.config import MAX_TOKENS, Config, default_config

# Sizes that fill no tile, a product with few outputs, and one whose inputs do not divide among the splits.
SHAPES = [(1, 40, 50), (5, 100, 200), (16, 256, 64), (17, 272, 90), (MAX_TOKENS, 96, 48), (70, 64, 34)]
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


def draw(rng, dtype, tokens, inputs, outputs):
    """Inputs, weights and bias. A result has about the scale 1."""
    weight = rng.normal(size=(outputs, inputs)) * inputs**-0.5
    return [jnp.asarray(x, dtype) for x in (rng.normal(size=(tokens, inputs)), weight, rng.normal(size=outputs))]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_match_the_oracle(rng, shape, is_gated, dtype, implementation):
    x, weight, bias = draw(rng, dtype, *shape)
    width = shape[2] // (1 + is_gated)
    parts = (width - 12, 5, 7)
    for added in (None, bias):
        out = linear(x, weight, added, is_gated=is_gated, parts=parts, run=run_by(implementation))
        assert [(y.shape, y.dtype) for y in out] == [((shape[0], size), dtype) for size in parts]
        wanted = oracle(x, weight, added, is_gated)
        # XLA rounds the products of many tokens before it adds the bias and gates them.
        roundings = 4 if implementation == "xla" and shape[0] > MAX_TOKENS else 1
        assert_close(np.concatenate(out, axis=1) / roundings, wanted / roundings, dtype, shape[1], "product")
    (out,) = linear(x, weight, is_gated=is_gated, out_dtype="float32", run=run_by(implementation))
    assert out.dtype == jnp.float32
    assert_close(out, oracle(x, weight, None, is_gated), jnp.float32, shape[1], "float32")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_total_of_the_sums_is_the_product(rng, shape, dtype, implementation):
    x, weight, _ = draw(rng, dtype, *shape)
    for splits in (1, 2, 8):  # of which the last ones may have no inputs
        config = None if implementation == "xla" else Config(16, 16, 32, splits, 4, 2)
        sums = linear_sums(x, weight, run=run_by(implementation, config))
        assert sums.dtype == (dtype if implementation == "xla" and shape[0] > MAX_TOKENS else jnp.float32)
        assert sums.shape[1:] == (shape[0], shape[2])
        assert implementation == "xla" or sums.shape[0] == splits
        total = np.asarray(sums.astype(jnp.float32), np.float64).sum(axis=0)
        assert_close(total, oracle(x, weight), sums.dtype, shape[1], "sums")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("tokens", [3, MAX_TOKENS + 1])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrower_inputs_of_float32_weights_are_multiplied_in_float32(rng, dtype, tokens, implementation):
    """The compiled kernel may add in another order than with inputs in float32. Otherwise the bits are the same."""
    x, weight, bias = draw(rng, jnp.float32, tokens, 96, 64)
    x = x.astype(dtype)
    for op, operands in ((linear, (weight, bias)), (linear_sums, (weight,))):
        found, wanted = (
            jax.tree.leaves(op(y, *operands, run=run_by(implementation)))[0] for y in (x, x.astype(jnp.float32))
        )
        assert found.dtype == jnp.float32
        if implementation != "triton":
            np.testing.assert_array_equal(found, wanted)
        total = found if op is linear else np.asarray(found, np.float64).sum(axis=0)
        assert_close(total, oracle(x, *operands), jnp.float32, 96, op.__name__)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_tokens_do_not_influence_each_other(rng, dtype, implementation):
    x, weight, bias = draw(rng, dtype, 20, 96, 64)
    (out,) = linear(x, weight, bias, run=run_by(implementation))
    (other,) = linear(x.at[3].set(jnp.nan).at[7].set(5), weight, bias, run=run_by(implementation))
    kept = np.delete(np.arange(20), [3, 7])
    np.testing.assert_array_equal(np.asarray(out[kept]), np.asarray(other[kept]))
    assert np.isnan(np.asarray(other[3], np.float32)).all()


def test_every_configuration_computes_the_same(rng):
    x, weight, bias = draw(rng, jnp.float32, 20, 100, 90)
    wanted = oracle(x, weight, bias)
    for config in (Config(16, 16, 16, 1, 2, 1), Config(32, 32, 64, 2, 4, 3), Config(64, 128, 128, 4, 8, 2)):
        out = linear(x, weight, bias, parts=(60, 30), run=run_by("interpret", config))
        assert_close(np.concatenate(out, axis=1), wanted, jnp.float32, 100, str(config))


@pytest.mark.parametrize("implementation", ["interpret", pytest.param("triton", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [64, 100, 600])
def test_configurations_of_a_single_token_match_the_oracle(rng, inputs, dtype, implementation):
    """Full tiles, tiles that are not full, and splits of which the last have no inputs."""
    x, weight, bias = draw(rng, dtype, 1, inputs, 90)
    for outputs, block, splits, warps in ((1, 64, 1, 1), (2, 32, 2, 1), (4, 256, 4, 1), (16, 128, 1, 2)):
        config = Config(1, outputs, block, splits, warps, 1)
        for is_gated in (False, True):
            out = linear(
                x,
                weight,
                bias,
                is_gated=is_gated,
                parts=(40, 5 if is_gated else 50),
                run=run_by(implementation, config),
            )
            assert_close(np.concatenate(out, axis=1), oracle(x, weight, bias, is_gated), dtype, inputs, str(config))
        sums = linear_sums(x, weight, run=run_by(implementation, config))
        assert (sums.shape, sums.dtype) == ((splits, 1, 90), jnp.float32)
        assert_close(np.asarray(sums, np.float64).sum(axis=0), oracle(x, weight), jnp.float32, inputs, str(config))


def test_a_single_token_has_a_tile_of_its_own_if_registers_hold_the_weights_of_an_output():
    def tokens(inputs, outputs, **options):
        x, weight = (jax.ShapeDtypeStruct((rows, inputs), jnp.bfloat16) for rows in (1, outputs))
        return default_config(x, weight, **options).tokens

    assert tokens(2560, 12352) == tokens(2560, 18432, is_gated=True) == tokens(10240, 12352) == 1
    assert tokens(10248, 12352) == tokens(5128, 18432, is_gated=True) == 16
    # Those that are summed, and those with few outputs or very many, are as they are for more tokens.
    assert tokens(2560, 12352, is_summed=True) == tokens(2560, 4224) == tokens(2560, 248320) == 16


def test_a_call_without_tokens_has_results_without_tokens():
    x, weight = jnp.zeros((0, 8)), jnp.zeros((6, 8))
    assert [y.shape for y in linear(x, weight, parts=(2, 4))] == [(0, 2), (0, 4)]
    assert linear_sums(x, weight).shape == (1, 0, 6)


def test_products_of_many_tokens_run_as_xla_code_by_default():
    """Shapes do not depend on the platform, so that a program can be lowered for any."""
    weight = jnp.zeros((64, 2048), jnp.bfloat16)
    for tokens, splits in (
        (MAX_TOKENS, default_config(jnp.zeros((MAX_TOKENS, 2048), jnp.bfloat16), weight, is_summed=True).shares),
        (65, 1),
    ):
        x = jnp.zeros((tokens, 2048), jnp.bfloat16)
        assert linear_sums(x, weight).shape[0] == splits
        for op in (linear, linear_sums):
            with on("NVIDIA H200"):
                text = jax.jit(op).trace(x, weight).lower(lowering_platforms=("cuda",)).as_text()
            assert ("__gpu$xla.gpu.triton" in text) == (tokens <= MAX_TOKENS)


@pytest.mark.gpu
def test_compiled_kernels_of_a_models_shapes_match_float64(rng):
    """The default configurations of a decode step, with weights of Qwen3.5-4B's shapes."""
    for tokens in (1, 16, 24, 64):
        for inputs, outputs, is_gated in ((2560, 12352, False), (2560, 18432, True), (9216, 2560, False)):
            x, weight, _ = draw(rng, jnp.bfloat16, tokens, inputs, outputs)
            (out,) = linear(x, weight, is_gated=is_gated, run=run_by("triton"))
            wanted = oracle(x, weight, None, is_gated)
            assert_close(out.astype(jnp.float32), wanted, jnp.bfloat16, inputs, f"{tokens} x {inputs} x {outputs}")


def test_errors_name_the_bad_argument():
    x, weight = jnp.zeros((2, 8)), jnp.zeros((6, 8))
    with pytest.raises(ValueError, match=r"linear: weight must be Float\[outputs inputs\], got"):
        linear(x, weight[:, :7])
    with pytest.raises(ValueError, match="linear: weight must have x's dtype float32, got bfloat16"):
        linear(x, weight.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match="linear_sums: weight must have x's dtype float32, got bfloat16"):
        linear_sums(x, weight.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match="linear: weight must have x's dtype bfloat16 or float32, got float16"):
        linear(x.astype(jnp.bfloat16), weight.astype(jnp.float16))
    with pytest.raises(ValueError, match=r"linear: bias must be Float\[ ?outputs\] or|linear: bias must be"):
        linear(x, weight, jnp.zeros(5))
    with pytest.raises(ValueError, match=r"linear: parts must be positive integers whose sum is 6, got \(2, 3\)"):
        linear(x, weight, parts=(2, 3))
    with pytest.raises(ValueError, match=r"linear: parts must be positive integers whose sum is 3, got \(6,\)"):
        linear(x, weight, is_gated=True, parts=(6,))
    with pytest.raises(ValueError, match="linear: gated weights must have an even number of rows, got 5"):
        linear(x, weight[:5], is_gated=True)
