"""Arithmetic of single threads, as operations of MLIR: what the thread code of product_chain is written with.

All functions are for `pm.inline`.
"""

from collections.abc import Sequence
from typing import Any

from pallas_kernels import _pallas_mosaic as pm
from pallas_kernels._pallas_mosaic import arith, ir, vector

_LOG2_E = 1.4426950408889634


def word_address(ref: Any, start: Any, place: Any) -> Any:
    """Returns the address of the word that has the numbers `place` and `place + 1`."""
    return pm.address(ref, total(arith.shrui(place, pm.constant(1)), pm.constant(start)))


def load(ref: Any, place: Any, count: int) -> Any:
    """Loads 2 or 8 neighbours from memory with one axis, as a vector. Their place is a multiple of their number."""
    kind = ir.MemRefType(ref.type).element_type
    return vector.load(vector_type(count, kind), ref, [index(place)], alignment=min(16, count * pm.bytes_of(kind)))


def wide(values: Any) -> Any:
    """Returns a vector's numbers as float32."""
    wanted = vector_type(ir.VectorType(values.type).shape[0], ir.F32Type.get())
    return values if values.type == wanted else arith.extf(wanted, values)


def words(values: Any) -> Any:
    """Returns eight numbers of 16 bits as four words."""
    return vector.bitcast(vector_type(4, pm.integer()), values)


def word(pair: Any) -> Any:
    """Returns two numbers of 16 bits as a word."""
    return vector.extract(vector.bitcast(vector_type(1, pm.integer()), pair), [], [0])


def rounded_pair(values: Sequence[Any], dtype: Any) -> Any:
    """Returns a vector of two float32 numbers, rounded to a dtype."""
    return arith.truncf(vector_type(2, pm.type_of(dtype)), from_parts(values))


def parts(x: Any) -> list[Any]:
    """Returns the elements of a vector."""
    return [vector.extract(x, [], [n]) for n in range(ir.VectorType(x.type).shape[0])]


def from_parts(parts: Sequence[Any]) -> Any:
    """Makes a vector of its elements."""
    return vector.from_elements(vector_type(len(parts), parts[0].type), parts)


def elements(x: Any) -> list[Any]:
    """Returns what a thread has of an array in the layout `pm.spread`."""
    return [element for held in x.registers.flat for element in parts(held)]


def array(numbers: Sequence[Any]) -> Any:
    """Makes an array in the layout `pm.spread` of what a thread has of it."""
    length = 128 * len(numbers)
    pack = pm.pack_of_spread(length)
    kind = vector_type(pack, numbers[0].type)
    held = [vector.from_elements(kind, numbers[n : n + pack]) for n in range(0, len(numbers), pack)]
    return pm.fragments_of_spread(held, length)


def vector_type(length: int, kind: Any) -> Any:
    """Returns the type of vectors."""
    return ir.VectorType.get((length,), kind)


def number(value: float) -> Any:
    """Returns a float32 number."""
    return arith.constant(ir.F32Type.get(), value)


def splat(value: float) -> Any:
    """Returns a vector of eight times the same float32 number."""
    return vector.broadcast(vector_type(8, ir.F32Type.get()), number(value))


def index(x: Any) -> Any:
    """Returns an integer as an index of memory."""
    return arith.index_cast(ir.IndexType.get(), x)


def total(first: Any, *others: Any) -> Any:
    """Returns the sum of integers."""
    for other in others:
        first = arith.addi(first, other)
    return first


def scaled(x: Any, factor: int) -> Any:
    """Returns the product of an integer and a constant."""
    return arith.muli(x, pm.constant(factor))


def added(values: Sequence[Any]) -> Any:
    """Returns the sum of floats, or of vectors of them, in their order."""
    result = values[0]
    for value in values[1:]:
        result = arith.addf(result, value)
    return result


def over(x: Any, count: int) -> Any:
    """Returns a float32 number divided by a constant."""
    return arith.mulf(x, number(1.0 / count))


def is_less(x: Any, limit: int) -> Any:
    """Returns whether an integer is less than a constant."""
    return arith.cmpi(arith.CmpIPredicate.slt, x, pm.constant(limit))


def sigmoid(x: Any) -> Any:
    """Returns 1 / (1 + exp(-x)) of a float32 number."""
    odds = approximate("ex2", arith.mulf(x, number(-_LOG2_E)))
    return approximate("rcp", arith.addf(number(1.0), odds))


def silu(x: Any) -> Any:
    """Returns x / (1 + exp(-x)) of a float32 number."""
    return arith.mulf(x, sigmoid(x))


def approximate(function: str, x: Any) -> Any:
    """Returns the GPU's approximation of "ex2", "rcp" or "rsqrt", which is right to about 2e-7."""
    text = f"{function}.approx.ftz.f32 $0, $1;"
    return pm.assembly(text, "=f,f", ir.F32Type.get(), [x], has_effects=False)
