"""How programs of one launch send each other float32 numbers through the GPU's memory, on Hopper GPUs.

The memory is +0 when the launch starts, and a number that is +0 is sent as -0. Whoever reads something else than +0 has the
number, so neither fences nor flags are needed. A fence would wait for all that the core is reading.

Source: the idea of NCCL's protocol "LL" (low latency), without a flag for each number.
"""

from collections.abc import Sequence
from typing import Any

import jax

from pallas_kernels import _pallas_mosaic as pm
from pallas_kernels._pallas_mosaic import arith, ir, vector

_WARP = 32  # lanes
_THREADS = 128  # of a warpgroup
_WARPS = 4  # of a warpgroup
_ASKED = 64  # numbers that a thread asks for at a time


def receive(refs: Sequence[Any]) -> list[jax.Array]:
    """Waits for numbers that other programs `send`. Returns a float32 vector for each reference, in the layout `pm.spread`.

    A thread asks for up to 64 numbers, of several references too, before it looks at the first one. All references have the
    same length.
    """
    length = refs[0].shape[0]
    together = max(1, _ASKED * _THREADS // length)
    if len(refs) > together:
        return receive(refs[:together]) + receive(refs[together:])
    pack = pm.pack_of_spread(length)
    names = [f"${place}" for place in range(pack)]
    target = names[0] if pack == 1 else "{" + ", ".join(names) + "}"
    load = f"ld.relaxed.gpu{'' if pack == 1 else f'.v{pack}'}.f32 {target},"
    lines = [".reg .pred p;", ".reg .b32 bits;"]
    lines += [f"mov.f32 ${place}, ${pack + place};" for place in range(pack)] + ["AGAIN:"]
    for place, name in enumerate(names):
        lines += [f"mov.b32 bits, {name};", f"setp.eq{'.or' if place else ''}.b32 p, bits, 0{', p' if place else ''};"]
    lines += ["@!p bra DONE;", f"{load} [${2 * pack}];", "bra AGAIN;", "DONE:"]
    again = "{" + " ".join(lines) + "}"

    def body(_: Any, *refs: Any) -> Any:
        kind = ir.F32Type.get()
        result = kind if pack == 1 else ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * pack)})>")
        numbers = lambda x: [x] if pack == 1 else [pm.element_of_struct(x, place, kind) for place in range(pack)]
        thread = arith.muli(pm.thread_index(), pm.constant(pack))
        starts = [arith.addi(thread, pm.constant(first)) for first in range(0, length, _THREADS * pack)]
        places = [pm.address(ref, start) for ref in refs for start in starts]
        first = [pm.assembly(f"{load} [${pack}];", ",".join(["=f"] * pack + ["l"]), result, [at]) for at in places]
        constraints = ",".join(["=&f"] * pack + ["f"] * pack + ["l"])
        found = [
            pm.assembly(again, constraints, result, [*numbers(x), at]) for x, at in zip(first, places, strict=True)
        ]
        held = [vector.from_elements(ir.VectorType.get((pack,), kind), numbers(x)) for x in found]
        parts = [held[n : n + len(starts)] for n in range(0, len(held), len(starts))]
        return tuple(pm.fragments_of_spread(part, length) for part in parts)

    return pm.inline_arrays(body, refs, length)


def _lane_and_warp() -> tuple[Any, Any]:
    """Returns a thread's place in its warp, and the warp's in its warpgroup."""
    thread = pm.thread_index()
    return arith.andi(thread, pm.constant(_WARP - 1)), arith.shrui(thread, pm.constant(5))


def send(ref: Any, numbers: jax.Array) -> None:
    """Stores four float32 numbers, one from each warp, where other programs can `receive` them."""

    def body(_: Any, numbers: Any, ref: Any) -> None:
        lane, warp = _lane_and_warp()
        number = vector.extract(numbers.registers.flat[0], [], [0])
        text = (
            "{.reg .pred first, zero; .reg .f32 number; setp.eq.s32 first, $2, 0; setp.eq.f32 zero, $1, 0f00000000;"
            " selp.f32 number, 0f80000000, $1, zero; @first st.relaxed.gpu.f32 [$0], number;}"
        )
        pm.assembly(text, "l,f,r", None, [pm.address(ref, warp), number, lane])

    pm.inline_of_warps(body, numbers, ref)


def tell(counter: Any) -> None:
    """Adds the four warps to a counter, int32 [1], when each gets here. What they have sent may arrive later."""

    def body(_: Any, counter: Any) -> None:
        lane, _warp = _lane_and_warp()
        text = "{.reg .pred first; setp.eq.s32 first, $1, 0; @first red.relaxed.gpu.add.u32 [$0], 1;}"
        pm.assembly(text, "l,r", None, [pm.address(counter, pm.constant(0)), lane])

    pm.inline(body, (counter, ()))


def listen(counter: Any, programs: int) -> None:
    """Waits until three of four warps of so many programs have called `tell`. It only keeps `receive` from asking too often.

    One warp reads the counter for its warpgroup, because each read delays the calls of `tell`. The last warps are not waited
    for here, because `receive` sees their numbers sooner than their calls.
    """

    def body(_: Any, counter: Any) -> None:
        _lane, warp = _lane_and_warp()
        text = (
            "{.reg .pred early, idle; .reg .s32 count; setp.ne.s32 idle, $2, 0; @idle bra DONE;"
            " AGAIN: ld.relaxed.gpu.s32 count, [$0]; setp.lt.s32 early, count, $1; @early bra AGAIN; DONE:}"
        )
        enough = pm.constant((_WARPS - 1) * programs)
        pm.assembly(text, "l,r,r", None, [pm.address(counter, pm.constant(0)), enough, warp])
        pm.warpgroup_barrier()

    pm.inline(body, (counter, ()))
