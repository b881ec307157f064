"""Runs all programs of product_chain's launch for several tokens in NumPy, all threads of a program at once.

Each program is a Python thread, so programs wait for each other as they do on a GPU. One runs at a time, until it waits. If
many compiled the same operation of JAX at once, one might read what another one has half written to JAX's cache. What
fetches weights runs before what multiplies by them, with a place in shared memory for each group. So this shows that a
kernel's logic is right: what is fetched, multiplied, sent and received. It does not show that places are used again at the
right time.

A value is an array with a number or a vector per thread. The tensor core's product is written down from NVIDIA's PTX ISA.
"""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.product_chain import _few_tokens, _fragments, _messages, _residual_stream
from pallas_kernels.product_chain import _thread_code as code
from pallas_kernels.product_chain._schedule import TOKENS_ROWS, WIDTH, schedule_of_tokens
from pallas_kernels.product_chain._steps import gated_norm_of, norms_of, weights_of

THREADS = 256
PATIENCE = 60  # seconds after which programs that wait for each other have failed


class VectorType:
    """The type of vectors. `VectorType(x.type)` is the type of the vector x, as in MLIR."""

    def __init__(self, shape, kind=None):
        self.shape, self.kind = (shape.shape, shape.kind) if isinstance(shape, VectorType) else (shape, kind)

    get = classmethod(lambda cls, shape, kind: cls(shape, kind))

    def __eq__(self, other):
        return isinstance(other, VectorType) and (self.shape, self.kind) == (other.shape, other.kind)

    __hash__ = None


class Value(np.ndarray):
    """A number or a vector per thread."""

    @property
    def type(self):
        return self.dtype if self.ndim < 2 else VectorType((self.shape[1],), self.dtype)


def value(x):
    """Returns numbers as a `Value`."""
    return np.asarray(x).view(Value)


class Held:
    """An array of which each thread has its part."""

    def __init__(self, registers):
        self.registers = SimpleNamespace(flat=registers)

    def __add__(self, other):
        return Held([x + y for x, y in zip(self.registers.flat, other.registers.flat, strict=True)])


class Ref:
    """An array in memory, or a view of one."""

    def __init__(self, array):
        self.array = array

    shape = property(lambda self: self.array.shape)
    type = property(lambda self: SimpleNamespace(element_type=self.array.dtype, shape=self.array.shape))
    at = property(lambda self: self)

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        return Ref(self.array[tuple(x if isinstance(x, slice) else int(x) for x in index)])

    def reshape(self, shape):
        return Ref(self.array.reshape(shape))


class Programs:
    """What all programs share: which threads of a program run, and the memory over which they tell each other."""

    def __init__(self):
        self.local, self.changed = threading.local(), threading.Condition()
        self.has_failed = False

    def mask(self):
        return np.logical_and.reduce([np.ones(THREADS, bool), *getattr(self.local, "blocks", [])])

    def running(self, index):
        """Returns places for threads that run, and 0 for the others, whose places may not exist."""
        return np.where(self.mask(), index, 0)

    @contextlib.contextmanager
    def insertion_point(self, block):
        self.local.blocks = [*getattr(self.local, "blocks", []), np.broadcast_to(block, THREADS)]
        yield
        self.local.blocks = self.local.blocks[:-1]

    def arrived(self, _asked, places, kind):
        """Waits until none of the numbers is +0. Other programs run meanwhile."""
        deadline = time.monotonic() + PATIENCE

        def read(place):
            ref, index, pack = place
            return ref.array[index[:, None] + np.arange(pack)]

        asked = [(*place, pack) for place, pack in zip(places, _asked, strict=True)]
        while not all((read(place).view(np.int32) != 0).all() for place in asked):
            assert not self.has_failed, "another program has failed"
            assert time.monotonic() < deadline, "a program waits for what nobody sends"
            self.changed.wait(0.5)
        found = [read(place).view(kind) for place in asked]
        return [[value(numbers[:, n]) for n in range(numbers.shape[1])] for numbers in found]

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


def _arithmetic():
    same = lambda function: lambda x, y: value(function(x, y))
    unsigned = lambda x: np.asarray(x).astype(np.uint32)
    compare = lambda predicate, x, y: predicate(np.asarray(x), np.asarray(y))
    return SimpleNamespace(
        constant=lambda kind, number: value(np.full(THREADS, number, kind)),
        addi=same(np.add), subi=same(np.subtract), muli=same(np.multiply), andi=same(np.bitwise_and),
        minsi=same(np.minimum), divui=same(np.floor_divide), remui=same(np.remainder), shrui=same(np.right_shift),
        addf=same(np.add), mulf=same(np.multiply),
        index_cast=lambda _, x: np.asarray(x).astype(np.int64),
        cmpi=compare,
        CmpIPredicate=SimpleNamespace(slt=np.less, ult=lambda x, y: unsigned(x) < unsigned(y)),
        extf=lambda kind, x: value(np.asarray(x).astype(kind.kind)),
        truncf=lambda kind, x: value(np.asarray(x).astype(kind.kind)),
    )  # fmt: skip


