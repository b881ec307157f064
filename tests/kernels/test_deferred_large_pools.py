"""Deferred states in blocks beyond 2^31 elements of a pool."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import deferred_mamba2_rows, deferred_rows
from kernels.common import dirty_pool, skip_if_unavailable
from kernels.deferred_rows import LAYER, LAYERS

KINDS = {
    "gated delta rule": deferred_rows.Kind("64 x 128", "bfloat16", "bfloat16"),
    "Mamba-2": deferred_mamba2_rows.Kind("one group", "bfloat16", "bfloat16"),
}
ELEMENTS = 2**31
CASES = [(name, "triton") for name in KINDS] + [(name, "mosaic_gpu") for name in ("gated delta rule", "Mamba-2")]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "implementation"), CASES)
@pytest.mark.large_pool
def test_folds_reach_blocks_beyond_2_to_the_31_elements(rng, name, implementation):
    """A row reads the last block and folds into the one before it, with the bits of a small pool.

    The blocks of the other layer, of which an offset of 32 bits would find one, are kept.
    """
    skip_if_unavailable(implementation)
    kind, tokens = KINDS[name], [(0, t) for t in range(4)]
    sequences, small = kind.sequences(rng, [len(tokens)]), dirty_pool(rng, kind.pool_shape, kind.state, (1,))
    # Log decays must not be positive.
    rings = [jnp.asarray(-np.abs(rng.normal(size=ring.shape))).astype(ring.dtype) for ring in kind.rings()]
    _, _, *state = kind.pool_shape
    blocks = ELEMENTS // (LAYERS * math.prod(state)) + 8
    last = blocks - 1

    def run(pool, read, fold):
        ints = lambda *values: jnp.asarray(values, jnp.int32)
        rows = ints(0, len(tokens)), ints(0), ints(kind.length), ints(2 * kind.length), ints(read), ints(fold)
        return sequences.call(tokens, (pool, *rings), rows, implementation)

    def fill():
        pool = jnp.zeros((LAYERS, blocks, *state), small.dtype).at[0].set(7.0)
        return pool.at[LAYER, last].set(small[LAYER, 1])

    program = jax.jit(run, static_argnums=(1, 2))
    wanted, after, *_ = program(small, 1, 3)
    out, pool, *_ = program(jax.jit(fill)(), last, last - 1)
    np.testing.assert_array_equal(out, wanted)
    np.testing.assert_array_equal(pool[LAYER, last - 1], after[LAYER, 3])
    np.testing.assert_array_equal(pool[LAYER, last], small[LAYER, 1])
    assert float(pool[0].min()) == float(pool[0].max()) == 7.0
