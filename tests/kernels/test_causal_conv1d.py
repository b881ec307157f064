"""causal_conv1d: outputs and windows against the oracle, and the bitwise promises."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.common import IMPLEMENTATIONS, assert_close, assert_untouched, pack, run_by
from kernels.conv_claims import (
    CHANNELS,
    check_a_prefill_chunk_may_follow_a_verify_step,
    check_every_config_computes_the_same_bits,
    check_every_prefill_config_computes_the_same_bits,
    check_prefill_matches_the_oracle,
    check_prefill_of_a_row_depends_on_that_row_alone,
    check_prefill_split_anywhere_is_bit_identical,
    check_update_matches_the_oracle,
    check_update_of_a_row_depends_on_that_row_alone,
    exact,
    how_prefill,
    make,
    one_row,
    rows_of,
)

from pallas_kernels import BoundaryWindow, Run, causal_conv1d_prefill, causal_conv1d_update


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("width", "K", "bias", "activation"),
    [(4, 0, False, "silu"), (4, 3, False, "silu"), (2, 0, True, None), (3, 2, True, None), (5, 8, True, "silu")],
)
def test_update_matches_the_oracle(rng, width, K, bias, activation, dtype, implementation):
    check_update_matches_the_oracle(rng, width, K, bias, activation, dtype, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_update_of_a_row_depends_on_that_row_alone(rng, implementation):
    check_update_of_a_row_depends_on_that_row_alone(rng, implementation)


@pytest.mark.parametrize("implementation", ["interpret", pytest.param("triton", marks=pytest.mark.gpu)])
def test_every_config_computes_the_same_bits(rng, implementation):
    check_every_config_computes_the_same_bits(rng, implementation)


@pytest.mark.gpu
@pytest.mark.large_pool
def test_update_reaches_blocks_beyond_2_to_the_31_elements(rng):
    x, _, _, _ = make(rng, [1], 4, jnp.bfloat16, extra_tokens=0)
    channels, blocks = 8192, 90000  # 2.2e9 elements
    x, weight = jnp.tile(x, (1, channels // CHANNELS + 1))[:, :channels], jnp.ones((4, channels))
    last, first = blocks - 1, 2**31 // (3 * channels)
    wrapped = last - first
    window = jnp.asarray(rng.normal(size=(3, channels)), jnp.bfloat16)
    fill = lambda: jnp.zeros((1, blocks, 3, channels), jnp.bfloat16).at[0, last].set(window).at[0, wrapped].set(7.0)
    step = jax.jit(
        lambda pool: causal_conv1d_update(x, pool, weight, None, one_row(1, last), run=Run(implementation="triton")),
        donate_argnums=0,
    )
    y, pool = step(jax.jit(fill)())
    wanted, after = causal_conv1d_update(
        x, window[None, None].repeat(2, 1), weight, None, one_row(1, 1), run=Run(implementation="xla")
    )
    np.testing.assert_array_equal(pool[0, last].astype(jnp.float32), after[0, 1].astype(jnp.float32))
    assert_close(y, np.asarray(wanted.astype(jnp.float32), np.float64), jnp.bfloat16, 4, "outputs")
    assert float(pool[0, wrapped].min()) == float(pool[0, wrapped].max()) == 7.0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("width", "K", "bias", "activation"),
    [(4, 0, False, "silu"), (4, 2, True, None), (2, 0, False, "silu"), (3, 0, True, None), (5, 1, True, "silu")],
)
def test_prefill_matches_the_oracle(rng, width, K, bias, activation, dtype, implementation):
    check_prefill_matches_the_oracle(rng, width, K, bias, activation, dtype, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_prefill_split_anywhere_is_bit_identical(rng, implementation):
    check_prefill_split_anywhere_is_bit_identical(rng, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_prefill_of_a_row_depends_on_that_row_alone(rng, implementation):
    check_prefill_of_a_row_depends_on_that_row_alone(rng, implementation)


@pytest.mark.parametrize("implementation", ["interpret", pytest.param("triton", marks=pytest.mark.gpu)])
def test_every_prefill_config_computes_the_same_bits(rng, implementation):
    check_every_prefill_config_computes_the_same_bits(rng, implementation)


@pytest.mark.gpu
@pytest.mark.large_pool
def test_prefill_reaches_blocks_beyond_2_to_the_31_elements(rng):
    channels, blocks = 8192, 90000  # 2.2e9 elements
    last = blocks - 1
    wrapped = last - 2**31 // (3 * channels)
    draw = lambda *shape: jnp.asarray(rng.normal(size=(*shape, channels)), jnp.bfloat16)
    x, window, weight = draw(20), draw(3), jnp.ones((4, channels))
    fill = lambda: jnp.zeros((1, blocks, 3, channels), jnp.bfloat16).at[0, last].set(window).at[0, wrapped].set(7.0)
    step = jax.jit(
        lambda pool: causal_conv1d_prefill(x, pool, weight, None, one_row(20, last), run=Run(implementation="triton")),
        donate_argnums=0,
    )
    y, pool = step(jax.jit(fill)())
    wanted, _ = causal_conv1d_prefill(
        x, window[None, None].repeat(2, 1), weight, None, one_row(20, 1), run=Run(implementation="xla")
    )
    np.testing.assert_array_equal(pool[0, last].astype(jnp.float32), x[-3:].astype(jnp.float32))
    assert_close(y, np.asarray(wanted.astype(jnp.float32), np.float64), jnp.bfloat16, 4, "outputs")
    assert float(pool[0, wrapped].min()) == float(pool[0, wrapped].max()) == 7.0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_prefill_chunk_may_follow_a_verify_step(rng, implementation):
    check_a_prefill_chunk_may_follow_a_verify_step(rng, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_prefill_ignores_other_channels_and_cuts_its_outputs(rng, implementation):
    lengths = [5, 0, 19]
    x, pool, weight, bias = make(rng, lengths, 4, jnp.bfloat16, bias=True)
    x, pool, weight, bias = exact(implementation, x, pool, weight, bias)
    wide = jnp.concatenate([x, jnp.full((x.shape[0], 7), jnp.nan, x.dtype)], axis=1)
    rows = rows_of(pack(lengths), jnp.array([3, 0, 4]), jnp.array([0, 0, 0]), jnp.array([6, 0, 8]))
    run = lambda x, **options: causal_conv1d_prefill(
        x, pool, weight, bias, rows, **options, run=how_prefill(implementation)
    )
    y, after = run(x)
    parts = 3, 1, CHANNELS - 4
    outs, after_parts = run(wide, parts=parts)
    assert tuple(out.shape[1] for out in outs) == parts
    np.testing.assert_array_equal(jnp.concatenate(outs, axis=1), y)
    assert_untouched(after, after_parts, written=())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("layout", ["SD", "DS"])
def test_update_cuts_its_outputs(rng, layout, implementation):
    """Padding tokens are 0 in every part. A row may also keep a boundary's window."""
    lengths = [1, 3, 0, 2]
    x, pool, weight, bias = make(rng, lengths, 4, jnp.bfloat16, K=2, bias=True)
    pool = pool if layout == "SD" else pool.swapaxes(2, 3)
    boundary = BoundaryWindow(row=jnp.array([0, 0, 1, 1]), block=jnp.array([0, 9, 10, 0]))
    where = jnp.array([3, 0, 4, 5]), jnp.array([0, 1, 0, 2]), jnp.array([6, 7, 0, 8])
    rows = rows_of(pack(lengths), *where, boundary=boundary)
    run = lambda **options: causal_conv1d_update(
        x, pool, weight, bias, rows, layout=layout, **options, run=run_by(implementation)
    )
    y, after = run()
    parts = 3, 1, CHANNELS - 4
    outs, after_parts = run(parts=parts)
    assert tuple(out.shape[1] for out in outs) == parts
    np.testing.assert_array_equal(jnp.concatenate(outs, axis=1), y)
    assert not np.asarray(y[sum(lengths) :]).any()
    np.testing.assert_array_equal(np.asarray(after.astype(jnp.float32)), np.asarray(after_parts.astype(jnp.float32)))
    (out,), _ = run(parts=(CHANNELS,))
    np.testing.assert_array_equal(out, y)


