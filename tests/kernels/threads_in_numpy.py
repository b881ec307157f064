"""Runs the code of single threads in NumPy, all threads of a program at once, in place of the operations of MLIR.

A value is an array with a number or a vector per thread. The tensor core's product is written down from NVIDIA's PTX ISA.
"""

import contextlib
import functools
import threading
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

from pallas_kernels.product_chain import _fragments

THREADS = 256
code = _fragments.code  # the arithmetic of single threads, of all kernels


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


class Type:
    """The type of an array in memory, or of a view of one."""

    def __init__(self, array):
        self.element_type, self.shape = array.dtype, array.shape
        self.strides = [stride // array.itemsize for stride in array.strides]

    def get_strides_and_offset(self):
        return self.strides, 0


def _from(array):
    """Returns memory from the first element of a view of an array up to its last one."""
    length = 1 + sum((n - 1) * stride for n, stride in zip(array.shape, Type(array).strides, strict=True))
    return np.lib.stride_tricks.as_strided(array, (length,), (array.itemsize,))


class Ref:
    """An array in memory, or a view of one."""

    def __init__(self, array):
        self.array = array

    shape = property(lambda self: self.array.shape)
    dtype = property(lambda self: self.array.dtype)
    type = property(lambda self: Type(self.array))
    at = property(lambda self: self)

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        return Ref(self.array[tuple(x if isinstance(x, slice) else int(x) for x in index)])

    def reshape(self, shape):
        return Ref(self.array.reshape(shape))


def _swizzled(pieces):
    """Returns pieces [.., 8, elements] with their parts of 16 bytes where the swizzle puts them, or puts them back."""
    groups = np.arange(8)
    parts = pieces.reshape(*pieces.shape[:-1], 8, 16 // pieces.itemsize)
    return parts[..., groups[:, None], groups[:, None] ^ groups, :].reshape(pieces.shape)


def tiled(tiles):
    """Returns tiles [.., rows, columns] as shared memory has them: see `_pallas_mosaic.tiling`."""
    *outer, rows, columns = tiles.shape
    width = 128 // tiles.itemsize
    return _swizzled(tiles.reshape(*outer, rows // 8, 8, columns // width, width).swapaxes(-3, -2))


def untiled(pieces):
    """Returns the tiles of which shared memory has the pieces."""
    *outer, down, across, rows, width = pieces.shape
    return _swizzled(pieces).swapaxes(-3, -2).reshape(*outer, down * rows, across * width)


def held_tile(tile):
    """Returns a tile [64, columns] of which each thread has its part, in the layout of tensor cores."""
    thread = np.arange(THREADS) & 127
    row, pair = 16 * (thread >> 5) + (thread & 31) // 4, 2 * (thread & 3)
    places = [(row + 8 * part, 8 * n + pair) for n in range(tile.shape[1] // 8) for part in range(2)]
    return Held([value(np.asarray(tile)[rows[:, None], first[:, None] + np.arange(2)]) for rows, first in places])


class Threads:
    """Which threads of a program run."""

    def __init__(self):
        self.local = threading.local()

    def mask(self):
        return np.logical_and.reduce([np.ones(THREADS, bool), *getattr(self.local, "blocks", [])])

    def running(self, index):
        """Returns places for threads that run, and 0 for the others, whose places may not exist."""
        return np.where(self.mask(), index, 0)

    @contextlib.contextmanager
    def only_if(self, condition):
        self.local.blocks = [*getattr(self.local, "blocks", []), np.broadcast_to(condition, THREADS)]
        yield
        self.local.blocks = self.local.blocks[:-1]


def _select(condition, x, y):
    """Returns x where a condition, which all threads or each one has, is met, and else y. They may be vectors."""
    condition = np.broadcast_to(condition, THREADS)
    return value(np.where(condition[:, None] if np.ndim(x) == 2 else condition, x, y))


def _arithmetic():
    same = lambda function: lambda x, y: value(function(x, y))
    unsigned = lambda x: np.asarray(x).astype(np.uint32)
    compare = lambda predicate, x, y: predicate(np.asarray(x), np.asarray(y))
    return SimpleNamespace(
        constant=lambda kind, number: value(np.full(THREADS, number, kind)),
        addi=same(np.add), subi=same(np.subtract), muli=same(np.multiply), andi=same(np.bitwise_and),
        minsi=same(np.minimum), maxsi=same(np.maximum), xori=same(np.bitwise_xor),
        divui=same(np.floor_divide), remui=same(np.remainder), shrui=same(np.right_shift),
        addf=same(np.add), subf=same(np.subtract), mulf=same(np.multiply), divf=same(np.divide), maximumf=same(np.maximum),
        minimumf=same(np.minimum),
        negf=lambda x: value(-np.asarray(x)), select=_select,
        index_cast=lambda _, x: np.asarray(x).astype(np.int64),
        cmpi=compare,
        CmpIPredicate=SimpleNamespace(
            slt=np.less, sgt=np.greater, sge=np.greater_equal, eq=np.equal, ne=np.not_equal,
            ult=lambda x, y: unsigned(x) < unsigned(y),
        ),
        bitcast=lambda kind, x: value(np.ascontiguousarray(x).view(kind)),
        extf=lambda kind, x: value(np.asarray(x).astype(getattr(kind, "kind", kind))),
        truncf=lambda kind, x: value(np.asarray(x).astype(kind.kind if isinstance(kind, VectorType) else kind)),
    )  # fmt: skip


def _vectors(threads):
    def places(index, count):
        *outer, last = (np.broadcast_to(x, THREADS)[:, None] for x in index)
        return (*outer, last + np.arange(count))

    def load(kind, ref, index, alignment):
        return value(ref.array[places([threads.running(x) for x in index], kind.shape[0])])

    def store(x, ref, index, alignment):
        here = threads.mask()
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
        assert pack * len(held.registers.flat) * 128 == np.prod(length)
        assert kind == dtype
    return list(found)


def add_product(sums, a, b):
    """Adds each warp's product [16, 8] to the sums of its threads, which have four elements each."""
    product = (a @ b).reshape(len(a), 2, 8, 4, 2)
    parts = [product[:, rows, :, :, n].reshape(THREADS) for rows in range(2) for n in range(2)]
    return [value(before + part) for before, part in zip(sums, parts, strict=True)]


def multiply_tile(sums, left, right, kind):
    """The tensor core's product of 16 tokens, 16 inputs and 8 outputs, for each warp."""
    pairs = lambda word: np.ascontiguousarray(word).view(kind).astype(np.float32).reshape(8, 8, 4, 2)
    a, b = np.zeros((8, 16, 16), np.float32), np.zeros((8, 16, 8), np.float32)
    for n, word in enumerate(left):
        half, rows = divmod(n, 2)
        a[:, 8 * rows : 8 * rows + 8, 8 * half : 8 * half + 8] = pairs(word).reshape(8, 8, 8)
    for half, word in enumerate(right):
        b[:, 8 * half : 8 * half + 8] = pairs(word).reshape(8, 8, 8).swapaxes(1, 2)
    return add_product(sums, a, b)


def multiply_tile_of_tf32(sums, left, right):
    """The tensor core's product of 16 rows, 8 inputs and 8 outputs, for each warp."""
    warps, cut = THREADS // 32, lambda x: (np.ascontiguousarray(x).view(np.int32) & -(1 << 13)).view(np.float32)
    a, b = np.zeros((warps, 16, 8), np.float32), np.zeros((warps, 8, 8), np.float32)
    for n, numbers in enumerate(left):
        half, rows = divmod(n, 2)
        a[:, 8 * rows : 8 * rows + 8, 4 * half : 4 * half + 4] = cut(numbers).reshape(warps, 8, 4)
    for half, numbers in enumerate(right):
        b[:, 4 * half : 4 * half + 4] = cut(numbers).reshape(warps, 8, 4).swapaxes(1, 2)
    return add_product(sums, a, b)


@np.errstate(invalid="ignore")
def _rsqrt(x):
    """Returns 1 / sqrt(x), and NaN for negative numbers, which threads may have that do not use the result."""
    return 1 / np.sqrt(x)


APPROXIMATIONS = {"ex2": np.exp2, "rcp": np.reciprocal, "rsqrt": _rsqrt}


class Address:
    """An address per thread: an element of a row of one of two arrays, of the first one where a condition is met."""

    def __init__(self, ref, row, column):
        self.choices = [(np.ones(THREADS, bool), ref.array, np.asarray(row), np.asarray(column))]
        self.element = ref, np.asarray(row) * Type(ref.array).strides[0] + np.asarray(column)

    def unless(self, condition, other):
        """Returns this address where the condition is met, and else the other one."""
        chosen = Address.__new__(Address)
        limited = lambda choices, where: [(mask & where, *rest) for mask, *rest in choices]
        chosen.choices = limited(self.choices, condition) + limited(other.choices, ~condition)
        return chosen

    def places(self, mask, first):
        """The arrays, the threads whose address is in them, and the places of eight numbers of 16 bits."""
        for where, array, row, column in self.choices:
            here = np.flatnonzero(where & mask)
            yield array, here, (row[here, None], column[here, None] + first // 2 + np.arange(8))


def _words(threads):
    def load(at, first=0):
        found = np.zeros((THREADS, 4), np.int32)
        for array, here, places in at.places(threads.mask(), first):
            found[here] = np.ascontiguousarray(array[places]).view(np.int32)
        return [value(found[:, n]) for n in range(4)]

    def store(at, words, first=0, *, passes_cache=False):
        if not isinstance(at, Address):
            return store_words_if(True, at, words, first)
        stacked = np.stack(words, axis=1)
        for array, here, places in at.places(threads.mask(), first):
            array[places] = np.ascontiguousarray(stacked[here]).view(array.dtype)

    def either(condition, x, y):
        return x.unless(condition, y) if isinstance(x, Address) else _select(condition, x, y)

    def load_if(condition, place, bits):
        (ref, index), here = place, np.broadcast_to(condition, THREADS) & threads.mask()
        size = ref.dtype.itemsize
        found, places = np.zeros((THREADS, 4 // size), ref.dtype), np.arange(bits // 8 // size)
        found[np.flatnonzero(here)[:, None], places] = ref.array.reshape(-1)[index[here, None] + places]
        return value(found.view(np.int32)[:, 0])

    def store_if(condition, place, word, bits):
        (ref, index), here = place, np.broadcast_to(condition, THREADS) & threads.mask()
        halves = np.arange(bits // 16)
        numbers = np.ascontiguousarray(word[here, None]).view(ref.dtype)
        ref.array.reshape(-1)[index[here, None] + halves] = numbers[:, halves]

    def of_16_bytes(place, first, condition):
        """The array of an address, the threads that use it, and the places of what 16 bytes hold."""
        ref, index = place.element if isinstance(place, Address) else place
        here, size = np.flatnonzero(np.broadcast_to(condition, THREADS) & threads.mask()), ref.dtype.itemsize
        return _from(ref.array), here, index[here, None] + first // size + np.arange(16 // size)

    def load_words_if(condition, place, first=0, *, passes_cache=False):
        found = np.zeros((THREADS, 4), np.int32)
        array, here, places = of_16_bytes(place, first, condition)
        found[here] = np.ascontiguousarray(array[places]).view(np.int32)
        return [value(found[:, n]) for n in range(4)]

    def load_transposed_matrices(place):
        ref, first = place
        rows = ref.array.reshape(-1)[first[:, None] + np.arange(8)].reshape(-1, 4, 4, 2, 8)
        pairs = np.ascontiguousarray(np.moveaxis(rows, (4, 2), (2, 3))).reshape(-1, 4, 32, 2)
        return [value(pairs[:, n].reshape(THREADS, 2).view(np.int32)[:, 0]) for n in range(4)]

    def store_matrices(place, words, *, transposed=False):
        ref, first = place
        pairs = np.stack(words, axis=1).astype(np.int32).reshape(-1, 32, 4, 1).view(ref.dtype).reshape(-1, 8, 4, 4, 2)
        matrices = np.moveaxis(pairs, 3, 1).reshape(-1, 4, 8, 8)
        rows = matrices.swapaxes(2, 3) if transposed else matrices
        ref.array.reshape(-1)[first[:, None] + np.arange(8)] = rows.reshape(THREADS, 8)

    def store_words_if(condition, place, words, first=0):
        array, here, places = of_16_bytes(place, first, condition)
        array[places] = np.ascontiguousarray(np.stack(words, axis=1)[here]).view(array.dtype)

    return dict(
        load_if=load_if,
        load_words_if=load_words_if,
        store_words_if=store_words_if,
        store_if=store_if,
        address_in_rows=lambda ref, row, length, column: (ref, np.int64(row) * length + np.int64(column)),
        load_shared_words=lambda place: load_words_if(True, place),
        clear_shared_words_if=lambda condition, place: store_words_if(
            condition, place, [np.zeros(THREADS, np.int32)] * 4
        ),
        load_transposed_matrices=load_transposed_matrices,
        store_matrices=store_matrices,
        load_words=load,
        store_words=store,
        either=either,
        load_address=lambda halves, number: value(np.full(THREADS, halves.array.view(np.int64)[number])),
        moved=lambda address, offset: value(np.asarray(address) + np.asarray(offset)),
    )


def sum_over(x, distances):
    """Does what `pm.sum_over` does to the numbers of all threads."""
    number = np.arange(len(x))
    return functools.reduce(lambda total, distance: value(total + total[number ^ distance]), distances, x)


def fake(threads):
    """Returns what stands for `pm`, and for the modules of operations by their names."""

    def place(ref, index):
        return tuple(np.broadcast_to(threads.running(x), THREADS) for x in index)

    def store(x, ref, index):
        here = threads.mask()
        ref.array[tuple(x[here] for x in place(ref, index))] = np.broadcast_to(x, THREADS)[here]

    def value_if(condition, make, otherwise):
        with threads.only_if(condition):
            made = make()
        return [value(np.where(condition, x, y)) for x, y in zip(made, otherwise, strict=True)]

    def repeated(start, stop, body, values):
        for n in range(int(start[0]), int(stop[0])):
            values = body(value(np.full(THREADS, n)), list(values))
        return values

    nothing = lambda *arguments, **options: None
    absolute = lambda x: value(np.abs(x))
    of_float32 = lambda function: lambda x: value(function(np.asarray(x)))
    operations = dict(
        ir=_types(),
        arith=_arithmetic(),
        vector=_vectors(threads),
        memref=SimpleNamespace(load=lambda ref, index: value(ref.array[place(ref, index)]), store=store),
        math=SimpleNamespace(
            exp=of_float32(np.exp),
            log1p=of_float32(np.log1p),
            rsqrt=of_float32(APPROXIMATIONS["rsqrt"]),
            absf=absolute,
            fma=lambda x, y, z: value((np.float64(x) * np.float64(y) + np.float64(z)).astype(np.float32)),
        ),
    )
    number = np.arange(THREADS, dtype=np.int32)
    pm = SimpleNamespace(
        inline=_inline,
        only_if=threads.only_if,
        pack_of_spread=_fragments.pm.pack_of_spread,
        **dict.fromkeys(("fragments_of_spread", "fragments_of_tile"), lambda registers, size: Held(list(registers))),
        thread_of_program=lambda: value(number),
        **dict.fromkeys(("thread_index", "thread_index_again"), lambda: value(number & 127)),
        constant=lambda number: value(np.full(THREADS, number, np.int32)),
        integer=lambda: np.dtype(np.int32),
        type_of=jnp.dtype,
        bytes_of=lambda kind: np.dtype(kind).itemsize,
        SWIZZLE=128,
        tiling=lambda dtype, **options: (),
        **dict.fromkeys(("address", "address_in_shared"), lambda ref, index: (ref, np.asarray(index))),
        address_in_row=Address,
        sum_over=sum_over,
        from_earlier=lambda x, distance: value(x[np.where(number % 32 >= distance, number - distance, number)]),
        from_lane=lambda x, lane, of=32: value(x[number & -of | lane]),
        from_partner=lambda x, distance: value(x[number ^ distance]),
        repeated=repeated,
        value_if=value_if,
        **dict.fromkeys(("commit", "barrier_of_warpgroups", "warpgroup_barrier", "warp_barrier"), nothing),
    )
    return pm, operations


def install(monkeypatch, threads, pm, operations, modules):
    """Lets the modules, and the arithmetic that they share, run in NumPy."""
    for module in (*modules, code):
        monkeypatch.setattr(module, "pm", pm, raising=False)
        for name, operation in operations.items():
            monkeypatch.setattr(module, name, operation, raising=False)
    for name, function in _words(threads).items():
        monkeypatch.setattr(code, name, function)
    monkeypatch.setattr(code, "multiply_tile", multiply_tile)
    monkeypatch.setattr(code, "multiply_tile_of_tf32", multiply_tile_of_tf32)
    monkeypatch.setattr(code, "approximate", lambda name, x: value(APPROXIMATIONS[name](np.asarray(x))))
