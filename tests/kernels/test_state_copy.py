"""state_copy: copies of blocks and shifts of windows against NumPy, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.common import IMPLEMENTATIONS, assert_untouched, run_by

from pallas_kernels import UnsupportedError, state_copy
from pallas_kernels.state_copy.config import Config

SHAPES = {
    "square": (2, 9, 4, 16, 32),
    "heads of 96 x 192": (1, 9, 3, 192, 96),
    "mamba-1, one axis of 24": (3, 9, 24, 16),
}


def make_pool(rng, shape, dtype):
    pool = rng.normal(size=shape).astype(np.float32)
    pool[:, 0] = np.nan  # NULL_BLOCK may hold anything
    return jnp.asarray(pool).astype(dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_copies_of_whole_blocks_are_exact(rng, shape, dtype, implementation):
    pool = make_pool(rng, shape, dtype)
    # A copy, a skipped row, a copy of a block onto itself, a fresh block, and two rows that read the same block.
    source, destination = [3, 4, 5, 0, 3], [1, 0, 5, 6, 8]
    wanted = np.array(pool)
    wanted[:, 1], wanted[:, 6], wanted[:, 8] = wanted[:, 3], 0, wanted[:, 3]
    actual = state_copy(pool, jnp.array(source), jnp.array(destination), run=run_by(implementation))
    np.testing.assert_array_equal(np.asarray(actual).view(np.uint8), wanted.view(np.uint8))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("channels", "layout"), [(64, "SD"), (1000, "SD"), (1100, "DS")])
def test_shifts_of_windows_are_exact(rng, channels, layout, dtype, implementation):
    pool = make_pool(rng, (2, 9, 6, channels), dtype)
    before = np.array(pool)
    # Shifts by 0 and 2 to another block, by 1 and 3 within a block, a skipped row, a shift by 0 within a block (which
    # does nothing), and a fresh block.
    rows = [(1, 2, 0), (1, 3, 2), (4, 4, 1), (5, 5, 3), (6, 0, 2), (7, 7, 0), (0, 8, 1)]
    wanted = before.copy()
    for source, destination, offset in rows:
        if destination:
            moved = np.zeros_like(before[:, 0]) if source == 0 else before[:, source]
            wanted[:, destination, : 6 - offset] = moved[:, offset:]
    turn = lambda x: x if layout == "SD" else x.swapaxes(2, 3)
    rows = (jnp.array(x) for x in zip(*rows, strict=True))
    actual = turn(state_copy(turn(pool), *rows, layout=layout, run=run_by(implementation)))
    np.testing.assert_array_equal(np.asarray(actual).view(np.uint8), wanted.view(np.uint8))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_tile_size_copies_the_same_bits(rng, implementation):
    if implementation == "xla":
        pytest.skip("XLA has no tiles")
    pool = make_pool(rng, (1, 5, 3, 24, 40), jnp.float32)
    arguments = pool, jnp.array([1, 2]), jnp.array([3, 4])
    wanted = state_copy(*arguments, run=run_by("xla"))
    for tile, programs in ((64, 1), (1024, 7), (4096, 1000)):
        actual = state_copy(*arguments, run=run_by(implementation, Config(tile=tile, programs=programs, num_warps=4)))
        np.testing.assert_array_equal(np.asarray(actual), np.asarray(wanted))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_empty_batches_and_skipped_rows_change_nothing(rng, implementation):
    pool = make_pool(rng, (2, 4, 8, 16), jnp.float32)
    none = jnp.zeros((0,), jnp.int32)
    assert_untouched(pool, state_copy(pool, none, none, run=run_by(implementation)), written=())
    idle = jnp.zeros((5,), jnp.int32)
    assert_untouched(pool, state_copy(pool, idle + 2, idle, run=run_by(implementation)), written=())


@pytest.mark.gpu
@pytest.mark.large_pool
def test_reaches_blocks_beyond_2_to_the_31_elements():
    blocks, state = 4200, (32, 128, 128)  # 2.2e9 float16 elements
    pool = jnp.zeros((1, blocks, *state), jnp.float16)
    last = blocks - 1
    wrapped = (last * 32 * 128 * 128 - 2**31) // (32 * 128 * 128)
    pool = jax.jit(lambda p: p.at[0, 1].set(1.0).at[0, wrapped].set(2.0), donate_argnums=0)(pool)
    copy = jax.jit(lambda p, s, d: state_copy(p, s, d, run=run_by("triton")), donate_argnums=0)
    pool = copy(pool, jnp.array([1]), jnp.array([last]))
    pool = copy(pool, jnp.array([last]), jnp.array([5]))
    assert [float(pool[0, block].min()) for block in (1, wrapped, last, 5, 6)] == [1, 2, 1, 1, 0]


def test_errors_name_the_bad_argument(rng):
    pool = make_pool(rng, (2, 4, 8, 16), jnp.float32)
    row = jnp.array([1])
    with pytest.raises(ValueError, match=r"destination must be Int32\[ ?rows\], got jax\S* int32\[2\]"):
        state_copy(pool, row, jnp.array([1, 2]))
    with pytest.raises(ValueError, match="source must be Int32"):
        state_copy(pool, row.astype(jnp.float32), row)
    with pytest.raises(ValueError, match="window_row needs a pool"):
        state_copy(pool[..., None], row, row, row)
    with pytest.raises(ValueError, match="state_copy: layout must be 'SD' or 'DS', got 'ds'"):
        state_copy(pool, row, row, row, layout="ds")
    with pytest.raises(ValueError, match="implementation must be 'xla', 'triton', 'mosaic_gpu' or None, got 'cuda'"):
        state_copy(pool, row, row, run=run_by("cuda"))
    assert issubclass(UnsupportedError, NotImplementedError)
