"""The only file that imports Pallas' Triton lowering. JAX has deprecated it, and a replacement would start here.

Kernels get references to whole arrays and address them with scalars and index vectors. This subset lowers, and is
interpreted, in the same way on every supported JAX. BlockSpec tiling is not used, because before JAX 0.12 a block that
extends beyond an array writes past its end.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from pallas_kernels import _math

LOG2_E = 1.4426950408889634
# A kernel's arrays, by the names under which `call` was given them. An array that was left out is None.
Refs: TypeAlias = SimpleNamespace
_NONE: Mapping[str, Any] = MappingProxyType({})
# The index vector of a tile's axis, and the mask of indices inside the array.
Lanes: TypeAlias = tuple[jax.Array, jax.Array]

program_id = pl.program_id
num_programs = pl.num_programs
when = pl.when
load = plt.load
store = plt.store
barrier = plt.debug_barrier  # waits for all threads of a program; not for interpret mode


def power_of_two(extent: int) -> int:
    """Return the smallest power of two that is at least `extent`. Triton's tiles have no other sizes."""
    return 1 << max(extent - 1, 0).bit_length()


def lanes(tile: jax.Array | int, size: int, extent: int) -> Lanes:
    """Return the indices [size] of tile `tile` of an axis, and the mask of indices less than `extent`."""
    index = tile * size + jax.lax.broadcasted_iota(jnp.int32, (size,), 0)
    return index, index < extent


