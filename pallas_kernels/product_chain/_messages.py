"""How programs of one launch send each other float32 numbers through the GPU's memory, on Hopper GPUs.

The memory is +0 when the launch starts, and a number that is +0 is sent as -0. Whoever reads something else than +0 has the
number, so neither fences nor flags are needed. A fence would wait for all that the core is reading.

Source: the idea of NCCL's protocol "LL" (low latency), without a flag for each number.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_mosaic as pm
from pallas_kernels import _thread_code as code
from pallas_kernels._pallas_mosaic import arith, ir, vector
from pallas_kernels._warpgroup import THREADS

WARPS = 4  # of a warpgroup
_ASKED = 64  # numbers that a thread asks for at a time


def receive(refs: Sequence[Any]) -> list[jax.Array]:
    """Waits for numbers that other programs `send`. Returns a float32 vector for each reference, in the layout `pm.spread`.

    A thread asks for up to 64 numbers, of several references too, before it looks at the first one. All references have the
    same length.
    """
    length = refs[0].shape[0]
    together = max(1, _ASKED * THREADS // length)
    if len(refs) > together:
        return receive(refs[:together]) + receive(refs[together:])
    pack = pm.pack_of_spread(length)

    def body(_: Any, *refs: Any) -> Any:
        kind = ir.F32Type.get()
        thread = arith.muli(pm.thread_index(), pm.constant(pack))
        starts = [arith.addi(thread, pm.constant(first)) for first in range(0, length, THREADS * pack)]
        places = [pm.address(ref, start) for ref in refs for start in starts]
        found = arrived(ask(places, pack, kind), places, kind)
        held = [vector.from_elements(ir.VectorType.get((pack,), kind), numbers) for numbers in found]
        parts = [held[n : n + len(starts)] for n in range(0, len(held), len(starts))]
        return tuple(pm.fragments_of_spread(part, length) for part in parts)

    return pm.inline(body, *((ref, ()) for ref in refs), results=[(length, jnp.float32)] * len(refs))


def ask(places: Sequence[Any], pack: int, kind: Any) -> list[list[Any]]:
    """Reads `pack` numbers that follow each other at each place, whether they are there or not, in `pm.inline`.

    Args:
        places: Addresses in the GPU's memory.
        pack: 1, 2 or 4.
        kind: The numbers' type, which has 32 bits.

    Returns:
        A list of numbers for each place.
    """
    # A plain load is faster than a relaxed one. It may miss what has been sent, which `arrived` then reads.
    text, letter = f"{_load(pack, pack, '.global')};", _letter(kind)
    constraints = ",".join([f"={letter}"] * pack + ["l"])
    return [_numbers(pm.assembly(text, constraints, _result(pack, kind), [at]), pack, kind) for at in places]


def arrived(asked: Sequence[Sequence[Any]], places: Sequence[Any], kind: Any) -> list[list[Any]]:
    """Waits until the numbers that `ask` has read are there, and reads them again if they were not, in `pm.inline`."""
    pack, letter = len(asked[0]), _letter(kind)
    lines = [".reg .pred p;", ".reg .b32 bits;"]
    lines += [f"mov.b32 ${place}, ${pack + place};" for place in range(pack)] + ["AGAIN:"]
    for place in range(pack):
        lines += [
            f"mov.b32 bits, ${place};",
            f"setp.eq{'.or' if place else ''}.b32 p, bits, 0{', p' if place else ''};",
        ]
    lines += ["@!p bra DONE;", f"{_load(pack, 2 * pack)};", "bra AGAIN;", "DONE:"]
    text = "{" + " ".join(lines) + "}"
    constraints = ",".join([f"=&{letter}"] * pack + [letter] * pack + ["l"])
    once_more = lambda first, at: pm.assembly(text, constraints, _result(pack, kind), [*first, at])
    return [_numbers(once_more(first, at), pack, kind) for first, at in zip(asked, places, strict=True)]


def _load(pack: int, place: int, how: str = ".relaxed.gpu") -> str:
    """Writes the instruction that reads numbers at the address that is operand `place`."""
    names = [f"${number}" for number in range(pack)]
    return f"ld{how}{'' if pack == 1 else f'.v{pack}'}.b32 {names[0] if pack == 1 else _braced(names)}, [${place}]"


def _braced(names: Sequence[str]) -> str:
    return "{" + ", ".join(names) + "}"


def _letter(kind: Any) -> str:
    return "r" if isinstance(kind, ir.IntegerType) else "f"


def _result(pack: int, kind: Any) -> Any:
    return kind if pack == 1 else ir.Type.parse(f"!llvm.struct<({', '.join([str(kind)] * pack)})>")


def _numbers(result: Any, pack: int, kind: Any) -> list[Any]:
    return [result] if pack == 1 else [pm.element_of_struct(result, place, kind) for place in range(pack)]


def store(place: Any, numbers: Sequence[Any]) -> None:
    """Stores one or two numbers of 32 bits where other programs wait for them, in `pm.inline`.

    Args:
        place: The address of the first one. It is a multiple of their bytes.
        numbers: int32 or float32 numbers of this thread. If all bits of one are 0, its sign is set instead.
    """
    bits = [arith.bitcast(pm.integer(), number) for number in numbers]
    is_zero = [arith.cmpi(arith.CmpIPredicate.eq, each, pm.constant(0)) for each in bits]
    sent = [arith.select(*pair) for pair in zip(is_zero, [pm.constant(-(2**31))] * len(bits), bits, strict=True)]
    names = [f"${number + 1}" for number in range(len(sent))]
    text = f"st.relaxed.gpu{'' if len(sent) == 1 else f'.v{len(sent)}'}.b32 [$0], "
    text += f"{names[0] if len(sent) == 1 else _braced(names)};"
    pm.assembly(text, ",".join(["l"] + ["r"] * len(sent)), None, [place, *sent])


def number_of_warp(numbers: Any) -> Any:
    """Returns the number of this thread's warp, of an array with one for each warp, in `pm.inline`."""
    return vector.extract(numbers.registers.flat[0], [], [0])


