"""gated_delta_rule's prefill: rows of any length against the oracle, and the bitwise promises at the ends of chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.common import MOSAIC_GPU, assert_close, how, pack, run_by
from kernels.delta_rule_claims import LAYER, Dims, state_of
from kernels.delta_rule_prefill_claims import (
    CHUNK,
    DIMS,
    assert_rows_match_the_oracle,
    check_prefill_matches_the_oracle,
    check_prefill_split_on_the_grid_is_bit_identical,
    check_prefill_then_update_continues_one_recurrence,
    float64,
    make_prefill,
    prefill,
    terms_of,
)
from oracles.ops import gated_delta_rule

from pallas_kernels import (
    Rows,
    UnsupportedError,
    chunk_rows,
    gated_delta_rule_prefill,
)
from pallas_kernels.gated_delta_rule.config import PrefillConfig

GPU = pytest.mark.gpu
# Sizes that the Mosaic GPU kernels take. With a decay per key channel, key heads are value heads.
MOSAIC_GPU_DIMS = [("kimi", False), ("kimi", True), ("64 x 128", False), ("three heads", False)]


CASES = [
    ("grouped", jnp.float32, jnp.float32, False, "xla"),
    ("odd", jnp.float16, jnp.float16, False, "xla"),
    ("grouped", jnp.float32, jnp.float32, True, "xla"),
    ("narrow", jnp.float32, jnp.float32, False, "interpret"),
    ("96 x 192", jnp.bfloat16, jnp.bfloat16, False, "interpret"),
    ("narrow", jnp.float16, jnp.float16, True, "interpret"),
    ("odd", jnp.bfloat16, jnp.float32, True, "interpret"),
    *(
        pytest.param(dims, dtype, state_dtype, kda, "triton", marks=GPU)
        for dims, dtype, state_dtype in (
            ("grouped", jnp.float32, jnp.float32),
            ("grouped", jnp.bfloat16, jnp.float32),
            ("odd", jnp.float16, jnp.float16),
            ("96 x 192", jnp.bfloat16, jnp.bfloat16),
            ("96 x 192", jnp.float32, jnp.float32),
            ("256 x 64", jnp.bfloat16, jnp.float32),
            ("256 x 64", jnp.float32, jnp.float32),
            ("kimi", jnp.bfloat16, jnp.float32),
            ("kimi", jnp.float32, jnp.bfloat16),
            ("narrow", jnp.bfloat16, jnp.float32),
            ("narrow", jnp.float32, jnp.float32),
        )
        for kda in (False, True)
    ),
    *(
        pytest.param(dims, jnp.bfloat16, state_dtype, kda, "mosaic_gpu", marks=GPU)
        for dims, kda in MOSAIC_GPU_DIMS
        for state_dtype in (jnp.float32, jnp.bfloat16, jnp.float16)
    ),
    *(
        pytest.param(dims, jnp.bfloat16, jnp.float32, kda, "mosaic_gpu", marks=GPU)
        for dims, kda in (("16 of 32", False), ("32 of 32", True))
    ),
]


@pytest.mark.parametrize(("dims", "dtype", "state_dtype", "kda", "implementation"), CASES)
def test_prefill_matches_the_oracle(rng, dims, dtype, state_dtype, kda, implementation):
    check_prefill_matches_the_oracle(rng, dims, dtype, state_dtype, kda, implementation)


@pytest.mark.parametrize("implementation", ["xla", pytest.param("triton", marks=GPU), MOSAIC_GPU])
@pytest.mark.parametrize("kda", [False, True])
def test_prefill_of_rows_of_1_to_64_tokens(rng, kda, implementation):
    """Each of the rows starts at another position within a chunk."""
    mosaic_gpu = implementation == "mosaic_gpu"
    dims, lengths = DIMS["kimi" if mosaic_gpu else "grouped"], list(range(1, 65))
    inputs, pool = make_prefill(rng, lengths, dims, jnp.bfloat16 if mosaic_gpu else jnp.float32, kda=kda)
    read, computed = [0, 3, 4, 5] * 16, [7 * n % 64 for n in lengths]
    out, after = prefill(inputs, pool, lengths, computed, read, [0] * 64, **how(implementation))
    kept = [{} for _ in lengths]
    assert_rows_match_the_oracle(inputs, lengths, read, kept, out, pool, after, dims.key_dim**-0.5, terms_of(dims))


SPLITS = [
    ("grouped", jnp.float32, False, "xla"),
    ("grouped", jnp.float32, True, "xla"),
    ("grouped", jnp.float32, False, "interpret"),
    *(
        pytest.param("kimi", dtype, kda, "triton", marks=GPU)
        for dtype in (jnp.float32, jnp.bfloat16)
        for kda in (False, True)
    ),
    *(pytest.param(dims, jnp.bfloat16, kda, "mosaic_gpu", marks=GPU) for dims, kda in MOSAIC_GPU_DIMS),
]


@pytest.mark.parametrize(("dims", "dtype", "kda", "implementation"), SPLITS)
def test_prefill_split_on_the_grid_is_bit_identical(rng, dims, dtype, kda, implementation):
    check_prefill_split_on_the_grid_is_bit_identical(rng, dims, dtype, kda, implementation)


@pytest.mark.parametrize("implementation", ["xla", pytest.param("triton", marks=GPU)])
def test_prefill_split_off_the_grid_is_close(rng, implementation):
    dims, total, split = DIMS["grouped"], 130, 37
    inputs, pool = make_prefill(rng, [total], dims)
    run = lambda *arguments: prefill(*arguments, **how(implementation))
    whole, after = run(inputs, pool, [total], [0], [3], [6])
    first, pool = run([x[:split] for x in inputs], pool, [split], [0], [3], [7])
    second, pool = run([x[split:] for x in inputs], pool, [total - split], [split], [7], [8])
    parts = np.concatenate([first[:split], second[: total - split]])
    assert_close(parts, *float64(whole[:total]), jnp.float32, terms_of(dims), "outputs")
    assert_close(pool[LAYER, 8], *float64(after[LAYER, 6]), jnp.float32, terms_of(dims), "state")


@pytest.mark.gpu
@pytest.mark.parametrize("kda", [False, True])
@pytest.mark.parametrize(
    ("dtype", "implementation"),
    [(jnp.float32, "triton"), (jnp.bfloat16, "triton"), pytest.param(jnp.bfloat16, "mosaic_gpu")],
)
def test_prefill_of_a_row_is_the_same_alone_and_among_many(rng, dtype, kda, implementation):
    """Triton's default configurations for one row and for 24 differ."""
    dims = Dims(16, 32, 128, 128)
    inputs, pool = make_prefill(rng, [200], dims, dtype, kda=kda)
    alone, after = prefill(inputs, pool, [200], [0], [3], [6], **how(implementation))
    many = [np.concatenate([x] * 24) for x in inputs]
    out, pool = prefill(many, pool, [200] * 24, [0] * 24, [3] * 24, [6] + [0] * 23, **how(implementation))
    for n in range(24):
        np.testing.assert_array_equal(out[200 * n : 200 * (n + 1)], alone[:200])
    np.testing.assert_array_equal(pool[LAYER, 6], after[LAYER, 6])


