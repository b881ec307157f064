"""The PTX by which a kernel adds up the values of the devices of a mesh axis.

A value and the epoch of its call are stored as one word of 64 bits, which memory never tears. A thread that reads a word
with the right epoch has the value, so neither fences nor further flags are needed, and a transfer takes as long as a store.

Source: NCCL's protocol "LL" (low latency).
"""

from collections.abc import Iterator


def sum_over_devices(num_devices: int, source_bytes: int, pack: int) -> tuple[str, str]:
    """Return the PTX by which a thread sends `pack` values, waits for the values of all devices and adds them.

    The operands are the sum; the value, the epoch, and the value's offset in a mailbox in bytes, which is negative for an
    element that is not summed; and for each row of `Mailboxes.addresses` the lower and the upper half of an address. The sum
    begins with the first device, so that all devices get the same bits. Running the PTX twice is the same as once. A mailbox
    has `source_bytes` for each sending device. The second result are the operands' constraints.
    """
    names = ["total", "value", "epoch", "offset"]
    names += [f"{half}{device}" for device in range(num_devices + 1) for half in ("low", "high")]
    registers = {
        (name, element): f"${index * pack + element}" for index, name in enumerate(names) for element in range(pack)
    }
    lines = [".reg .b32 low, high, epoch;", ".reg .f32 value, total;", ".reg .b64 address, word;", ".reg .pred p;"]
    for element in range(pack):
        lines += _send(lambda name, element=element: registers[name, element], num_devices)
    for element in range(pack):
        lines += _receive(lambda name, element=element: registers[name, element], element, num_devices, source_bytes)
    constraints = ["=&f"] * pack + ["f"] * pack + ["r"] * (pack * (len(names) - 2))
    return "{" + "\n".join(lines) + "}", ",".join(constraints)


def _address(register, device: int) -> Iterator[str]:
    yield f"add.cc.u32 low, {register(f'low{device}')}, {register('offset')};"
    yield f"addc.u32 high, {register(f'high{device}')}, 0;"
    yield "mov.b64 address, {low, high};"


def _send(register, num_devices: int) -> Iterator[str]:
    yield f"setp.ge.s32 p, {register('offset')}, 0;"
    yield f"mov.b64 word, {{{register('value')}, {register('epoch')}}};"
    for device in range(num_devices):
        yield from _address(register, device)
        yield "@p st.relaxed.sys.global.b64 [address], word;"


def _receive(register, element: int, num_devices: int, source_bytes: int) -> Iterator[str]:
    yield "mov.f32 total, 0f00000000;"
    yield f"setp.lt.s32 p, {register('offset')}, 0;"
    yield f"@p bra END{element};"
    yield from _address(register, num_devices)
    for device in range(num_devices):
        yield f"WAIT{element}_{device}:"
        yield f"ld.relaxed.sys.global.b64 word, [address + {device * source_bytes}];"
        yield "mov.b64 {value, epoch}, word;"
        yield f"setp.ne.u32 p, epoch, {register('epoch')};"
        yield f"@p bra WAIT{element}_{device};"
        yield "add.rn.f32 total, total, value;" if device else "mov.f32 total, value;"
    yield f"END{element}:"
    yield f"mov.f32 {register('total')}, total;"
