"""Tiles of weights for Triton kernels, of arrays and of quantised weights.

A kernel multiplies tiles of stored values, and each product by the scale of its block. All values of a tile have the same
inputs' block, so a tile's product has one scale per output.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels._dot import dot
from pallas_kernels.quantized import Part, QuantizedWeight

_SMALLEST_TILE = 16  # inputs; tensor cores multiply no fewer


class Place(NamedTuple):
    """Where the weights of a run of columns lie in one projection.

    Attributes:
        part: The index of their part.
        first: The row of the first one in the part.
        block: See `Part.block`. None if the values mean themselves.
    """

    part: int
    first: int
    block: tuple[int, int] | None


class Columns(NamedTuple):
    """A run of a product's columns whose weights lie in the same part, in each of its projections.

    Attributes:
        begin: The index of the first one.
        size: The number of columns.
        places: One for each projection.
    """

    begin: int
    size: int
    places: tuple[Place, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the columns are the rows of one part: all columns of a product by an array, for instance."""
        return self.begin == 0 and all(place == (0, n * self.size, place.block) for n, place in enumerate(self.places))


def parts_of(weight: jax.Array | QuantizedWeight) -> tuple[Part, ...]:
    """Return the parts of a weight. An array is one part."""
    return weight.parts if isinstance(weight, QuantizedWeight) else (Part(weight),)


def itemsize(weight: jax.Array | QuantizedWeight) -> int:
    """Return the bytes of a stored value in most of the weight."""
    return max(parts_of(weight), key=lambda part: part.values.shape[-2]).values.dtype.itemsize


def operands(weight: jax.Array | QuantizedWeight) -> dict[str, jax.Array | None]:
    """Return the arrays of a weight by the names under which kernels find them."""
    found: dict[str, jax.Array | None] = {}
    for number, part in enumerate(parts_of(weight)):
        found |= {f"values{number}": part.values, f"scales{number}": part.scales}
    return found


def runs(weight: jax.Array | QuantizedWeight, projections: int = 1) -> tuple[Columns, ...]:
    """Return the runs of a product's columns. With two projections there must be one: see `unsupported`."""
    parts = parts_of(weight)
    if projections > 1:
        size = weight.shape[-2] // projections
        in_one = [Place(0, number * size, parts[0].block) for number in range(projections)]
        each = in_one if len(parts) == 1 else [Place(number, 0, part.block) for number, part in enumerate(parts)]
        return (Columns(0, size, tuple(each)),)
    found, begin = [], 0
    for number, part in enumerate(parts):
        size = part.values.shape[-2]
        found.append(Columns(begin, size, (Place(number, 0, part.block),)))
        begin += size
    return tuple(found)


def depth(weight: jax.Array | QuantizedWeight, wanted: int) -> int:
    """Return the number of inputs of a tile, at most `wanted`, with which every tile lies in one block of inputs."""
    inputs = weight.shape[-1]
    blocks = [part.block[1] for part in parts_of(weight) if part.block is not None and part.block[1] < inputs]
    return math.gcd(wanted, *blocks)


def unsupported(*weights: tuple[jax.Array | QuantizedWeight, int]) -> str | None:
    """Return why kernels cannot multiply by weights, each with its number of projections, or None if they can."""
    for weight, projections in weights:
        parts = parts_of(weight)
        if isinstance(weight, QuantizedWeight) and weight.activation_dtype == "fp8":
            return "the inputs of a weight with activation_dtype 'fp8' are rounded, which these kernels do not do"
        if depth(weight, _SMALLEST_TILE) < _SMALLEST_TILE:
            return f"blocks of a quantised weight must have a multiple of {_SMALLEST_TILE} inputs"
        sizes = [part.values.shape[-2] for part in parts]
        if projections > 1 and len(parts) > 1 and sizes != [sizes[0]] * projections:
            return f"a quantised weight of {projections} projections must have one part, or one for each projection"
    return None


def each_run(runs: Sequence[Columns], tile: jax.Array, columns: int, do: Callable[[Columns, jax.Array], None]) -> None:
    """Call `do` with the run to which a program's tile belongs, and the index of the tile in that run."""
    if len(runs) == 1:
        do(runs[0], tile)
        return
    begin = 0
    for run in runs:
        end = begin + -(-run.size // columns)
        pt.when((tile >= begin) & (tile < end))(lambda run=run, begin=begin: do(run, tile - begin))
        begin = end


def scale_of(
    refs: pt.Refs, place: Place, row: jax.Array, lead: tuple[Any, ...], exists: Any, tile: jax.Array, depth: int
) -> jax.Array | None:
    """Load the scales of rows of a part, for a tile of `depth` inputs. None if there are no scales."""
    if place.block is None:
        return None
    down, across = place.block
    scales, place_of = getattr(refs, f"scales{place.part}"), lambda index, size: jax.lax.div(index, jnp.int32(size))
    at = scales.at[(*lead, place_of(row, down), place_of(tile * depth, across))]
    return pt.load(at) if exists is None else pt.load(at, mask=exists, other=0.0)


def add_product(total: jax.Array, x: jax.Array, tile: jax.Array, scale: jax.Array | None, interpret: bool) -> jax.Array:
    """Add the product of tokens [tokens, depth] and stored values [outputs, depth], times the outputs' scales."""
    product = dot(x, tile.astype(x.dtype), contract=(1, 1), interpret=interpret)
    return total + (product if scale is None else product * scale[None, :])