@pytest.mark.parametrize(
    ("beta", "dtype", "kda", "implementation"),
    [
        *((beta, jnp.float32, kda, "xla") for beta in (1.0, 2.0) for kda in (False, True)),
        (2.0, jnp.float32, False, "interpret"),
        *(
            pytest.param(beta, dtype, kda, "triton", marks=GPU)
            for beta in (1.0, 2.0)
            for dtype, kda in ((jnp.float32, False), (jnp.float32, True), (jnp.bfloat16, False))
        ),
        *(pytest.param(beta, jnp.bfloat16, False, "mosaic_gpu", marks=GPU) for beta in (1.0, 2.0)),
    ],
)
def test_prefill_of_one_repeated_key_without_decay(rng, beta, dtype, kda, implementation):
    """With identical normalised keys and no decay, an inverse by repeated doubling would overflow."""
    dims, n = DIMS["64 x 128" if implementation == "mosaic_gpu" else "grouped"], 192
    (q, k, v, g, b), pool = make_prefill(rng, [n], dims, dtype, kda=kda)
    inputs = (*(np.broadcast_to(x[:1], x.shape) for x in (q, k, v)), np.zeros_like(g), np.full_like(b, beta))
    out, after = prefill(inputs, pool, [n], [0], [3], [6], **how(implementation))
    wanted, states = gated_delta_rule(*float64(*inputs), state_of(pool, 3), dims.key_dim**-0.5)
    # With beta = 2 the corrections change sign at every token without shrinking. Each one sums products of up to beta *
    # beta * |v - S k| over its chunk, and the state sums n of them. With bfloat16 inputs the pieces have a relative
    # error of 2^-16, which is 2^7 times that of float32.
    reach = np.abs(float64(v)).max() + np.linalg.norm(state_of(pool, 3), axis=-1).max()
    terms = CHUNK * n * (beta**2 * reach * (2**7 if dtype == jnp.bfloat16 else 1)) ** 2
    assert_close(out[:n], wanted, dtype, terms, "outputs")
    assert_close(after[LAYER, 6], states[-1], jnp.float32, terms, "state")


