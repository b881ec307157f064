"""Products of a quantised weight have the bits of products of the array that it means, at every number of tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import chains, mixtures
from kernels.lowered_cases import array, lower

from pallas_kernels import (
    Routing,
    Run,
    UnsupportedError,
    linear,
    linear_sums,
    mixture_of_experts,
    mixture_of_experts_sums,
    product_chain,
    quantize,
    routed_experts_sums,
)
from pallas_kernels.linear.config import MAX_TOKENS
from pallas_kernels.product_chain import Experts, Product
from pallas_kernels.quantized import QuantizedWeight, concatenate, quantize_activations

DTYPES = ["float32", "bfloat16"]
XLA = Run(implementation="xla")  # a kernel for arrays may add in another order


def joint(rng, dtype, inputs=200):
    """A weight of parts with blocks, with a scale per channel, with one scale, and without scales."""
    draw = lambda outputs: jnp.asarray(rng.normal(size=(outputs, inputs)) * inputs**-0.5, dtype)
    blocks = (16, 24), (1, inputs), (34, inputs)
    return concatenate([*(quantize(draw(34), block) for block in blocks), draw(6)])


def assert_same(quantised, plain):
    for ours, theirs in zip(jax.tree.leaves(quantised), jax.tree.leaves(plain), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 5, MAX_TOKENS + 1])
def test_dense_products_are_those_of_the_array(rng, dtype, tokens):
    weight = joint(rng, dtype)
    x, bias = (jnp.asarray(rng.normal(size=size), dtype) for size in ((tokens, 200), (108,)))
    plain = weight.dequantize()
    assert_same(linear(x, weight, bias, parts=(34, 74), run=XLA), linear(x, plain, bias, parts=(34, 74), run=XLA))
    assert_same(linear(x, weight, is_gated=True, run=XLA), linear(x, plain, is_gated=True, run=XLA))
    assert_same(linear(x, weight, out_dtype="float32", run=XLA), linear(x, plain, out_dtype="float32", run=XLA))
    # The number of splits is that of a configuration. XLA puts the whole product into the first one.
    assert_same(linear_sums(x, weight, run=XLA)[0], linear_sums(x, plain, run=XLA)[0])


@pytest.mark.parametrize(("dtype", "tokens"), [("float32", 1), ("bfloat16", 7)])
def test_experts_are_those_of_the_arrays(rng, dtype, tokens):
    plain, routing = mixtures.make(rng, 5, jnp.dtype(dtype)), Routing(top_k=2)
    quantised = [quantize(weight, (16, 24)) for weight in (plain.up, plain.down)]
    arrays = [weight.dequantize() for weight in quantised]
    x = mixtures.draw_tokens(rng, tokens, dtype)
    logits = jnp.asarray(rng.normal(size=(tokens, 5)), jnp.float32)
    chosen = jnp.asarray(rng.integers(-1, 5, (tokens, 2)), jnp.int32)
    weights = jnp.asarray(rng.random((tokens, 2)), jnp.float32)
    for op, others in ((mixture_of_experts, (chosen, weights)), (mixture_of_experts_sums, (chosen, weights))):
        assert_same(op(x, *quantised, *others, run=XLA), op(x, *arrays, *others, run=XLA))
    assert_same(routed_experts_sums(x, logits, *quantised, routing), routed_experts_sums(x, logits, *arrays, routing))


@pytest.mark.parametrize("tokens", [1, 5, MAX_TOKENS + 1])
def test_inputs_are_rounded_to_fp8_at_every_number_of_tokens(rng, tokens):
    """Those of quantised parts alone. Without the rounding of the inputs, results would differ by percents."""
    weight = dataclasses.replace(joint(rng, "float32"), activation_dtype="fp8")
    x = jnp.asarray(rng.normal(size=(tokens, 200)), jnp.float32)
    rounded = np.asarray(quantize_activations(x).dequantize("float32"), np.float64)
    whole = np.asarray(weight.dequantize(), np.float64)
    wanted = np.concatenate([rounded @ whole[:102].T, np.asarray(x, np.float64) @ whole[102:].T], axis=1)
    for found in (linear(x, weight)[0], linear_sums(x, weight)[0]):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=200 * 2.0**-24 * np.abs(wanted).max())


def test_inputs_of_experts_are_rounded_to_fp8(rng):
    plain = mixtures.make(rng, 2)
    up, down = (
        dataclasses.replace(quantize(each, (16, 24)), activation_dtype="fp8") for each in (plain.up, plain.down)
    )
    x = mixtures.draw_tokens(rng, 1)
    found = mixture_of_experts(x, up, down, jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1)))
    rounded = lambda y: np.asarray(quantize_activations(jnp.asarray(y, jnp.float32)).dequantize("float32"), np.float64)
    gate, other = np.split(rounded(x) @ np.asarray(up[0].dequantize(), np.float64).T, 2, axis=1)
    middle = rounded(gate / (1 + np.exp(-gate)) * other)
    np.testing.assert_allclose(found, middle @ np.asarray(down[0].dequantize(), np.float64).T, rtol=0, atol=1e-5)


def in_fp8(step):
    """A step with quantised weights, and with the arrays that they mean."""
    fields = {Product: ("weight",), Experts: ("up", "down")}.get(type(step), ())
    quantised = {field: quantize(getattr(step, field), (16, 24)) for field in fields}
    arrays = {field: weight.dequantize() for field, weight in quantised.items()}
    return dataclasses.replace(step, **quantised), dataclasses.replace(step, **arrays)


@pytest.mark.parametrize(
    ("case", "tokens"), [(chains.WITH_EXPERTS[0], 1), (chains.WITH_GATED_NORM[0], 3)], ids=lambda each: str(each)[:24]
)
def test_chains_are_those_of_the_arrays(rng, case, tokens):
    x, steps, residual = chains.draw(rng, case, tokens)
    quantised, arrays = zip(*map(in_fp8, steps), strict=True)
    assert any(isinstance(leaf, QuantizedWeight) for step in quantised for leaf in vars(step).values())
    found, wanted = (product_chain(x, own, residual, parts=case.parts, run=XLA) for own in (quantised, arrays))
    assert_same(found, wanted)


# The Triton kernels, interpreted on a CPU, where they multiply in float32.
TRITON = Run(implementation="triton", interpret=True)
ON_GPU = pytest.param(Run(implementation="triton"), marks=pytest.mark.gpu, id="triton")


def for_kernels(rng, dtype, sizes, inputs=200, lead=()):
    """A weight whose parts have blocks, a scale per channel, one scale, or none, for kernels: see `_weight_tiles`."""
    draw = lambda outputs: jnp.asarray(rng.normal(size=(*lead, outputs, inputs)) * inputs**-0.5, dtype)
    blocks = (16, 32), (1, inputs), (10**6, inputs), None
    parts = [quantize(draw(size), block) if block else draw(size) for size, block in zip(sizes, blocks, strict=False)]
    return concatenate(parts)


def assert_sums(found, x, weight):
    """Whether float32 sums of products are right: their error is at most that of adding the terms in any order."""
    x, weight = np.asarray(x, np.float64), np.asarray(weight.dequantize("float32"), np.float64)
    bound = 2.0**-23 * x.shape[-1] * (np.abs(x) @ np.abs(weight).swapaxes(-1, -2))
    assert np.all(np.abs(np.asarray(found, np.float64) - x @ weight.swapaxes(-1, -2)) <= bound)


@pytest.mark.parametrize("run", [pytest.param(TRITON, id="interpret"), ON_GPU])
@pytest.mark.parametrize(
    ("tokens", "sizes"), [(3, (34, 50, 34, 6)), pytest.param(40, (130, 34), marks=pytest.mark.deep)]
)
def test_kernels_multiply_stored_values_by_their_scales(rng, run, tokens, sizes):
    weight = for_kernels(rng, "bfloat16", sizes)
    x = jnp.asarray(rng.normal(size=(tokens, 200)), "bfloat16")
    assert_sums(jnp.concatenate(linear(x, weight, parts=sizes, out_dtype="float32", run=run), axis=1), x, weight)
    assert_sums(jnp.sum(linear_sums(x, weight, run=run), axis=0), x, weight)


@pytest.mark.parametrize("run", [pytest.param(TRITON, id="interpret"), ON_GPU])
@pytest.mark.parametrize("sizes", [pytest.param((36,), marks=pytest.mark.deep), (36, 36)])
def test_kernels_multiply_the_two_halves_of_a_gated_weight(rng, run, sizes):
    size = sum(sizes) // 2
    weight = for_kernels(rng, "bfloat16", sizes)
    x = jnp.asarray(rng.normal(size=(5, 200)), "bfloat16")
    bias = jnp.asarray(rng.normal(size=2 * size), "bfloat16")
    (found,) = linear(x, weight, bias, is_gated=True, out_dtype="float32", run=run)
    both = np.asarray(x, np.float64) @ np.asarray(weight.dequantize("float32"), np.float64).T
    gate, up = np.split(both + np.asarray(bias, np.float64), 2, axis=1)
    np.testing.assert_allclose(found, gate / (1 + np.exp(-gate)) * up, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("run", [pytest.param(TRITON, id="interpret"), ON_GPU])
@pytest.mark.parametrize(
    ("tokens", "sizes"), [(1, (48,)), (7, (24, 24)), pytest.param(150, (48,), marks=pytest.mark.deep)]
)
def test_kernels_multiply_by_quantised_experts(rng, run, tokens, sizes):
    """Of 3 experts, the last one is never chosen and has a NaN: its weights must not be read."""
    up = for_kernels(rng, "bfloat16", sizes, inputs=96, lead=(3,))
    down = for_kernels(rng, "bfloat16", (96,), inputs=24, lead=(3,))
    x = jnp.asarray(rng.normal(size=(tokens, 96)), "bfloat16")
    chosen = jnp.asarray(rng.integers(-1, 2, (tokens, 2)), jnp.int32)
    weights = jnp.asarray(rng.random((tokens, 2)), jnp.float32)
    found = mixture_of_experts(x, up, down, chosen, weights, out_dtype="float32", run=run)
    wide = [np.asarray(weight.dequantize("float32"), np.float64) for weight in (up, down)]
    wanted, middle_bound = np.zeros((tokens, 96)), 0.0
    for token, choice in np.ndindex(tokens, 2):
        if (expert := int(chosen[token, choice])) < 0:
            continue
        gate, middle = np.split(wide[0][expert] @ np.asarray(x[token], np.float64), 2)
        out = wide[1][expert] @ (gate / (1 + np.exp(-gate)) * middle)
        wanted[token] += float(weights[token, choice]) * out
        middle_bound = max(middle_bound, np.abs(wide[1][expert]).sum(axis=1).max() * np.abs(gate * middle).max())
    # The activation's result and each expert's output are rounded to bfloat16.
    np.testing.assert_allclose(found, wanted, rtol=2**-7, atol=2.0**-7 * middle_bound)


def in_blocks(rng, outputs, inputs=256, others=0):
    """A weight of one part in blocks of 128 x 128, whose inputs are rounded, and perhaps of a part without scales."""
    draw = lambda outputs: jnp.asarray(rng.normal(size=(outputs, inputs)) * inputs**-0.5, "bfloat16")
    parts = [dataclasses.replace(quantize(draw(outputs)), activation_dtype="fp8"), *([draw(others)] if others else [])]
    return concatenate(parts)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "outputs", "others"), [(1, 64, 0), (130, 320, 0), (300, 192, 40)])
def test_the_tensor_cores_multiply_rounded_inputs_in_fp8(rng, tokens, outputs, others):
    """Sums of 128 products keep about 14 bits, and results are rounded to bfloat16."""
    weight = in_blocks(rng, outputs, others=others)
    x = jnp.asarray(rng.normal(size=(tokens, 256)), "bfloat16")
    wide, rounded = np.asarray(x, np.float64), np.asarray(quantize_activations(x).dequantize("float32"), np.float64)
    whole = np.asarray(weight.dequantize("float32"), np.float64)
    wanted = np.concatenate([rounded @ whole[:outputs].T, wide @ whole[outputs:].T], axis=1)
    terms = np.concatenate([np.abs(rounded) @ np.abs(whole[:outputs]).T, np.abs(wide) @ np.abs(whole[outputs:]).T], 1)
    run = Run(implementation="mosaic_gpu")
    for found in (linear(x, weight, run=run)[0], linear_sums(x, weight, run=run)[0]):
        assert np.all(np.abs(np.asarray(found, np.float64) - wanted) <= 2**-8 * np.abs(wanted) + 2**-12 * terms)


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="Mosaic GPU kernels need JAX 0.11.2")
@pytest.mark.parametrize("tokens", [1, 300])
def test_the_product_in_fp8_is_one_launch(rng, tokens):
    weight, x = in_blocks(rng, 320), array(jnp.bfloat16, tokens, 256)
    run = lambda x, weight: linear(x, weight, run=Run(implementation="mosaic_gpu"))
    assert lower("NVIDIA H200", run, x, weight, donated=()).count("@mosaic_gpu_v2(") == 1


def test_the_product_in_fp8_refuses_other_weights(rng):
    run = Run(implementation="mosaic_gpu")
    with pytest.raises(UnsupportedError):
        linear(jnp.ones((2, 200), jnp.bfloat16), quantize(jnp.ones((64, 200), jnp.bfloat16)), run=run)


def test_kernels_refuse_quantised_weights_that_they_cannot_multiply(rng):
    x = jnp.ones((2, 200), jnp.bfloat16)
    for weight, is_gated, message in (
        (quantize(jnp.ones((32, 200), jnp.bfloat16), (16, 24)), False, "multiple of 16 inputs"),
        (for_kernels(rng, "bfloat16", (20, 12)), True, "one part, or one for each projection"),
    ):
        for run in (Run(implementation="triton"), TRITON):
            with pytest.raises(UnsupportedError, match=message):
                linear(x, weight, is_gated=is_gated, run=run)
    with pytest.raises(UnsupportedError, match="weights must be arrays, got a QuantizedWeight"):
        product_chain(x, [Product(quantize(jnp.ones((32, 200), jnp.bfloat16)))], run=Run(implementation="mosaic_gpu"))


def test_shapes_and_dtypes_of_quantised_weights_are_checked_by_name(rng):
    weight = joint(rng, "float32")
    with pytest.raises(
        ValueError, match=r"linear: weight must be Float\[outputs inputs\], got QuantizedWeight float32"
    ):
        linear(jnp.ones((2, 199)), weight)
    with pytest.raises(ValueError, match="linear: weight must have x's dtype bfloat16 or float32, got float16"):
        linear(jnp.ones((2, 200), jnp.bfloat16), weight.astype("float16"))
    with pytest.raises(ValueError, match=r"step 0: weight must be \[outputs, 199\], got \[108, 200\]"):
        product_chain(jnp.ones((2, 199)), [Product(weight)])
