"""Weights that stay as narrow in memory as a file holds them, with the scales that say what they mean.

A quantised weight is stored as 8-bit floats and float32 scales: a stored value times its block's scale is the number that
is meant. Published files have a scale for each block of 128 x 128 values (DeepSeek-AI, "DeepSeek-V3", 2024), for each output
channel or for the whole tensor. A product of several projections may join tensors that differ in all of this, so a
weight is a sequence of parts along its outputs.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels._check import require

# To what products round the inputs of quantised weights.
ActivationDtype: TypeAlias = Literal["bfloat16", "fp8"]
BLOCK = (128, 128)
CHANNELS = 128  # of a token that share a scale
_LARGEST = 448.0  # The largest number of e4m3.
# XLA turns divisions by constants, and by numbers that many elements share, into products with their inverse. So only
# these products have the same bits everywhere.
_PER_LARGEST = np.float32(1 / _LARGEST)
_SMALLEST_SCALE = 2.0**-126  # Smaller float32 numbers are subnormal, which XLA takes for zero on some devices.


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Part:
    """A run of a weight's outputs, of one dtype and with scales for one size of blocks.

    Attributes:
        values: What is stored. [..., outputs, inputs]
        scales: What the values of each block are multiplied by, positive float32
            [..., ceil(outputs / block[0]), ceil(inputs / block[1])]. None if the values mean themselves.
        block: Outputs and inputs of a block: (1, inputs) for a scale per output channel, and (outputs, inputs) for a scale
            per tensor. Blocks begin at the part's first output and input, and the last ones may be smaller. None without
            scales.
    """

    values: Any
    scales: Any = None
    block: tuple[int, int] | None = field(default=None, metadata=dict(static=True))

    def dequantize(self, dtype: Any) -> Any:
        """Return the numbers that are meant, [..., outputs, inputs]: float32 products, rounded once to `dtype`."""
        if self.scales is None or self.block is None:
            return self.values.astype(dtype)
        (outputs, inputs), (rows, columns) = self.values.shape[-2:], self.block
        scales = _spread(self.scales, columns, inputs, axis=-1)
        if isinstance(self.values, np.ndarray):
            return _multiplied(self.values, scales, rows).astype(dtype)
        return (self.values.astype(jnp.float32) * _spread(scales, rows, outputs, axis=-2)).astype(dtype)

    def take(self, order: np.ndarray, axis: int, devices: int = 1) -> "Part":
        """Return the outputs (`axis` -2) or inputs (-1) of the indices `order`, with their scales.

        Blocks become as small as it takes for each to have one scale: a cut inside a block repeats that block's scale.

        Args:
            order: Indices on the host, which may repeat. int [taken]
            axis: -2 or -1.
            devices: The number of equal shares into which the result will be cut along `axis`. If there is more than one
                scale along it, these can be cut in the same way.
        """
        values = _taken(self.values, order, axis)
        if self.scales is None or self.block is None:
            return Part(values)
        places, size = scale_places(order, self.block[axis], devices)
        block = (size, self.block[1]) if axis == -2 else (self.block[0], size)
        return Part(values, _taken(self.scales, places, axis), block)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedWeight:
    """A weight some or all of whose outputs are quantised. Ops that multiply by a weight take it instead of an array.

    It is a pytree, so it can be the value of a parameter, be donated, and be placed on a mesh leaf by leaf.

    Attributes:
        parts: What lies side by side along the outputs. All parts have the same inputs and the same leading axes.
        dtype: The dtype to which products round the weight, and which their inputs have.
        activation_dtype: "bfloat16" if products take their inputs as they are, whichever dtype they have; "fp8" if the
            inputs of quantised parts are rounded as `quantize_activations` does. Products of float32 numbers follow then, to
            which the weight is not rounded.
    """

    parts: tuple[Part, ...]
    dtype: Any = field(default=np.dtype(ml_dtypes.bfloat16), metadata=dict(static=True))
    activation_dtype: ActivationDtype = field(default="bfloat16", metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., outputs, inputs]: that of the array which it stands for."""
        *lead, _, inputs = self.parts[0].values.shape
        return (*lead, sum(part.values.shape[-2] for part in self.parts), inputs)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of weights."""
        return math.prod(self.shape)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The outputs of each part."""
        return tuple(part.values.shape[-2] for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        leaves = jax.tree.leaves(self)
        return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in leaves)

    def __getitem__(self, index: Any) -> "QuantizedWeight":
        """Return itself for `...`, or what an index of the first axis, such as an expert's, selects."""
        if index is ...:
            return self
        require(self.ndim > 2, f"QuantizedWeight: only an axis before outputs and inputs has an index, got {index!r}")
        return jax.tree.map(lambda leaf: leaf[index], self)

    def dequantize(self, dtype: Any = None) -> Any:
        """Return the array that is meant, [..., outputs, inputs]. None is the weight's dtype.

        An entry is the float32 product of stored value and scale, rounded once to `dtype`.
        """
        wanted = self.dtype if dtype is None else jnp.dtype(dtype)
        parts = [part.dequantize(wanted) for part in self.parts]
        return parts[0] if len(parts) == 1 else _numpy_of(*parts).concatenate(parts, axis=-2)

    def take(self, order: np.ndarray, axis: int, devices: int = 1) -> "QuantizedWeight":
        """Return inputs (`axis` -1), or outputs (-2) of a weight of one part, with their scales: see `Part.take`."""
        require(
            axis == -1 or len(self.parts) == 1, f"QuantizedWeight: outputs of {len(self.parts)} parts have no order"
        )
        return replace(self, parts=tuple(part.take(order, axis, devices) for part in self.parts))

    def astype(self, dtype: Any) -> "QuantizedWeight":
        """Return the weight for products in another dtype. Its quantised parts stay as they are."""
        parts = tuple(replace(p, values=p.values.astype(dtype)) if p.scales is None else p for p in self.parts)
        return replace(self, parts=parts, dtype=jnp.dtype(dtype))


