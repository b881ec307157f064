"""How owners of the residual stream on several devices add up what each device has, on Hopper GPUs.

An owner sends its sums to the owner of the same channels on every device, its own included, and waits for theirs. A number
travels with the turn in which it was sent, as one word of 64 bits, which memory never tears: see `all_reduce`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from pallas_kernels import _pallas_mosaic as pm
from pallas_kernels import _thread_code as code
from pallas_kernels._pallas_mosaic import arith, ir, memref
from pallas_kernels.all_reduce.mailboxes import SIDES, WORD_BYTES


class Devices(NamedTuple):
    """The devices, their mailboxes and a turn.

    Attributes:
        addresses: The addresses of the mailboxes: see `Mailboxes`. int32 [2 * (count + 1)], in the GPU's memory
        turn: The turn of the chain's first sum over devices. int32 [1], in the GPU's memory
        count: The number of devices.
        capacity: The numbers that a side of a mailbox holds.
        sums: The number of sums over devices before this one in the chain.
    """

    addresses: Any
    turn: Any
    count: int
    capacity: int
    sums: int

    @property
    def operands(self) -> list[Any]:
        """What `pm.inline` gets for `added_up`."""
        return [(self.addresses, ()), (self.turn, ())]


def added_up(
    devices: Devices, addresses: Any, turn: Any, pairs: Sequence[Any], places: Sequence[Any]
) -> list[list[Any]]:
    """Adds up pairs of numbers over the devices, in their order, in `pm.inline`.

    Args:
        devices: The devices.
        addresses: The operand for `devices.addresses`.
        turn: The operand for `devices.turn`.
        pairs: This thread's pairs of float32 numbers.
        places: The place of each pair's first number among those of a turn, which is even.

    Returns:
        The sums, in pairs.
    """
    first = memref.load(turn, [code.index(pm.constant(0))])
    own = code.total(first, pm.constant(2 * devices.sums))
    side_bytes = devices.capacity * WORD_BYTES
    # Turns are odd, so that no word of an empty mailbox has one.
    side = arith.andi(arith.shrui(own, pm.constant(1)), pm.constant(SIDES - 1))
    offsets = [code.total(code.scaled(side, side_bytes), code.scaled(place, WORD_BYTES)) for place in places]
    begins = [code.load_address(addresses, number) for number in range(devices.count + 1)]
    for begin in begins[:-1]:
        for pair, offset in zip(pairs, offsets, strict=True):
            send(code.moved(begin, offset), pair, own)
    sums: list[list[Any]] = []
    for offset in offsets:
        sources = [
            code.moved(begins[-1], code.total(offset, pm.constant(number * SIDES * side_bytes)))
            for number in range(devices.count)
        ]
        found = [receive(source, own) for source in sources]
        sums.append([code.added([pair[n] for pair in found]) for n in range(2)])
    return sums


def next_turn(devices: Devices, target: Any) -> None:
    """Stores the turn after the chain in `target`, int32 [1]. `devices.sums` is the number of all sums."""

    def body(_: Any, addresses: Any, turn: Any, target: Any) -> None:
        zero = code.index(pm.constant(0))
        with pm.only_if(code.is_less(pm.thread_of_program(), 1)):
            memref.store(code.total(memref.load(turn, [zero]), pm.constant(2 * devices.sums)), target, [zero])

    pm.inline(body, *devices.operands, (target, ()))


def send(place: Any, pair: Sequence[Any], turn: Any) -> None:
    """Stores two float32 numbers with their turn at an address of any device, in `pm.inline`."""
    text = "{.reg .b64 one, two; mov.b64 one, {$1, $3}; mov.b64 two, {$2, $3};"
    text += " st.relaxed.sys.global.v2.b64 [$0], {one, two};}"
    pm.assembly(text, "l,f,f,r", None, [place, *pair, turn])


def receive(place: Any, turn: Any) -> list[Any]:
    """Waits for two float32 numbers of a turn at an address of this device, in `pm.inline`."""
    f32 = ir.F32Type.get()
    text = "{.reg .pred p; .reg .b64 one, two; .reg .b32 turn;"
    text += " AGAIN: ld.relaxed.sys.global.v2.b64 {one, two}, [$2];"
    for number, word in enumerate(("one", "two")):
        text += f" mov.b64 {{${number}, turn}}, {word}; setp.ne.u32 p, turn, $3; @p bra AGAIN;"
    found = pm.assembly(text + "}", "=&f,=&f,l,r", ir.Type.parse("!llvm.struct<(f32, f32)>"), [place, turn])
    return [pm.element_of_struct(found, n, f32) for n in range(2)]
