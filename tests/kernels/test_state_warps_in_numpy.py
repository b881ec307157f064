"""The kernels by Mosaic GPU that advance states token by token, run in NumPy."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from kernels import delta_rule_claims as of_delta_rule
from kernels import state_space_rows as of_state_space
from kernels.common import assert_untouched, mixed_rows, pack
from kernels.threads_in_numpy import Ref, Threads, fake, install
from oracles.ops import gates

from pallas_kernels.gated_delta_rule import _gate_code
from pallas_kernels.gated_delta_rule import sm90 as delta_rule
from pallas_kernels.gated_delta_rule._arguments import Options
from pallas_kernels.gated_delta_rule.gates import Gates
from pallas_kernels.hopper import state_warps
from pallas_kernels.selective_state_update import sm90 as state_space

LAYER = of_delta_rule.LAYER
# The number of columns, the dtypes of inputs and of states, and the window.
NUMBERS = [
    (128, jnp.bfloat16, jnp.float32, 4),
    (128, jnp.bfloat16, jnp.bfloat16, 4),
    (64, jnp.float16, jnp.float16, 4),
    (64, jnp.float32, jnp.float32, 1),
    (256, jnp.float32, jnp.bfloat16, 1),
]


@pytest.fixture
def run(monkeypatch):
    """Returns a function that runs all programs: (recurrence, inputs, pool, rows, state_rows) -> outputs and pool."""
    threads = Threads()
    hp = fake(threads)
    install(monkeypatch, threads, hp, (state_warps, delta_rule, _gate_code, state_space))
    hp.optimization_barrier = lambda x: x
    indices = {}
    hp.axis_index = lambda axis: indices[axis]

    def run(recurrence, inputs, pool, rows, state_rows=None):
        dtype, tokens = next(iter(inputs.values())).dtype, next(iter(inputs.values())).shape[0]
        given, pool = [Ref(np.array(x)) for x in inputs.values()], Ref(np.array(pool))
        starts, read, write = map(np.asarray, rows)
        heads, rows_of_head, _ = head = pool.shape[2:]
        state_rows = state_rows or state_warps.state_rows_of_warp(*write.shape, head, pool.dtype.itemsize)
        out = Ref(np.full((tokens, heads, rows_of_head), np.nan, dtype))
        for row, head, tile in itertools.product(
            range(len(read)), range(heads), range(rows_of_head // 4 // state_rows)
        ):
            indices.update(row=row, head=head, tile=tile)
            numbers = np.array([LAYER]), starts, read, Ref(write)
            options = dict(names=list(inputs), state_rows=state_rows, recurrence=recurrence)
            state_warps.kernel(*numbers, pool, *given, out, **options)
        return jnp.asarray(out.array), jnp.asarray(pool.array)

    return run


def delta_rule_of(options):
    return lambda refs, warp: delta_rule._DeltaRule(refs, warp, options)


def named(inputs):
    return dict(zip(("qkv", "a", "b", "A_log", "dt_bias"), inputs, strict=True))


@pytest.mark.parametrize("gate", [(None, False), (-5.0, False), (None, True)])
@pytest.mark.parametrize(("key_dim", "dtype", "state_dtype", "window"), NUMBERS)
def test_the_delta_rule_matches_the_oracle(rng, run, key_dim, dtype, state_dtype, window, gate):
    dims = of_delta_rule.Dims(1, 2, key_dim, 64)
    lower_bound, allow_neg_eigval = gate
    lengths, read, write = mixed_rows(window)
    *inputs, pool = of_delta_rule.make(rng, lengths, dims, dtype, state_dtype)
    rows = pack(lengths, padding_rows=2), jnp.array([*read, 5, 0]), jnp.asarray(write)
    wanted_gates = Gates(lower_bound=lower_bound, allow_neg_eigval=allow_neg_eigval)
    options = Options(key_dim**-0.5, True, gates=wanted_gates)
    out, after = run(delta_rule_of(options), named(inputs), pool, rows)
    a, b, A_log, dt_bias = (x.astype(jnp.float32) for x in inputs[1:5])
    gated = gates(a, b, A_log, dt_bias, lower_bound, beta_max=1 + allow_neg_eigval)
    numbers = *of_delta_rule.unpack(inputs[0], dims), *gated
    of_delta_rule.assert_rows_match_the_oracle(lengths, read, write, out, pool, after, numbers, key_dim**-0.5)


@pytest.mark.parametrize("options", [("D", "z", "dt_bias"), ()])
@pytest.mark.parametrize(("state_dim", "dtype", "state_dtype", "window"), NUMBERS)
def test_the_state_space_matches_the_oracle(rng, run, state_dim, dtype, state_dtype, window, options):
    dims = of_state_space.Dims(2, 64, state_dim, 2 if window > 1 else 1)
    lengths, read, write = mixed_rows(window)
    inputs, pool, optional = of_state_space.make(rng, lengths, dims, dtype, state_dtype)
    optional = {name: optional[name] for name in options}
    rows = pack(lengths, padding_rows=2), jnp.array([*read, 5, 0]), jnp.asarray(write)
    recurrence = lambda refs, warp: state_space._StateSpace(refs, warp, dt_softplus=True)
    arrays = dict(zip(("x", "dt", "A", "B", "C"), inputs, strict=True)) | optional
    out, after = run(recurrence, arrays, pool, rows)
    of_state_space.assert_rows_match_the_oracle(lengths, read, write, out, pool, after, inputs, optional)


@pytest.mark.parametrize("state_dtype", [jnp.float32, jnp.bfloat16])
def test_the_state_rows_of_a_warp_do_not_change_a_bit(rng, run, state_dtype):
    dims, lengths = of_delta_rule.Dims(1, 1, 128, 128), [3, 1]
    *inputs, pool = of_delta_rule.make(rng, lengths, dims, jnp.bfloat16, state_dtype, clean=(3, 4))
    rows = pack(lengths), jnp.array([3, 4]), jnp.array([[6, 7, 8], [9, 0, 0]])
    recurrence = delta_rule_of(Options(dims.key_dim**-0.5, True))
    (out, after), *others = (run(recurrence, named(inputs), pool, rows, n) for n in (2, 4, 8, 16))
    for other_out, other_after in others:
        np.testing.assert_array_equal(out, other_out)
        assert_untouched(after, other_after, written=())
