"""Arithmetic of single threads that is written in their registers' operators."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from pallas_kernels._warpgroup import LANES
from pallas_kernels.hopper import registers as _registers
from pallas_kernels.hopper.control import assembly
from pallas_kernels.hopper.registers import Register

_LOG2_E = 1.4426950408889634


def add(*terms: Any) -> Register:
    """Return the sum of scalars or vectors, added in their order. All of them are computed before the first sum."""
    total, *others = [_registers.of_python(x) for x in terms]
    for x in others:
        total = total + x
    return total


def clamp(x: Register, low: Any, high: Any) -> Register:
    """Return the integer from `low` to `high` that is nearest to x."""
    low, high = _registers.of_python(low), _registers.of_python(high)
    return _registers.minimum(_registers.maximum(x, low), high)


def is_between(x: Register, low: Any, high: Any) -> Register:
    """Return whether low <= x < high."""
    low, high = _registers.of_python(low), _registers.of_python(high)
    return (x >= low) & (x < high)


def words(values: Register) -> Register:
    """Return a vector of 16-bit values as a vector of half as many words, int32."""
    return _registers.bitcast_vector(values, jnp.int32)


def word(pair: Register) -> Register:
    """Return a vector of two 16-bit values as a word, int32."""
    return _registers.unpack(words(pair))[0]


def from_words(words: Sequence[Register], dtype: Any) -> Register:
    """Return 32-bit words as a vector of twice as many values of a 16-bit dtype."""
    return _registers.bitcast_vector(_registers.pack(words), dtype)


def rounded_pair(values: Sequence[Register], dtype: Any) -> Register:
    """Return a vector of two float32 values, rounded to a dtype."""
    return _registers.pack(values).astype(dtype)


def lane_and_warp(thread: Register) -> tuple[Register, Register]:
    """Return a thread's lane and its warp, given its index."""
    return thread & (LANES - 1), thread >> (LANES.bit_length() - 1)


def swizzled(group: Register, row: Register, length: int) -> Register:
    """Return the first column of a 16-byte group of `length` elements in a row of a swizzled tile.

    Args:
        group: The group's index in the row before the swizzle.
        row: The row's index among the eight over which the swizzle repeats.
        length: The number of elements in a group.
    """
    return (group ^ row) * length


def softplus(x: Register) -> Register:
    """Return log(1 + exp(x)) of a float32 scalar."""
    large = _registers.maximum(x, 0.0)
    return large + _registers.log1p(_registers.exp(-_registers.absolute(x)))


def sigmoid(x: Register) -> Register:
    """Return 1 / (1 + exp(-x)) of a float32 scalar, right to about 2e-7."""
    odds = approximate("ex2", x * -_LOG2_E)
    return approximate("rcp", _registers.f32(1.0) + odds)


def silu(x: Register) -> Register:
    """Return x / (1 + exp(-x)) of a float32 scalar, right to about 2e-7."""
    return x * sigmoid(x)


def approximate(function: str, x: Register) -> Register:
    """Return the GPU's approximation of "ex2", "rcp" or "rsqrt", which is right to about 2e-7."""
    return assembly(f"{function}.approx.ftz.f32 $0, $1;", "=f,f", jnp.float32, [x], has_effects=False)
