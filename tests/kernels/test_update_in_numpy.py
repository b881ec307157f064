"""The update of gated_delta_rule for Hopper GPUs, which is written in operations of MLIR, run in NumPy for all threads."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from kernels.common import assert_untouched, pack
from kernels.test_gated_delta_rule import Dims, assert_rows_match_the_oracle, make, mixed_rows, unpack
from kernels.threads_in_numpy import Ref, Threads, fake, install
from oracles.ops import gates

from pallas_kernels.gated_delta_rule import gate_code, mosaic_gpu
from pallas_kernels.gated_delta_rule.gate_code import Gate

LAYER = 1
NUMBERS = [
    (Dims(1, 2, 128, 64), jnp.bfloat16, jnp.float32, 4),
    (Dims(1, 2, 128, 64), jnp.bfloat16, jnp.bfloat16, 4),
    (Dims(2, 2, 64, 128), jnp.float16, jnp.float16, 4),
    (Dims(1, 1, 64, 64), jnp.float32, jnp.float32, 1),
    (Dims(1, 1, 128, 128), jnp.float32, jnp.bfloat16, 1),
]


@pytest.fixture
def run(monkeypatch):
    """Returns a function that runs all programs: (inputs, rows, gate, loads) -> outputs and pool."""
    threads = Threads()
    pm, operations = fake(threads)
    install(monkeypatch, threads, pm, operations, (mosaic_gpu, gate_code))
    pm.computed = lambda x: x
    place = {}
    pm.axis_index = lambda axis: place[axis]

    def run(inputs, rows, gate, loads=None):
        *given, pool = (Ref(np.array(x)) for x in inputs)
        starts, read, write = map(np.asarray, rows)
        (heads, value_dim, key_dim), itemsize = pool.shape[2:], pool.dtype.itemsize
        loads = loads or mosaic_gpu.loads_of_lane(write.shape[1], key_dim, itemsize)
        values = 4 * loads * 32 * 16 // (key_dim * itemsize)
        out = Ref(np.full((given[0].shape[0], heads, value_dim), np.nan, given[0].dtype))
        for row, head, part in itertools.product(range(len(read)), range(heads), range(value_dim // values)):
            place.update(row=row, head=head, part=part)
            numbers = np.array([LAYER]), starts, read, Ref(write)
            mosaic_gpu._kernel(*numbers, *given, pool, out, loads=loads, gate=gate)
        return jnp.asarray(out.array), jnp.asarray(pool.array)

    return run


@pytest.mark.parametrize("gate", [(None, False), (-5.0, False), (None, True)])
@pytest.mark.parametrize(("dims", "dtype", "state_dtype", "window"), NUMBERS)
def test_update_matches_the_oracle(rng, run, dims, dtype, state_dtype, window, gate):
    lower_bound, allow_neg_eigval = gate
    lengths, read, write = mixed_rows(window)
    inputs = make(rng, lengths, dims, dtype, state_dtype)
    rows = pack(lengths, padding_rows=2), jnp.array([*read, 5, 0]), jnp.asarray(write)
    out, after = run(inputs, rows, Gate(*gate, dims.key_dim**-0.5, True))
    a, b, A_log, dt_bias = (x.astype(jnp.float32) for x in inputs[1:5])
    gated = gates(a, b, A_log, dt_bias, lower_bound, beta_max=1 + allow_neg_eigval)
    numbers = *unpack(inputs[0], dims), *gated
    assert_rows_match_the_oracle(lengths, read, write, out, inputs[-1], after, numbers, dims.key_dim**-0.5)


@pytest.mark.parametrize("state_dtype", [jnp.float32, jnp.bfloat16])
def test_the_value_dims_of_a_warp_do_not_change_a_bit(rng, run, state_dtype):
    dims, lengths = Dims(1, 1, 128, 128), [3, 1]
    inputs = make(rng, lengths, dims, jnp.bfloat16, state_dtype, clean=(3, 4))
    rows = pack(lengths), jnp.array([3, 4]), jnp.array([[6, 7, 8], [9, 0, 0]])
    gate = Gate(None, False, dims.key_dim**-0.5, True)
    (out, pool), *others = (run(inputs, rows, gate, loads) for loads in (1, 2, 4, 8))
    for other_out, other_pool in others:
        np.testing.assert_array_equal(out, other_out)
        assert_untouched(pool, other_pool, written=())
