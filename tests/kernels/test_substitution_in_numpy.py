"""The substitution of the Mosaic GPU kernels, which is written in operations of MLIR, run in NumPy for all threads."""

import contextlib
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta_rule.prefill import substitution

SIZE, GROUPS = substitution.SIZE, np.arange(8)


class Memory:
    """An array in shared memory. Places are numbers, or one number per thread."""

    def __init__(self, array):
        self.array, self.type = array, SimpleNamespace(shape=list(array.shape))

    def vector(self, at, length):
        """Returns an index for `length` neighbours in memory, per thread."""
        *at, last = (np.broadcast_to(x, 128)[:, None] for x in at)
        return (*at, last + np.arange(length))


class If:
    """Runs both branches, and takes each thread's results from its own."""

    def __init__(self, condition, types, *, has_else):
        assert has_else
        self.condition, self.then_block, self.else_block = condition, [], []

    @property
    def results(self):
        return [np.where(self.condition, *both) for both in zip(self.then_block, self.else_block, strict=True)]


def fake():
    """Returns what stands for `pm`."""
    blocks = []

    @contextlib.contextmanager
    def insertion_point(block):
        blocks.append(block)
        yield
        blocks.pop()

    def store_vector(value, memory, at, alignment):
        memory.array[memory.vector(at, value.shape[1])] = value

    def store(value, memory, at):
        memory.array[tuple(at)] = value

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
        subf=np.subtract,
        negf=np.negative,
        select=np.where,
        cmpi=lambda _, x, y: x == y,
        CmpIPredicate=SimpleNamespace(eq=None),
        bitcast=lambda dtype, x: np.ascontiguousarray(x).view(dtype),
        truncf=lambda dtype, x: x.astype(jnp.bfloat16),
    )
    vector = SimpleNamespace(
        load=lambda _, memory, at, alignment: memory.array[memory.vector(at, 4)],
        extract=lambda x, _, place: x[:, place[0]],
        from_elements=lambda _, parts: np.stack(np.broadcast_arrays(*parts), axis=1),
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
        memref=SimpleNamespace(load=lambda memory, at: memory.array[tuple(at)], store=store),
        scf=SimpleNamespace(IfOp=If, yield_=lambda values: blocks[-1].extend(values)),
        vector=vector,
        thread_index=lambda: np.arange(128),
        warpgroup_barrier=lambda: None,
        tiling=lambda _: None,
        inline=lambda body, *refs: body(None, *(ref for ref, _ in refs)),
    )


def swizzled(tiles, length):
    """Returns tiles [.., 8, elements] with parts of `length` elements where the swizzle puts them, or puts them back."""
    parts = tiles.reshape(*tiles.shape[:-1], 8, length)
    return parts[..., GROUPS[:, None], GROUPS[:, None] ^ GROUPS, :].reshape(tiles.shape)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_substitution_inverts_two_systems(rng, monkeypatch, transposed, count):
    """What is not below the diagonal of a system may be anything."""
    system = np.tril(0.3 * rng.normal(size=(2, SIZE, SIZE)), -1).astype(np.float32)
    beta = rng.uniform(size=(2, SIZE)).astype(np.float32)
    tiles = np.where(np.tri(SIZE, k=-1), system, np.float32(np.nan)).reshape(2, 8, 8, 2, 32).swapaxes(2, 3)
    shape = (2, count, 8, 1, 8, SIZE) if transposed else (2, count, SIZE, SIZE)
    solution = Memory(np.full(shape, np.nan, jnp.bfloat16))
    monkeypatch.setattr(substitution, "pm", fake())
    substitution.substitute(Memory(swizzled(tiles, 4)), Memory(beta), solution, transposed=transposed)

    found = solution.array.astype(np.float64)
    if transposed:
        found = swizzled(found, 8).reshape(2, count, SIZE, SIZE).swapaxes(-1, -2)
    wanted = np.linalg.inv(np.eye(SIZE) + system.astype(np.float64)) * beta[:, None]
    # So many pieces have a relative error of 2^-8 each.
    np.testing.assert_allclose(found.sum(axis=1), wanted, rtol=2.0 ** (-8 * count), atol=1e-5 * np.abs(wanted).max())
    assert not np.triu(found.sum(axis=1), 1).any()