def dequantized(weight: Any) -> Any:
    """Return a weight as an array: a `QuantizedWeight` as what it means, and an array as it is.

    Within a program the array is rounded even where XLA might keep more digits, so a product has the bits of a product with
    an array.
    """
    if not isinstance(weight, QuantizedWeight):
        return weight
    return jax.lax.optimization_barrier(weight.dequantize())


def operands(x: Any, weight: QuantizedWeight) -> list[tuple[Any, Any]]:
    """Return the float32 inputs [tokens, inputs] and weights [outputs, inputs] of each part's product.

    The inputs of quantised parts are rounded to FP8, and not the inputs of other parts.
    """
    # Without the barrier XLA may leave out the conversion to FP8 and back.
    rounded = jax.lax.optimization_barrier(quantize_activations(x)).dequantize(np.float32)
    wide = x.astype(jnp.float32)
    return [(wide if part.scales is None else rounded, part.dequantize(np.float32)) for part in weight.parts]


def not_an_array(*weights: Any) -> str | None:
    """Return why a kernel that multiplies by arrays alone cannot run with these weights, or None if it can."""
    if any(isinstance(weight, QuantizedWeight) for weight in weights):
        return "weights must be arrays, got a QuantizedWeight"
    return None


def quantize(weight: Any, block: tuple[int, int] = BLOCK, dtype: Any = None) -> QuantizedWeight:
    """Quantise a weight to e4m3 with one scale per block, the block's largest magnitude times 1 / 448.

    All arithmetic is float32, the factor too. Numbers are multiplied by 1 / scale and rounded to the nearest value, ties to
    even. A block of zeros has the scale 1.

    Args:
        weight: Finite numbers, of NumPy or JAX. [..., outputs, inputs]
        block: See `Part.block`.
        dtype: The dtype of the result's products; None is that of `weight`.

    Raises:
        ValueError: `weight` is no array of floating point numbers with at least two axes, or `block` is not two positive
            integers.
    """
    is_weight = getattr(weight, "ndim", 0) >= 2 and jnp.issubdtype(weight.dtype, jnp.floating) and weight.size > 0
    got = f"{getattr(weight, 'dtype', type(weight).__name__)}{list(getattr(weight, 'shape', ()))}"
    require(is_weight, f"quantize: weight must be floating point numbers [..., outputs, inputs], got {got}")
    is_block = isinstance(block, tuple) and len(block) == 2 and all(type(size) is int and size >= 1 for size in block)
    require(is_block, f"quantize: block must be two positive integers, got {block!r}")
    numpy, (outputs, inputs) = _numpy_of(weight), weight.shape[-2:]
    lead, rows, columns = weight.shape[:-2], min(block[0], outputs), min(block[1], inputs)
    down, across = -(-outputs // rows), -(-inputs // columns)
    pad = [(0, 0)] * len(lead) + [(0, down * rows - outputs), (0, across * columns - inputs)]
    cut = numpy.pad(weight.astype(np.float32), pad).reshape(*lead, down, rows, across, columns)
    largest = numpy.abs(cut).max(axis=(-3, -1))
    scales = _scales(largest, numpy)
    scaled = numpy.clip(cut * (1 / scales)[..., :, None, :, None], -_LARGEST, _LARGEST)
    values = scaled.astype(ml_dtypes.float8_e4m3fn).reshape(*lead, down * rows, across * columns)
    wanted = jnp.dtype(weight.dtype if dtype is None else dtype)
    return QuantizedWeight((Part(values[..., :outputs, :inputs], scales, block),), wanted)


def quantize_activations(x: Any) -> Part:
    """Quantise the inputs of products to e4m3, with one scale for each token and 128 channels: see `quantize`.

    A token's values depend on that token alone, so they are the same for every number of tokens.

    Args:
        x: Finite numbers, of NumPy or JAX. [..., tokens, channels]

    Returns:
        The values [..., tokens, channels], and float32 scales [..., tokens, ceil(channels / 128)].

    Raises:
        ValueError: `x` is no array of floating point numbers with at least two axes.
    """
    return quantize(x, (1, CHANNELS)).parts[0]


def concatenate(weights: Sequence[Any]) -> Any:
    """Put weights, arrays or `QuantizedWeight`, one below the other along their outputs. An array becomes a part.

    Returns an array if all are arrays.

    Raises:
        ValueError: they differ in their inputs, their leading axes or the dtype of their products.
    """
    require(len(weights) > 0, "concatenate: weights must not be empty")
    first = weights[0]
    for weight in weights:
        is_like = (*weight.shape[:-2], weight.shape[-1]) == (*first.shape[:-2], first.shape[-1])
        require(is_like, f"concatenate: weights must have one number of inputs, got {[list(w.shape) for w in weights]}")
    if not any(isinstance(weight, QuantizedWeight) for weight in weights):
        return _numpy_of(*weights).concatenate(weights, axis=-2)
    dtypes = {jnp.dtype(weight.dtype) for weight in weights}
    require(len(dtypes) == 1, f"concatenate: weights must have one dtype, got {sorted(map(str, dtypes))}")
    each = [weight.parts if isinstance(weight, QuantizedWeight) else (Part(weight),) for weight in weights]
    quantised = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    kinds = {weight.activation_dtype for weight in quantised}
    require(len(kinds) == 1, f"concatenate: weights must have one activation_dtype, got {sorted(kinds)}")
    return replace(quantised[0], parts=tuple(part for parts in each for part in parts))


def scale_places(order: np.ndarray, step: int, devices: int = 1) -> tuple[np.ndarray, int]:
    """Say which scales elements have that are taken from blocks of `step` elements, and in blocks of which size.

    Args:
        order: Index of each element that is taken. int [taken]
        step: Elements of a block before.
        devices: See `Part.take`.

    Returns:
        The index of each new block's scale among the scales before, int [blocks], and the number of elements of a new
        block, which is `step` wherever that is possible.
    """
    of_block = np.asarray(order) // step
    changes = np.flatnonzero(of_block[1:] != of_block[:-1]) + 1
    if not changes.size:
        return of_block[:1], max(step, len(of_block))
    size = functools.reduce(math.gcd, map(int, changes), len(of_block) // devices if devices > 1 else 0)
    size = step if size % step == 0 else size
    return of_block[::size], size


def _scales(largest: Any, numpy: Any) -> Any:
    """Return the scales of blocks of these largest magnitudes, float32."""
    scales = numpy.maximum(largest * _PER_LARGEST, np.float32(_SMALLEST_SCALE))
    return numpy.where(largest > 0, scales, np.float32(1.0))


def _numpy_of(*arrays: Any) -> Any:
    """Return the library of arrays: NumPy if all of them are NumPy's."""
    return np if all(isinstance(array, np.ndarray) for array in arrays) else jnp


def _taken(array: Any, order: np.ndarray, axis: int) -> Any:
    if len(order) == array.shape[axis] and np.array_equal(order, np.arange(len(order))):
        return array
    return np.take(array, order, axis) if isinstance(array, np.ndarray) else jnp.take(array, order, axis=axis)


def _spread(scales: Any, step: int, length: int, axis: int) -> Any:
    """Repeat each scale `step` times along an axis of `length` elements. A single scale is left for broadcasting."""
    if scales.shape[axis] == 1 or step == 1:
        return scales
    repeated = _numpy_of(scales).repeat(scales, step, axis=axis)
    return repeated[..., :length] if axis == -1 else repeated[..., :length, :]


def _multiplied(values: np.ndarray, scales: np.ndarray, rows: int) -> np.ndarray:
    """Multiply NumPy's values by scales that have been spread along the inputs, in float32."""
    if values.dtype.itemsize == 1:
        # A table of all 256 values is several times as fast as a conversion one by one.
        table = np.arange(256, dtype=np.uint8).view(values.dtype).astype(np.float32)
        weight = table[np.ascontiguousarray(values).view(np.uint8)]
    else:
        weight = values.astype(np.float32)
    if scales.shape[-2] == 1 or rows == 1:
        weight *= scales
        return weight
    for number in range(scales.shape[-2]):
        weight[..., number * rows : (number + 1) * rows, :] *= scales[..., number, None, :]
    return weight
