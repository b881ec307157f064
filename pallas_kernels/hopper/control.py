"""Code of single threads in a kernel: how it begins, which threads run it, its loops, and its instructions of PTX."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.mosaic.gpu import fragmented_array as fragments
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, scf
from jaxlib.mlir.dialects import llvm

from pallas_kernels._warpgroup import THREADS, pack_of_spread
from pallas_kernels.hopper.layouts import by_warp, plgpu, spread
from pallas_kernels.hopper.registers import Memory, Register, index, pack, type_of, unpack


def inline(body: Callable[..., Any], *operands: Any, results: Sequence[tuple[Any, Any]] = ()) -> list[jax.Array]:
    """Run code of single threads, by one warpgroup.

    Args:
        body: Gets each of `operands`: memory as `Memory`, where a tiled one has the axes of its swizzled rows last; an array
            as a list of the thread's registers; and a scalar as a `Register`. It returns a tuple with a list of registers
            for each of `results`, vectors as `strided` makes them or pairs of a tile, or None if there are none.
        operands: Pairs of a reference to memory and its `tiling`, or () if it has none; arrays in the layout `spread`; tiles
            in the tensor cores' layout, of which a thread has pairs, ordered by eight columns and then by half of the warp's
            16 rows; arrays [4] with a value for each warp; and scalars.
        results: The length and the dtype of each array that is returned, in the layout `spread`, or the shape of a tile, in
            the tensor cores' layout.

    Returns:
        The arrays.
    """
    is_scalar = lambda x: not isinstance(x, tuple) and jnp.ndim(x) == 0

    def layout(x: Any) -> Any:
        if isinstance(x, tuple):
            return plgpu.RefType(x[1])
        if is_scalar(x):
            return plgpu.Layout.WG_SPLAT
        if len(x.shape) == 2:
            return plgpu.Layout.WGMMA
        return by_warp().reduce(1) if x.shape == (4,) else spread(x.shape[0])

    def seen(operand: Any, x: Any) -> Any:
        if isinstance(operand, tuple):
            return Memory(x)
        held = [Register(each) for each in x.registers.flat]
        return held[0] if is_scalar(operand) else held  # a scalar comes as an array without axes

    def run(_: Any, *given: Any) -> Any:
        found = body(*(seen(*pair) for pair in zip(operands, given, strict=True)))
        if found is None:
            return None
        return tuple(_array(x, size) for x, (size, _) in zip(found, results, strict=True))

    def described(size: Any, dtype: Any) -> Any:
        if isinstance(size, tuple):
            return plgpu.ShapeDtypeStruct(size, dtype, plgpu.Layout.WGMMA)
        return plgpu.ShapeDtypeStruct((size,), dtype, spread(size))

    types = tuple(described(*each) for each in results)
    written = plgpu.inline_mgpu(arg_types=tuple(map(layout, operands)), return_type=types or None)(run)
    found = written(*(x[0] if isinstance(x, tuple) else x for x in operands))
    return list(found) if types else []


def _array(registers: Sequence[Register], size: Any) -> Any:
    """Make an array of which each thread has the given registers."""
    if isinstance(size, tuple):
        return held([x.value for x in registers], plgpu.Layout.WGMMA.to_mgpu(), size)
    layout = fragments.WGStridedFragLayout((size,), pack_of_spread(size))
    return held([x.value for x in registers], layout, (size,))


def held(values: Sequence[Any], layout: Any, shape: tuple[int, ...]) -> Any:
    """Make an array of which each thread has vectors of MLIR in registers."""
    registers = np.empty((len(values),), object)
    registers[:] = values
    is_signed = True if isinstance(values[0].type.element_type, ir.IntegerType) else None
    registers = registers.reshape(layout.registers_shape(shape))
    return fragments.FragmentedArray(_registers=registers, _layout=layout, _is_signed=is_signed)


def elements(registers: Sequence[Register]) -> list[Register]:
    """Return a thread's elements of an array in the layout `spread`."""
    return [element for x in registers for element in unpack(x)]


def strided(elements: Sequence[Register]) -> list[Register]:
    """Return a thread's elements of an array in the layout `spread` as its registers."""
    count = pack_of_spread(THREADS * len(elements))
    return [pack(elements[n : n + count]) for n in range(0, len(elements), count)]


def thread_index() -> Register:
    """Return a thread's index in its warpgroup, int32."""
    return Register(mosaic.thread_idx()) & (THREADS - 1)


def thread_index_again() -> Register:
    """Return a thread's index in its warpgroup like `thread_index`, but read the register again.

    The compiler does not know that the two are equal, so it computes nothing from this index before the instruction that
    reads it, and keeps nothing in registers over the code between.
    """
    return assembly("mov.u32 $0, %tid.x;", "=r", jnp.int32, []) & (THREADS - 1)


def thread_of_cta() -> Register:
    """Return a thread's index in its CTA, of all warpgroups, int32."""
    return Register(mosaic.thread_idx())


@contextlib.contextmanager
def predicated(condition: Register) -> Iterator[None]:
    """Let only those threads run the block's code that meet a condition."""
    branch = scf.IfOp(condition.value)
    with ir.InsertionPoint(branch.then_block):
        yield
        scf.yield_([])


def branch(condition: Register, then: Callable[[], Sequence[Any]], otherwise: Sequence[Any]) -> list[Any]:
    """Return the registers that `then` returns in threads that meet a condition, and `otherwise` in the others."""
    found = scf.IfOp(condition.value, [x.value.type for x in otherwise], has_else=True)
    with ir.InsertionPoint(found.then_block):
        scf.yield_([x.value for x in then()])
    assert found.else_block is not None
    with ir.InsertionPoint(found.else_block):
        scf.yield_([x.value for x in otherwise])
    return [Register(x) for x in found.results]


def for_range(start: Any, stop: Any, body: Callable[[Any, list[Any]], list[Any]], carry: Sequence[Any]) -> list[Any]:
    """Run carry = body(n, carry) for each n from `start` up to `stop`. All are registers. Return the last ones."""
    start, stop = index(start), index(stop)
    step = arith.constant(ir.IndexType.get(), 1)
    loop = scf.ForOp(start.value, stop.value, step, [x.value for x in carry])
    with ir.InsertionPoint(loop.body):
        n = Register(arith.index_cast(type_of(jnp.int32), loop.induction_variable))
        scf.yield_([x.value for x in body(n, [Register(x) for x in loop.inner_iter_args])])
    return [Register(x) for x in loop.results]


def assembly(text: str, constraints: str, results: Any, operands: Sequence[Any], *, has_effects: bool = True) -> Any:
    """Write instructions of PTX. They keep their order if they have effects besides their results.

    Args:
        text: The instructions.
        constraints: The constraints of LLVM's inline assembly, the results' first.
        results: The dtype of the result, or a list of dtypes of several, or None.
        operands: The operands, registers.
        has_effects: Whether they have effects.

    Returns:
        The result, a list of several, or None.
    """
    kinds = [type_of(x) for x in (results if isinstance(results, list) else [] if results is None else [results])]
    kind = ir.Type.parse(f"!llvm.struct<({', '.join(map(str, kinds))})>") if len(kinds) > 1 else None
    given = [x.value for x in operands]
    written: Any = llvm.inline_asm(kind or (kinds or [None])[0], given, text, constraints, has_side_effects=has_effects)
    if kind is not None:
        return [Register(llvm.extractvalue(each, written, [n])) for n, each in enumerate(kinds)]
    found = [Register(written)] if kinds else []
    return found if isinstance(results, list) else found[0] if found else None
