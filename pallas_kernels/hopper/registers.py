"""Scalars and vectors in a thread's registers, and references to memory: the values of code for single threads."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, math, memref, vector

_DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16, "i32": jnp.int32, "i64": jnp.int64, "i1": bool}
_P = arith.CmpIPredicate


def dtype_of(kind: Any) -> Any:
    """Return the dtype of MLIR's type of a scalar."""
    return jnp.dtype(_DTYPES[str(kind)])


def type_of(dtype: Any) -> Any:
    """Return MLIR's type of scalars of a dtype."""
    return utils.dtype_to_ir_type(jnp.dtype(dtype))


class Register:
    """A scalar, an address or a short vector in each thread's registers, with the operators of NumPy's arrays.

    Integers are int32, and `//`, `%` and `>>` take them as unsigned. The right operand may be a Python scalar.

    Attributes:
        value: The value as MLIR has it.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape: () for a scalar, and [length] for a vector."""
        return tuple(self.value.type.shape) if isinstance(self.value.type, ir.VectorType) else ()

    @property
    def dtype(self) -> Any:
        """The dtype of the scalar, or of the vector's elements."""
        return dtype_of(self._kind)

    @property
    def _kind(self) -> Any:
        kind = self.value.type
        return kind.element_type if isinstance(kind, ir.VectorType) else kind

    @property
    def is_float(self) -> bool:
        """Whether its elements are floats."""
        return not isinstance(self._kind, ir.IntegerType)

    def astype(self, dtype: Any) -> "Register":
        """Convert floats to another dtype."""
        kind = type_of(dtype)
        if kind == self._kind:
            return self
        convert = arith.extf if utils.bitwidth(kind) > utils.bitwidth(self._kind) else arith.truncf
        return Register(convert(ir.VectorType.get(self.shape, kind) if self.shape else kind, self.value))

    def __neg__(self) -> "Register":
        return Register(arith.negf(self.value))

    def _operator(of_integers: Callable[..., Any], of_floats: Callable[..., Any] | None = None) -> Any:
        """Make the method of an operator."""

        def operate(self: "Register", other: Any) -> "Register":
            other = like(other, self)
            apply = of_floats if of_floats is not None and self.is_float else of_integers
            return Register(apply(self.value, other.value))

        return operate

    def _comparison(predicate: Any) -> Any:
        """Make the method of a comparison of integers."""
        return lambda self, other: Register(arith.cmpi(predicate, self.value, like(other, self).value))

    __add__ = _operator(arith.addi, arith.addf)
    __sub__ = _operator(arith.subi, arith.subf)
    __mul__ = _operator(arith.muli, arith.mulf)
    __truediv__ = _operator(arith.divf)
    __floordiv__ = _operator(arith.divui)
    __mod__ = _operator(arith.remui)
    __and__ = _operator(arith.andi)
    __or__ = _operator(arith.ori)
    __xor__ = _operator(arith.xori)
    __rshift__ = _operator(arith.shrui)
    __lt__, __le__, __gt__, __ge__ = map(_comparison, (_P.slt, _P.sle, _P.sgt, _P.sge))
    __eq__ = _comparison(_P.eq)
    __ne__ = _comparison(_P.ne)


class Memory:
    """An array in GMEM or SMEM, or a view of one. `memory[i, j]` loads an element, and `memory[i, j] = x` stores one.

    Attributes:
        value: The reference as MLIR has it.
    """

    def __init__(self, value: Any) -> None:
        self.value, self._type = value, ir.MemRefType(value.type)

    @property
    def shape(self) -> list[int]:
        """The length of each axis."""
        return self._type.shape

    @property
    def strides(self) -> list[int]:
        """The elements between neighbours along each axis."""
        return self._type.get_strides_and_offset()[0]

    @property
    def dtype(self) -> Any:
        """The dtype of the elements."""
        return dtype_of(self._type.element_type)

    def __getitem__(self, at: Any) -> Register:
        return Register(memref.load(self.value, _indices(at)))

    def __setitem__(self, at: Any, x: Register) -> None:
        memref.store(x.value, self.value, _indices(at))


def _indices(at: Any) -> list[Any]:
    """Return integers, one for each axis, as MLIR's indices."""
    at = [x if isinstance(x, Register) else i32(x) for x in (at if isinstance(at, tuple) else (at,))]
    return [index(x).value for x in at]


def index(x: Register) -> Register:
    """Convert an integer to MLIR's index type, once for several loads and stores, each of which would convert it again."""
    kind = ir.IndexType.get()
    return x if x.value.type == kind else Register(arith.index_cast(kind, x.value))


