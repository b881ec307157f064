"""How weights are put together from tensors, whether these are arrays or quantised weights.

Scales go where their values go. Arrays are of NumPy, or of JAX where only shapes are looked at.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantized import Part, QuantizedWeight, concatenate

# A tensor, or a parameter that is made from tensors.
Weight: TypeAlias = np.ndarray | QuantizedWeight


class UnlikeError(ValueError):
    """Raised if weights cannot share one array because they are quantised in different ways."""


def below(weights: Sequence[Any]) -> Any:
    """Concatenates tensors along their first axis; of quantised weights that are the outputs, and each keeps its parts."""
    if any(isinstance(weight, QuantizedWeight) for weight in weights):
        return concatenate(weights)
    return _numpy_of(weights).concatenate(weights, axis=0)


def ordered(weight: Any, order: np.ndarray) -> Any:
    """Puts the outputs of a tensor [outputs, inputs] into another order, which names each of them once.

    Raises:
        ValueError: the tensor has another number of outputs.
    """
    if weight.shape[0] != len(order):
        raise ValueError(f"a tensor must have {len(order)} outputs, got {weight.shape[0]}")
    return weight.take(order, -2) if isinstance(weight, QuantizedWeight) else weight[order]


def stack(make: Callable[[int], Any], number: int) -> Any:
    """Stacks `number` weights, made one after the other, along a new first axis. Of arrays of NumPy it holds one at a time.

    Raises:
        ValueError: they differ in their shapes.
        UnlikeError: they are quantised in different ways.
    """
    first = make(0)
    leaves, structure = jax.tree.flatten(first)
    in_numpy = all(isinstance(leaf, np.ndarray) for leaf in leaves)
    outs: list[Any] = [np.empty((number, *leaf.shape), leaf.dtype) if in_numpy else [leaf] for leaf in leaves]
    for place in range(number):
        each = make(place) if place else first
        if each.shape != first.shape:  # NumPy would repeat some shapes
            raise ValueError(f"weights must have one shape to be stacked, got {first.shape} and {each.shape}")
        if jax.tree.structure(each) != structure:
            raise UnlikeError("weights to be stacked are quantised in different ways")
        for out, leaf in zip(outs, jax.tree.leaves(each), strict=True):
            if in_numpy:
                out[place] = leaf
            elif place:
                out.append(leaf)
    return jax.tree.unflatten(structure, outs if in_numpy else [jnp.stack(out) for out in outs])


def pieces(weight: Any, axis: int, number: int, size: int) -> Any:
    """Cuts a tensor [outputs, inputs] into `number` pieces of `size` outputs (`axis` -2) or inputs (-1) each.

    Channels that the last piece lacks are 0.

    Returns:
        [number, size, inputs], or [number, outputs, size].
    """
    if not isinstance(weight, QuantizedWeight):
        return _stood_apart(_padded(weight, axis, number * size), axis, number)
    return replace(weight, parts=tuple(_pieces_of(part, axis, number, size) for part in weight.parts))


def appended(weights: Sequence[Any]) -> Any:
    """Concatenates weights [experts, outputs, inputs] along their first axis.

    Raises:
        ValueError: they differ in outputs or inputs.
        UnlikeError: they are quantised in different ways.
    """
    if not any(isinstance(weight, QuantizedWeight) for weight in weights):
        return _numpy_of(weights).concatenate(weights)
    if not all(isinstance(weight, QuantizedWeight) for weight in weights):
        raise UnlikeError("some experts are quantised, and others are not")
    if len({weight.shape[1:] for weight in weights}) > 1:
        raise ValueError(f"experts must have one shape, got {[weight.shape for weight in weights]}")
    ends = sorted({end for weight in weights for end in np.cumsum(weight.sizes).tolist()})
    cut = [_cut_at(weight, ends) for weight in weights]
    parts = [_appended_parts(each) for each in zip(*cut, strict=True)]
    return replace(weights[0], parts=tuple(parts))


def _pieces_of(part: Part, axis: int, number: int, size: int) -> Part:
    values = _padded(part.values, axis, number * size)
    if part.scales is None or part.block is None:
        return Part(_stood_apart(values, axis, number))
    block = list(part.block)
    if part.scales.shape[axis] == 1:  # What is added may have the only scale too.
        block[axis] = max(block[axis], number * size)
    scales = _padded(part.scales, axis, math.ceil(number * size / block[axis]), 1.0)
    wide = Part(values, scales, (block[0], block[1])).take(np.arange(number * size), axis, devices=number)
    if wide.scales.shape[axis] == 1:
        scales = _numpy_of([wide.scales]).broadcast_to(wide.scales, (number, *wide.scales.shape))
    else:
        scales = _stood_apart(wide.scales, axis, number)
    return Part(_stood_apart(wide.values, axis, number), scales, wide.block)


def _padded(array: Any, axis: int, length: int, value: float = 0.0) -> Any:
    if array.shape[axis] == length:
        return array
    pad = [(0, 0)] * array.ndim
    pad[axis] = (0, length - array.shape[axis])
    # NumPy can't pad FP8 by a number of Python.
    fill = np.asarray(value, array.dtype)
    return _numpy_of([array]).pad(array, pad, constant_values=fill)


def _stood_apart(array: Any, axis: int, number: int) -> Any:
    """Cuts [rows, columns] into `number` equal pieces along an axis, [number, rows, columns]."""
    rows, columns = array.shape
    if axis == -2:
        return array.reshape(number, rows // number, columns)
    return array.reshape(rows, number, columns // number).swapaxes(0, 1)


def _cut_at(weight: QuantizedWeight, ends: Sequence[int]) -> list[Part]:
    """Cuts the parts of a weight so that they end at `ends`, among which are their own ends."""
    found, start = [], 0
    for part in weight.parts:
        length, first = part.values.shape[-2], start
        while first < start + length:
            end = next(end for end in ends if end > first)
            found.append(part.take(np.arange(first - start, end - start), -2))
            first = end
        start += length
    return found


def _appended_parts(parts: Sequence[Part]) -> Part:
    """Concatenates parts of one shape along their first axis, in blocks of which each lies in a block of every part."""
    numpy = _numpy_of([part.values for part in parts])
    if len({(part.values.dtype, part.scales is None) for part in parts}) > 1:
        raise UnlikeError("experts are quantised in different ways")
    values = numpy.concatenate([part.values for part in parts])
    if parts[0].scales is None:
        return Part(values)
    outputs, inputs = values.shape[-2:]
    block = _common([part.block for part in parts], 0, outputs), _common([part.block for part in parts], 1, inputs)
    return Part(values, numpy.concatenate([_in_blocks(part, block) for part in parts]), block)


def _common(blocks: Sequence[Any], place: int, length: int) -> int:
    """Returns the largest size of blocks, along one axis of `length`, of which each lies in one block of every size."""
    sizes = {block[place] for block in blocks}
    if len(sizes) == 1:
        return sizes.pop()
    several = [size for size in sizes if size < length]
    return math.gcd(*several) if several else length


def _in_blocks(part: Part, block: tuple[int, int]) -> Any:
    """Returns a part's scales for smaller blocks, or for larger ones where there is one block."""
    scales = part.scales
    assert part.block is not None
    for axis in (-2, -1):
        places = np.arange(0, part.values.shape[axis], block[axis]) // part.block[axis]
        scales = _numpy_of([scales]).take(scales, places, axis=axis)
    return scales


def _numpy_of(arrays: Sequence[Any]) -> Any:
    return np if all(isinstance(array, np.ndarray) for array in arrays) else jnp