def part_shapes(num_rows: int, sizes: Sequence[int], dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the outputs `part0`, `part1`, .. of a kernel that cuts its columns into arrays of `sizes` columns."""
    return {f"part{n}": jax.ShapeDtypeStruct((num_rows, size), dtype) for n, size in enumerate(sizes)}


def parts(refs: Refs, sizes: Sequence[int], column: jax.Array) -> Iterator[tuple[Any, jax.Array, jax.Array]]:
    """Yield the reference of each output of `part_shapes`, the indices of `column` in it, and the mask of those in range."""
    begin = 0
    for n, size in enumerate(sizes):
        index = column - begin
        yield getattr(refs, f"part{n}"), index, (index >= 0) & (index < size)
        begin += size


def segments(extent: int, size: int) -> Lanes:
    """Return the indices of a whole axis, folded to [segments, size], and the mask of indices less than `extent`.

    In a tile of a state, [segments, rows, size], one thread holds the elements of a row that are `size` apart. Most of
    a sum along the row then needs no shuffles.
    """
    shape = (max(power_of_two(extent) // size, 1), size)
    index = jax.lax.broadcasted_iota(jnp.int32, shape, 0) * size + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return index, index < extent


def row_sum(tile: jax.Array) -> jax.Array:
    """Sum each row of a tile [segments, rows, size]; returns [rows]."""
    return jnp.sum(jnp.sum(tile, axis=0), axis=1)


def assembly(asm: str, constraints: str, *args: jax.Array, pack: int = 1) -> jax.Array:
    """Apply PTX to arrays of one shape, `pack` elements of a thread at a time, and return an array like the first one.

    Operands $0 to $(pack - 1) are elements of the result, and the next `pack` operands are elements of the first argument.
    The compiler may run the PTX twice or, if the result is not used, not at all.
    """
    shape = jax.ShapeDtypeStruct(args[0].shape, args[0].dtype)
    return plt.elementwise_inline_asm(asm, args=args, constraints=constraints, pack=pack, result_shape_dtypes=[shape])[
        0
    ]


def _assembly(asm: str, *args: jax.Array) -> jax.Array:
    """Apply PTX to float32 arrays, element by element."""
    return assembly(asm, ",".join(["=f"] + ["f"] * len(args)), *args)


def _instruction(name: str, x: jax.Array) -> jax.Array:
    return _assembly(f"{name} $0, $1;", x)


def exp2(x: jax.Array, interpret: bool) -> jax.Array:
    """Return 2 ** x by one instruction, within 2 units in the last place.

    libdevice's exp2 takes three more instructions, for denormal results.
    """
    return jnp.exp2(x) if interpret else _instruction("ex2.approx.ftz.f32", x)


def exp2_of_sum(x: jax.Array, factor: float, addend: jax.Array, interpret: bool) -> jax.Array:
    """Return 2 ** (x * factor + addend), within 2 units in the last place of the exponential.

    The exponent is one fused multiply-add wherever the function is used. The compiler would otherwise be free to fuse the
    two in one loop and not in another one, whose results must be the same bits.
    """
    if interpret:  # A sum that is multiplied cannot be fused, unlike a product to which something is added.
        return jnp.exp2((x + addend / factor) * factor)
    factors, addends = jnp.full(x.shape, factor, x.dtype), jnp.broadcast_to(addend, x.shape)
    return _assembly("fma.rn.f32 $0, $1, $2, $3; ex2.approx.ftz.f32 $0, $0;", x, factors, addends)


def product(x: jax.Array, y: jax.Array, interpret: bool) -> jax.Array:
    """Return x * y, rounded, for `y` that broadcasts against `x`.

    The compiler would otherwise be free to fuse the product with an addition that follows, in one kernel and not in another
    one whose results must be the same bits. In interpret mode it is free to.
    """
    if interpret:
        return x * y
    return _assembly("mul.rn.f32 $0, $1, $2;", x, jnp.broadcast_to(y, x.shape))


def silu(x: jax.Array, interpret: bool) -> jax.Array:
    """Return the sigmoid linear unit by five instructions. Its sigmoid is within 4 units in the last place."""
    if interpret:
        return _math.silu(x)
    return x * _instruction("rcp.approx.ftz.f32", 1.0 + exp2(x * -LOG2_E, interpret))


def _refuse(context: Any, x: Any, *, name: str) -> Any:
    raise ValueError(
        f"{name}: implementation='triton' compiles for NVIDIA GPUs only; with interpret=True the kernel's body runs anywhere"
    )


# The identity. Its lowering for other platforms than CUDA raises an error that names `interpret=True`.
_for_gpus = Primitive("for_gpus")
_for_gpus.def_impl(lambda x, *, name: x)
_for_gpus.def_abstract_eval(lambda x, *, name: x)
batching.defvectorized(_for_gpus)
mlir.register_lowering(_for_gpus, _refuse)
mlir.register_lowering(_for_gpus, lambda context, x, *, name: [x], platform="cuda")


def call(
    kernel: Callable[[Refs], None],
    *,
    name: str,
    grid: tuple[int, ...],
    inputs: Mapping[str, Any],
    outputs: Mapping[str, jax.ShapeDtypeStruct] = _NONE,
    updates: Mapping[str, jax.Array] = _NONE,
    num_warps: int,
    num_stages: int = 1,
    interpret: bool = False,
) -> dict[str, jax.Array]:
    """Launch `kernel` on references to whole arrays.

    Args:
        kernel: The body of one program. Its argument has an attribute for each name in `inputs`, `outputs` and
            `updates`.
        name: The name of the launch in a profile.
        grid: The number of programs along each axis. Programs along the first axis run next to each other.
        inputs: Arrays that are read, by name. Scalars are 0-d arrays, and None stands for an array that is left out.
        outputs: Arrays that are written, by name.
        updates: Arrays that are read and written in place, by name.
        num_warps: The number of warps per program.
        num_stages: The software-pipelining depth of loops.
        interpret: Whether to run the body as plain JAX, on any platform.

    Returns:
        The outputs and the updated arrays, by name.
    """
    given = {key: value for key, value in inputs.items() if value is not None}
    out_shape = dict(outputs) | {key: jax.ShapeDtypeStruct(x.shape, x.dtype) for key, x in updates.items()}

    def body(*refs):
        # The kernel gets only the output reference of an updated array, because in interpret mode its input reference
        # keeps the old values.
        read, written = refs[: len(given)], refs[len(given) + len(updates) :]
        by_name = (
            dict.fromkeys(inputs) | dict(zip(given, read, strict=True)) | dict(zip(out_shape, written, strict=True))
        )
        kernel(Refs(**by_name))

    operands = [*given.values(), *updates.values()]
    if not interpret:
        operands[0] = _for_gpus.bind(operands[0], name=name)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    results = pl.pallas_call(
        body,
        out_shape=list(out_shape.values()),
        grid=grid,
        in_specs=[whole] * (len(given) + len(updates)),
        out_specs=[whole] * len(out_shape),
        input_output_aliases={len(given) + i: len(outputs) + i for i in range(len(updates))},
        # Without Triton's own parameters JAX 0.10 would lower to Mosaic.
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
    )(*operands)
    return dict(zip(out_shape, results, strict=True))