def load_vector(memory: Memory, *at: Any, count: int, is_aligned: bool = True) -> Register:
    """Load `count` neighbouring elements as a vector. `at` is the index of the first.

    The address must be a multiple of the vector's bytes, or of 16 if it has more, unless `is_aligned` is False.
    """
    kind = ir.VectorType.get((count,), type_of(memory.dtype))
    alignment = _alignment(count, memory.dtype) if is_aligned else None
    return Register(vector.load(kind, memory.value, _indices(at), alignment=alignment))


def store_vector(x: Register, memory: Memory, *at: Any) -> None:
    """Store a vector. See `load_vector`."""
    vector.store(x.value, memory.value, _indices(at), alignment=_alignment(x.shape[0], x.dtype))


def _alignment(count: int, dtype: Any) -> int:
    return min(16, count * dtype.itemsize)


def i32(value: int) -> Register:
    """Return an int32 constant."""
    return Register(arith.constant(type_of(jnp.int32), value))


def f32(value: float) -> Register:
    """Return a float32 constant."""
    return Register(arith.constant(type_of(jnp.float32), float(value)))


def like(x: Any, other: Register) -> Register:
    """Return a Python scalar as a constant, float32 if `other` has floats, else int32, and a register unchanged."""
    return x if isinstance(x, Register) else f32(x) if other.is_float else i32(x)


def of_python(x: Any) -> Register:
    """Return a Python scalar as a constant, float32 or int32. A register is returned unchanged."""
    return x if isinstance(x, Register) else f32(x) if isinstance(x, float) else i32(x)


def select(condition: Register, x: Any, y: Any) -> Register:
    """Return x where a condition is met, and else y. Both are scalars, vectors or addresses."""
    x, y = of_python(x), of_python(y)
    return Register(arith.select(condition.value, x.value, y.value))


def minimum(x: Register, y: Any) -> Register:
    """Return the smaller of two scalars."""
    return Register((arith.minimumf if x.is_float else arith.minsi)(x.value, like(y, x).value))


def maximum(x: Register, y: Any) -> Register:
    """Return the larger of two scalars."""
    return Register((arith.maximumf if x.is_float else arith.maxsi)(x.value, like(y, x).value))


def unsigned_less(x: Register, y: Any) -> Register:
    """Return whether x < y for unsigned integers."""
    return Register(arith.cmpi(_P.ult, x.value, like(y, x).value))


def bitcast(x: Register, dtype: Any) -> Register:
    """Return a scalar's bits as a scalar of another dtype of the same width."""
    return Register(arith.bitcast(type_of(dtype), x.value))


def bitcast_vector(x: Register, dtype: Any) -> Register:
    """Return the bits of a vector of 32-bit words as a vector of a dtype of 16 or 64 bits, or the other way round."""
    count = x.shape[0] * x.dtype.itemsize // jnp.dtype(dtype).itemsize
    return Register(vector.bitcast(ir.VectorType.get((count,), type_of(dtype)), x.value))


def unpack(x: Register) -> list[Register]:
    """Return the elements of a vector."""
    return [Register(vector.extract(x.value, [], [n])) for n in range(x.shape[0])]


def pack(elements: Sequence[Register]) -> Register:
    """Make a vector of its elements."""
    kind = ir.VectorType.get((len(elements),), elements[0].value.type)
    return Register(vector.from_elements(kind, [x.value for x in elements]))


def broadcast(x: Register, length: int) -> Register:
    """Return a vector of `length` copies of a scalar."""
    return Register(vector.broadcast(ir.VectorType.get((length,), x.value.type), x.value))


def reduce_add(x: Register) -> Register:
    """Return the sum of a vector's elements."""
    return Register(vector.reduction(type_of(x.dtype), vector.CombiningKind.ADD, x.value))


def fma(x: Register, y: Register, z: Register) -> Register:
    """Return x * y + z, rounded once."""
    return Register(math.fma(x.value, y.value, z.value))


def _function(operation: Callable[..., Any], name: str) -> Callable[[Register], Register]:
    def apply(x: Register) -> Register:
        return Register(operation(x.value))

    apply.__doc__ = f"Return {name} of a float32 scalar."
    return apply


exp = _function(math.exp, "exp(x)")
exp2 = _function(math.exp2, "2 ** x")
log1p = _function(math.log1p, "log(1 + x)")
rsqrt = _function(math.rsqrt, "1 / sqrt(x)")
absolute = _function(math.absf, "|x|")