def test_empty_arrays_return_at_once(rng):
    x, pool, weight, _ = make(rng, [2], 4, jnp.float32)
    none = jnp.zeros((0,), jnp.int32)
    rows = rows_of(pack([]), none, none, none)
    for op in (causal_conv1d_update, causal_conv1d_prefill):
        y, after = op(x, pool, weight, None, rows)
        assert y.shape == x.shape
        assert not y.any()
        assert after is pool
        outs, after = op(x[:0], pool, weight, None, rows, parts=(CHANNELS - 1, 1))
        assert [out.shape for out in outs] == [(0, CHANNELS - 1), (0, 1)]
        assert after is pool


def test_errors_name_the_bad_argument(rng):
    x, pool, weight, _ = make(rng, [2], 4, jnp.float32)
    row = jnp.array([1])
    rows = rows_of(pack([2]), row, row, row)
    for op in (causal_conv1d_update, causal_conv1d_prefill):
        with pytest.raises(ValueError, match="x must have the pool's dtype float32, got bfloat16"):
            op(x.astype(jnp.bfloat16), pool, weight, None, rows)
        with pytest.raises(ValueError, match="weight must have 2 to 5 taps, got 6"):
            op(x, pool, jnp.ones((6, CHANNELS)), None, rows)
        with pytest.raises(ValueError, match="at least 4 window rows, got 3"):
            op(x, pool, jnp.ones((5, CHANNELS)), None, rows)
        with pytest.raises(ValueError, match=r"pool must (be Float|have 8 channels as SD)"):
            op(x[:, :8], pool, weight[:, :8], None, rows)
        with pytest.raises(ValueError, match="layout must be 'SD' or 'DS', got 'ds'"):
            op(x, pool, weight, None, rows, layout="ds")
        with pytest.raises(ValueError, match="activation must be 'silu' or None, got 'relu'"):
            op(x, pool, weight, None, rows, activation="relu")
        for parts in ((8, 8), (CHANNELS, 0), (CHANNELS - 0.5, 0.5), (CHANNELS - 1, True), CHANNELS, "parts", ()):
            wanted = f"parts must be positive integers whose sum is {CHANNELS}, got {parts!r}"
            with pytest.raises(ValueError, match=re.escape(wanted)):
                op(x, pool, weight, None, rows, parts=parts)
    with pytest.raises(ValueError, match=f"x must have at least weight's {CHANNELS} channels, got 8"):
        causal_conv1d_prefill(x[:, :8], pool, weight, None, rows)
    for field in ("layer", "window_read", "window_row", "write"):
        for op in (causal_conv1d_update, causal_conv1d_prefill):
            with pytest.raises(ValueError, match=rf"{op.__name__}: rows\.{field} must be given, got None"):
                op(x, pool, weight, None, dataclasses.replace(rows, **{field: None}))


@pytest.mark.parametrize("activation", ["silu", None])
def test_prefill_differentiates(rng, activation):
    """Tokens after the last row are NaN, and so is the block that a padding row reads."""
    x, pool, weight, bias = make(rng, [6], 4, jnp.float32, bias=True)
    rows = rows_of(pack([6], 1), jnp.array([3, 6]), jnp.array([0, 0]), jnp.array([3, 0]))

    def loss(taps, bias, x):
        x = jnp.concatenate([x, jnp.full((3, CHANNELS), jnp.nan)])
        options = dict(activation=activation, run=Run(implementation="xla"))
        return jnp.sum(causal_conv1d_prefill(x, pool, taps, bias, rows, **options)[0] ** 2)

    at = weight, bias, x[:6]
    step = jax.tree.map(lambda v: 1e-2 * jnp.ones_like(v), at)
    forth, back = (jax.tree.map(lambda v, s, sign=sign: v + sign * s, at, step) for sign in (1, -1))
    slope = sum(jnp.vdot(g, s) for g, s in zip(jax.grad(loss, (0, 1, 2))(*at), step, strict=True))
    np.testing.assert_allclose(slope, (loss(*forth) - loss(*back)) / 2, rtol=1e-3)
