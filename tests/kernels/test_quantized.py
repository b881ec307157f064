"""A quantised weight means, to the bit, what its values and scales say, however it is cut, joined, stored and moved."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.quantized import Part, QuantizedWeight, concatenate, dequantized, quantize, quantize_activations

E4M3 = ml_dtypes.float8_e4m3fn
# Outputs and inputs with short last blocks, and one block that is larger than the weight.
SHAPES = [((40, 50), (16, 24)), ((3, 33, 65), (16, 24)), ((130, 257), (128, 128)), ((24, 16), (128, 128))]
CHANNEL, TENSOR = ((40, 50), (1, 50)), ((2, 40, 50), (40, 50))


def drawn(rng, shape, block, dtype="float32"):
    """A part with every finite value of e4m3, subnormals too, and scales of many magnitudes."""
    bits = rng.permutation(np.resize([byte for byte in range(256) if byte & 0x7F != 0x7F], np.prod(shape)))
    grid = [-(-size // step) for size, step in zip(shape[-2:], block, strict=True)]
    scales = np.exp2(rng.uniform(-20, 3, (*shape[:-2], *grid))).astype(np.float32)
    return Part(bits.astype(np.uint8).view(E4M3).reshape(shape), scales, block)


def meant(part):
    """The numbers that a part means, in float64, entry by entry."""
    out = np.empty(part.values.shape)
    for index in np.ndindex(out.shape):
        block = (*index[:-2], index[-2] // part.block[0], index[-1] // part.block[1])
        out[index] = float(part.values[index]) * float(part.scales[block])
    return out


def on_device(weight):
    return jax.tree.map(jnp.asarray, weight)


@pytest.mark.parametrize(("shape", "block"), [*SHAPES, CHANNEL, TENSOR], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_value_is_the_float32_product_rounded_once(rng, shape, block, dtype):
    """By NumPy, by JAX and within a program. A product of four by 24 bits, in float64, is exact."""
    part = drawn(rng, shape, block)
    wanted = meant(part).astype(np.float32).astype(dtype)
    weight = QuantizedWeight((part,), np.dtype(dtype))
    assert (weight.shape, weight.ndim, weight.dtype) == (shape, len(shape), np.dtype(dtype))
    for got in (weight.dequantize(), on_device(weight).dequantize(), jax.jit(dequantized)(on_device(weight))):
        assert got.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(np.asarray(got, np.float32), wanted.astype(np.float32))


@pytest.mark.parametrize(("shape", "block"), [*SHAPES, CHANNEL, TENSOR], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantised_values_are_the_nearest_of_a_scale_from_the_largest(rng, shape, block, dtype):
    """NumPy and JAX, within a program and without, give the same bits."""
    weight = (rng.normal(size=shape) * np.exp(rng.normal(size=(*shape[:-1], 1)))).astype(dtype)
    weight[..., :3, :] = 0  # more than one block of (1, inputs)
    found = quantize(weight, block)
    (part,) = found.parts
    whole = weight.astype(np.float64)
    for index in np.ndindex(part.scales.shape):
        *lead, row, column = index
        rows, columns = (slice(at * step, (at + 1) * step) for at, step in zip((row, column), block, strict=True))
        own, stored = whole[(*lead, rows, columns)], part.values[(*lead, rows, columns)].astype(np.float64)
        scale, largest = float(part.scales[index]), np.abs(own).max()
        assert scale == (np.float32(largest) * np.float32(1 / 448) if largest else 1.0)
        # Half a step of e4m3 at each magnitude, and the rounding of 1 / scale and of the product with it.
        step = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(stored), 2.0**-6))) - 3)
        assert (np.abs(own / scale - stored) <= step / 2 + 448 * 2.0**-22).all()
    for other in (
        quantize(jnp.asarray(weight), block),
        jax.jit(quantize, static_argnums=1)(jnp.asarray(weight), block),
    ):
        assert other.parts[0].block == block
        assert other.dtype == np.dtype(dtype)
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(ours.view(np.uint8), np.asarray(theirs).view(np.uint8))


@pytest.mark.parametrize(("block", "finer"), [((16, 24), (2, 3)), ((1, 50), (1, 50)), ((40, 50), (40, 50))], ids=str)
def test_what_is_taken_means_the_same(rng, block, finer):
    """Heads of two devices are put side by side. A cut inside a block repeats its scale, and whole blocks stay whole."""
    part = drawn(rng, (40, 50), block)
    order = np.concatenate([np.arange(10), np.arange(22, 32), np.arange(10, 20), np.arange(20, 30)])
    taken = part.take(order, -2, devices=2)
    np.testing.assert_array_equal(meant(taken), meant(part)[order])
    assert taken.block == (finer[0], block[1])
    assert taken.scales.shape[0] == 1 or taken.scales.shape[0] % 2 == 0
    columns = np.concatenate([np.arange(9, 27), np.arange(3)])
    np.testing.assert_array_equal(meant(part.take(columns, -1)), meant(part)[:, columns])
    assert part.take(columns, -1).block[1] == finer[1]
    every = part.take(np.arange(40), -2)
    assert every.block == block
    assert every.values is part.values
    assert part.take(np.arange(block[0], 40), -2).block == block or block[0] == 40


def test_a_token_is_quantised_as_if_it_were_alone(rng):
    """With a scale for each 128 channels, of which the last are fewer, and to the same bits in any number of tokens."""
    x = (rng.normal(size=(9, 300)) * np.exp(rng.normal(size=(9, 1)))).astype("bfloat16")
    several = jax.jit(quantize_activations)(jnp.asarray(x))
    assert several.scales.shape == (9, 3)
    assert several.block == (1, 128)
    wide, scales = x.astype(np.float32), np.repeat(several.scales, 128, axis=1)[:, :300]
    # Half a step of e4m3's three bits, or of its subnormals.
    bound = np.maximum(2.0**-4 * np.abs(wide), 2.0**-10 * scales)
    assert (np.abs(several.dequantize("float32") - wide) <= 1.001 * bound).all()
    for token in range(9):
        alone = jax.jit(quantize_activations)(jnp.asarray(x[token : token + 1]))
        np.testing.assert_array_equal(alone.values.view(jnp.uint8)[0], several.values.view(jnp.uint8)[token])
        np.testing.assert_array_equal(alone.scales[0], several.scales[token])


def test_parts_lie_one_below_the_other_each_with_its_own_blocks(rng):
    quantised, plain = drawn(rng, (40, 50), (16, 24)), rng.normal(size=(7, 50)).astype(np.float32)
    other = drawn(rng, (3, 50), (1, 50))
    weights = [QuantizedWeight((part,), np.dtype("float32")) for part in (quantised, other)]
    joined = concatenate([weights[0], plain, weights[1]])
    assert joined.sizes == (40, 7, 3)
    assert (joined.shape, joined.size) == ((50, 50), 2500)
    assert joined.nbytes == 40 * 50 + 4 * 9 + 7 * 50 * 4 + 3 * 50 + 4 * 3
    wanted = np.concatenate([meant(quantised), plain, meant(other)]).astype(np.float32)
    np.testing.assert_array_equal(joined.dequantize(), wanted)
    np.testing.assert_array_equal(joined.astype("bfloat16").dequantize(), wanted.astype("bfloat16"))
    assert isinstance(concatenate([plain, plain]), np.ndarray)


def test_index_of_an_expert_selects_its_values_and_scales(rng):
    part = drawn(rng, (3, 33, 65), (16, 24))
    weight = on_device(QuantizedWeight((part,), np.dtype("float32")))
    assert weight[...] is weight
    chosen = jax.jit(lambda expert: weight[expert].dequantize())(jnp.int32(2))
    np.testing.assert_array_equal(chosen, meant(part)[2].astype(np.float32))
    with pytest.raises(ValueError, match="only an axis before outputs and inputs has an index, got 0"):
        weight[0][0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: quantize(np.zeros(3, np.float32)),
            "weight must be floating point numbers [..., outputs, inputs], got",
        ),
        (lambda: quantize(np.zeros((3, 3), np.int32)), "got int32[3, 3]"),
        (lambda: quantize([[1.0]]), "got list[]"),
        (lambda: quantize(np.zeros((0, 3), np.float32)), "got float32[0, 3]"),
        (lambda: quantize(np.zeros((3, 3), np.float32), (0, 3)), "block must be two positive integers, got (0, 3)"),
        (lambda: quantize(np.zeros((3, 3), np.float32), 128), "block must be two positive integers, got 128"),
        (lambda: concatenate([]), "weights must not be empty"),
        (lambda: concatenate([np.zeros((2, 3)), np.zeros((2, 4))]), "one number of inputs, got [[2, 3], [2, 4]]"),
        (
            lambda: concatenate([quantize(np.ones((2, 3), np.float32)), np.zeros((2, 3), np.float16)]),
            "weights must have one dtype, got ['float16', 'float32']",
        ),
    ],
)
def test_wrong_arguments_are_refused_by_name(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
