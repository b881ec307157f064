"""The language of Hopper kernels in NumPy: what single threads write in `pallas_kernels.hopper`, of all threads at once.

A register is an array with a number or a vector per thread, and has NumPy's operators, as in the language. The tensor core's
product is written down from NVIDIA's PTX ISA.
"""

import contextlib
import functools
import threading
from types import SimpleNamespace

import numpy as np

from pallas_kernels import hopper
from pallas_kernels.hopper import arithmetic

THREADS = 256


def constant(x):
    """Returns a number of Python as the language does, and other registers as they are."""
    return x if isinstance(x, np.ndarray) else np.full(THREADS, x, np.float32 if isinstance(x, float) else np.int32)


class Held:
    """An array of which each thread has some registers."""

    def __init__(self, registers):
        self.registers = list(registers)

    def __add__(self, other):
        return Held([x + y for x, y in zip(self.registers, other.registers, strict=True)])


class Ref:
    """An array in memory, or a view of one. Threads load and store its elements, as in the language's `Memory`."""

    threads = None  # which threads run, while code of threads does

    def __init__(self, array):
        self.array = array

    shape = property(lambda self: self.array.shape)
    dtype = property(lambda self: self.array.dtype)
    strides = property(lambda self: [stride // self.array.itemsize for stride in self.array.strides])
    at = property(lambda self: _At(self.array))

    def _places(self, index):
        index = index if isinstance(index, tuple) else (index,)
        return tuple(np.broadcast_to(self.threads.running(x), THREADS) for x in index)

    def __getitem__(self, index):
        return self.array[self._places(index)]

    def __setitem__(self, index, x):
        here = self.threads.mask()
        self.array[tuple(each[here] for each in self._places(index))] = np.broadcast_to(x, THREADS)[here]

    def reshape(self, shape):
        return Ref(self.array.reshape(shape))


class _At:
    """The views of an array."""

    def __init__(self, array):
        self.array = array

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        return Ref(self.array[tuple(x if isinstance(x, slice) else int(x) for x in index)])


def _from(ref):
    """Returns memory from the first element of a view of an array up to its last one."""
    length = 1 + sum((n - 1) * stride for n, stride in zip(ref.shape, ref.strides, strict=True))
    return np.lib.stride_tricks.as_strided(ref.array, (length,), (ref.array.itemsize,))


def _swizzled(pieces):
    """Returns pieces [.., 8, elements] with their parts of 16 bytes where the swizzle puts them, or puts them back."""
    groups = np.arange(8)
    parts = pieces.reshape(*pieces.shape[:-1], 8, 16 // pieces.itemsize)
    return parts[..., groups[:, None], groups[:, None] ^ groups, :].reshape(pieces.shape)


def tiled(tiles):
    """Returns tiles [.., rows, columns] as shared memory has them: see `hopper.tiling`."""
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
    return Held([np.asarray(tile)[rows[:, None], first[:, None] + np.arange(2)] for rows, first in places])


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
    def predicated(self, condition):
        self.local.blocks = [*getattr(self.local, "blocks", []), np.broadcast_to(condition, THREADS)]
        yield
        self.local.blocks = self.local.blocks[:-1]


def select(condition, x, y):
    """Returns x where a condition is met, and else y: numbers, vectors or addresses."""
    if isinstance(x, Address):
        return x.unless(condition, y)
    x, y, condition = constant(x), constant(y), np.broadcast_to(condition, THREADS)
    return np.where(condition[:, None] if x.ndim == 2 else condition, x, y)


def _vectors(threads):
    def places(index, count):
        *outer, last = (np.broadcast_to(x, THREADS)[:, None] for x in index)
        return (*outer, last + np.arange(count))

    def load(ref, *index, count):
        return ref.array[places([threads.running(x) for x in index], count)]

    def store(x, ref, *index):
        here = threads.mask()
        ref.array[tuple(part[here] for part in np.broadcast_arrays(*places(index, x.shape[1])))] = x[here]

    return dict(load_vector=load, store_vector=store)


def _inline(body, *operands, results=()):
    def given(x):
        if isinstance(x, tuple):
            return x[0]
        return x.registers if isinstance(x, Held) else np.full(THREADS, int(x), np.int32)

    found = body(*map(given, operands))
    if not results:
        assert found is None
        return []
    for held, (length, dtype) in zip(found, results, strict=True):
        ((pack, kind),) = {(np.shape(x)[1], x.dtype) for x in held}
        assert pack * len(held) * 128 == np.prod(length)
        assert kind == dtype
    return [Held(x) for x in found]


def add_product(sums, a, b):
    """Adds each warp's product [16, 8] to the sums of its threads, which have four elements each."""
    product = (a @ b).reshape(len(a), 2, 8, 4, 2)
    parts = [product[:, rows, :, :, n].reshape(THREADS) for rows in range(2) for n in range(2)]
    return [before + part for before, part in zip(sums, parts, strict=True)]


def mma(sums, left, right, kind):
    """The tensor core's product of 16 tokens, 16 inputs and 8 outputs, for each warp."""
    pairs = lambda word: np.ascontiguousarray(word).view(kind).astype(np.float32).reshape(8, 8, 4, 2)
    a, b = np.zeros((8, 16, 16), np.float32), np.zeros((8, 16, 8), np.float32)
    for n, word in enumerate(left):
        half, rows = divmod(n, 2)
        a[:, 8 * rows : 8 * rows + 8, 8 * half : 8 * half + 8] = pairs(word).reshape(8, 8, 8)
    for half, word in enumerate(right):
        b[:, 8 * half : 8 * half + 8] = pairs(word).reshape(8, 8, 8).swapaxes(1, 2)
    return add_product(sums, a, b)


def mma_tf32(sums, left, right):
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
        self.choices = [(np.ones(THREADS, bool), ref.array, row, column)]
        self.element = ref, row * ref.strides[0] + column

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
        return [found[:, n] for n in range(4)]

    def store(at, words, first=0, *, passes_cache=False):
        if not isinstance(at, Address):
            return store_words_if(True, at, words, first)
        stacked = np.stack(words, axis=1)
        for array, here, places in at.places(threads.mask(), first):
            array[places] = np.ascontiguousarray(stacked[here]).view(array.dtype)

    def load_if(condition, place, bits):
        (ref, index), here = place, np.broadcast_to(condition, THREADS) & threads.mask()
        size = ref.dtype.itemsize
        found, places = np.zeros((THREADS, 4 // size), ref.dtype), np.arange(bits // 8 // size)
        found[np.flatnonzero(here)[:, None], places] = ref.array.reshape(-1)[index[here, None] + places]
        return found.view(np.int32)[:, 0]

    def store_if(condition, place, word, bits):
        (ref, index), here = place, np.broadcast_to(condition, THREADS) & threads.mask()
        halves = np.arange(bits // 16)
        numbers = np.ascontiguousarray(word[here, None]).view(ref.dtype)
        ref.array.reshape(-1)[index[here, None] + halves] = numbers[:, halves]

    def of_16_bytes(place, first, condition):
        """The array of an address, the threads that use it, and the places of what 16 bytes hold."""
        ref, index = place.element if isinstance(place, Address) else place
        here, size = np.flatnonzero(np.broadcast_to(condition, THREADS) & threads.mask()), ref.dtype.itemsize
        return _from(ref), here, index[here, None] + first // size + np.arange(16 // size)

    def load_words_if(condition, place, first=0, *, passes_cache=False):
        found = np.zeros((THREADS, 4), np.int32)
        array, here, places = of_16_bytes(place, first, condition)
        found[here] = np.ascontiguousarray(array[places]).view(np.int32)
        return [found[:, n] for n in range(4)]

    def ldmatrix_transposed(place):
        ref, first = place
        rows = ref.array.reshape(-1)[first[:, None] + np.arange(8)].reshape(-1, 4, 4, 2, 8)
        pairs = np.ascontiguousarray(np.moveaxis(rows, (4, 2), (2, 3))).reshape(-1, 4, 32, 2)
        return [pairs[:, n].reshape(THREADS, 2).view(np.int32)[:, 0] for n in range(4)]

    def stmatrix(place, words, *, transposed=False):
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
        long_row_address=lambda ref, row, length, column: (ref, np.int64(row) * length + np.int64(column)),
        load_smem_words=lambda place: load_words_if(True, place),
        clear_smem_words_if=lambda condition, place: store_words_if(
            condition, place, [np.zeros(THREADS, np.int32)] * 4
        ),
        ldmatrix_transposed=ldmatrix_transposed,
        stmatrix=stmatrix,
        load_words=load,
        store_words=store,
        load_address=lambda halves, number: np.full(THREADS, halves.array.view(np.int64)[number]),
        advance=lambda address, offset: address + offset,
    )


def fake(threads):
    """Returns what stands for `pallas_kernels.hopper` in code of single threads."""

    def branch(condition, then, otherwise):
        with threads.predicated(condition):
            made = then()
        return [np.where(condition, x, y) for x, y in zip(made, otherwise, strict=True)]

    def for_range(start, stop, body, carry):
        for n in range(int(start[0]), int(stop[0])):
            carry = body(np.full(THREADS, n, np.int32), list(carry))
        return carry

    def reduce_warp(operation, x):
        reduce = dict(max=np.max, min=np.min)[operation]
        return np.repeat(reduce(np.reshape(x, (-1, 32)), axis=1), 32)

    nothing = lambda *arguments, **options: None
    number = np.arange(THREADS, dtype=np.int32)
    hp = SimpleNamespace(
        inline=_inline,
        i32=lambda x: np.full(THREADS, x, np.int32),
        f32=lambda x: np.full(THREADS, x, np.float32),
        of_python=constant,
        index=lambda x: x,
        select=select,
        minimum=np.minimum,
        maximum=lambda x, y: np.maximum(x, y).astype(x.dtype),
        unsigned_less=lambda x, y: x.astype(np.uint32) < y,
        bitcast=lambda x, dtype: np.ascontiguousarray(x).view(dtype),
        bitcast_vector=lambda x, dtype: np.ascontiguousarray(x).view(dtype),
        unpack=lambda x: list(x.T),
        pack=lambda numbers: np.stack([np.broadcast_to(x, THREADS) for x in numbers], axis=1),
        broadcast=lambda x, length: np.repeat(np.broadcast_to(x, THREADS)[:, None], length, axis=1),
        reduce_add=lambda x: x.sum(axis=1, dtype=x.dtype),
        fma=lambda x, y, z: (np.float64(x) * np.float64(y) + np.float64(z)).astype(np.float32),
        exp=np.exp,
        exp2=np.exp2,
        log1p=np.log1p,
        rsqrt=APPROXIMATIONS["rsqrt"],
        absolute=np.abs,
        elements=lambda registers: [x for held in registers for x in held.T],
        strided=_strided,
        thread_of_cta=lambda: number,
        **dict.fromkeys(("thread_index", "thread_index_again"), lambda: number & 127),
        predicated=threads.predicated,
        branch=branch,
        for_range=for_range,
        tiling=lambda dtype, **options: (),
        **dict.fromkeys(("address", "smem_address"), lambda ref, offset: (ref, constant(offset))),
        row_address=Address,
        sum_over_lanes=lambda x, distances: functools.reduce(lambda x, n: x + x[number ^ n], distances, x),
        shfl_up=lambda x, distance: x[np.where(number % 32 >= distance, number - distance, number)],
        shfl_idx=lambda x, lane, width=32: x[number & -width | lane],
        shfl_xor=lambda x, distance: x[number ^ distance],
        reduce_warp=reduce_warp,
        mma=mma,
        mma_tf32=mma_tf32,
        approximate=lambda name, x: APPROXIMATIONS[name](x),
        **dict.fromkeys(("commit_smem", "barrier_of_warpgroups", "warpgroup_barrier", "warp_barrier"), nothing),
        **_vectors(threads),
        **_words(threads),
    )
    names = {name for name in vars(hopper) if getattr(arithmetic, name, None) is getattr(hopper, name)}
    vars(hp).update({name: getattr(arithmetic, name) for name in names - vars(hp).keys()})
    hp.word_address = lambda ref, start, at: hp.address(ref, (at >> 1) + start)
    return hp


def _strided(numbers):
    count = next(count for count in (4, 2, 1) if len(numbers) % count == 0)
    return [np.stack(numbers[n : n + count], axis=1) for n in range(0, len(numbers), count)]


def install(monkeypatch, threads, hp, modules):
    """Lets the modules, and the arithmetic that they share, run in NumPy."""
    monkeypatch.setattr(Ref, "threads", threads)
    monkeypatch.setattr(arithmetic, "_registers", hp)
    monkeypatch.setattr(arithmetic, "approximate", hp.approximate)
    for module in modules:
        monkeypatch.setattr(module, "hp", hp)
