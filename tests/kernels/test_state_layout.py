"""gated_delta_rule with states [key_dim, value_dim], layout "KV": the claims for [value_dim, key_dim], the same bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import delta_rule_claims as update_claims
from kernels import delta_rule_prefill_claims as prefill_claims
from kernels.common import IMPLEMENTATIONS, how, mixed_rows, pack, run_by
from kernels.delta_rule_claims import DIMS, LAYER, make, padded_rows, rows_of, unpack
from kernels.delta_rule_prefill_claims import make_prefill, prefill

from pallas_kernels import (
    Rows,
    Run,
    gated_delta_rule_gates,
    gated_delta_rule_prefill,
    gated_delta_rule_recurrent,
    gated_delta_rule_update,
)
from pallas_kernels.gated_delta_rule.config import Config

GPU = [pytest.param("triton", marks=pytest.mark.gpu)]
IN_KV = pytest.mark.usefixtures("in_layout_kv")


def transposed(op):
    """Returns `op` on pools of layout "KV". It takes and returns pools of layout "VK", which is argument number 5."""

    @functools.wraps(op)
    def run(*arguments, **options):
        pool = arguments[5].swapaxes(3, 4)
        out, pool = op(*arguments[:5], pool, *arguments[6:], layout="KV", **options)
        return out, pool.swapaxes(3, 4)

    return run


@pytest.fixture
def in_layout_kv(monkeypatch):
    """Lets the claims of the default layout run the ops on pools of layout "KV"."""
    for module in (update_claims, prefill_claims):
        for op in (gated_delta_rule_update, gated_delta_rule_recurrent, gated_delta_rule_prefill):
            if hasattr(module, op.__name__):
                monkeypatch.setattr(module, op.__name__, transposed(op))


NUMBERS = [
    ("odd", jnp.float32, jnp.float32),
    ("96 x 192", jnp.bfloat16, jnp.bfloat16),
    pytest.param("256 x 64", jnp.bfloat16, jnp.float16, marks=pytest.mark.deep),
    ("narrow", jnp.float32, jnp.float32),
    pytest.param("kimi", jnp.bfloat16, jnp.float32, marks=pytest.mark.gpu),
]


@IN_KV
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [4, pytest.param(1, marks=pytest.mark.deep)])
@pytest.mark.parametrize(("dims", "dtype", "state_dtype"), NUMBERS)
def test_update_matches_the_oracle(rng, dims, dtype, state_dtype, window, implementation):
    update_claims.check_update_matches_the_oracle(rng, dims, dtype, state_dtype, True, window, implementation)


@IN_KV
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dims", ["odd", "equal heads"])
def test_update_with_a_decay_per_key_channel_matches_the_oracle(rng, dims, implementation):
    update_claims.check_update_with_a_decay_per_key_channel_matches_the_oracle(
        rng, dims, jnp.float32, -5.0, implementation
    )


@IN_KV
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kda", [False, True])
def test_recurrent_matches_the_oracle(rng, kda, implementation):
    update_claims.check_recurrent_matches_the_oracle(rng, "odd", jnp.float32, kda, 4, implementation)


PREFILL = [
    ("odd", jnp.float32, jnp.float32, False, "xla"),
    pytest.param("odd", jnp.float16, jnp.float16, True, "xla", marks=pytest.mark.deep),
    ("narrow", jnp.float32, jnp.float32, False, "interpret"),
    pytest.param("odd", jnp.bfloat16, jnp.float32, True, "interpret", marks=pytest.mark.deep),
    *(
        pytest.param(dims, dtype, state_dtype, kda, "triton", marks=pytest.mark.gpu)
        for dims, dtype, state_dtype in (
            ("odd", jnp.float16, jnp.float16),
            ("96 x 192", jnp.bfloat16, jnp.bfloat16),
            ("256 x 64", jnp.float32, jnp.float32),
            ("kimi", jnp.bfloat16, jnp.float32),
        )
        for kda in (False, True)
    ),
]


@IN_KV
@pytest.mark.parametrize(("dims", "dtype", "state_dtype", "kda", "implementation"), PREFILL)
def test_prefill_matches_the_oracle(rng, dims, dtype, state_dtype, kda, implementation):
    """Among the rows are empty and fresh ones, one that writes its read block, and checkpoints inside chunks' ends."""
    prefill_claims.check_prefill_matches_the_oracle(rng, dims, dtype, state_dtype, kda, implementation)


@IN_KV
@pytest.mark.deep
@pytest.mark.parametrize(("dims", "dtype", "implementation"), update_claims.ALONE)
def test_update_of_a_row_depends_on_that_row_alone(rng, dims, dtype, implementation):
    update_claims.check_update_of_a_row_depends_on_that_row_alone(rng, dims, dtype, implementation)


@IN_KV
@pytest.mark.deep
@pytest.mark.parametrize("kda", [False, True])
@pytest.mark.parametrize("implementation", ["xla", *GPU])
def test_prefill_split_on_the_grid_is_bit_identical(rng, kda, implementation):
    prefill_claims.check_prefill_split_on_the_grid_is_bit_identical(rng, "grouped", jnp.float32, kda, implementation)


@IN_KV
@pytest.mark.parametrize("implementation", ["xla", *GPU])
def test_prefill_then_update_continues_one_recurrence(rng, implementation):
    prefill_claims.check_prefill_then_update_continues_one_recurrence(rng, implementation)