def _vectors(programs):
    def places(index, count):
        *outer, last = (np.broadcast_to(x, THREADS)[:, None] for x in index)
        return (*outer, last + np.arange(count))

    def load(kind, ref, index, alignment):
        return value(ref.array[places([programs.running(x) for x in index], kind.shape[0])])

    def store(x, ref, index, alignment):
        here = programs.mask()
        ref.array[tuple(part[here] for part in np.broadcast_arrays(*places(index, x.shape[1])))] = x[here]

    return SimpleNamespace(
        load=load,
        store=store,
        extract=lambda x, _, place: value(x[:, place[0]]),
        from_elements=lambda _, parts: value(np.stack([np.broadcast_to(x, THREADS) for x in parts], axis=1)),
        bitcast=lambda kind, x: value(np.ascontiguousarray(x).view(kind.kind)),
        broadcast=lambda kind, x: value(np.repeat(np.broadcast_to(x, THREADS)[:, None], kind.shape[0], axis=1)),
        reduction=lambda kind, combine, x: value(np.asarray(x).sum(axis=1, dtype=kind)),
        CombiningKind=SimpleNamespace(ADD=None),
    )


def _types():
    kind = lambda dtype: SimpleNamespace(get=lambda: np.dtype(dtype))
    return SimpleNamespace(
        F32Type=kind(np.float32), IndexType=kind(np.int64), VectorType=VectorType, MemRefType=lambda x: x
    )


def _inline(body, *operands, results=()):
    def given(x):
        if isinstance(x, tuple):
            return x[0]
        return x if isinstance(x, Held) else value(np.full(THREADS, int(x), np.int32))

    found = body(None, *map(given, operands))
    if not results:
        assert found is None
        return []
    for held, (length, dtype) in zip(found, results, strict=True):
        shapes = {(np.shape(x)[1], x.dtype) for x in held.registers.flat}
        ((pack, kind),) = shapes
        assert pack * len(held.registers.flat) * 128 == length
        assert kind == dtype
    return list(found)


def multiply_tile(sums, left, right, kind):
    """The tensor core's product of 16 tokens, 16 inputs and 8 outputs, for each warp."""
    pairs = lambda word: np.ascontiguousarray(word).view(kind).astype(np.float32).reshape(8, 8, 4, 2)
    a, b = np.zeros((8, 16, 16), np.float32), np.zeros((8, 16, 8), np.float32)
    for n, word in enumerate(left):
        half, rows = divmod(n, 2)
        a[:, 8 * rows : 8 * rows + 8, 8 * half : 8 * half + 8] = pairs(word).reshape(8, 8, 8)
    for half, word in enumerate(right):
        b[:, 8 * half : 8 * half + 8] = pairs(word).reshape(8, 8, 8).swapaxes(1, 2)
    product = (a @ b).reshape(8, 2, 8, 4, 2)
    parts = [product[:, rows, :, :, n].reshape(THREADS) for rows in range(2) for n in range(2)]
    return [value(before + part) for before, part in zip(sums, parts, strict=True)]


APPROXIMATIONS = {"ex2": np.exp2, "rcp": np.reciprocal, "rsqrt": lambda x: 1 / np.sqrt(x)}


def _fake(programs):
    """Returns what stands for `pm`, and the operations."""

    def store(x, ref, index):
        here = programs.mask()
        ref.array[np.broadcast_to(index[0], THREADS)[here]] = np.broadcast_to(x, THREADS)[here]

    def copy_in(source, target, _):
        assert source.shape == target.shape
        target.array[...] = source.array

    def fragments_of_spread(registers, length):
        return Held(list(registers))

    nothing, original = lambda *arguments, **options: None, _few_tokens.pm
    ir, arith, vector = _types(), _arithmetic(), _vectors(programs)
    load = lambda ref, index: value(ref.array[programs.running(index[0])])
    memref = SimpleNamespace(load=load, store=store)
    scf = SimpleNamespace(IfOp=lambda condition: SimpleNamespace(then_block=condition), yield_=nothing)
    ir.InsertionPoint = programs.insertion_point
    pm = SimpleNamespace(
        WARPGROUP="warpgroup",
        axis_index=lambda name: jnp.int32(getattr(programs.local, name)),
        slice_of=lambda start, size: slice(int(start), int(start) + size),
        when=lambda condition: lambda body: body() if condition else None,
        copy_in=copy_in,
        inline=_inline,
        fragments_of_spread=fragments_of_spread,
        pack_of_spread=original.pack_of_spread,
        thread_of_program=lambda: value(np.arange(THREADS, dtype=np.int32)),
        constant=lambda number: value(np.full(THREADS, number, np.int32)),
        integer=lambda: np.dtype(np.int32),
        type_of=jnp.dtype,
        bytes_of=lambda kind: np.dtype(kind).itemsize,
        address=lambda ref, index: (ref, np.asarray(index)),
        exchanged=lambda x, distance: value(x[np.arange(THREADS) ^ distance]),
        **dict.fromkeys(("wait", "arrive", "set_max_registers", "finish_together", "barrier_of_warpgroups"), nothing),
    )
    return pm, dict(ir=ir, arith=arith, vector=vector, memref=memref, scf=scf)


