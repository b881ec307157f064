"""Deferred states of the gated delta rule, against the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import grouped
from kernels.common import MOSAIC_GPU, assert_close, assert_untouched, dirty_pool, how, pack, skip_if_unavailable
from kernels.deferred_claims import check_rows_in_every_phase_match_the_oracle
from kernels.deferred_rows import (
    ARGUMENTS,
    BLOCKS,
    DIMS,
    EVERY,
    LAYER,
    LAYERS,
    Kind,
    Sequences,
    dirty_rings,
    exact,
    two_rows,
)

from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.gated_delta_rule.deferred import gated_delta_rule_deferred
from pallas_kernels.gated_delta_rule.deferred.config import DeferredConfig

KINDS = [
    Kind(),
    Kind("grouped", "bfloat16"),
    Kind("grouped", "bfloat16", "bfloat16"),
    Kind("grouped", "bfloat16", "bfloat16", "bfloat16"),
    Kind("96 x 192", "bfloat16"),
    Kind("odd", length=32),
    Kind("equal heads", "float16", "float16"),
    Kind("grouped", l2norm=False),
    Kind("grouped", lower_bound=-5.0, beta_max=2),
    Kind("kimi", "bfloat16"),
    Kind("narrow"),
]
MOSAIC_GPU_KINDS = [
    Kind("64 x 128", "bfloat16"),
    Kind("64 x 128", "bfloat16", "bfloat16"),
    Kind("64 x 128", "bfloat16", "bfloat16", "bfloat16"),
    Kind("64 x 128", "bfloat16", "float16"),
    Kind("64 x 128", "bfloat16", length=32),
    Kind("64 x 128", "bfloat16", l2norm=False),
    Kind("64 x 128", "bfloat16", lower_bound=-5.0, beta_max=2),
    Kind("256 x 64", "bfloat16"),
    Kind("kimi", "bfloat16"),
]


def how_they_run(kinds):
    """Cases of kinds that XLA and the Triton kernel run, the latter interpreted or on a GPU."""
    cases = [(kind, implementation) for kind in kinds for implementation in ("xla", "interpret")]
    return cases + [pytest.param(kind, "triton", marks=pytest.mark.gpu) for kind in kinds]


@pytest.mark.parametrize(
    ("kind", "implementation"),
    how_they_run(KINDS)
    + [(kind, "by hand") for kind in MOSAIC_GPU_KINDS]
    + [pytest.param(kind, "mosaic_gpu", marks=pytest.mark.gpu) for kind in MOSAIC_GPU_KINDS],
    ids=str,
)
def test_rows_in_every_phase_match_the_oracle(rng, kind, implementation):
    check_rows_in_every_phase_match_the_oracle(rng, kind, implementation)


@pytest.mark.parametrize("implementation", [*EVERY, "by hand"])
@pytest.mark.parametrize("position", [14, 20])
def test_a_row_of_nan_leaves_the_next_one_alone(rng, position, implementation):
    """The next row began in the middle of a group, whose end it crosses, or it folds the group."""
    skip_if_unavailable(implementation)
    kind, known, count = Kind("64 x 128", "bfloat16"), position - 5, 4
    sequences = Sequences(rng, kind, [2, known + count])
    pool = dirty_pool(rng, kind.pool_shape, kind.state, (1, 2))
    rings, ints = dirty_rings(kind), lambda *values: jnp.asarray(values, jnp.int32)
    places = [(5 + t) % (2 * kind.length) for t in range(known)]
    for ring in rings:
        ring[LAYER, 1][:, places] = -0.25
    tokens = [(0, 0), (0, 1), *((1, known + t) for t in range(count))]
    rows = pack([2, count]), ints(0, 1), ints(0, 5), ints(0, position), ints(1, 2), ints(0, 3)
    arrays, results = (pool, *map(jnp.asarray, rings)), []
    for wrong in (False, True):
        if wrong:
            for inputs in (sequences.qkv, sequences.a, sequences.b):
                inputs[0] = np.full_like(inputs[0], np.nan)
        out, after, *kept = sequences.call(tokens, arrays, rows, implementation)
        results.append((exact(out)[2:], exact(after)[LAYER, 3], *(exact(ring)[LAYER, 1] for ring in kept)))
    for finite, found in zip(*results, strict=True):
        np.testing.assert_array_equal(found, finite)
    assert np.isfinite(results[1][0]).all()


@pytest.mark.deep
@pytest.mark.parametrize("implementation", EVERY)
@pytest.mark.parametrize("slow", [False, True])
def test_errors_do_not_grow_with_the_number_of_tokens(rng, slow, implementation):
    """After 1200 tokens the state is as near to float64 as after 80, with decays of few and of some hundred tokens."""
    skip_if_unavailable(implementation)
    kind, number, width = Kind("64 x 128" if implementation == "mosaic_gpu" else "grouped", "bfloat16"), 1216, 3
    sequences, dims = Sequences(rng, kind, [number]), DIMS[kind.dims]
    if slow:
        sequences.A_log = sequences.A_log - 6.0
    pool = dirty_pool(rng, (LAYERS, BLOCKS, dims.value_heads, dims.value_dim, dims.key_dim), kind.state)
    arrays, ints = (pool, *map(jnp.asarray, dirty_rings(kind))), lambda *values: jnp.asarray(values, jnp.int32)
    _, states, _ = sequences.oracle(0, slice(None), np.zeros(pool.shape[2:]))
    base, position, errors = 0, 0, {}
    while position < number - width:
        rows = ints(0, width), ints(0), ints(base), ints(position), ints(3 if base else 0), ints(3)
        _, *arrays = sequences.call([(0, position + t) for t in range(width)], arrays, rows, implementation)
        if position >= base + kind.length:
            base += kind.length
            wanted = states[base - 1]
            errors[base] = np.linalg.norm(exact(arrays[0])[LAYER, 3] - wanted) / np.linalg.norm(wanted)
        position += int(rng.integers(1, width + 1))
    early, late = (max(errors[n] for n in errors if low < n <= high) for low, high in ((0, 80), (1100, number)))
    assert late <= 2 * early + 1e-7, (early, late)
    assert late <= 2e-6


CONFIGS = [
    DeferredConfig(16, 16, 128, 1, 3),
    DeferredConfig(32, 16, 16, 2, 3),
    DeferredConfig(32, 32, 32, 4, 3, values_first=True),
]


@pytest.mark.parametrize("implementation", ["interpret", pytest.param("triton", marks=pytest.mark.gpu)])
def test_every_config_computes_the_same_numbers(rng, implementation):
    kind = Kind("grouped", "bfloat16")
    sequences, dims = Sequences(rng, kind, [3, 2]), DIMS[kind.dims]
    pool = dirty_pool(rng, (LAYERS, BLOCKS, dims.value_heads, dims.value_dim, dims.key_dim), kind.state, (1, 2))
    ints = lambda *values: jnp.asarray(values, jnp.int32)
    tokens = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    rows = ints(0, 3, 5), ints(0, 1), ints(14, 14), ints(14, 14), ints(1, 2), ints(3, 4)
    arrays = pool, *map(jnp.asarray, dirty_rings(kind))
    results = [sequences.call(tokens, arrays, rows, implementation, config=config)[0] for config in CONFIGS]
    for out in results[1:]:
        assert_close(exact(out), exact(results[0]), jnp.bfloat16, dims.key_dim, "outputs")


@pytest.mark.parametrize("implementation", ["xla", "interpret", MOSAIC_GPU])
def test_a_call_without_tokens_folds(rng, implementation):
    skip_if_unavailable(implementation)
    kind = Kind("64 x 128", "bfloat16") if implementation == "mosaic_gpu" else Kind()
    sequences, dims = Sequences(rng, kind, [17]), DIMS[kind.dims]
    pool = dirty_pool(rng, (LAYERS, BLOCKS, dims.value_heads, dims.value_dim, dims.key_dim), kind.state)
    arrays = pool, *map(jnp.asarray, dirty_rings(kind))
    ints = lambda *values: jnp.asarray(values, jnp.int32)
    for t in range(17):
        rows = ints(0, 1), ints(0), ints(0), ints(t), ints(0), ints(0)
        _, *arrays = sequences.call([(0, t)], arrays, rows, implementation)
    _, states, _ = sequences.oracle(0, slice(None), np.zeros(pool.shape[2:]))
    rows = ints(0, 0), ints(0), ints(0), ints(17), ints(0), ints(3)
    empty = [jnp.zeros((0, x[0].shape[1]), kind.dtype) for x in (sequences.qkv, sequences.a, sequences.b)]
    named = dict(zip(ARGUMENTS, (*empty, sequences.A_log, sequences.dt_bias, *arrays, LAYER, *rows), strict=True))
    out, after, ring = grouped.call(gated_delta_rule_deferred, **named, max_query_tokens=4, **how(implementation))
    kept = ring.arrays
    assert out.shape[0] == 0
    assert_close(after[LAYER, 3], states[15], jnp.float32, 64 * dims.key_dim, "fold")
    assert_untouched(pool, after, [3])
    for before, now in zip(arrays[1:], kept, strict=True):
        np.testing.assert_array_equal(np.asarray(before).view(np.uint8), np.asarray(now).view(np.uint8))


def refused(**changes):
    """Calls the op with zeros, of which some arguments are changed."""
    given = dict(
        qkv=jnp.zeros((3, 96)),
        a=jnp.zeros((3, 2)),
        b=jnp.zeros((3, 2)),
        A_log=jnp.zeros(2),
        dt_bias=jnp.zeros(2),
        pool=jnp.zeros((1, 4, 2, 16, 16)),
        ring_k=jnp.zeros((1, 3, 2, 32, 16)),
        ring_u=jnp.zeros((1, 3, 2, 32, 16)),
        ring_g=jnp.zeros((1, 3, 2, 32)),
        **two_rows(),
    )
    return grouped.call(gated_delta_rule_deferred, **given | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(max_query_tokens=9), r"at most 8 for groups of 16 tokens \(2 \* max_query_tokens - 2 < 16\), got 9"),
        (dict(max_query_tokens=0), "max_query_tokens must be at least 1, got 0"),
        (dict(qkv=jnp.zeros((3, 80))), r"qkv must have 2 \* 2 \* 16 \+ 2 \* 16 channels, got 80"),
        (dict(ring_k=jnp.zeros((1, 3, 2, 32, 16), jnp.bfloat16)), "ring.k must have qkv's dtype float32, got bfloat16"),
        (dict(ring_k=jnp.zeros((1, 3, 2, 30, 16))), "ring.u must be"),
        (dict(ring_g=jnp.zeros((1, 3, 2, 32), jnp.bfloat16)), "ring.g must be"),
        (dict(ring_k=jnp.zeros((1, 3, 3, 32, 16))), "the key heads of ring.k must divide the 2 value heads, got 3"),
        (dict(base=jnp.zeros(3, jnp.int32)), "rows.fold.base must be"),
        (dict(query_start_loc=jnp.zeros(5, jnp.int32)), "rows.query_start_loc must have 3 entries"),
        (dict(layer=1), r"rows.layer must be in \[0, 1\)"),
        (dict(a=jnp.zeros((3, 2, 16))), "a must be"),
        (dict(lower_bound=1.0), "gates.lower_bound must be negative or None, got 1.0"),
        (dict(implementation="cuda"), "run.implementation must be"),
    ],
)
def test_bad_arguments_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        refused(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(), "qkv must be bfloat16, got float32"),
        (dict(qkv=jnp.zeros((3, 96), jnp.bfloat16)), "must be multiples of 64, key_dim at most 256, got 16 and 16"),
    ],
)
def test_what_the_mosaic_gpu_kernel_cannot_run_is_refused(changes, message):
    ring_k = jnp.zeros((1, 3, 2, 32, 16), changes.get("qkv", jnp.zeros(0)).dtype)
    if jax.__version_info__ < (0, 11, 2):
        message = "Mosaic GPU kernels need JAX 0.11.2 or newer"
    with pytest.raises(UnsupportedError, match=message):
        refused(**changes, ring_k=ring_k, implementation="mosaic_gpu")


@pytest.mark.parametrize("sizes", [(32, 64), (48, 32), (32, 0)])
def test_a_configuration_must_cut_a_program_into_whole_tiles(sizes):
    block, tile = sizes
    with pytest.raises(ValueError, match=f"block_value must be a multiple of tile_value, got {block} and {tile}"):
        DeferredConfig(block, tile_value=tile, tile_key=32, num_warps=4, pieces=3)


def test_calls_without_rows_change_nothing():
    none = jnp.zeros(0, jnp.int32)
    names = ("slot", "base", "position", "read_block", "fold_block")
    out, *_ = refused(**dict.fromkeys(names, none), query_start_loc=jnp.zeros(1, jnp.int32))
    assert out.shape == (3, 2, 16)
    assert not out.any()
