"""The all-reduce of the residual stream's addends by its owners on all devices (SM90).

An owner sends its sums to the owner of the same channels on every device, its own included, and waits for their sums. A
value and its epoch are stored as one word of 64 bits, which memory never tears: see `all_reduce`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from pallas_kernels._lazy_hopper import hp, messages
from pallas_kernels.all_reduce.mailboxes import SIDES, WORD_BYTES


class Devices(NamedTuple):
    """The devices, their mailboxes and the epoch.

    Attributes:
        addresses: The addresses of the mailboxes: see `Mailboxes`. int32 [2 * (count + 1)], in GMEM
        epoch: The epoch of the chain's first sum over devices. int32 [1], in GMEM
        count: The number of devices.
        capacity: The number of values that a side of a mailbox holds.
        sums: The number of sums over devices before this one in the chain.
    """

    addresses: Any
    epoch: Any
    count: int
    capacity: int
    sums: int

    @property
    def operands(self) -> list[Any]:
        """The operands of `inline` for `added_up` and `next_epoch`."""
        return [(self.addresses, ()), (self.epoch, ())]


def added_up(
    devices: Devices, addresses: Any, epoch: Any, pairs: Sequence[Any], words: Sequence[Any]
) -> list[list[Any]]:
    """Add up pairs of values over the devices, in their order, in `inline`.

    Args:
        devices: The devices.
        addresses: The operand for `devices.addresses`.
        epoch: The operand for `devices.epoch`.
        pairs: This thread's pairs of float32 values.
        words: The index of each pair's first word in a side of a mailbox, which is even.

    Returns:
        The sums, in pairs.
    """
    own = epoch[0] + 2 * devices.sums
    side_bytes = devices.capacity * WORD_BYTES
    # Epochs are odd, so that no word of an empty mailbox has one.
    side = (own >> 1) & (SIDES - 1)
    offsets = [side * side_bytes + word * WORD_BYTES for word in words]
    begins = [hp.load_address(addresses, index) for index in range(devices.count + 1)]
    for begin in begins[:-1]:
        for pair, offset in zip(pairs, offsets, strict=True):
            messages.store_to_device(hp.advance(begin, offset), pair, own)
    sums: list[list[Any]] = []
    for offset in offsets:
        sources = [hp.advance(begins[-1], offset + index * SIDES * side_bytes) for index in range(devices.count)]
        found = [messages.poll_device(source, own) for source in sources]
        sums.append([hp.add(*[pair[n] for pair in found]) for n in range(2)])
    return sums


def next_epoch(devices: Devices, target: Any) -> None:
    """Store the epoch after the chain to `target`, int32 [1], in GMEM. `devices.sums` is the number of all sums."""

    def body(addresses: Any, epoch: Any, target: Any) -> None:
        zero = hp.index(hp.i32(0))
        with hp.predicated(hp.thread_of_cta() < 1):
            target[zero] = epoch[zero] + 2 * devices.sums

    hp.inline(body, *devices.operands, (target, ()))
