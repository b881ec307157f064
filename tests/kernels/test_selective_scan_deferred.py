"""Deferred states of Mamba-1: against the oracle, and the same bits under every schedule of drafts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.common import IMPLEMENTATIONS, assert_close, assert_untouched, dirty_pool, how
from kernels.deferred_mamba1_rows import DIMS, Kind
from kernels.deferred_phases import check_rows_in_every_phase
from kernels.deferred_rows import LAYER, exact, two_rows
from kernels.deferred_schedules import assert_same_bits, schedules, serve

from pallas_kernels import selective_scan, selective_scan_deferred
from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.selective_scan.deferred.config import DeferredConfig

KINDS = [
    Kind(),
    Kind(dtype="bfloat16"),
    Kind(dtype="bfloat16", state="bfloat16"),
    Kind(dtype="float16", state="float16"),
    Kind(given=()),
    Kind(given=("D",), dt_softplus=False),
    Kind("odd", "bfloat16", length=32),
    Kind("narrow"),
    Kind("heads"),
    Kind("wide states", "bfloat16"),
]
ints = lambda *values: jnp.asarray(values, jnp.int32)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_in_every_phase_match_the_oracle(rng, kind, implementation):
    check_rows_in_every_phase(rng, kind, implementation)


@functools.cache
def wanted_bits(kind, implementation):
    return serve(kind, implementation, schedules(kind.length)["one"])


BITS = [
    Kind(dtype="bfloat16"),
    Kind(dtype="bfloat16", state="bfloat16"),
    Kind("narrow", length=4),
    Kind("odd", dt_softplus=False),
    Kind("heads", "bfloat16", "float16"),
]


@pytest.mark.usefixtures("optimized_programs")
@pytest.mark.parametrize("kind", BITS, ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("schedule", ["all accepted", "three, all accepted", "one accepted", "random"])
def test_schedules_of_drafts_change_no_bit(kind, schedule, implementation):
    """Folds, outputs and entries of accepted tokens are those of one token at a time."""
    found = serve(kind, implementation, schedules(kind.length)[schedule])
    assert_same_bits(found, wanted_bits(kind, implementation), kind.length)


@pytest.mark.usefixtures("optimized_programs")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_program_for_single_tokens_gives_the_bits_of_one_for_drafts(implementation):
    found = serve(BITS[0], implementation, schedules(16)["one"], width=1)
    assert found == wanted_bits(BITS[0], implementation)


@pytest.mark.usefixtures("optimized_programs")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_row_depends_on_that_row_alone(implementation):
    """Neither the order of rows nor padding changes a bit."""
    schedule = schedules(16)["three, all accepted"]
    found = serve(BITS[0], implementation, schedule, order=(2, 0, 1), padding=4)
    assert found == serve(BITS[0], implementation, schedule)


@pytest.mark.parametrize("implementation", ["interpret", pytest.param("triton", marks=pytest.mark.gpu)])
def test_every_config_computes_the_same_numbers(rng, implementation):
    kind = Kind("wide states", "bfloat16")
    sequences, pool = kind.sequences(rng, [3, 2]), dirty_pool(rng, kind.pool_shape, kind.state, (1, 2))
    tokens = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    rows = ints(0, 3, 5), ints(0, 1), ints(14, 14), ints(14, 14), ints(1, 2), ints(3, 4)
    arrays = pool, *map(jnp.asarray, kind.rings())
    configs = [DeferredConfig(16, 4, 1), DeferredConfig(4, 32, 1), DeferredConfig(64, 16, 4)]
    results = [sequences.call(tokens, arrays, rows, implementation, config=config)[0] for config in configs]
    for out in results[1:]:
        assert_close(exact(out), exact(results[0]), jnp.bfloat16, DIMS[kind.dims].state_dim, "outputs")


@pytest.mark.deep
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_errors_do_not_grow_with_the_number_of_tokens(rng, implementation):
    """After 1200 tokens the state is as near to float64 as after 400, with decays of some ten to a hundred tokens.

    A compiled kernel's exponentials are right to 2 units in the last place, other ones to less than 1. The errors of the
    exponentials and products of a hundred tokens add up like a random walk.
    """
    kind, number, width = Kind(dtype="bfloat16"), 1216, 3
    sequences = kind.sequences(rng, [number])
    sequences.A = -jnp.broadcast_to(jnp.geomspace(0.01, 0.1, 16, dtype=jnp.float32), sequences.A.shape)
    pool = dirty_pool(rng, kind.pool_shape, kind.state)
    arrays = pool, *map(jnp.asarray, kind.rings())
    _, states = sequences.oracle(0, slice(None), np.zeros(pool.shape[2:]))
    base, position, errors = 0, 0, {}
    while position < number - width:
        rows = ints(0, width), ints(0), ints(base), ints(position), ints(3 if base else 0), ints(3)
        _, *arrays = sequences.call([(0, position + t) for t in range(width)], arrays, rows, implementation)
        if position >= base + kind.length:
            base += kind.length
            wanted = states[base - 1]
            errors[base] = np.linalg.norm(exact(arrays[0])[LAYER, 3] - wanted) / np.linalg.norm(wanted)
        position += int(rng.integers(1, width + 1))
    early, late = (max(errors[n] for n in errors if low < n <= high) for low, high in ((300, 500), (1000, number)))
    assert late <= 2 * early, (early, late)
    assert late <= (2.5 * 100**0.5 * 2**-23 if implementation == "triton" else 1e-6), (early, late)


@pytest.mark.usefixtures("optimized_programs")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_folds_are_near_the_states_of_a_prefill(rng, implementation):
    """A prompt of whole groups leaves the same state by `selective_scan` as tokens that fold, but for rounding."""
    kind = Kind()
    sequences, pool = kind.sequences(rng, [33]), dirty_pool(rng, kind.pool_shape, kind.state)
    arrays = pool, *map(jnp.asarray, kind.rings())
    for t in range(33):
        rows = ints(0, 1), ints(0), ints(16 * (t > 16)), ints(t), ints(3 if t > 16 else 0), ints(3)
        _, *arrays = sequences.call([(0, t)], arrays, rows, implementation)
    x, dt, B, C = (jnp.asarray(getattr(sequences, name)[0][:32]) for name in ("x", "dt", "B", "C"))
    options = dict(dt_bias=sequences.given["dt_bias"], implementation="xla")
    _, wanted = selective_scan(x, dt, sequences.A, B, C, pool, LAYER, ints(0, 32), ints(0), ints(4), **options)
    assert_close(exact(arrays[0])[LAYER, 3], exact(wanted)[LAYER, 4], jnp.float32, 64, "fold")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("number", [16, 17])
def test_a_call_without_tokens_folds(rng, implementation, number):
    kind = Kind()
    sequences, pool = kind.sequences(rng, [number]), dirty_pool(rng, kind.pool_shape, kind.state)
    arrays = pool, *map(jnp.asarray, kind.rings())
    for t in range(number):
        rows = ints(0, 1), ints(0), ints(0), ints(t), ints(0), ints(0)
        _, *arrays = sequences.call([(0, t)], arrays, rows, implementation)
    _, states = sequences.oracle(0, slice(None), np.zeros(pool.shape[2:]))
    rows = ints(0, 0), ints(0), ints(0), ints(number), ints(0), ints(3)
    x, dt, B, C, z = (jnp.zeros((0, *getattr(sequences, name)[0].shape[1:])) for name in sequences.inputs)
    options = sequences.given | dict(z=z, max_query_tokens=4) | how(implementation)
    out, after, *kept = selective_scan_deferred(x, dt, sequences.A, B, C, *arrays, LAYER, *rows, **options)
    assert out.shape[0] == 0
    assert_close(after[LAYER, 3], states[15], jnp.float32, 64 * DIMS[kind.dims].state_dim, "fold")
    assert_untouched(pool, after, [3])
    for before, now in zip(arrays[1:], kept, strict=True):
        np.testing.assert_array_equal(np.asarray(before).view(np.uint8), np.asarray(now).view(np.uint8))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_empty_entries_add_nothing_to_a_fold(rng, implementation, dtype):
    """`settle` fills a group with them. After three tokens the fold is the state of these three."""
    kind = Kind(dtype=dtype)
    sequences, pool = kind.sequences(rng, [4]), dirty_pool(rng, kind.pool_shape, kind.state, [1])
    arrays = pool, *map(jnp.asarray, kind.rings())
    rows = ints(0, 3), ints(0), ints(0), ints(0), ints(1), ints(0)
    _, *arrays = sequences.call([(0, t) for t in range(3)], arrays, rows, implementation)
    for n, value in ((1, 0), (2, 0), (3, -jnp.inf)):
        arrays[n] = arrays[n].at[LAYER, 0, :, 3:16].set(value)
    _, after, *_ = sequences.call([None], arrays, (ints(0, 0), *rows[1:3], ints(16), ints(1), ints(3)), implementation)
    _, states = sequences.oracle(0, slice(0, 3), exact(pool)[LAYER, 1])
    assert_close(exact(after)[LAYER, 3], states[-1], jnp.float32, 64, "fold")


def refused(**changes):
    """Calls the op with zeros, of which some arguments are changed."""
    given = dict(
        x=jnp.zeros((3, 2, 16)),
        dt=jnp.zeros((3, 2, 16)),
        A=jnp.zeros((2, 16, 8)),
        B=jnp.zeros((3, 1, 8)),
        C=jnp.zeros((3, 1, 8)),
        pool=jnp.zeros((1, 4, 2, 16, 8)),
        ring_x=jnp.zeros((1, 3, 2, 32, 16)),
        ring_B=jnp.zeros((1, 3, 1, 32, 8)),
        ring_dt=jnp.zeros((1, 3, 2, 32, 16)),
        **two_rows(),
    )
    return selective_scan_deferred(**given | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(max_query_tokens=9), r"at most 8 for groups of 16 tokens \(2 \* max_query_tokens - 2 < 16\), got 9"),
        (dict(max_query_tokens=0), "max_query_tokens must be at least 1, got 0"),
        (dict(ring_x=jnp.zeros((1, 3, 2, 32, 16), jnp.bfloat16)), "ring_x must have x's dtype float32, got bfloat16"),
        (dict(ring_B=jnp.zeros((1, 3, 1, 32, 8), jnp.bfloat16)), "ring_B must have B's dtype float32, got bfloat16"),
        (
            dict(ring_dt=jnp.zeros((1, 3, 2, 32, 16), jnp.bfloat16)),
            "ring_dt must have dt's dtype float32, got bfloat16",
        ),
        (dict(ring_x=jnp.zeros((1, 3, 2, 30, 16))), "ring_B must be"),
        (dict(A=jnp.zeros(2)), "A must be"),
        (
            {name: jnp.zeros((3, 3, 8)) for name in "BC"} | dict(ring_B=jnp.zeros((1, 3, 3, 32, 8))),
            "the number of groups of B must divide x's 2 heads, got 3",
        ),
        (dict(base=jnp.zeros(3, jnp.int32)), "base must be"),
        (dict(query_start_loc=jnp.zeros(5, jnp.int32)), "query_start_loc must have 3 entries"),
        (dict(layer=1), r"layer must be in \[0, 1\)"),
        (dict(implementation="cuda"), "implementation must be"),
    ],
)
def test_bad_arguments_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        refused(**changes)


def test_there_is_no_mosaic_gpu_kernel():
    with pytest.raises(UnsupportedError, match="the op has no such kernel"):
        refused(implementation="mosaic_gpu")


def test_calls_without_rows_change_nothing():
    none = jnp.zeros(0, jnp.int32)
    names = ("slot", "base", "position", "read_block", "fold_block")
    out, *_ = refused(**dict.fromkeys(names, none), query_start_loc=jnp.zeros(1, jnp.int32))
    assert out.shape == (3, 2, 16)
    assert not out.any()


def test_an_op_under_jit_updates_pool_and_rings_in_place():
    names = "pool", "ring_x", "ring_B", "ring_dt"
    run = lambda *arrays: refused(**dict(zip(names, arrays, strict=True)))
    shapes = (1, 4, 2, 16, 8), (1, 3, 2, 32, 16), (1, 3, 1, 32, 8), (1, 3, 2, 32, 16)
    arrays = [jnp.zeros(shape) for shape in shapes]
    donated = jax.jit(run, donate_argnums=range(4)).lower(*arrays).compile().memory_analysis()
    assert donated.alias_size_in_bytes == sum(x.nbytes for x in arrays)
