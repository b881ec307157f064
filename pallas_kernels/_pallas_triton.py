"""The only file that imports Pallas' Triton lowering, which JAX has deprecated: replacing it starts here.

Kernels see whole arrays (no BlockSpec tiling: an overhanging block writes past the array before JAX 0.12) and address
them with scalars and index vectors, the subset that lowers and interprets alike on every supported JAX.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

program_id = pl.program_id
when = pl.when
load = plt.load
store = plt.store


def power_of_two(extent: int) -> int:
    """The smallest power of two that is at least `extent`: Triton's tiles have no other sizes."""
    return 1 << max(extent - 1, 0).bit_length()


def lanes(tile: jax.Array | int, size: int, extent: int) -> tuple[jax.Array, jax.Array]:
    """Indices of tile number `tile` of an axis, and which of them lie inside its `extent`."""
    index = tile * size + jax.lax.broadcasted_iota(jnp.int32, (size,), 0)
    return index, index < extent


def call(
    kernel: Callable[..., None],
    operands: Sequence[jax.Array],
    *,
    name: str,
    grid: tuple[int, ...],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    aliases: Mapping[int, int],
    num_warps: int,
    num_stages: int = 1,
    interpret: bool = False,
) -> Any:
    """Launches `kernel` over whole-array refs: one per operand, then one per output.

    Args:
        kernel: Takes the refs. An aliased array must be touched through its output ref alone.
        operands: Arrays, scalars as 0-d arrays.
        name: What the launch is called in a profile.
        grid: Programs per axis.
        out_shape: One entry per output.
        aliases: Operand number -> output number that shares its buffer.
        num_warps: Warps per program.
        num_stages: Software-pipelining depth of loops.
        interpret: Runs the body on any platform, as plain JAX.
    """
    whole = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        kernel,
        out_shape=list(out_shape),
        grid=grid,
        in_specs=[whole] * len(operands),
        out_specs=[whole] * len(out_shape),
        input_output_aliases=dict(aliases),
        # Without Triton's own parameters JAX 0.10 lowers to Mosaic.
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
    )(*operands)