DECAYS = (-1e4, -1e-7, "strong, then weak")


@pytest.mark.parametrize(
    ("decay", "dtype", "kda", "implementation"),
    [
        *((decay, jnp.float32, kda, "xla") for decay in DECAYS for kda in (False, True)),
        *(("strong, then weak", jnp.float32, kda, "interpret") for kda in (False, True)),
        ("strong, then weak", jnp.bfloat16, True, "interpret"),
        *(
            pytest.param(decay, dtype, kda, "triton", marks=GPU)
            for decay in DECAYS
            for dtype in (jnp.float32, jnp.bfloat16)
            for kda in (False, True)
        ),
        *(pytest.param(decay, jnp.bfloat16, kda, "mosaic_gpu", marks=GPU) for decay in DECAYS for kda in (False, True)),
    ],
)
def test_prefill_with_extreme_decays_matches_the_oracle(rng, decay, dtype, kda, implementation):
    """The difference of two large sums of decays would lose the small decay between two tokens close to each other."""
    dims, n = DIMS["kimi" if implementation == "mosaic_gpu" else "grouped"], 70
    (q, k, v, g, beta), pool = make_prefill(rng, [n], dims, dtype, kda=kda)
    if decay == "strong, then weak":
        strong = (np.arange(n) % 37 < 21).reshape(-1, *(1,) * (g.ndim - 1))
        g = np.where(strong, -300.0, -1e-3 * np.abs(g)).astype(np.float32)
    else:
        g = np.full_like(g, decay)
    inputs = q, k, v, g, beta
    out, after = prefill(inputs, pool, [n], [0], [3], [6], **how(implementation))
    wanted, states = gated_delta_rule(*float64(*inputs), state_of(pool, 3), dims.key_dim**-0.5)
    terms = terms_of(dims)
    if dtype == jnp.bfloat16:
        # Pieces have a relative error of 2^-16, which is 2^7 times that of float32. Decayed keys are rounded to 2^-8,
        # which is 2^15 times that of float32. If nothing is forgotten, that error is a walk of n steps of the size of a
        # key.
        terms = 2**30 * n // dims.key_dim if kda else 2**14 * terms
    assert_close(out[:n], wanted, dtype, terms, "outputs")
    assert_close(after[LAYER, 6], states[-1], jnp.float32, terms, "state")


@pytest.mark.parametrize("implementation", ["xla", pytest.param("triton", marks=GPU)])
def test_prefill_then_update_continues_one_recurrence(rng, implementation):
    check_prefill_then_update_continues_one_recurrence(rng, implementation)


@pytest.mark.parametrize("kda", [False, True])
def test_prefill_differentiates(rng, kda):
    dims, n = DIMS["odd"], 70
    inputs, pool = make_prefill(rng, [n], dims, kda=kda)
    run = lambda inputs: prefill(inputs, pool, [n], [0], [0], [0], padded=False, implementation="xla")
    loss = jax.jit(lambda *inputs: jnp.sum(run(inputs)[0] ** 2))
    gradients = jax.jit(jax.grad(loss, argnums=range(5)))(*inputs)
    for at, gradient in enumerate(gradients):
        assert np.isfinite(gradient).all()
        step = 1e-2 * jnp.sign(gradient)
        up, down = (loss(*inputs[:at], inputs[at] + s, *inputs[at + 1 :]) for s in (step, -step))
        np.testing.assert_allclose(jnp.vdot(gradient, step), (up - down) / 2, rtol=2e-2)


