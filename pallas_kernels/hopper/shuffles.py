"""Warp shuffles and reductions. All 32 lanes of the warp must take part.

Source: "shfl.sync" and "redux.sync" in NVIDIA's PTX ISA.
"""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jaxlib.mlir.dialects import nvvm

from pallas_kernels.hopper.control import assembly
from pallas_kernels.hopper.registers import Register, bitcast, i32


def shfl_up(x: Register, distance: int) -> Register:
    """Return the float32 value of the lane `distance` before. A warp's first lanes get their own."""
    return _shuffled(x, distance, 0, nvvm.ShflKind.up)


def shfl_xor(x: Register, distance: int) -> Register:
    """Return the float32 value of the lane whose index differs in the bit `distance`, a power of two."""
    return _shuffled(x, distance, 31, nvvm.ShflKind.bfly)


def shfl_idx(x: Register, lane: int, *, width: int = 32) -> Register:
    """Return the float32 value of a lane, given its index among `width` neighbours, a power of two."""
    return _shuffled(x, lane, (32 - width) << 8 | 31, nvvm.ShflKind.idx)


def _shuffled(x: Register, operand: int, last: int, kind: Any) -> Register:
    bits = bitcast(x, jnp.int32)
    operands = i32(-1).value, bits.value, i32(operand).value, i32(last).value
    return bitcast(Register(nvvm.shfl_sync(*operands, kind)), jnp.float32)


def sum_over_lanes(x: Register, distances: Iterable[int]) -> Register:
    """Return the sum of the float32 values of lanes whose indices differ only in the bits `distances`, powers of two."""
    for distance in distances:
        x = x + shfl_xor(x, distance)
    return x


def reduce_warp(operation: str, x: Register) -> Register:
    """Return the largest ("max") or the smallest ("min") of the warp's int32 values."""
    return assembly(f"redux.sync.{operation}.s32 $0, $1, 0xffffffff;", "=r,r", jnp.int32, [x])
