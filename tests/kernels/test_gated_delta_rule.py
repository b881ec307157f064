"""gated_delta_rule's update: outputs and states against the oracle, and the bitwise promises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.common import (
    IMPLEMENTATIONS,
    WINDOWS,
    assert_close,
    mixed_rows,
    pack,
    run_by,
    skip_if_unavailable,
)
from kernels.delta_rule_claims import (
    ALONE,
    DIMS,
    LAYER,
    Dims,
    assert_rows_match_the_oracle,
    check_recurrent_matches_the_oracle,
    check_update_matches_the_oracle,
    check_update_of_a_row_depends_on_that_row_alone,
    check_update_with_a_decay_per_key_channel_matches_the_oracle,
    make,
    padded_rows,
    rows_of,
    unpack,
)
from oracles.ops import gates

from pallas_kernels import (
    Gates,
    Rows,
    Run,
    gated_delta_rule_gates,
    gated_delta_rule_update,
)
from pallas_kernels.gated_delta_rule.config import Config

# Dims and implementations that only a GPU runs.
ON_A_GPU = [
    pytest.param(*each, marks=pytest.mark.gpu)
    for each in (("grouped", "triton"), ("kimi", "mosaic_gpu"), ("64 x 128", "mosaic_gpu"))
]


NUMBERS = [
    ("grouped", jnp.float32, jnp.float32, True),
    ("96 x 192", jnp.bfloat16, jnp.bfloat16, True),
    ("odd", jnp.float32, jnp.float32, True),
    ("grouped", jnp.float32, jnp.float32, False),
    # float32 outputs would show if a narrow state were rounded between tokens.
    ("grouped", jnp.float32, jnp.bfloat16, True),
    ("grouped", jnp.bfloat16, jnp.float32, True),
    ("grouped", jnp.bfloat16, jnp.bfloat16, True),
    ("grouped", jnp.float16, jnp.float16, True),
    ("equal heads", jnp.float32, jnp.float32, True),
    ("96 x 192", jnp.float32, jnp.float32, True),
    ("256 x 64", jnp.bfloat16, jnp.float16, True),
]

MOSAIC_NUMBERS = [
    (jnp.bfloat16, jnp.float32),
    (jnp.bfloat16, jnp.bfloat16),
    (jnp.float16, jnp.float16),
    (jnp.float32, jnp.float32),
    (jnp.float32, jnp.bfloat16),
]


@pytest.mark.parametrize(("window", "implementation"), WINDOWS)
@pytest.mark.parametrize(("dims", "dtype", "state_dtype", "l2norm"), NUMBERS)
def test_update_matches_the_oracle(rng, dims, dtype, state_dtype, l2norm, window, implementation):
    check_update_matches_the_oracle(rng, dims, dtype, state_dtype, l2norm, window, implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("l2norm", [True, False])
@pytest.mark.parametrize(("dtype", "state_dtype"), MOSAIC_NUMBERS)
@pytest.mark.parametrize("dims", ["kimi", "128 x 64", "64 x 128"])
def test_update_by_mosaic_gpu_matches_the_oracle(rng, dims, dtype, state_dtype, l2norm, window):
    test_update_matches_the_oracle(rng, dims, dtype, state_dtype, l2norm, window, "mosaic_gpu")


@pytest.mark.parametrize(("dims", "dtype", "state_dtype", "l2norm"), NUMBERS[:3])
def test_update_with_a_window_of_one_matches_the_oracle(rng, dims, dtype, state_dtype, l2norm):
    """A window of one has a Triton kernel of its own."""
    test_update_matches_the_oracle(rng, dims, dtype, state_dtype, l2norm, 1, "interpret")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("dims", "dtype"), [("equal heads", jnp.float32), ("odd", jnp.float32), ("kimi", jnp.bfloat16)]
)
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_update_with_a_decay_per_key_channel_matches_the_oracle(rng, dims, dtype, lower_bound, implementation):
    check_update_with_a_decay_per_key_channel_matches_the_oracle(rng, dims, dtype, lower_bound, implementation)


@pytest.mark.parametrize(
    ("dims", "implementation"),
    [*((dims, each) for dims in ("grouped", "odd") for each in ("xla", "interpret")), *ON_A_GPU],
)
def test_update_with_negative_eigenvalues_matches_the_oracle(rng, dims, implementation):
    """beta goes up to 2, as in OLMo."""
    dims = DIMS[dims]
    lengths, read, write = mixed_rows(4)
    qkv, a, b, A_log, dt_bias, pool = make(rng, lengths, dims)
    rows, wide = padded_rows(lengths, read, write), Gates(allow_neg_eigval=True)
    out, after = gated_delta_rule_update(
        qkv, a, b + 3.0, A_log, dt_bias, pool, rows, gates=wide, run=run_by(implementation)
    )
    inputs = (*unpack(qkv, dims), *gates(a, b + 3.0, A_log, dt_bias, beta_max=2))
    assert_rows_match_the_oracle(lengths, read, write, out, pool, after, inputs, dims.key_dim**-0.5)


@pytest.mark.parametrize(("window", "implementation"), WINDOWS)
@pytest.mark.parametrize("kda", [False, True])
@pytest.mark.parametrize(
    ("dims", "dtype"), [("grouped", jnp.float32), ("odd", jnp.float32), ("96 x 192", jnp.bfloat16)]
)
def test_recurrent_matches_the_oracle(rng, dims, dtype, kda, window, implementation):
    check_recurrent_matches_the_oracle(rng, dims, dtype, kda, window, implementation)


@pytest.mark.parametrize("kda", [False, True])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_gates_match_the_oracle(rng, kda, lower_bound):
    dims = DIMS["odd"]
    _, a, b, A_log, dt_bias, _ = make(rng, [5], dims, extra_tokens=0, kda=kda)
    a = a * 20  # reaches both ends of the softplus
    wanted = Gates(lower_bound=lower_bound, allow_neg_eigval=True)
    g, beta = gated_delta_rule_gates(a, b, A_log, dt_bias, gates=wanted)
    wanted_g, wanted_beta = gates(a, b, A_log, dt_bias, lower_bound, beta_max=2)
    np.testing.assert_allclose(g, wanted_g, rtol=4e-6)
    np.testing.assert_allclose(beta, wanted_beta, rtol=4e-6)


ALONE_BY_MOSAIC_GPU = [
    pytest.param(dims, dtype, "mosaic_gpu", marks=pytest.mark.gpu)
    for dims in ("kimi", "64 x 128")
    for dtype in (jnp.float32, jnp.bfloat16)
]


@pytest.mark.parametrize(("dims", "state_dtype", "implementation"), [*ALONE, *ALONE_BY_MOSAIC_GPU])
def test_update_of_a_row_depends_on_that_row_alone(rng, dims, state_dtype, implementation):
    check_update_of_a_row_depends_on_that_row_alone(rng, dims, state_dtype, implementation)


@pytest.mark.parametrize(("dims", "implementation"), [*(("grouped", each) for each in ("xla", "interpret")), *ON_A_GPU])
def test_verify_and_single_decodes_agree(rng, dims, implementation):
    dims = DIMS[dims]
    qkv, a, b, A_log, dt_bias, pool = make(rng, [4], dims, extra_tokens=0)
    verified, after = gated_delta_rule_update(
        qkv,
        a,
        b,
        A_log,
        dt_bias,
        pool,
        rows_of(pack([4]), jnp.array([3]), jnp.array([[6, 7, 8, 9]])),
        run=run_by(implementation),
    )
    decoded = []
    for t in range(4):
        out, pool = gated_delta_rule_update(
            qkv[t : t + 1],
            a[t : t + 1],
            b[t : t + 1],
            A_log,
            dt_bias,
            pool,
            rows_of(pack([1]), jnp.array([3]), jnp.array([[3]])),
            run=run_by(implementation),
        )
        decoded.append(out)
    # Storing and loading a float32 state does not round it. Only the order of instructions may differ.
    assert_close(verified, np.asarray(jnp.concatenate(decoded), np.float64), jnp.float32, dims.key_dim, "outputs")
    assert_close(after[LAYER, 9], np.asarray(pool[LAYER, 3], np.float64), jnp.float32, dims.key_dim, "state")


@pytest.mark.parametrize("implementation", ["interpret", pytest.param("triton", marks=pytest.mark.gpu)])
def test_every_config_computes_the_same_numbers(rng, implementation):
    dims = DIMS["odd"]
    qkv, a, b, A_log, dt_bias, pool = make(rng, [1, 1], dims)
    results = [
        gated_delta_rule_update(
            qkv,
            a,
            b,
            A_log,
            dt_bias,
            pool,
            rows_of(pack([1, 1]), jnp.array([3, 0]), jnp.array([[6], [7]])),
            run=run_by(implementation, Config(*config)),
        )
        for config in ((4, 4, 16, 1), (16, 4, 16, 1), (16, 2, 8, 2), (32, 32, 32, 4))
    ]
    for out, after in results[1:]:
        assert_close(out, np.asarray(results[0][0], np.float64), jnp.float32, dims.key_dim, "outputs")
        assert_close(
            after[LAYER, 6], np.asarray(results[0][1][LAYER, 6], np.float64), jnp.float32, dims.key_dim, "state"
        )


@pytest.mark.gpu
@pytest.mark.large_pool
@pytest.mark.parametrize("implementation", ["triton", "mosaic_gpu"])
def test_update_reaches_blocks_beyond_2_to_the_31_elements(rng, implementation):
    skip_if_unavailable(implementation)
    dims, blocks = Dims(4, 8, 128, 128), 16500
    qkv, a, b, A_log, dt_bias, small = make(rng, [1], dims, extra_tokens=0)
    pool = jnp.zeros((1, blocks, 8, 128, 128), jnp.float32)  # 2.16e9 elements
    last = blocks - 1
    wrapped = last - 2**31 // (8 * 128 * 128)
    pool = jax.jit(lambda p: p.at[0, last].set(small[LAYER, 3]).at[0, wrapped].set(7.0), donate_argnums=0)(pool)
    step = jax.jit(
        lambda pool, rows, run: gated_delta_rule_update(qkv, a, b, A_log, dt_bias, pool, rows, run=run),
        static_argnums=2,
        donate_argnums=0,
    )
    row = Rows(query_start_loc=pack([1]), layer=0, read=jnp.array([last]), write=jnp.array([[last]]))
    out, pool = step(pool, row, Run(implementation=implementation))
    row = rows_of(pack([1]), jnp.array([3]), jnp.array([[3]]))
    wanted, after = gated_delta_rule_update(qkv, a, b, A_log, dt_bias, small, row, run=Run(implementation="xla"))
    np.testing.assert_allclose(out, wanted, atol=1e-5)
    np.testing.assert_allclose(pool[0, last], after[LAYER, 3], atol=1e-5)
    assert float(pool[0, wrapped].min()) == float(pool[0, wrapped].max()) == 7.0


def test_empty_arrays_return_at_once(rng):
    dims = DIMS["grouped"]
    qkv, a, b, A_log, dt_bias, pool = make(rng, [2], dims)
    none = jnp.zeros((0,), jnp.int32)
    out, after = gated_delta_rule_update(qkv, a, b, A_log, dt_bias, pool, rows_of(pack([]), none, none[:, None]))
    assert not out.any()
    assert after is pool


def test_errors_name_the_bad_argument(rng):
    dims = DIMS["grouped"]
    qkv, a, b, A_log, dt_bias, pool = make(rng, [2], dims)
    row = jnp.array([1])
    update = lambda qkv=qkv, a=a, write=row[None]: gated_delta_rule_update(
        qkv, a, b, A_log, dt_bias, pool, rows_of(pack([2]), row, write)
    )
    with pytest.raises(ValueError, match="qkv must have 2 \\* key_heads \\* 16"):
        update(qkv=qkv[:, :-8])
    with pytest.raises(ValueError, match="b must be Float"):
        update(a=a[:, :2])
    with pytest.raises(ValueError, match=r"rows\.write must be Int32"):
        update(write=row)
    with pytest.raises(ValueError, match="dt_bias must have the shape"):
        update(a=jnp.zeros((*a.shape, dims.key_dim)))
    with pytest.raises(ValueError, match="lower_bound must be negative or None, got 5"):
        gated_delta_rule_gates(a, b, A_log, dt_bias, gates=Gates(lower_bound=5.0))
