"""Products of a quantised weight have the bits of products of the array that it means, at every number of tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import chains, mixtures

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
    assert_same(linear_sums(x, weight, run=XLA), linear_sums(x, plain, run=XLA))


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


def test_kernels_that_take_arrays_alone_refuse_quantised_weights(rng):
    x, weight = jnp.ones((2, 200)), joint(rng, "float32")
    experts = quantize(jnp.ones((2, 8, 200))), quantize(jnp.ones((2, 200, 4)))
    others = jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1))
    for run in (Run(implementation="triton"), Run(implementation="triton", interpret=True)):
        for call in (
            lambda run=run: linear(x, weight, run=run),
            lambda run=run: linear_sums(x, weight, run=run),
            lambda run=run: mixture_of_experts(x, *experts, *others, run=run),
        ):
            with pytest.raises(UnsupportedError, match="weights must be arrays, got a QuantizedWeight"):
                call()
    with pytest.raises(UnsupportedError, match="weights must be arrays, got a QuantizedWeight"):
        product_chain(x, [Product(weight)], run=Run(implementation="mosaic_gpu"))


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