def assert_same(got, wanted):
    """Fails unless outputs and pools are the same bits, where a NaN equals a NaN."""
    for x, y in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.parametrize("kda", [False, True])
@pytest.mark.parametrize("implementation", ["xla", "interpret"])
@pytest.mark.parametrize("dims", ["odd", "96 x 192"])
def test_both_layouts_update_to_the_same_bits(rng, dims, implementation, kda):
    """A compiled Triton kernel adds up a state's keys in an order that follows the layout, so it is left out."""
    dims = DIMS[dims]
    lengths, read, write = mixed_rows(4)
    qkv, a, b, A_log, dt_bias, pool = make(rng, lengths, dims, kda=kda)
    rows, options = padded_rows(lengths, read, write), dict(run=run_by(implementation, Config(16, 8, 16, 1)))
    inputs = qkv, a, b, A_log, dt_bias, pool, rows
    assert_same(transposed(gated_delta_rule_update)(*inputs, **options), gated_delta_rule_update(*inputs, **options))
    q, k, v = (jnp.asarray(x, jnp.float32) for x in unpack(qkv, dims))
    inputs = q, k, v, *gated_delta_rule_gates(a, b, A_log, dt_bias), pool, rows
    assert_same(
        transposed(gated_delta_rule_recurrent)(*inputs, **options), gated_delta_rule_recurrent(*inputs, **options)
    )


@pytest.mark.parametrize("kda", [False, True])
@pytest.mark.parametrize("implementation", ["xla", pytest.param("interpret", marks=pytest.mark.deep), *GPU])
def test_both_layouts_prefill_to_the_same_bits(rng, implementation, kda, monkeypatch):
    dims, lengths, checkpoints = DIMS["odd"], [65, 0, 130], (np.array([[64], [9], [128]]), np.array([[8], [9], [10]]))
    inputs, pool = make_prefill(rng, lengths, dims, kda=kda)
    run = lambda: prefill(
        inputs, pool, lengths, [0, 5, 0], [3, 4, 0], [3, 6, 7], checkpoints, padded=False, **how(implementation)
    )
    wanted = run()
    monkeypatch.setattr(prefill_claims, "gated_delta_rule_prefill", transposed(gated_delta_rule_prefill))
    assert_same(run(), wanted)


def test_a_pool_of_the_other_layout_is_refused(rng):
    dims, row = DIMS["odd"], jnp.array([1])
    qkv, a, b, A_log, dt_bias, pool = make(rng, [2], dims, extra_tokens=0, kda=True)
    q, k, v = (jnp.asarray(x, jnp.float32) for x in unpack(qkv, dims))
    gates = gated_delta_rule_gates(a, b, A_log, dt_bias)
    rows = rows_of(pack([2]), row, jnp.array([[1, 2]]))
    for layout, given in (("KV", pool), ("VK", pool.swapaxes(3, 4))):
        with pytest.raises(ValueError, match=f"pool must have 24 key dims as {layout}|qkv must have 2"):
            gated_delta_rule_update(qkv, a, b, A_log, dt_bias, given, rows, layout=layout)
        with pytest.raises(ValueError, match=f"pool must have 20 value dims and 24 key dims as {layout}"):
            gated_delta_rule_recurrent(q, k, v, *gates, given, rows, layout=layout)
        with pytest.raises(ValueError, match=f"pool must have 20 value dims and 24 key dims as {layout}"):
            prefill((q, k, v, *gates), given, [2], [0], [0], [1], layout=layout)
    with pytest.raises(ValueError, match="layout must be 'VK' or 'KV', got 'SD'"):
        gated_delta_rule_update(qkv, a, b, A_log, dt_bias, pool, rows, layout="SD")
    with pytest.raises(ValueError, match="layout must be 'VK' or 'KV', got None"):
        prefill((q, k, v, *gates), pool, [2], [0], [0], [1], layout=None)


@pytest.mark.gpu
@pytest.mark.large_pool
@pytest.mark.usefixtures("in_layout_kv")
def test_update_reaches_blocks_beyond_2_to_the_31_elements(rng):
    dims, blocks = update_claims.Dims(4, 8, 128, 128), 16500
    qkv, a, b, A_log, dt_bias, small = make(rng, [1], dims, extra_tokens=0)
    last = blocks - 1
    wrapped = last - 2**31 // (8 * 128 * 128)
    fill = lambda: jnp.zeros((1, blocks, 8, 128, 128)).at[0, last].set(small[LAYER, 3]).at[0, wrapped].set(7.0)
    row = Rows(query_start_loc=pack([1]), layer=0, read=jnp.array([last]), write=jnp.array([[last]]))
    step = jax.jit(
        lambda pool: gated_delta_rule_update(
            *(qkv, a, b, A_log, dt_bias, pool, row), layout="KV", run=Run(implementation="triton")
        ),
        donate_argnums=0,
    )
    out, pool = step(jax.jit(fill)())
    wanted, after = gated_delta_rule_update(
        *(qkv, a, b, A_log, dt_bias, small, rows_of(pack([1]), jnp.array([3]), jnp.array([[3]]))),
        layout="KV",
        run=Run(implementation="xla"),
    )
    np.testing.assert_allclose(out, wanted, atol=1e-5)
    np.testing.assert_allclose(pool[0, last], after[LAYER, 3], atol=1e-5)
    assert float(pool[0, wrapped].min()) == float(pool[0, wrapped].max()) == 7.0
