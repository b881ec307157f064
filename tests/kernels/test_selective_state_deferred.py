"""Deferred states of Mamba-2: against the oracle, and the same bits under every schedule of drafts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import grouped
from kernels.common import MOSAIC_GPU, assert_close, assert_untouched, dirty_pool, run_by, skip_if_unavailable
from kernels.deferred_mamba2_rows import DIMS, Kind
from kernels.deferred_phases import check_rows_in_every_phase
from kernels.deferred_rows import EVERY, LAYER, exact, rows_of, two_rows
from kernels.deferred_schedules import assert_same_bits, schedules, serve

from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.selective_state_update.deferred import Mamba2Entries, selective_state_deferred
from pallas_kernels.selective_state_update.deferred.config import DeferredConfig

KINDS = [
    Kind(),
    Kind("grouped", "bfloat16"),
    Kind("grouped", "bfloat16", "bfloat16"),
    Kind("grouped", "float16", "float16"),
    Kind("grouped", given=()),
    Kind("grouped", given=("D",), dt_softplus=False),
    Kind("one group", "bfloat16"),
    Kind("wide states", "bfloat16"),
    Kind("odd", length=32),
    Kind("narrow"),
]
MOSAIC_GPU_KINDS = [
    Kind("one group", "bfloat16"),
    Kind("one group", "bfloat16", "bfloat16"),
    Kind("one group", "bfloat16", "float16"),
    Kind("one group", "bfloat16", length=32),
    Kind("many heads", "bfloat16"),
    Kind("many heads", "bfloat16", given=()),
]
ints = lambda *values: jnp.asarray(values, jnp.int32)


@pytest.mark.parametrize(
    ("kind", "implementation"),
    [(kind, implementation) for kind in KINDS for implementation in ("xla", "interpret")]
    + [(kind, "by hand") for kind in (*KINDS[:6], *MOSAIC_GPU_KINDS[3:])]
    + [pytest.param(kind, "triton", marks=pytest.mark.gpu) for kind in KINDS]
    + [pytest.param(kind, "mosaic_gpu", marks=pytest.mark.gpu) for kind in MOSAIC_GPU_KINDS],
    ids=str,
)
def test_rows_in_every_phase_match_the_oracle(rng, kind, implementation):
    skip_if_unavailable(implementation)
    check_rows_in_every_phase(rng, kind, implementation)


@functools.cache
def wanted_bits(kind, implementation):
    return serve(kind, implementation, schedules(kind.length)["one"])


BITS = [
    Kind("grouped", "bfloat16"),
    Kind("one group", "bfloat16", "bfloat16"),
    Kind("narrow", length=4),
    Kind("wide states", "bfloat16"),
]


@pytest.mark.usefixtures("optimized_programs")
@pytest.mark.parametrize("schedule", ["all accepted", "three, all accepted", "one accepted", "random"])
@pytest.mark.parametrize(
    ("kind", "implementation"),
    [(kind, implementation) for kind in BITS for implementation in ("xla", "interpret")]
    + [pytest.param(kind, "triton", marks=pytest.mark.gpu) for kind in BITS]
    + [pytest.param(kind, "mosaic_gpu", marks=pytest.mark.gpu) for kind in MOSAIC_GPU_KINDS[:4]],
    ids=str,
)
def test_schedules_of_drafts_change_no_bit(kind, schedule, implementation):
    """Folds, outputs and entries of accepted tokens are those of one token at a time.

    A CPU's programs are optimized, because in others the rows of a product of tiles may be summed in different ways.
    """
    skip_if_unavailable(implementation)
    found = serve(kind, implementation, schedules(kind.length)[schedule])
    assert_same_bits(found, wanted_bits(kind, implementation), kind.length)


@pytest.mark.usefixtures("optimized_programs")
@pytest.mark.parametrize("implementation", ["xla", pytest.param("triton", marks=pytest.mark.gpu), MOSAIC_GPU])
def test_a_program_for_single_tokens_gives_the_bits_of_one_for_drafts(implementation):
    skip_if_unavailable(implementation)
    kind = (MOSAIC_GPU_KINDS if implementation == "mosaic_gpu" else BITS)[0]
    found = serve(kind, implementation, schedules(kind.length)["one"], width=1)
    assert found == wanted_bits(kind, implementation)


@pytest.mark.usefixtures("optimized_programs")
@pytest.mark.parametrize("implementation", EVERY)
def test_a_row_depends_on_that_row_alone(implementation):
    """Neither the order of rows nor padding changes a bit."""
    skip_if_unavailable(implementation)
    kind = (MOSAIC_GPU_KINDS if implementation == "mosaic_gpu" else BITS)[0]
    schedule = schedules(kind.length)["three, all accepted"]
    found = serve(kind, implementation, schedule, order=(2, 0, 1), padding=4)
    assert found == serve(kind, implementation, schedule)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [Kind("one group", "bfloat16"), Kind("one group", "bfloat16", "bfloat16")], ids=str)
def test_the_number_of_channels_of_a_program_changes_no_bit(kind):
    configs = [DeferredConfig(block, 4, 3, dims_first=False) for block in (32, 64)]
    found = [serve(kind, "triton", schedules(kind.length)["random"], config=config) for config in configs]
    assert found[0] == found[1]


@pytest.mark.deep
@pytest.mark.parametrize("implementation", EVERY)
def test_errors_do_not_grow_with_the_number_of_tokens(rng, implementation):
    """After 1200 tokens the state is as near to float64 as after 400, with decays of some ten to a hundred tokens."""
    skip_if_unavailable(implementation)
    kind, number, width = Kind("one group" if implementation == "mosaic_gpu" else "grouped", "bfloat16"), 1216, 3
    sequences = kind.sequences(rng, [number])
    sequences.A = -jnp.geomspace(0.01, 0.1, len(sequences.A), dtype=jnp.float32)
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
    assert late <= 1e-6


@pytest.mark.parametrize("implementation", ["interpret", pytest.param("triton", marks=pytest.mark.gpu)])
def test_every_config_computes_the_same_numbers(rng, implementation):
    kind = Kind("one group", "bfloat16")
    sequences, pool = kind.sequences(rng, [3, 2]), dirty_pool(rng, kind.pool_shape, kind.state, (1, 2))
    tokens = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    rows = ints(0, 3, 5), ints(0, 1), ints(14, 14), ints(14, 14), ints(1, 2), ints(3, 4)
    arrays = pool, *map(jnp.asarray, kind.rings())
    configs = [DeferredConfig(16, 1, 3, False), DeferredConfig(32, 2, 3, True), DeferredConfig(64, 4, 3, True)]
    results = [sequences.call(tokens, arrays, rows, implementation, config=config)[0] for config in configs]
    for out in results[1:]:
        assert_close(exact(out), exact(results[0]), jnp.bfloat16, DIMS[kind.dims].state_dim, "outputs")


@pytest.mark.parametrize("implementation", ["xla", "interpret", MOSAIC_GPU])
def test_a_call_without_tokens_folds(rng, implementation):
    skip_if_unavailable(implementation)
    kind = Kind("one group", "bfloat16") if implementation == "mosaic_gpu" else Kind()
    sequences, pool = kind.sequences(rng, [17]), dirty_pool(rng, kind.pool_shape, kind.state)
    arrays = pool, *map(jnp.asarray, kind.rings())
    for t in range(17):
        rows = ints(0, 1), ints(0), ints(0), ints(t), ints(0), ints(0)
        _, *arrays = sequences.call([(0, t)], arrays, rows, implementation)
    _, states = sequences.oracle(0, slice(None), np.zeros(pool.shape[2:]))
    rows = rows_of((ints(0, 0), ints(0), ints(0), ints(17), ints(0), ints(3)), max_query_tokens=4)
    empty = [jnp.zeros((0, x[0].shape[1]), kind.dtype) for x in (sequences.xBC, sequences.dt)]
    operands = *empty, sequences.A, arrays[0], Mamba2Entries(*arrays[1:]), rows
    out, after, kept = selective_state_deferred(*operands, **sequences.given, run=run_by(implementation))
    assert out.shape[0] == 0
    assert_close(after[LAYER, 3], states[15], jnp.float32, 64 * DIMS[kind.dims].state_dim, "fold")
    assert_untouched(pool, after, [3])
    for before, now in zip(arrays[1:], jax.tree.leaves(kept), strict=True):
        np.testing.assert_array_equal(np.asarray(before).view(np.uint8), np.asarray(now).view(np.uint8))


def refused(**changes):
    """Calls the op with zeros, of which some arguments are changed."""
    given = dict(
        xBC=jnp.zeros((3, 64)),
        dt=jnp.zeros((3, 2)),
        A=jnp.zeros(2),
        pool=jnp.zeros((1, 4, 2, 16, 16)),
        ring_x=jnp.zeros((1, 3, 2, 32, 16)),
        ring_B=jnp.zeros((1, 3, 1, 32, 16)),
        ring_dt=jnp.zeros((1, 3, 2, 32)),
        ring_g=jnp.zeros((1, 3, 2, 32)),
        **two_rows(),
    )
    return grouped.call(selective_state_deferred, **given | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(max_query_tokens=9), r"at most 8 for groups of 16 tokens \(2 \* max_query_tokens - 2 < 16\), got 9"),
        (dict(max_query_tokens=0), "rows.max_query_tokens must be at least 1, got 0"),
        (dict(xBC=jnp.zeros((3, 80))), r"xBC must have 2 \* 16 \+ 2 \* 1 \* 16 channels, got 80"),
        (dict(ring_x=jnp.zeros((1, 3, 2, 32, 16), jnp.bfloat16)), "ring.x must have xBC's dtype float32, got bfloat16"),
        (dict(ring_B=jnp.zeros((1, 3, 1, 32, 16), jnp.bfloat16)), "ring.B must have xBC's dtype float32, got bfloat16"),
        (dict(ring_x=jnp.zeros((1, 3, 2, 30, 16))), "ring.B must be"),
        (dict(ring_dt=jnp.zeros((1, 3, 2, 32), jnp.bfloat16)), "ring.dt must be"),
        (dict(ring_B=jnp.zeros((1, 3, 3, 32, 16))), "the groups of ring.B must divide the 2 heads, got 3"),
        (dict(base=jnp.zeros(3, jnp.int32)), "rows.fold.base must be"),
        (dict(query_start_loc=jnp.zeros(5, jnp.int32)), "rows.query_start_loc must have 3 entries"),
        (dict(layer=1), r"rows.layer must be in \[0, 1\)"),
        (dict(implementation="cuda"), "implementation must be"),
    ],
)
def test_bad_arguments_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        refused(**changes)


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (jnp.float32, "xBC must be bfloat16, got float32"),
        (jnp.bfloat16, "must be multiples of 64, state_dim at most 256, got 16 and 16"),
    ],
)
def test_what_the_mosaic_gpu_kernel_cannot_run_is_refused(dtype, message):
    changes = dict(xBC=jnp.zeros((3, 64), dtype), ring_x=jnp.zeros((1, 3, 2, 32, 16), dtype))
    if jax.__version_info__ < (0, 11, 2):
        message = "Mosaic GPU kernels need JAX 0.11.2 or newer"
    with pytest.raises(UnsupportedError, match=message):
        refused(**changes, ring_B=jnp.zeros((1, 3, 1, 32, 16), dtype), implementation="mosaic_gpu")


def test_calls_without_rows_change_nothing():
    none = jnp.zeros(0, jnp.int32)
    names = ("slot", "base", "position", "read_block", "fold_block")
    out, *_ = refused(**dict.fromkeys(names, none), query_start_loc=jnp.zeros(1, jnp.int32))
    assert out.shape == (3, 2, 16)
    assert not out.any()
