"""causal_conv1d_update keeps the window of a boundary beside the new one, in both layouts."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.common import IMPLEMENTATIONS, assert_untouched, dirty_pool, pack, run_by
from kernels.conv_claims import rows_of, transposed

from pallas_kernels import BoundaryWindow, causal_conv1d_update
from pallas_kernels.causal_conv1d.config import Config

LAYER, LAYERS, BLOCKS, CHANNELS = 1, 2, 24, 40
OPS = {"SD": causal_conv1d_update, "DS": transposed(causal_conv1d_update)}
BOTH = pytest.mark.parametrize("layout", OPS)


def floats(x):
    return np.asarray(x.astype(jnp.float32))


def make(rng, lengths, width, K, dtype):
    """Makes the tokens of the rows and three of padding, a pool whose blocks 1 to 8 are numbers, and taps."""
    x = rng.normal(size=(sum(lengths) + 3, CHANNELS)).astype(np.float32)
    x[sum(lengths) :] = np.nan
    pool = dirty_pool(rng, (LAYERS, BLOCKS, width - 1 + K, CHANNELS), dtype, clean=range(1, 9))
    weight, bias = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((width, CHANNELS), CHANNELS))
    return jnp.asarray(x).astype(dtype), pool, weight, bias


# Tokens, read block, window row, write block, boundary row, boundary block. K is 4, and a row from 100 on is no row.
ROWS = [
    (5, 1, 2, 10, 0, 11),  # a boundary that was jumped over
    (1, 2, 3, 12, 3, 2),  # the boundary is the newest token, in the block that is read: its window moves to row 0
    (3, 3, 4, 3, 1, 13),  # the row writes the block that it reads
    (2, 4, 0, 14, 100, 0),  # no boundary, as in most rows
    (0, 5, 100, 0, 4, 15),  # no tokens
    (0, 6, 4, 16, 4, 6),  # no tokens, and the window moves inside its block; the write block is not written
    (4, 7, 1, 0, 1, 17),  # no write
    (1, 0, 0, 18, 0, 19),  # a window of zeros
    (0, 8, 0, 20, 0, 0),  # a row that takes no part
]
PADDING = (0, 9, 100, 21, 100, 0)


@BOTH
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("width", [4, 2, 5])
def test_boundaries_are_kept_and_nothing_else_changes(rng, width, dtype, implementation, layout):
    lengths, *columns = zip(*ROWS, strict=True)
    x, pool, weight, bias = make(rng, lengths, width, 4, dtype)
    # The first row's boundary begins at window row 0, and it reads up to row 2 + width - 2. No row reads the others.
    pool = pool.at[:, 1, 2 + width - 1 :].set(jnp.nan)
    read, row, write, *boundary = (
        jnp.array([*column, *[padding] * 2], jnp.int32) for column, padding in zip(columns, PADDING[1:], strict=True)
    )
    run = lambda **boundary: OPS[layout](
        *(x, pool, weight, bias, rows_of(pack(lengths, padding_rows=2), read, row, write, **boundary)),
        run=run_by(implementation),
    )
    (wanted_y, without), (y, after) = run(), run(boundary=BoundaryWindow(row=boundary[0], block=boundary[1]))
    np.testing.assert_array_equal(floats(y), floats(wanted_y))
    assert np.isfinite(floats(y)).all()
    for length, read, _, write, first, block in ROWS:
        if length and write:
            used = slice(0, width - 2 + length)
            np.testing.assert_array_equal(floats(after)[LAYER, write, used], floats(without)[LAYER, write, used])
        if block:
            old = floats(pool)[LAYER, read, first : first + width - 1] if read else np.zeros((width - 1, CHANNELS))
            np.testing.assert_array_equal(floats(after)[LAYER, block, : width - 1], old)
    assert_untouched(pool, after, written=(2, 3, 6, 10, 11, 12, 13, 14, 15, 17, 18, 19))
    assert_untouched(pool[:LAYER], after[:LAYER], written=())


@BOTH
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_boundaries_are_kept_in_a_call_without_tokens(rng, implementation, layout):
    x, pool, weight, _ = make(rng, [], 4, 2, jnp.bfloat16)
    where = pack([0, 0, 0]), jnp.array([3, 4, 5]), jnp.array([2, 2, 0]), jnp.array([0, 0, 0])
    rows = rows_of(*where, boundary=BoundaryWindow(row=jnp.array([1, 2, 0]), block=jnp.array([10, 4, 0])))
    y, after = OPS[layout](x[:0], pool, weight, None, rows, run=run_by(implementation))
    assert y.shape == (0, CHANNELS)
    np.testing.assert_array_equal(floats(after)[LAYER, 10, :3], floats(pool)[LAYER, 3, 1:4])
    np.testing.assert_array_equal(floats(after)[LAYER, 4, :3], floats(pool)[LAYER, 4, 2:5])
    assert_untouched(pool, after, written=(4, 10))
    assert_untouched(pool[:LAYER], after[:LAYER], written=())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_boundary_of_a_row_depends_on_that_row_alone(rng, implementation):
    lengths, *columns = zip(*ROWS, strict=True)
    x, pool, weight, bias = make(rng, lengths, 4, 4, jnp.bfloat16)
    loc = np.asarray(pack(lengths))

    @jax.jit
    def run(x, loc, read, row, write, first, block):
        rows = rows_of(loc, read, row, write, boundary=BoundaryWindow(row=first, block=block))
        return causal_conv1d_update(x, pool, weight, bias, rows, run=run_by(implementation))

    def results(chosen, padding):
        tokens = np.concatenate([np.arange(loc[r], loc[r + 1]) for r in chosen] + [np.zeros(padding, int)])
        here = [jnp.array([column[r] for r in chosen] + [0] * padding, jnp.int32) for column in columns]
        _, after = run(x[tokens], pack([lengths[r] for r in chosen], padding), *here)
        return {r: floats(after)[LAYER, ROWS[r][-1], :3] for r in chosen if ROWS[r][-1]}

    wanted = results(range(len(ROWS)), 0)
    for chosen, padding in [([0], 0), ([1], 5), ([4, 0], 0), (range(len(ROWS) - 1, -1, -1), 3)]:
        for r, window in results(chosen, padding).items():
            np.testing.assert_array_equal(window, wanted[r])


@BOTH
@pytest.mark.parametrize("implementation", ["interpret", pytest.param("triton", marks=pytest.mark.gpu)])
def test_every_config_keeps_the_same_boundaries(rng, implementation, layout):
    lengths, *columns = zip(*ROWS, strict=True)
    x, pool, weight, bias = make(rng, lengths, 4, 4, jnp.float32)
    *where, first, block = (jnp.array(column, jnp.int32) for column in columns)
    rows = rows_of(pack(lengths), *where, boundary=BoundaryWindow(row=first, block=block))
    results = [
        OPS[layout](x, pool, weight, bias, rows, run=run_by(implementation, Config(*config)))
        for config in ((16, 1), (64, 2), (512, 4))
    ]
    for y, after in results[1:]:
        np.testing.assert_array_equal(floats(y), floats(results[0][0]))
        assert_untouched(results[0][1], after, written=())


@pytest.mark.parametrize("boundaries", [False, True])
def test_a_call_without_boundaries_has_the_kernel_of_one_without_the_arguments(rng, boundaries):
    """Two more inputs, both of them indices, and no second launch."""
    x, pool, weight, _ = make(rng, [2], 4, 2, jnp.float32)
    row = jnp.array([3])
    boundary = BoundaryWindow(row=row * 0, block=row + 9) if boundaries else None
    run = functools.partial(causal_conv1d_update, run=run_by("interpret"))
    rows = rows_of(pack([2]), row, row * 0, row, boundary=boundary)
    text = str(jax.make_jaxpr(run)(x, pool, weight, None, rows))
    assert text.count("pallas_call[") == 1
    operands = re.search(r"\] ((?:\w+ ?)+)\n", text.partition("pallas_call[")[2])
    assert len(operands[1].split()) == 8 + 2 * boundaries
