"""Messages between the CTAs of one launch through GMEM: 32-bit values without flags, and counters.

The memory is +0 when the launch starts, and a value of +0 is sent as -0. A reader that loads anything else has the value,
so neither fences nor flags are needed. A fence would wait for all outstanding loads of the SM.

Between devices, a value and the epoch of its exchange are one 64-bit word, which memory never tears.

Source: the idea of NCCL's protocol "LL" (low latency), without a flag for each value.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import hopper as hp
from pallas_kernels._warpgroup import THREADS, pack_of_spread
from pallas_kernels.hopper.control import assembly

WARPS = 4  # warps of a warpgroup
_OUTSTANDING = 64  # values that a thread loads before it checks the first one


def receive(refs: Sequence[Any]) -> list[jax.Array]:
    """Wait for the values that other CTAs `send`. Return a float32 vector for each reference, in the layout `spread`.

    A thread loads up to 64 values, of several references too, before it checks the first one. All references have the same
    length.
    """
    length = refs[0].shape[0]
    together = max(1, _OUTSTANDING * THREADS // length)
    if len(refs) > together:
        return receive(refs[:together]) + receive(refs[together:])
    count = pack_of_spread(length)

    def body(*refs: Any) -> Any:
        thread = hp.thread_index() * count
        starts = [thread + first for first in range(0, length, THREADS * count)]
        addresses = [hp.address(ref, start) for ref in refs for start in starts]
        found = poll(load(addresses, count, jnp.float32), addresses, jnp.float32)
        held = [hp.pack(values) for values in found]
        return tuple(held[n : n + len(starts)] for n in range(0, len(held), len(starts)))

    return hp.inline(body, *((ref, ()) for ref in refs), results=[(length, jnp.float32)] * len(refs))


def load(addresses: Sequence[Any], count: int, dtype: Any) -> list[list[Any]]:
    """Load `count` 32-bit values (1, 2 or 4) at each address, whether they have been sent or not. See `poll`."""
    # A plain load is faster than a relaxed one. It may miss a value that has been sent, which `poll` then loads.
    text, letter = f"{_load(count, count, '.global')};", _letter(dtype)
    constraints = ",".join([f"={letter}"] * count + ["l"])
    return [assembly(text, constraints, [dtype] * count, [at]) for at in addresses]


def poll(loaded: Sequence[Sequence[Any]], addresses: Sequence[Any], dtype: Any) -> list[list[Any]]:
    """Wait until the values that `load` has loaded have been sent, and return them. It loads them again if necessary."""
    count, letter = len(loaded[0]), _letter(dtype)
    lines = [".reg .pred p;", ".reg .b32 bits;"]
    lines += [f"mov.b32 ${n}, ${count + n};" for n in range(count)] + ["AGAIN:"]
    for n in range(count):
        lines += [
            f"mov.b32 bits, ${n};",
            f"setp.eq{'.or' if n else ''}.b32 p, bits, 0{', p' if n else ''};",
        ]
    lines += ["@!p bra DONE;", f"{_load(count, 2 * count)};", "bra AGAIN;", "DONE:"]
    text = "{" + " ".join(lines) + "}"
    constraints = ",".join([f"=&{letter}"] * count + [letter] * count + ["l"])
    again = lambda first, at: assembly(text, constraints, [dtype] * count, [*first, at])
    return [again(first, at) for first, at in zip(loaded, addresses, strict=True)]


def _load(count: int, operand: int, how: str = ".relaxed.gpu") -> str:
    """Return the instruction that loads `count` values at the address in an operand."""
    return f"ld{how}{_vector(count)}.b32 {_names(0, count)}, [${operand}]"


def _vector(count: int) -> str:
    return "" if count == 1 else f".v{count}"


def _names(first: int, count: int) -> str:
    names = [f"${first + n}" for n in range(count)]
    return names[0] if count == 1 else "{" + ", ".join(names) + "}"


def _letter(dtype: Any) -> str:
    return "r" if dtype == jnp.int32 else "f"


def store(address: Any, values: Sequence[Any]) -> None:
    """Store one or two 32-bit values for other CTAs to `poll`, by single threads.

    Args:
        address: The address of the first value. It is a multiple of their size in bytes.
        values: int32 or float32 values of this thread. A value with all bits 0 is stored with its sign bit set.
    """
    bits = [hp.bitcast(value, jnp.int32) for value in values]
    is_zero = [each == 0 for each in bits]
    sent = [hp.select(*pair) for pair in zip(is_zero, [hp.i32(-(2**31))] * len(bits), bits, strict=True)]
    text = f"st.relaxed.gpu{_vector(len(sent))}.b32 [$0], {_names(1, len(sent))};"
    assembly(text, ",".join(["l"] + ["r"] * len(sent)), None, [address, *sent])


def send(ref: Any, values: jax.Array) -> None:
    """Store four float32 values, one of each warp, in GMEM, from which other CTAs `receive` them."""

    def body(values: Any, ref: Any) -> None:
        lane, warp = hp.lane_and_warp(hp.thread_index())
        value = hp.unpack(values[0])[0]
        text = (
            "{.reg .pred first, zero; .reg .f32 number; setp.eq.s32 first, $2, 0; setp.eq.f32 zero, $1, 0f00000000;"
            " selp.f32 number, 0f80000000, $1, zero; @first st.relaxed.gpu.f32 [$0], number;}"
        )
        assembly(text, "l,f,r", None, [hp.address(ref, warp), value, lane])

    hp.inline(body, values, (ref, ()))


def signal_by_warp(counter: Any) -> None:
    """Add one per warp, four, to a counter, int32 [1], as each warp gets here. Values that they sent may arrive later."""
    hp.inline(lambda counter: _count_if_zero(counter, hp.lane_and_warp(hp.thread_index())[0]), (counter, ()))


def signal(counter: Any) -> None:
    """Add one to a counter, int32 [1], when the CTA's first warp gets here. Values that it sent may arrive later."""
    hp.inline(lambda counter: _count_if_zero(counter, hp.thread_of_cta()), (counter, ()))


