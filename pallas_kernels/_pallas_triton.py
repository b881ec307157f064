"""The only file that imports Pallas' Triton lowering, which JAX has deprecated: replacing it starts here.

Kernels see whole arrays (no BlockSpec tiling: an overhanging block writes past the array before JAX 0.12) and address
them with scalars and index vectors, the subset that lowers and interprets alike on every supported JAX.
"""

from collections.abc import Callable, Mapping
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import _math

LOG2_E = 1.4426950408889634

program_id = pl.program_id
num_programs = pl.num_programs
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


def segments(extent: int, size: int) -> tuple[jax.Array, jax.Array]:
    """Indices of a whole axis, folded to [segments, size], and which of them lie inside its `extent`.

    A state tile [segments, rows, size] keeps the parts of a row that are `size` apart in one thread: most of a sum along
    the row then needs no exchange between threads.
    """
    shape = (max(power_of_two(extent) // size, 1), size)
    index = jax.lax.broadcasted_iota(jnp.int32, shape, 0) * size + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return index, index < extent


def row_sum(tile: jax.Array) -> jax.Array:
    """Sums of the rows of a tile [segments, rows, size]."""
    return jnp.sum(jnp.sum(tile, axis=0), axis=1)


def _instruction(name: str, x: jax.Array) -> jax.Array:
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    asm = f"{name} $0, $1;"
    return plt.elementwise_inline_asm(asm, args=[x], constraints="=f,f", pack=1, result_shape_dtypes=[shape])[0]


def exp2(x: jax.Array, interpret: bool) -> jax.Array:
    """2 ** x in one instruction, within 2 units in the last place; libdevice spends three more on denormal results."""
    return jnp.exp2(x) if interpret else _instruction("ex2.approx.ftz.f32", x)


def silu(x: jax.Array, interpret: bool) -> jax.Array:
    """The sigmoid linear unit in five instructions, its sigmoid within 4 units in the last place."""
    if interpret:
        return _math.silu(x)
    return x * _instruction("rcp.approx.ftz.f32", 1.0 + exp2(x * -LOG2_E, interpret))


def call(
    kernel: Callable[[SimpleNamespace], None],
    *,
    name: str,
    grid: tuple[int, ...],
    inputs: Mapping[str, jax.Array | None],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    updates: Mapping[str, jax.Array],
    num_warps: int,
    num_stages: int = 1,
    interpret: bool = False,
) -> dict[str, jax.Array]:
    """Launches `kernel` over whole-array refs.

    Args:
        kernel: Takes a namespace with a ref, or None, under each name of `inputs`, `outputs` and `updates`.
        name: What the launch is called in a profile.
        grid: Programs per axis, those that should run side by side first.
        inputs: Arrays that are read, scalars as 0-d arrays; None for those left out.
        outputs: Arrays that are written.
        updates: Arrays that are read and written in place.
        num_warps: Warps per program.
        num_stages: Software-pipelining depth of loops.
        interpret: Runs the body on any platform, as plain JAX.

    Returns:
        The outputs and the updated arrays, by name.
    """
    given = {key: value for key, value in inputs.items() if value is not None}
    out_shape = dict(outputs) | {key: jax.ShapeDtypeStruct(x.shape, x.dtype) for key, x in updates.items()}

    def body(*refs):
        # An updated array is touched through its output ref alone: interpreted, its input ref keeps the old values.
        read, written = refs[: len(given)], refs[len(given) + len(updates) :]
        by_name = (
            dict.fromkeys(inputs) | dict(zip(given, read, strict=True)) | dict(zip(out_shape, written, strict=True))
        )
        kernel(SimpleNamespace(**by_name))

    whole = pl.BlockSpec(memory_space=pl.ANY)
    results = pl.pallas_call(
        body,
        out_shape=list(out_shape.values()),
        grid=grid,
        in_specs=[whole] * (len(given) + len(updates)),
        out_specs=[whole] * len(out_shape),
        input_output_aliases={len(given) + i: len(outputs) + i for i in range(len(updates))},
        # Without Triton's own parameters JAX 0.10 lowers to Mosaic.
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
    )(*given.values(), *updates.values())
    return dict(zip(out_shape, results, strict=True))
