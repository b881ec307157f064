"""How programs of one launch send each other float32 numbers through the GPU's memory, on Hopper GPUs.

The memory is +0 when the launch starts, and a number that is +0 is sent as -0. Whoever reads something else than +0 has the
number, so neither fences nor flags are needed. A fence would wait for all that the core is reading.

Source: the idea of NCCL's protocol "LL" (low latency), without a flag for each number.
"""

from typing import Any

import jax

from pallas_kernels import _pallas_mosaic as pm
from pallas_kernels._pallas_mosaic import arith, ir, vector

_WARP = 32  # lanes
_THREADS = 128  # of a warpgroup


def receive(ref: Any) -> jax.Array:
    """Waits for numbers that other programs `send`, and returns them as float32, in the layout `pm.spread`.

    All of them are on their way before the first one is looked at.
    """
    length = ref.shape[0]
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

    def body(_: Any, ref: Any) -> Any:
        kind = ir.F32Type.get()
        result = kind if pack == 1 else ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * pack)})>")
        numbers = lambda x: [x] if pack == 1 else [pm.element_of_struct(x, place, kind) for place in range(pack)]
        thread = arith.muli(pm.thread_index(), pm.constant(pack))
        places = [
            pm.address(ref, arith.addi(thread, pm.constant(first))) for first in range(0, length, _THREADS * pack)
        ]
        first = [pm.assembly(f"{load} [${pack}];", ",".join(["=f"] * pack + ["l"]), result, [at]) for at in places]
        constraints = ",".join(["=&f"] * pack + ["f"] * pack + ["l"])
        found = [
            pm.assembly(again, constraints, result, [*numbers(x), at]) for x, at in zip(first, places, strict=True)
        ]
        held = [vector.from_elements(ir.VectorType.get((pack,), kind), numbers(x)) for x in found]
        return pm.fragments_of_spread(held, length)

    return pm.inline_array(body, ref, length)


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
    """Waits until all warps of so many programs have called `tell`. It only keeps `receive` from asking too often."""

    def body(_: Any, counter: Any) -> None:
        text = (
            "{.reg .pred early; .reg .s32 count; AGAIN: ld.relaxed.gpu.s32 count, [$0];"
            " setp.lt.s32 early, count, $1; @early bra AGAIN;}"
        )
        pm.assembly(text, "l,r", None, [pm.address(counter, pm.constant(0)), pm.constant(4 * programs)])

    pm.inline(body, (counter, ()))
