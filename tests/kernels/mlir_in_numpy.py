"""Runs code of single threads, which is written in operations of MLIR, in NumPy, for all threads of a warpgroup at once.

A value is an array with a number per thread, or one number that is the same for all.
"""

import contextlib
import functools
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

THREADS = 128


class Memory:
    """An array in memory. Places are numbers, or one number per thread."""

    def __init__(self, array):
        self.array, self.type = array, SimpleNamespace(shape=list(array.shape))

    def vector(self, at, length):
        """Returns an index for `length` neighbours in memory, per thread."""
        *at, last = (np.broadcast_to(x, THREADS)[:, None] for x in at)
        return (*at, last + np.arange(length))


class Block(list):
    """What a branch returns, and which threads take it."""

    def __init__(self, threads):
        super().__init__()
        self.threads = threads


class If:
    """Runs both branches, and takes each thread's results from its own."""

    def __init__(self, condition, types=(), *, has_else=False):
        self.condition, self.then_block, self.else_block = condition, Block(condition), Block(~condition)

    @property
    def results(self):
        return [np.where(self.condition, *both) for both in zip(self.then_block, self.else_block, strict=True)]


def sum_over(x, distances):
    """Does what `pm.sum_over` does to the numbers of all threads."""
    thread = np.arange(len(x))
    return functools.reduce(lambda total, distance: total + total[thread ^ distance], distances, x)


def fake():
    """Returns what stands for `pm`."""
    blocks = []

    @contextlib.contextmanager
    def insertion_point(block):
        blocks.append(block)
        yield
        blocks.pop()

    def threads():
        """Returns which threads run the block that is being written."""
        return np.broadcast_to(np.logical_and.reduce([block.threads for block in blocks]), THREADS)

    def store_vector(value, memory, at, alignment):
        here, at = threads(), np.broadcast_arrays(*memory.vector(at, value.shape[1]))
        memory.array[tuple(x[here] for x in at)] = value[here]

    def store(value, memory, at):
        here, at = threads(), [np.broadcast_to(x, THREADS) for x in at]
        memory.array[tuple(x[here] for x in at)] = np.broadcast_to(value, THREADS)[here]

    def load(memory, at):
        # Threads of the other branch may be outside the array.
        return memory.array[tuple(np.minimum(x, size - 1) for x, size in zip(at, memory.array.shape, strict=True))]

    def load_vector(_, memory, at, alignment):
        at = zip(memory.vector(at, 4), memory.array.shape, strict=True)
        return memory.array[tuple(np.minimum(x, size - 1) for x, size in at)]

    def repeated(start, stop, body, values):
        for n in range(int(np.min(start)), stop):
            blocks.append(Block(n >= start))
            new = body(np.int64(n), list(values))
            blocks.pop()
            values = [np.where(n >= start, *both) for both in zip(new, values, strict=True)]
        return values

    lane = np.arange(THREADS)

    def from_earlier(x, distance):
        return x[np.where(lane % 32 >= distance, lane - distance, lane)]

    def from_lane(x, place, of=32):
        return x[lane // of * of + place]

    def fma(x, y, z):
        return (np.float64(x) * np.float64(y) + np.float64(z)).astype(np.float32)

    dtype = lambda dtype: SimpleNamespace(get=lambda *_: dtype, get_signless=lambda _: dtype)
    arith = SimpleNamespace(
        constant=lambda dtype, n: dtype(n),
        index_cast=lambda _, x: x,
        divui=np.floor_divide,
        remui=np.remainder,
        addi=np.add,
        muli=np.multiply,
        xori=np.bitwise_xor,
        andi=np.bitwise_and,
        ori=np.bitwise_or,
        addf=np.add,
        subf=np.subtract,
        mulf=np.multiply,
        minimumf=np.minimum,
        negf=np.negative,
        select=np.where,
        cmpi=lambda compare, x, y: compare(x, y),
        CmpIPredicate=SimpleNamespace(eq=np.equal, ult=np.less, ugt=np.greater, uge=np.greater_equal),
        bitcast=lambda dtype, x: np.ascontiguousarray(x).view(dtype),
        truncf=lambda dtype, x: x.astype(jnp.bfloat16),
    )
    vector = SimpleNamespace(
        load=load_vector,
        extract=lambda x, _, place: x[:, place[0]],
        from_elements=lambda _, parts: np.stack([np.broadcast_to(x, THREADS) for x in parts], axis=1),
        store=store_vector,
    )
    return SimpleNamespace(
        SWIZZLE=128,
        ir=SimpleNamespace(
            IndexType=dtype(np.int64),
            F32Type=dtype(np.float32),
            BF16Type=dtype(jnp.bfloat16),
            IntegerType=dtype(np.int32),
            VectorType=dtype(None),
            InsertionPoint=insertion_point,
        ),
        arith=arith,
        math=SimpleNamespace(fma=fma),
        memref=SimpleNamespace(load=load, store=store),
        scf=SimpleNamespace(IfOp=If, yield_=lambda values: blocks[-1].extend(values)),
        vector=vector,
        thread_index=lambda: np.arange(THREADS),
        thread_index_again=lambda: np.arange(THREADS),
        from_earlier=from_earlier,
        from_lane=from_lane,
        sum_over=sum_over,
        only_if=lambda condition: insertion_point(Block(condition)),
        repeated=repeated,
        warpgroup_barrier=lambda: None,
        tiling=lambda _: None,
        inline=lambda body, *given: body(None, *(x[0] if isinstance(x, tuple) else x for x in given)),
    )