def run(monkeypatch, x, steps, residual, parts, number_of_programs):
    """Returns what the last step computes, a list of parts or [shares, tokens, outputs], and the residual stream."""
    programs = Programs()
    pm, operations = _fake(programs)
    for module in (_few_tokens, _fragments, _residual_stream, code):
        monkeypatch.setattr(module, "pm", pm)
        for name, operation in operations.items():
            monkeypatch.setattr(module, name, operation, raising=False)
    for name in ("listen", "tell_once"):
        monkeypatch.setattr(_messages, name, lambda *_: None)
    monkeypatch.setattr(_messages, "ask", lambda places, pack, _: [pack] * len(places))
    monkeypatch.setattr(_messages, "arrived", programs.arrived)
    monkeypatch.setattr(_messages, "store", programs.store)
    monkeypatch.setattr(_fragments, "_multiply_tile", multiply_tile)
    monkeypatch.setattr(code, "approximate", lambda name, x: value(APPROXIMATIONS[name](np.asarray(x))))

    tokens = x.shape[0]
    weights = [np.asarray(weight) for weight in weights_of(steps)]
    dtype = weights[0].dtype
    norms, gated = norms_of(steps), gated_norm_of(steps)
    plan = schedule_of_tokens(steps, parts, 2)
    groups = sum(phase.blocks * phase.terms * phase.pieces // phase.group for phase in plan.phases)
    plan = plan._replace(slots=groups + 1, depth=2)
    flat = lambda array: Ref(np.asarray(array).reshape(-1).copy())
    last = plan.phases[-1]
    sizes = [tokens * part for part in parts] if parts else [last.shares * tokens * last.outputs]
    out = [Ref(np.full(size, np.nan, dtype if parts else np.float32)) for size in sizes]
    out += [Ref(np.full(residual.size, np.nan, residual.dtype))] if norms else []
    sent = _few_tokens.places(plan, tokens)[-1].end
    shared = dict(
        x=flat(x),
        weights=[Ref(weight.reshape(len(weight), -1, WIDTH)) for weight in weights],
        norms=[flat(norm.weight) for norm in norms],
        residual=[] if residual is None else [flat(residual)],
        gated=None if gated is None else [flat(gated.gate), flat(np.asarray(gated.weight, np.float32))],
        sent=Ref(np.zeros(sent, np.float32)),
        counters=Ref(np.zeros(2 * len(plan.phases), np.int32)),
        out=out,
    )
    largest = TOKENS_ROWS * WIDTH * max(phase.group for phase in plan.phases)

    def program(number):
        dirty = lambda *shape: Ref(np.full(shape, np.nan, np.float32))
        own = dict(partials=dirty(32768), staging=dirty(4096), factors=dirty(16))
        refs = SimpleNamespace(**shared, **own, blocks=Ref(np.full((plan.slots, largest), np.nan, dtype)))
        refs.full = refs.free = Ref(np.zeros(plan.slots))
        refs.done = None
        programs.local.program = number
        try:
            with programs.changed, jax.disable_jit():
                for warpgroup in (_fragments.WARPGROUPS, 0):
                    programs.local.warpgroup = warpgroup
                    _few_tokens._run(refs, plan, gated, norms, parts, dtype, number_of_programs, tokens)
        except BaseException:
            programs.has_failed = True
            raise

    with ThreadPoolExecutor(number_of_programs) as pool:
        list(pool.map(program, range(number_of_programs)))
    results = [ref.array.reshape(tokens, -1) for ref in out[: len(parts)]] if parts else None
    if results is None:
        results = out[0].array.reshape(last.shares, tokens, last.outputs)
    return results, None if residual is None else out[-1].array.reshape(tokens, -1)
