"""causal_conv1d with windows [channels, window], layout "DS": the claims for [window, channels], and the same bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import conv_claims as plain
from kernels.common import IMPLEMENTATIONS, pack, run_by
from kernels.conv_claims import one_row, rows_of, transposed
from kernels.lowered_cases import on

from pallas_kernels import Run, causal_conv1d_prefill, causal_conv1d_update

OPS = [causal_conv1d_update, causal_conv1d_prefill]


@pytest.fixture(autouse=True)
def _in_layout_ds(monkeypatch):
    """Lets the claims of `conv_claims` run the ops on pools of layout "DS"."""
    for op in OPS:
        monkeypatch.setattr(plain, op.__name__, transposed(op))


WINDOWS = [(4, 3, True, "silu"), (2, 0, False, None), (5, 2, True, None)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("width", "K", "bias", "activation"), WINDOWS)
def test_update_matches_the_oracle(rng, width, K, bias, activation, dtype, implementation):
    plain.check_update_matches_the_oracle(rng, width, K, bias, activation, dtype, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("width", "K", "bias", "activation"), WINDOWS)
def test_prefill_matches_the_oracle(rng, width, K, bias, activation, dtype, implementation):
    plain.check_prefill_matches_the_oracle(rng, width, K, bias, activation, dtype, implementation)


GPU = [pytest.param("triton", marks=pytest.mark.gpu)]


@pytest.mark.deep
@pytest.mark.parametrize("implementation", ["xla", *GPU])
def test_a_row_depends_on_that_row_alone(rng, implementation):
    plain.check_update_of_a_row_depends_on_that_row_alone(rng, implementation)
    plain.check_prefill_of_a_row_depends_on_that_row_alone(rng, implementation)


@pytest.mark.parametrize("implementation", ["xla", *GPU])
def test_prefill_split_anywhere_is_bit_identical(rng, implementation):
    plain.check_prefill_split_anywhere_is_bit_identical(rng, implementation)
    plain.check_a_prefill_chunk_may_follow_a_verify_step(rng, implementation)


@pytest.mark.parametrize("implementation", [pytest.param("interpret", marks=pytest.mark.deep), *GPU])
def test_every_config_computes_the_same_bits(rng, implementation):
    plain.check_every_config_computes_the_same_bits(rng, implementation)
    plain.check_every_prefill_config_computes_the_same_bits(rng, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("op", OPS)
def test_both_layouts_compute_the_same_bits(rng, op, implementation):
    """Outputs and pools are the same bits, in rows that follow a verify step and write the block that they read."""
    x, pool, weight, bias = plain.make(rng, [1, 3, 0, 2], 4, jnp.float32, 2, bias=True)
    x, pool, weight, bias = plain.exact(implementation, x, pool, weight, bias)
    pool = jnp.where(jnp.isnan(pool), 7.0, pool)  # equal numbers are then equal bits
    rows = rows_of(pack([1, 3, 0, 2], 1), *map(jnp.array, ([3, 4, 5, 0, 5], [0, 2, 0, 0, 0], [6, 4, 7, 8, 9])))
    y, after = op(x, pool, weight, bias, rows, run=run_by(implementation))
    same_y, same = transposed(op)(x, pool, weight, bias, rows, run=run_by(implementation))
    np.testing.assert_array_equal(same_y, y)
    live = np.arange(pool.shape[2]) < 3  # other rows are unspecified
    np.testing.assert_array_equal(same[:, :, live], after[:, :, live])


@pytest.mark.parametrize("op", OPS)
def test_cuda_gets_the_triton_kernel(rng, op):
    x, pool, weight, _ = plain.make(rng, [2], 4, jnp.float32)
    run = jax.jit(lambda pool: op(x, pool, weight, None, one_row(2, 3), layout="DS"))
    with on("NVIDIA H200"):
        lowered = run.trace(pool.swapaxes(2, 3)).lower(lowering_platforms=("cuda",))
    assert "__gpu$xla.gpu.triton" in lowered.as_text()


@pytest.mark.parametrize("op", OPS)
def test_a_pool_of_the_other_layout_is_refused(rng, op):
    x, pool, weight, _ = plain.make(rng, [2], 4, jnp.float32)
    for layout, given in (("DS", pool), ("SD", pool.swapaxes(2, 3))):
        with pytest.raises(ValueError, match=f"pool must have 40 channels as {layout}"):
            op(x, given, weight, None, one_row(2, 3), layout=layout)


@pytest.mark.gpu
@pytest.mark.large_pool
def test_update_reaches_blocks_beyond_2_to_the_31_elements(rng):
    channels, blocks = 8192, 90000  # 2.2e9 elements
    last = blocks - 1
    wrapped = last - 2**31 // (3 * channels)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    x, window, weight = draw(1, channels), draw(channels, 3), jnp.ones((4, channels))
    fill = lambda: jnp.zeros((1, blocks, channels, 3), jnp.bfloat16).at[0, last].set(window).at[0, wrapped].set(7.0)
    step = jax.jit(
        lambda pool: causal_conv1d_update(
            x, pool, weight, None, one_row(1, last), layout="DS", run=Run(implementation="triton")
        ),
        donate_argnums=0,
    )
    _, pool = step(jax.jit(fill)())
    np.testing.assert_array_equal(pool[0, last, :, :2].astype(jnp.float32), window[:, 1:].astype(jnp.float32))
    np.testing.assert_array_equal(pool[0, last, :, 2].astype(jnp.float32), x[0].astype(jnp.float32))
    assert float(pool[0, wrapped].min()) == float(pool[0, wrapped].max()) == 7.0
