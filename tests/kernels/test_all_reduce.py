"""all_reduce: sums over devices against float64, and the assembly by which devices exchange them, run by an interpreter."""

import functools
import re
import struct
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from kernels.common import IMPLEMENTATIONS, assert_close, run_by
from oracles.ops import add_rms_norm as oracle

from pallas_kernels import Mailboxes, UnsupportedError, all_reduce, all_reduce_rms_norm, can_write_each_other
from pallas_kernels.all_reduce import mailboxes as module
from pallas_kernels.all_reduce._ptx import sum_over_devices
from pallas_kernels.all_reduce.mailboxes import SIDES, WORD_BYTES

AXIS = "devices"


def mesh_of(count):
    if len(jax.devices()) < count:
        pytest.skip(f"there is no device number {count}")
    return Mesh(np.array(jax.devices()[:count]), (AXIS,))


def mailboxes(mesh, capacity):
    if not can_write_each_other(mesh.devices.flat) and jax.default_backend() == "gpu":
        pytest.skip("the GPUs can't write into each other's memory")
    return Mailboxes.create(mesh, AXIS, capacity)


def on_devices(mesh, boxes, function, *arguments):
    """Lets every device run `function` on its mailbox and its shard of each array. Returns the results of all devices."""

    def run(boxes, *parts):
        return jax.tree.map(lambda x: x[None], function(boxes, *(part[0] for part in parts)))

    specs = (boxes.partition(), *[P(AXIS)] * len(arguments))
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P(AXIS), check_vma=False))(boxes, *arguments)


def draw(rng, devices, splits, tokens, channels, dtype="float32"):
    return jnp.asarray(rng.normal(size=(devices, splits, tokens, channels)), dtype)


COUNTS = [1, pytest.param(2, marks=pytest.mark.gpu)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("shape", [(1, 3, 7), (2, 5, 1000), (4, 1, 2560), (1, 2, 20000), (1, 16, 4)], ids=str)
def test_sums_match_float64_on_every_device(rng, count, shape, implementation):
    mesh = mesh_of(count)
    boxes, addend = mailboxes(mesh, 2**16), draw(rng, count, *shape)

    def run(boxes, addend):
        epoch, found = jnp.int32(1), []
        for factor in (1, 2, 3, 4, 5):
            total, epoch = all_reduce(factor * addend, boxes, epoch, run=run_by(implementation))
            found.append(total)
        return jnp.stack(found)

    for total in np.asarray(on_devices(mesh, boxes, run, addend)):
        for factor, each in enumerate(total, 1):
            wanted = factor * np.asarray(addend, np.float64).sum((0, 1))
            assert_close(each, wanted, "float32", count * shape[0], f"times {factor}")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("dtype", "addend_dtype"), [("float32", "float32"), ("bfloat16", "float32"), ("float16",) * 2])