def _count_if_zero(counter: Any, index: Any) -> None:
    """Add one to a counter in those threads whose `index` is 0."""
    text = "{.reg .pred first; setp.eq.s32 first, $1, 0; @first red.relaxed.gpu.add.u32 [$0], 1;}"
    assembly(text, "l,r", None, [hp.address(counter, 0), index])


def wait(counter: Any, enough: int) -> None:
    """Wait until a counter, int32 [1], is at least `enough`. It only keeps `receive` and `poll` from loading too often.

    One warp loads the counter for its warpgroup, because each load delays the signals. Three of four signals are enough
    where few values are polled: the last ones are seen sooner than their senders' signals.
    """

    def body(counter: Any) -> None:
        _lane, warp = hp.lane_and_warp(hp.thread_index())
        text = (
            "{.reg .pred early, idle; .reg .s32 count; setp.ne.s32 idle, $2, 0; @idle bra DONE;"
            " AGAIN: ld.relaxed.gpu.s32 count, [$0]; setp.lt.s32 early, count, $1; @early bra AGAIN; DONE:}"
        )
        assembly(text, "l,r,r", None, [hp.address(counter, 0), hp.i32(enough), warp])
        hp.warpgroup_barrier()

    hp.inline(body, (counter, ()))


def store_to_device(address: Any, pair: Sequence[Any], epoch: Any) -> None:
    """Store two float32 values, each with the epoch, at an address of any device, by single threads."""
    text = "{.reg .b64 one, two; mov.b64 one, {$1, $3}; mov.b64 two, {$2, $3};"
    text += " st.relaxed.sys.global.v2.b64 [$0], {one, two};}"
    assembly(text, "l,f,f,r", None, [address, *pair, epoch])


def poll_device(address: Any, epoch: Any) -> list[Any]:
    """Wait for two float32 values of an epoch at an address of this device, by single threads. Return them."""
    text = "{.reg .pred p; .reg .b64 one, two; .reg .b32 epoch;"
    text += " AGAIN: ld.relaxed.sys.global.v2.b64 {one, two}, [$2];"
    for n, word in enumerate(("one", "two")):
        text += f" mov.b64 {{${n}, epoch}}, {word}; setp.ne.u32 p, epoch, $3; @p bra AGAIN;"
    return assembly(text + "}", "=&f,=&f,l,r", [jnp.float32] * 2, [address, epoch])
