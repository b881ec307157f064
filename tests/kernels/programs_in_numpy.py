"""Runs all programs of product_chain's launch for several tokens in NumPy, all threads of a program at once.

Each program is a Python thread, so programs wait for each other as they do on a GPU. One runs at a time, until it waits. If
many compiled the same operation of JAX at once, one might read what another one has half written to JAX's cache. What
fetches weights runs before what multiplies by them, with a place in shared memory for each group. So this shows that a
kernel's logic is right: what is fetched, multiplied, sent and received. It does not show that places are used again at the
right time, except those of partial sums: see `Shared`.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from kernels.threads_in_numpy import THREADS, Ref, Threads, fake, install

from pallas_kernels.all_reduce.mailboxes import SIDES, WORD_BYTES
from pallas_kernels.hopper import messages
from pallas_kernels.product_chain import few_tokens, fragments, launch, over_devices
from pallas_kernels.product_chain.few_tokens import FewTokens
from pallas_kernels.product_chain.schedule import FEW_TOKENS, schedule, slot_elements
from pallas_kernels.product_chain.step import norms_of
from pallas_kernels.product_chain.steps import convolution, gated_norm, norm, product

PATIENCE = 300  # seconds after which programs that wait for each other have failed

CAPACITY = 2**15  # numbers that a side of a mailbox holds
DEVICE = 2**40  # bytes between the first addresses of two devices' memory


# Those that run in NumPy.
_MODULES = convolution, few_tokens, fragments, gated_norm, launch, norm, over_devices, product


class Programs(Threads):
    """What all programs share: the memory over which they tell each other, of one device and of several."""

    def __init__(self, devices):
        super().__init__()
        self.changed, self.has_failed = threading.Condition(), False
        words = devices * SIDES * CAPACITY * WORD_BYTES // 4
        self.mailboxes = [np.zeros(words, np.int32) for _ in range(devices)]

    def addresses(self, device):
        """The addresses of the mailboxes for a device: see `Mailboxes`."""
        begins = DEVICE * (1 + np.arange(len(self.mailboxes)))
        halves = np.append(begins + device * SIDES * CAPACITY * WORD_BYTES, begins[device])
        return Ref(halves.view(np.int32))

    def wait(self, ready):
        """Waits until a condition is met. Other programs run meanwhile."""
        deadline = time.monotonic() + PATIENCE
        while not ready():
            assert not self.has_failed, "another program has failed"
            assert time.monotonic() < deadline, "a program waits for what nobody sends"
            self.changed.wait(0.5)

    def send_to_device(self, place, pair, epoch):
        """Stores pairs of numbers with their epoch in the mailboxes of any device. No other epoch's may be waited for."""
        here, place, epoch = self.mask(), np.asarray(place), np.asarray(epoch)
        assert (place % 16 == 0).all()
        for thread in np.flatnonzero(here):
            mailbox, word = self.mailboxes[place[thread] // DEVICE - 1], place[thread] % DEVICE // 4
            bits = [np.float32(number[thread]).view(np.int32) for number in pair]
            assert mailbox[word + 1] in (0, epoch[thread], epoch[thread] - 2 * SIDES), "an epoch is left out"
            mailbox[word : word + 4] = bits[0], epoch[thread], bits[1], epoch[thread]
        self.changed.notify_all()

    def receive_from_device(self, place, epoch):
        """Waits for pairs of numbers of an epoch in this device's mailbox."""
        place, epoch = np.asarray(place), np.asarray(epoch)
        (number,) = set(place // DEVICE - 1)
        mailbox, words = self.mailboxes[number], place % DEVICE // 4
        self.wait(lambda: all((mailbox[words + n] == epoch).all() for n in (1, 3)))
        return [mailbox[words + n].view(np.float32) for n in (0, 2)]

    def poll(self, loaded, places, dtype):
        """Waits until none of the numbers is +0."""

        def read(place):
            ref, index, pack = place
            return ref.array[index[:, None] + np.arange(pack)]

        asked = [(*place, pack) for place, pack in zip(places, loaded, strict=True)]
        self.wait(lambda: all((read(place).view(np.int32) != 0).all() for place in asked))
        found = [read(place).view(dtype) for place in asked]
        return [list(numbers.T) for numbers in found]

    def store(self, place, numbers):
        """Sends numbers, +0 as -0. What is there already must be the same."""
        (ref, index), here = place, self.mask()
        words = ref.array.view(np.int32)
        for n, number in enumerate(numbers):
            bits = np.broadcast_to(np.asarray(number), THREADS).astype(np.asarray(number).dtype).view(np.int32)
            bits = np.where(bits == 0, np.int32(-(2**31)), bits)[here]
            before = words[index[here] + n]
            assert ((before == 0) | (before == bits)).all(), "a number is sent twice"
            words[index[here] + n] = bits
        self.changed.notify_all()


class Shared(Ref):
    """Shared memory whose elements may not be stored between a load and the next barrier of the warpgroups.

    Here all threads store before any goes on. On a GPU, a warp may store while another one still loads.
    """

    def __init__(self, size):
        super().__init__(np.full(size, np.nan, np.float32))
        self.is_loaded = np.zeros(size, bool)


def _checked(programs, hp):
    """Returns the vectors' loads and stores and the barrier, which check what `Shared` says."""

    def elements(index, count):
        return np.broadcast_to(index, THREADS)[programs.mask(), None] + np.arange(count)

    def load(ref, *index, count):
        if isinstance(ref, Shared):
            ref.is_loaded[elements(*index, count)] = True
        return plain_load(ref, *index, count=count)

    def store(x, ref, *index):
        if isinstance(ref, Shared):
            assert not ref.is_loaded[elements(*index, x.shape[1])].any(), "another warp may still load these elements"
        plain_store(x, ref, *index)

    plain_load, plain_store = hp.load_vector, hp.store_vector
    barrier = lambda count: programs.local.partials.is_loaded.fill(False)
    return dict(load_vector=load, store_vector=store, barrier_of_warpgroups=barrier)


def _fake(programs):
    """Returns what stands for the language, in a launch too."""

    def copy_in(source, target, _):
        assert source.shape == target.shape
        target.array[...] = source.array

    nothing = lambda *arguments, **options: None
    hp = fake(programs)
    vars(hp).update(
        WARPGROUP="warpgroup",
        axis_index=lambda name: jnp.int32(getattr(programs.local, name)),
        ds=lambda start, size: slice(int(start), int(start) + size),
        when=lambda condition: lambda body: body() if condition else None,
        copy_gmem_to_smem=copy_in,
        **dict.fromkeys(("barrier_wait", "barrier_arrive", "set_max_registers", "finish_together"), nothing),
        **_checked(programs, hp),
    )
    return hp


def run(monkeypatch, x, steps, residual, parts, number_of_programs):
    """Returns what the last step computes, and the residual stream.

    The first is a list of parts, which a convolution ends with the pool of windows, or an array [shares, tokens, outputs].
    """
    programs = _in_numpy(monkeypatch, devices=1)
    device = _Device(x, steps, residual, parts)
    _run(programs, [device], number_of_programs)
    return device.results()


def run_on_devices(monkeypatch, arguments, parts, number_of_programs, epoch):
    """Runs a chain on several devices at the same time.

    `arguments` has (x, steps, residual) of each device. Returns the results of each device, and the next epoch of each.
    """
    programs = _in_numpy(monkeypatch, devices=len(arguments))
    addresses = [programs.addresses(number) for number in range(len(arguments))]
    devices = [
        _Device(*given, parts, (where, Ref(np.array([epoch], np.int32)), None))
        for given, where in zip(arguments, addresses, strict=True)
    ]
    _run(programs, devices, number_of_programs)
    return [device.results() for device in devices], [int(device.refs["epoch"].array[0]) for device in devices]


def _in_numpy(monkeypatch, devices):
    """Lets the launch run in NumPy."""
    programs = Programs(devices)
    install(monkeypatch, programs, _fake(programs), _MODULES)
    for name in ("wait", "signal"):
        monkeypatch.setattr(messages, name, lambda *_: None)
    monkeypatch.setattr(messages, "load", lambda places, count, _: [count] * len(places))
    monkeypatch.setattr(messages, "poll", programs.poll)
    monkeypatch.setattr(messages, "store", programs.store)
    monkeypatch.setattr(messages, "store_to_device", programs.send_to_device)
    monkeypatch.setattr(messages, "poll_device", programs.receive_from_device)
    return programs


class _Device:
    """A launch on one device: its arguments, and its memory."""

    def __init__(self, x, steps, residual, parts, over_devices=None):
        dtype = x.dtype
        plan = schedule(steps, parts, 2, FEW_TOKENS)
        groups = sum(phase.blocks * phase.copies for phase in plan.phases)
        plan = plan._replace(slots=groups + 1, depth=2)
        capacity = None if over_devices is None else CAPACITY
        self.call = launch.Call(plan, parts, dtype, None, x.shape[0], capacity)
        ref = lambda array: array if array is None else Ref(np.array(array[...]))
        self.steps = [step.prepared() for step in steps]
        operands = [step.operands() for step in self.steps]
        operands = [{role: [*map(ref, arrays)] for role, arrays in each.items()} for each in operands]
        self.steps = [step.with_references(each) for step, each in zip(self.steps, operands, strict=True)]
        last = plan.phases[-1]
        sizes = [x.shape[0] * part for part in parts or ()] or [last.splits * x.shape[0] * last.outputs]
        self.refs = dict(
            x=ref(x.reshape(-1)),
            residual=None if residual is None else ref(residual.reshape(-1)),
            sent=Ref(np.zeros(FewTokens.words(self.call), np.float32)),
            counters=Ref(np.zeros(FewTokens.counters * len(plan.phases), np.int32)),
            over_devices=over_devices,
            results=[Ref(np.full(size, np.nan, dtype if parts else np.float32)) for size in sizes],
            stream=Ref(np.full(residual.size, np.nan, residual.dtype)) if norms_of(steps) else None,
            epoch=Ref(np.zeros(1, np.int32)),
        )

    def run(self, programs, number, number_of_programs):
        """Runs one program."""
        dirty = lambda *shape: Ref(np.full(shape, np.nan, np.float32))
        own = dict(partials=Shared(32768), staging=dirty(4096), factors=dirty(max(len(norms_of(self.steps)), 1), 16))
        slots = self.call.plan.slots
        blocks = Ref(np.full((slots, slot_elements(self.call.plan.phases)), np.nan, self.call.dtype))
        full = Ref(np.zeros(slots))
        refs = SimpleNamespace(**self.refs, **own, blocks=blocks, full=full, free=full, done=None)
        programs.local.cta, programs.local.partials = number, own["partials"]
        with programs.changed, jax.disable_jit():
            for warpgroup in (fragments.WARPGROUPS, 0):
                programs.local.warpgroup = warpgroup
                FewTokens(refs, self.steps, self.call._replace(ctas=number_of_programs)).run()

    def results(self):
        """What the last step has computed, and the residual stream."""
        tokens, last, results = self.call.tokens, self.call.plan.phases[-1], self.refs["results"]
        stream = self.refs["stream"]
        found = [ref.array.reshape(tokens, -1) for ref in results]
        if isinstance(self.steps[-1], convolution.Convolution):
            found.append(self.steps[-1].pool.array)
        if not self.call.parts:
            found = results[0].array.reshape(last.splits, tokens, last.outputs)
        return found, stream and stream.array.reshape(tokens, -1)


def _run(programs, devices, number_of_programs):
    """Runs all programs of all devices."""

    def program(device, number):
        try:
            device.run(programs, number, number_of_programs)
        except BaseException:
            programs.has_failed = True
            raise

    each = [(device, number) for device in devices for number in range(number_of_programs)]
    with ThreadPoolExecutor(len(each)) as pool:
        list(pool.map(program, *zip(*each, strict=True)))