def test_sum_and_norm_match_the_oracle(rng, count, dtype, addend_dtype, implementation):
    mesh, options = mesh_of(count), dict(epsilon=0.01, offset=1.0, scale=0.22)
    boxes, addend = mailboxes(mesh, 2**16), draw(rng, count, 3, 5, 1000, addend_dtype)
    x = jnp.asarray(np.broadcast_to(rng.normal(size=(5, 1000)), (count, 5, 1000)), dtype)
    weight = jnp.asarray(np.broadcast_to(rng.normal(size=1000), (count, 1000)), jnp.float32)

    def run(boxes, x, addend, weight):
        return all_reduce_rms_norm(x, addend, weight, boxes, jnp.int32(7), **options, run=run_by(implementation))

    totals, normed, epochs = on_devices(mesh, boxes, run, x, addend, weight)
    everything = addend.reshape(-1, 5, 1000)
    assert set(np.asarray(epochs).tolist()) == {9 if implementation == "triton" else 7}
    for device in range(count):
        wanted, _ = oracle(x[0], everything, weight[0], **options)
        assert_close(totals[device], wanted, dtype, len(everything), "total")
        _, wanted = oracle(totals[device], jnp.zeros_like(everything), weight[0], **options)
        assert_close(normed[device], wanted, dtype, 1000, "normed")
        np.testing.assert_array_equal(np.asarray(totals[device]), np.asarray(totals[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("count", COUNTS)
def test_many_turns_of_many_sizes_over_the_wrap_of_the_turn(rng, count):
    """Nothing waits for ever, and no epoch gets the values of another one, whatever the sizes of both."""
    mesh = mesh_of(count)
    boxes = mailboxes(mesh, 2**16)
    sizes = [(int(rng.integers(1, 9)), int(rng.integers(1, 3000))) for _ in range(40)]
    parts = [draw(rng, count, 1, *size) for size in sizes]

    def run(boxes, epoch, *parts):
        found = []
        for part in parts:
            total, epoch = all_reduce(part, boxes, epoch, run=run_by("triton"))
            found.append(total)
        return epoch, found

    epoch = jnp.full(count, 2**31 - 41, jnp.int32)
    for _ in range(3):
        epoch, found = on_devices(mesh, boxes, run, epoch, *parts)
        for part, total in zip(parts, found, strict=True):
            for device in range(count):
                assert_close(total[device], np.asarray(part, np.float64).sum((0, 1)), "float32", count, "total")
    assert epoch[0] < 0


@pytest.mark.gpu
def test_padding_of_nan_and_infinity_pass_through(rng):
    mesh = mesh_of(1)
    special = jnp.asarray([[[[np.nan, np.inf, -np.inf, -0.0, 1e-42, 1.0, 2.0]]]], jnp.float32)
    run = lambda boxes, part: all_reduce(part, boxes, jnp.int32(1), run=run_by("triton"))[0]
    found = np.asarray(on_devices(mesh, mailboxes(mesh, 64), run, special))[0, 0]
    np.testing.assert_array_equal(found.view(np.int32), np.asarray(special).reshape(-1).view(np.int32))


def test_tokens_that_mailboxes_do_not_hold_are_left_to_xla(rng):
    mesh, boxes = mesh_of(1), Mailboxes.create(mesh_of(1), AXIS, 100)
    part = draw(rng, 1, 1, 3, 40)
    run = lambda boxes, part: all_reduce(part, boxes, jnp.int32(5))
    total, epoch = on_devices(mesh, boxes, run, part)
    assert_close(total[0], np.asarray(part)[0, 0], "float32", 1, "total")
    assert epoch[0] == 5
    with pytest.raises(UnsupportedError, match=r"addend must have at most 100 elements, .* got 120"):
        on_devices(mesh, boxes, lambda boxes, part: all_reduce(part, boxes, jnp.int32(5), run=run_by("triton")), part)


@pytest.mark.parametrize("shape", [(1, 2, 0, 3), (1, 2, 3, 0)], ids=str)
def test_a_call_without_tokens_or_channels_takes_no_turn(shape):
    mesh = mesh_of(1)
    total, epoch = on_devices(
        mesh, mailboxes(mesh, 64), lambda boxes, x: all_reduce(x, boxes, jnp.int32(1)), jnp.zeros(shape)
    )
    assert (total.shape, epoch.tolist()) == ((1, *shape[2:]), [1])


def test_errors_name_the_bad_argument():
    mesh = mesh_of(1)
    boxes = Mailboxes.create(mesh, AXIS, 100)
    run = lambda addend: on_devices(mesh, boxes, lambda boxes, part: all_reduce(part, boxes, jnp.int32(1)), addend)
    with pytest.raises(ValueError, match=r"all_reduce: addend must be Float\[splits tokens channels\], got"):
        run(jnp.zeros((1, 2, 3)))
    with pytest.raises(ValueError, match="all_reduce: addend must have at least one partial sum, got none"):
        run(jnp.zeros((1, 0, 2, 3)))
    with pytest.raises(ValueError, match="Mailboxes: capacity must be 1 to 134217727, got 0"):
        Mailboxes.create(mesh, AXIS, 0)
    with pytest.raises(ValueError, match="Mailboxes: mesh must have the axis 'other' alone, got"):
        Mailboxes.create(mesh, "other", 1)
    assert not can_write_each_other(jax.devices("cpu"))
    assert run(jnp.zeros((1, 2, 0, 3)))[0].shape == (1, 0, 3)


@pytest.mark.parametrize(
    ("result", "access", "wanted"),
    [(0, 3, True), (0, 0, False), (0, 1, False), (1, 0, True)],
    ids=["mapped", "not mapped", "mapped for reading", "of another allocator"],
)
def test_mailboxes_that_are_not_mapped_are_not_used(monkeypatch, result, access, wanted):
    def get_access(flags, where, begin):
        assert (where._obj.type, where._obj.id) == (1, jax.devices()[0].local_hardware_id)
        assert begin.value == boxes.memory.addressable_shards[0].data.unsafe_buffer_pointer()
        flags._obj.value = access
        return result

    boxes = Mailboxes.create(mesh_of(1), AXIS, 8)
    monkeypatch.setattr(module, "_driver", lambda: SimpleNamespace(cuMemGetAccess=get_access))
    assert boxes.are_reachable() == wanted
    monkeypatch.setattr(module, "_driver", lambda: None)
    assert not boxes.are_reachable()


# An interpreter of the assembly.


def bits(number):
    return struct.unpack("<I", struct.pack("<f", number))[0]


def number(word):
    return struct.unpack("<f", struct.pack("<I", word))[0]


def thread(text, operands, memory):
    """Runs assembly on operands, yields after every access of memory, and leaves the results in `operands`."""
    lines = [line.strip().rstrip(";") for line in text.strip("{}").splitlines()]
    labels = {line[:-1]: place for place, line in enumerate(lines) if line.endswith(":")}
    registers, place = dict(operands), 0

    def value(name):
        if name.startswith("0f"):
            return int(name[2:], 16)
        return registers[name] if not name.lstrip("-").isdigit() else int(name)

    signed = lambda word: word - 2**32 if word >= 2**31 else word
    while place < len(lines):
        line, place = lines[place], place + 1
        if line.startswith(".reg") or line.endswith(":"):
            continue
        if line.startswith("@"):
            predicate, line = line.split(" ", 1)
            if not registers[predicate[1:]]:
                continue
        name, rest = line.split(" ", 1)
        if name == "bra":
            place = labels[rest]
            continue
        groups = [part.strip() for part in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]]+", rest) if part.strip()]
        target, *sources = groups
        if name.startswith("st."):
            yield
            memory[registers[target.strip("[]")]] = value(sources[0])
        elif name.startswith("ld."):
            yield
            begin, offset = sources[0].strip("[]").split("+")
            registers[target] = memory.get(registers[begin.strip()] + int(offset), 0)
        elif name.startswith("setp."):
            a, b = (signed(value(source)) for source in sources)
            registers[target] = {"ge": a >= b, "lt": a < b, "ne": a != b}[name.split(".")[1]]
        elif name == "mov.b64" and sources[0].startswith("{"):
            low, high = (value(part.strip()) for part in sources[0].strip("{}").split(","))
            registers[target] = low + (high << 32)
        elif name == "mov.b64":
            low, high = (part.strip() for part in target.strip("{}").split(","))
            registers[low], registers[high] = value(sources[0]) % 2**32, value(sources[0]) >> 32
        elif name in ("add.cc.u32", "addc.u32"):
            total = sum(map(value, sources)) + (registers["carry"] if name == "addc.u32" else 0)
            registers[target], registers["carry"] = total % 2**32, total >> 32
        elif name == "mov.f32":
            registers[target] = value(sources[0])
        elif name == "add.rn.f32":
            registers[target] = bits(np.float32(number(value(sources[0]))) + np.float32(number(value(sources[1]))))
        else:
            raise AssertionError(f"the interpreter does not know {line}")
    operands.update({name: registers[name] for name in operands})


def device(me, begins, calls, memory, found, *, sides, capacity, pack):
    """Runs a device's calls one after the other: for each the numbers of its threads, and how its threads take turns."""
    count = len(begins)
    source = sides * capacity * WORD_BYTES
    text, constraints = sum_over_devices(count, source, pack)
    addresses = [begin + me * source for begin in begins] + [begins[me]]
    for call, (numbers, random) in enumerate(calls):
        epoch, threads = 2 * call + 1, []
        for first in range(0, len(numbers[me]), pack):
            given = [bits(x) for x in numbers[me][first : first + pack]], [epoch] * pack, []
            for element in range(first, first + pack):
                exists = element < len(numbers[me]) - 1  # The last one is padding.
                given[2].append((((epoch >> 1) % sides) * capacity + element) * WORD_BYTES if exists else 2**32 - 1)
            given = [0] * pack, *given, *([half] * pack for a in addresses for half in (a % 2**32, a >> 32))
            operands = {f"${place}": x for place, x in enumerate(x for each in given for x in each)}
            assert len(operands) == len(constraints.split(","))
            threads.append((operands, thread(text, operands, memory)))
        running = dict(enumerate(threads))
        while running:
            which = random.choice(list(running))
            if next(running[which][1], StopIteration) is StopIteration:
                del running[which]
            yield
        found[me].append([number(operands[f"${place}"]) for operands, _ in threads for place in range(pack)])


def exchange(random, count, pack, threads, num_calls, sides=SIDES):
    """Lets devices run at random, and returns whether all end, what each of them found and what was wanted for each call.

    In a round every device makes up to 50 stores or loads, so each may wait for long, and none for ever.
    """
    size = pack * threads
    calls = [([[random.uniform(-1, 1) for _ in range(size)] for _ in range(count)], random) for _ in range(num_calls)]
    begins = [2**33 * (1 + place) - 16 for place in range(count)]  # The lower half overflows.
    found = [[] for _ in range(count)]
    memory = {}
    running = {
        me: device(me, begins, calls, memory, found, sides=sides, capacity=size, pack=pack) for me in range(count)
    }
    for _ in range(200 * num_calls):
        for me in random.sample(sorted(running), len(running)):
            for _ in range(random.randint(1, 50)):
                if next(running[me], StopIteration) is StopIteration:
                    del running[me]
                    break
    wanted = []
    for numbers, _ in calls:
        total = functools.reduce(np.add, np.asarray(numbers, np.float32))
        total[-1] = 0
        wanted.append(total.tolist())
    return not running, found, wanted


@settings(deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 4), st.sampled_from([1, 2, 4]), st.integers(1, 3))
def test_devices_that_take_turns_in_any_order_get_the_same_sums(random, count, pack, threads):
    done, found, wanted = exchange(random, count, pack, threads, num_calls=4)
    assert done
    assert all(each == wanted for each in found)


def test_one_side_would_not_be_enough():
    """The test above can fail: a device that is ahead overwrites what another one has not read."""
    from random import Random

    assert not all(exchange(Random(seed), 2, 1, 2, num_calls=4, sides=1)[0] for seed in range(40))