@pytest.mark.parametrize("implementation", ["interpret", pytest.param("triton", marks=GPU)])
@pytest.mark.parametrize("chunk", [16, 32])
def test_other_chunk_sizes_match_the_oracle(rng, chunk, implementation):
    dims, lengths, computed, read, write = DIMS["grouped"], [50, 7], [5, 0], [3, 0], [6, 7]
    inputs, pool = make_prefill(rng, lengths, dims)
    out, after = prefill(inputs, pool, lengths, computed, read, write, padded=False, chunk=chunk, **how(implementation))
    kept = [{n: block} for n, block in zip(lengths, write, strict=True)]
    assert_rows_match_the_oracle(inputs, lengths, read, kept, out, pool, after, dims.key_dim**-0.5, terms_of(dims))


@pytest.mark.gpu
def test_every_prefill_config_computes_the_same_bits(rng):
    dims, n = DIMS["96 x 192"], 70
    inputs, pool = make_prefill(rng, [n], dims, jnp.bfloat16)
    run = lambda config: prefill(inputs, pool, [n], [0], [3], [6], config=config, implementation="triton")
    out, after = run(None)
    for config in (PrefillConfig(16, 4, 2, 2, 2), PrefillConfig(64, 4, 1, 4, 2)):
        same, pool_ = run(config)
        np.testing.assert_array_equal(same, out)
        np.testing.assert_array_equal(pool_[LAYER, 6], after[LAYER, 6])


@pytest.mark.parametrize(
    "implementation", [pytest.param("interpret", marks=pytest.mark.deep), pytest.param("triton", marks=GPU)]
)
def test_two_pieces_of_decayed_keys_are_nearly_float32(rng, implementation):
    dims, n = DIMS["kimi" if implementation == "mosaic_gpu" else "grouped"], 70
    inputs, pool = make_prefill(rng, [n], dims, jnp.bfloat16, kda=True)
    _, after = prefill(inputs, pool, [n], [0], [3], [6], config=PrefillConfig(32, 4, 1, 4, 2), **how(implementation))
    _, states = gated_delta_rule(*float64(*inputs), state_of(pool, 3), dims.key_dim**-0.5)
    # Each factor has a relative error of 2^-16, which is 2^7 times that of float32.
    assert_close(after[LAYER, 6], states[-1], jnp.float32, 2**14 * (CHUNK + dims.key_dim), "state")


@pytest.mark.parametrize("kda", [False, True])
@pytest.mark.parametrize("kernel", [pytest.param("triton", marks=GPU), MOSAIC_GPU])
def test_a_kernel_matches_xla_on_a_long_row(rng, kernel, kda):
    dims, n = Dims(1, 1, 64, 64), 65536
    dtype = jnp.bfloat16 if kernel == "mosaic_gpu" else jnp.float32
    inputs, pool = make_prefill(rng, [n], dims, dtype, kda=kda)
    wanted = prefill(inputs, pool, [n], [0], [3], [6], implementation="xla")
    actual = prefill(inputs, pool, [n], [0], [3], [6], **how(kernel))
    # Decays forget, so errors add up over some chunks only, not over all of them. With bfloat16 inputs the pieces have a
    # relative error of 2^-16, 2^7 times that of float32, and keys that are decayed per channel one of 2^-8.
    terms = 16 * terms_of(dims) * (2**14 if dtype == jnp.bfloat16 else 1)
    assert_close(actual[0], *float64(wanted[0]), dtype, terms, "outputs")
    state_dtype = dtype if kda else jnp.float32
    assert_close(actual[1][LAYER, 6], *float64(wanted[1][LAYER, 6]), state_dtype, terms, "state")


