"""Systems of the delta rule's prefill on Hopper GPUs: the operations of all threads, run in NumPy, beside float64."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._dot import pieces
from pallas_kernels.gated_delta_rule.prefill import substitution
from pallas_kernels.gated_delta_rule.prefill.substitution import SIZE

THREADS = 128
INDEX, INT32, FLOAT32, BFLOAT16 = np.int64, np.int32, np.float32, jnp.bfloat16


class _Memory:
    """Shared memory, as its bytes lie. A vector of each thread is [threads, elements]."""

    def __init__(self, array):
        self.array, self.type = array, SimpleNamespace(shape=array.shape)

    def _places(self, at, count):
        *outer, last = (np.broadcast_to(x, THREADS)[:, None] for x in at)
        return *outer, last + np.arange(count)

    def load(self, at, count):
        return self.array[self._places(at, count)]

    def store(self, values, at):
        self.array[self._places(at, values.shape[1])] = values


class _If:
    """A branch of which all threads run both sides, and keep the results of theirs."""

    def __init__(self, condition, types, has_else):
        self.condition, self.then_block, self.else_block = condition, [], []

    @property
    def results(self):
        return [np.where(self.condition, a, b) for a, b in zip(self.then_block, self.else_block, strict=True)]


class _InsertionPoint:
    current = None

    def __init__(self, block):
        self.block = block

    def __enter__(self):
        _InsertionPoint.current = self.block

    def __exit__(self, *_):
        _InsertionPoint.current = None


def _operations(memory):
    """The operations of MLIR that the substitution is written in, on arrays with a number for each thread."""
    kind = lambda dtype: SimpleNamespace(get=lambda: dtype)
    ir = SimpleNamespace(
        IndexType=kind(INDEX), F32Type=kind(FLOAT32), BF16Type=kind(BFLOAT16), InsertionPoint=_InsertionPoint
    )
    ir.IntegerType = SimpleNamespace(get_signless=lambda bits: {32: INT32}[bits])
    ir.VectorType = SimpleNamespace(get=lambda shape, dtype: (*shape, dtype))
    narrow = lambda dtype, x: x.astype(dtype[-1] if isinstance(dtype, tuple) else dtype)
    arith = SimpleNamespace(
        constant=lambda dtype, n: np.full(THREADS, n, dtype), index_cast=lambda dtype, x: x.astype(dtype),
        addi=np.add, muli=np.multiply, divui=np.floor_divide, remui=np.remainder, xori=np.bitwise_xor,
        andi=np.bitwise_and, subf=np.subtract, negf=np.negative, select=np.where,
        bitcast=lambda dtype, x: x.view(dtype), truncf=narrow,
        cmpi=lambda _, a, b: a == b, CmpIPredicate=SimpleNamespace(eq=None),
    )  # fmt: skip
    vector = SimpleNamespace(
        load=lambda kind, ref, at, alignment: ref.load(at, kind[0]),
        store=lambda values, ref, at, alignment: ref.store(values, at),
        extract=lambda values, _, at: values[:, at[0]],
        from_elements=lambda _, values: np.stack(values, axis=1),
    )
    return dict(
        ir=ir,
        arith=arith,
        vector=vector,
        math=SimpleNamespace(fma=lambda a, b, c: (a.astype(np.float64) * b + c).astype(FLOAT32)),
        memref=SimpleNamespace(
            load=lambda ref, at: ref.load(at, 1)[:, 0], store=lambda x, ref, at: ref.store(x[:, None], at)
        ),
        scf=SimpleNamespace(IfOp=_If, yield_=lambda values: _InsertionPoint.current.extend(values)),
        thread_index=lambda: np.arange(THREADS),
        warpgroup_barrier=lambda: None,
        tiling=lambda dtype: (),
        SWIZZLE=128,
        inline=lambda body, *refs: body(None, *memory),
    )


def _tiled(array):
    """Returns [.., rows, columns] as `pm.tiled` stores it: pieces of eight rows, whose parts of 16 bytes change places."""
    *outer, rows, columns = array.shape
    lanes = 128 // array.dtype.itemsize
    tiles = array.reshape(*outer, rows // 8, 8, columns // lanes, 8, lanes // 8).swapaxes(-4, -3)
    return _swapped(tiles).reshape(*outer, rows // 8, columns // lanes, 8, lanes)


def _swapped(tiles):
    """Swaps parts [.., 8 rows, 8 parts, elements] of rows. Doing it twice does nothing."""
    row, part = np.arange(8)[:, None], np.arange(8)[None, :]
    return tiles[..., row, row ^ part, :]


def _plain(tiled):
    """Does the opposite of `_tiled`."""
    *outer, row_tiles, column_tiles, _, lanes = tiled.shape
    tiles = _swapped(tiled.reshape(*outer, row_tiles, column_tiles, 8, 8, lanes // 8)).swapaxes(-4, -3)
    return tiles.reshape(*outer, row_tiles * 8, column_tiles * lanes)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_solved_systems_are_inverses_times_beta(rng, monkeypatch, count, transposed):
    """What a system holds on its diagonal and above is not read: it is NaN here."""
    lower = np.tril(rng.normal(size=(2, SIZE, SIZE)) * 0.2, -1)
    given = np.where(np.tril(np.ones((SIZE, SIZE)), -1) > 0, lower, np.nan).astype(FLOAT32)
    beta = rng.uniform(size=(2, SIZE)).astype(FLOAT32)
    solution = np.full((2, count, SIZE, SIZE), np.nan, BFLOAT16)
    stored = _Memory(_tiled(solution) if transposed else solution)
    memory = _Memory(_tiled(given)), _Memory(beta), stored
    monkeypatch.setattr(substitution, "pm", SimpleNamespace(**_operations(memory)))
    substitution.substitute(None, None, None, transposed=transposed)

    found = _plain(stored.array).swapaxes(-1, -2) if transposed else stored.array
    wanted = np.linalg.inv(np.eye(SIZE) + lower.astype(FLOAT32).astype(np.float64)) * beta[:, None, :]
    total = found.astype(np.float64).sum(axis=1)
    np.testing.assert_allclose(total, wanted, rtol=0, atol=2.0 ** (-8 * count) * np.abs(wanted).max())
    # The pieces are cut as those of other tiles are.
    again = np.stack(pieces(jnp.asarray(total, FLOAT32), count), axis=1)
    np.testing.assert_allclose(found[:, 0].astype(FLOAT32), again[:, 0].astype(FLOAT32), rtol=2**-7)