def send(ref: Any, numbers: jax.Array) -> None:
    """Stores four float32 numbers, one from each warp, where other programs can `receive` them."""

    def body(_: Any, numbers: Any, ref: Any) -> None:
        lane, warp = code.lane_and_warp(pm.thread_index())
        number = number_of_warp(numbers)
        text = (
            "{.reg .pred first, zero; .reg .f32 number; setp.eq.s32 first, $2, 0; setp.eq.f32 zero, $1, 0f00000000;"
            " selp.f32 number, 0f80000000, $1, zero; @first st.relaxed.gpu.f32 [$0], number;}"
        )
        pm.assembly(text, "l,f,r", None, [pm.address(ref, warp), number, lane])

    pm.inline(body, numbers, (ref, ()))


def tell(counter: Any) -> None:
    """Adds the four warps to a counter, int32 [1], when each gets here. What they have sent may arrive later."""
    pm.inline(lambda _, counter: _count_if_zero(counter, code.lane_and_warp(pm.thread_index())[0]), (counter, ()))


def tell_once(counter: Any) -> None:
    """Adds one to a counter, int32 [1], when the program's first warp gets here. What it has sent may arrive later."""
    pm.inline(lambda _, counter: _count_if_zero(counter, pm.thread_of_program()), (counter, ()))


def _count_if_zero(counter: Any, number: Any) -> None:
    """Adds one to a counter in those threads whose number is 0, in `pm.inline`."""
    text = "{.reg .pred first; setp.eq.s32 first, $1, 0; @first red.relaxed.gpu.add.u32 [$0], 1;}"
    pm.assembly(text, "l,r", None, [pm.address(counter, pm.constant(0)), number])


def listen(counter: Any, enough: int) -> None:
    """Waits until a counter, int32 [1], is at least `enough`. It only keeps `receive` and `ask` from asking too often.

    One warp reads the counter for its warpgroup, because each read delays the calls of `tell`. Three of four calls are
    enough where few numbers are asked for: the last ones are seen sooner than what their senders tell.
    """

    def body(_: Any, counter: Any) -> None:
        _lane, warp = code.lane_and_warp(pm.thread_index())
        text = (
            "{.reg .pred early, idle; .reg .s32 count; setp.ne.s32 idle, $2, 0; @idle bra DONE;"
            " AGAIN: ld.relaxed.gpu.s32 count, [$0]; setp.lt.s32 early, count, $1; @early bra AGAIN; DONE:}"
        )
        pm.assembly(text, "l,r,r", None, [pm.address(counter, pm.constant(0)), pm.constant(enough), warp])
        pm.warpgroup_barrier()

    pm.inline(body, (counter, ()))