@pytest.mark.parametrize("implementation", [pytest.param("triton", marks=GPU), MOSAIC_GPU])
@pytest.mark.large_pool
def test_prefill_reaches_blocks_beyond_2_to_the_31_elements(rng, implementation):
    dims, blocks, n = Dims(4, 8, 128, 128), 16500, 70
    dtype = jnp.bfloat16 if implementation == "mosaic_gpu" else jnp.float32
    inputs, small = make_prefill(rng, [n], dims, dtype)
    pool = jnp.zeros((1, blocks, 8, 128, 128), jnp.float32)  # 2.16e9 elements
    last = blocks - 1
    wrapped = last - 2**31 // (8 * 128 * 128)
    pool = jax.jit(lambda p: p.at[0, last].set(small[LAYER, 3]).at[0, wrapped].set(7.0), donate_argnums=0)(pool)
    row, chunks = jnp.array([last]), chunk_rows(pack([n]), jnp.array([0]), n)
    rows = Rows(query_start_loc=pack([n]), layer=0, read=row, write=row[:, None], chunks=chunks)
    step = jax.jit(
        lambda pool: gated_delta_rule_prefill(*map(jnp.asarray, inputs), pool, rows, run=run_by(implementation)),
        donate_argnums=0,
    )
    out, pool = step(pool)
    wanted, after = prefill(inputs, small, [n], [0], [3], [3], implementation="xla")
    # With bfloat16 inputs the pieces have a relative error of 2^-16, 2^7 times that of float32, and outputs are rounded.
    limit, rounding = (1e-5, 0.0) if dtype == jnp.float32 else (2**7 * 1e-5, float(jnp.finfo(dtype).eps))
    wanted = np.asarray(wanted[:n], np.float32)
    np.testing.assert_allclose(out.astype(jnp.float32), wanted, atol=limit + rounding * np.abs(wanted).max())
    np.testing.assert_allclose(pool[0, last], after[LAYER, 3], atol=limit)
    assert float(pool[0, wrapped].min()) == float(pool[0, wrapped].max()) == 7.0


def test_errors_name_the_bad_argument(rng):
    inputs, pool = make_prefill(rng, [2], DIMS["grouped"])
    run = lambda inputs=inputs, **options: prefill(inputs, pool, [2], [0], [0], [1], **options)
    k = np.concatenate([inputs[1], inputs[1][:, :1]], 1)
    with pytest.raises(ValueError, match="the number of heads of k must divide v's 4, got 3"):
        run((k, k, *inputs[2:]))
    with pytest.raises(ValueError, match="g must be Float32"):
        run((*inputs[:3], inputs[3].astype(jnp.bfloat16), inputs[4]))
    row, chunks = jnp.array([1]), chunk_rows(pack([2, 3]), jnp.array([0, 0]), 5)
    rows = Rows(query_start_loc=pack([2]), layer=0, read=row, write=row[:, None], chunks=chunks)
    with pytest.raises(ValueError, match="chunks must be chunk_rows of 1 rows in 2 tokens \\(2 chunks\\), got 2 rows"):
        gated_delta_rule_prefill(*map(jnp.asarray, inputs), pool, rows)
    with pytest.raises(UnsupportedError, match=r"chunk_size must be one of .*, got 24"):
        run(chunk=24, implementation="triton")


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="Mosaic GPU kernels need JAX 0.11.2")
@pytest.mark.parametrize(
    ("dims", "changes", "message"),
    [
        ("kimi", dict(dtype=jnp.float32), "q, k and v must be bfloat16, got float32, float32 and float32"),
        ("kimi", dict(chunk=32), "chunk_size must be 64, got 32"),
        ("kimi", dict(config=PrefillConfig(32, 4, 1, 2, 2)), "a configuration of the Triton kernel is given"),
        ("256 x 64", {}, "key_dim must be 64 or 128 and value_dim a multiple of 64, got 256 and 64"),
    ],
)
def test_what_the_mosaic_gpu_kernels_cannot_run_is_refused(rng, dims, changes, message):
    options = dict(changes)
    inputs, pool = make_prefill(rng, [2], DIMS[dims], options.pop("dtype", jnp.bfloat16))
    with pytest.raises(UnsupportedError, match=message):
        prefill(inputs, pool, [2], [0], [3], [6], implementation="mosaic_gpu", **options)


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="Mosaic GPU kernels need JAX 0.11.2")
def test_queries_of_another_dtype_are_refused_by_the_mosaic_gpu_kernels(rng):
    (q, *others), pool = make_prefill(rng, [2], DIMS["kimi"], jnp.bfloat16)
    with pytest.raises(UnsupportedError, match="q, k and v must be bfloat16, got float32, bfloat16 and bfloat16"):
        prefill((q.astype(np.float32), *others), pool, [2], [0], [3], [6], implementation="mosaic_gpu")
