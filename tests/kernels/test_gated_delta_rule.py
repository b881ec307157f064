"""gated_delta_rule's update: outputs and states against the oracle, and the bitwise promises."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.common import (
    IMPLEMENTATIONS,
    WINDOWS,
    assert_close,
    assert_untouched,
    dirty_pool,
    how,
    mixed_rows,
    pack,
    skip_if_unavailable,
)
from oracles.ops import gated_delta_rule, gates

from pallas_kernels import (
    gated_delta_rule_gates,
    gated_delta_rule_recurrent,
    gated_delta_rule_update,
)
from pallas_kernels.gated_delta_rule.config import Config

LAYER, LAYERS, BLOCKS = 1, 2, 24


@dataclasses.dataclass(frozen=True)
class Dims:
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 16
    value_dim: int = 32


DIMS = {
    "grouped": Dims(),
    "equal heads": Dims(3, 3, 32, 16),
    "96 x 192": Dims(1, 2, 96, 192),
    "256 x 64": Dims(1, 2, 256, 64),
    "odd": Dims(1, 3, 24, 20),
    "kimi": Dims(2, 2, 128, 128),
    "narrow": Dims(1, 2, 8, 10),
    "128 x 64": Dims(2, 6, 128, 64),
    "64 x 128": Dims(1, 1, 64, 128),
}

# Dims and implementations that only a GPU runs.
ON_A_GPU = [
    pytest.param(*each, marks=pytest.mark.gpu)
    for each in (("grouped", "triton"), ("kimi", "mosaic_gpu"), ("64 x 128", "mosaic_gpu"))
]


def make(rng, lengths, dims, dtype=jnp.float32, state_dtype=jnp.float32, extra_tokens=3, clean=(3, 4, 5), kda=False):
    tokens = sum(lengths) + extra_tokens

    def draw(*shape):
        x = rng.normal(size=(tokens, *shape)).astype(np.float32)
        x[sum(lengths) :] = np.nan  # padding tokens may hold anything
        return jnp.asarray(x).astype(dtype)

    channels = 2 * dims.key_heads * dims.key_dim + dims.value_heads * dims.value_dim
    head = lambda *key: jnp.asarray(rng.normal(size=(dims.value_heads, *key)), jnp.float32)
    key = (dims.key_dim,) if kda else ()
    pool = dirty_pool(rng, (LAYERS, BLOCKS, dims.value_heads, dims.value_dim, dims.key_dim), state_dtype, clean)
    return draw(channels), draw(dims.value_heads, *key), draw(dims.value_heads), head(), head(*key), pool


def unpack(qkv, dims):
    qkv = np.asarray(qkv.astype(jnp.float32), np.float64)
    keys = dims.key_heads * dims.key_dim
    q, k, v = qkv[:, :keys], qkv[:, keys : 2 * keys], qkv[:, 2 * keys :]
    return (
        q.reshape(-1, dims.key_heads, dims.key_dim),
        k.reshape(-1, dims.key_heads, dims.key_dim),
        v.reshape(-1, dims.value_heads, dims.value_dim),
    )


def state_of(pool, block):
    state = np.asarray(pool.astype(jnp.float32), np.float64)[LAYER, block]
    return state if block else np.zeros_like(state)


def assert_rows_match_the_oracle(lengths, read, write, out, before, after, row_inputs, scale, l2norm=True):
    """Checks the outputs, every state that was kept, and that nothing else in the pool changed."""
    key_dim, written = before.shape[-1], []
    ends = np.cumsum([0, *lengths])
    for r, n in enumerate(lengths):
        tokens = slice(ends[r], ends[r] + n)
        inputs = (x[tokens] for x in row_inputs)
        wanted, states = gated_delta_rule(*inputs, state_of(before, read[r]), scale, l2norm)
        # A token's output sums key_dim products of a state, which n steps of key_dim products each have made.
        terms = 4 * (n + 1) * key_dim
        assert_close(out[tokens], wanted, out.dtype, terms, f"row {r}")
        for t in range(n):
            if write[r, t]:
                written.append(write[r, t])
                assert_close(state_of(after, write[r, t]), states[t], after.dtype, terms, f"state {r}, {t}")
    assert not np.asarray(out[sum(lengths) :].astype(jnp.float32)).any()
    assert_untouched(before, after, written)
    assert_untouched(before[:LAYER], after[:LAYER], written=())


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
    dims = DIMS[dims]
    lengths, read, write = mixed_rows(window)
    qkv, a, b, A_log, dt_bias, pool = make(rng, lengths, dims, dtype, state_dtype)
    scale = dims.key_dim**-0.5 if l2norm else 1 / dims.key_dim
    out, after = gated_delta_rule_update(
        qkv,
        a,
        b,
        A_log,
        dt_bias,
        pool,
        LAYER,
        pack(lengths, padding_rows=2),
        jnp.array([*read, 5, 0]),
        jnp.asarray(write),
        use_qk_l2norm=l2norm,
        scale=None if l2norm else scale,
        **how(implementation),
    )
    gated = gates(*(x.astype(jnp.float32) for x in (a, b)), A_log, dt_bias)
    assert_rows_match_the_oracle(lengths, read, write, out, pool, after, (*unpack(qkv, dims), *gated), scale, l2norm)


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
    """Kimi delta attention with both kinds of gate, in rows of several tokens, each with its own gates."""
    dims = DIMS[dims]
    lengths, read, write = mixed_rows(4)
    qkv, a, b, A_log, dt_bias, pool = make(rng, lengths, dims, dtype, kda=True)
    rows = pack(lengths, padding_rows=2), jnp.array([*read, 5, 0]), jnp.asarray(write)
    out, after = gated_delta_rule_update(
        qkv, a, b, A_log, dt_bias, pool, LAYER, *rows, lower_bound=lower_bound, **how(implementation)
    )
    gated = gates(*(x.astype(jnp.float32) for x in (a, b)), A_log, dt_bias, lower_bound)
    inputs = (*unpack(qkv, dims), *gated)
    assert_rows_match_the_oracle(lengths, read, write, out, pool, after, inputs, dims.key_dim**-0.5)


@pytest.mark.parametrize(
    ("dims", "implementation"),
    [*((dims, each) for dims in ("grouped", "odd") for each in ("xla", "interpret")), *ON_A_GPU],
)
def test_update_with_negative_eigenvalues_matches_the_oracle(rng, dims, implementation):
    """beta goes up to 2, as in OLMo."""
    dims = DIMS[dims]
    lengths, read, write = mixed_rows(4)
    qkv, a, b, A_log, dt_bias, pool = make(rng, lengths, dims)
    rows = pack(lengths, padding_rows=2), jnp.array([*read, 5, 0]), jnp.asarray(write)
    out, after = gated_delta_rule_update(
        qkv, a, b + 3.0, A_log, dt_bias, pool, LAYER, *rows, allow_neg_eigval=True, **how(implementation)
    )
    inputs = (*unpack(qkv, dims), *gates(a, b + 3.0, A_log, dt_bias, beta_max=2))
    assert_rows_match_the_oracle(lengths, read, write, out, pool, after, inputs, dims.key_dim**-0.5)


@pytest.mark.parametrize(("window", "implementation"), WINDOWS)
@pytest.mark.parametrize("kda", [False, True])
@pytest.mark.parametrize(
    ("dims", "dtype"), [("grouped", jnp.float32), ("odd", jnp.float32), ("96 x 192", jnp.bfloat16)]
)
def test_recurrent_matches_the_oracle(rng, dims, dtype, kda, window, implementation):
    dims = DIMS[dims]
    lengths, read, write = mixed_rows(window)
    qkv, a, b, A_log, dt_bias, pool = make(rng, lengths, dims, dtype, kda=kda)
    q, k, v = (jnp.asarray(x, jnp.float32).astype(dtype) for x in unpack(qkv, dims))
    g, beta = gated_delta_rule_gates(a, b, A_log, dt_bias)
    rows = pack(lengths, padding_rows=2), jnp.array([*read, 5, 0]), jnp.asarray(write)
    out, after = gated_delta_rule_recurrent(q, k, v, g, 2 * beta, pool, LAYER, *rows, scale=0.3, **how(implementation))
    inputs = (*unpack(qkv, dims), np.asarray(g, np.float64), 2 * np.asarray(beta, np.float64))
    assert_rows_match_the_oracle(lengths, read, write, out, pool, after, inputs, 0.3)


@pytest.mark.parametrize("kda", [False, True])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_gates_match_the_oracle(rng, kda, lower_bound):
    dims = DIMS["odd"]
    _, a, b, A_log, dt_bias, _ = make(rng, [5], dims, extra_tokens=0, kda=kda)
    a = a * 20  # reaches both ends of the softplus
    g, beta = gated_delta_rule_gates(a, b, A_log, dt_bias, lower_bound=lower_bound, allow_neg_eigval=True)
    wanted_g, wanted_beta = gates(a, b, A_log, dt_bias, lower_bound, beta_max=2)
    np.testing.assert_allclose(g, wanted_g, rtol=4e-6)
    np.testing.assert_allclose(beta, wanted_beta, rtol=4e-6)


# On the GPU the sizes fill a warp's tiles, and the default configurations depend on rows and window.
ALONE = [
    ("grouped", jnp.float32, "xla"),
    pytest.param("grouped", jnp.float32, "interpret", marks=pytest.mark.deep),
    *(
        pytest.param(dims, dtype, "triton", marks=pytest.mark.gpu)
        for dims in ("grouped", "kimi")
        for dtype in (jnp.float32, jnp.bfloat16)
    ),
]
ALONE_BY_MOSAIC_GPU = [
    pytest.param(dims, dtype, "mosaic_gpu", marks=pytest.mark.gpu)
    for dims in ("kimi", "64 x 128")
    for dtype in (jnp.float32, jnp.bfloat16)
]


@pytest.mark.parametrize(("dims", "state_dtype", "implementation"), [*ALONE, *ALONE_BY_MOSAIC_GPU])
def test_update_of_a_row_depends_on_that_row_alone(rng, dims, state_dtype, implementation):
    """A row gives the same bits alone, among others, in another order, with padding, and as decode or verify row."""
    dims, lengths = DIMS[dims], [1, 3, 1, 2, 1]
    qkv, a, b, A_log, dt_bias, pool = make(rng, lengths, dims, jnp.bfloat16, state_dtype, clean=(1, 2, 3, 4, 5))
    loc = np.asarray(pack(lengths))
    run = jax.jit(
        lambda qkv, a, b, loc, read, write: gated_delta_rule_update(
            qkv, a, b, A_log, dt_bias, pool, LAYER, loc, read, write, **how(implementation)
        )
    )

    def results(rows, window, padding):
        tokens = np.concatenate([np.arange(loc[r], loc[r + 1]) for r in rows] + [np.zeros(padding, int)])
        # In interpret mode a window of one is a separate program, which XLA may round differently.
        window = 3 if implementation == "interpret" else window
        write = np.zeros((len(rows) + padding, window), np.int32)
        for i in range(len(rows)):
            write[i, :] = 6 + 3 * i + np.arange(window)
        read = jnp.array([r + 1 for r in rows] + [0] * padding)
        here = pack([lengths[r] for r in rows], padding)
        out, after = run(qkv[tokens], a[tokens], b[tokens], here, read, jnp.asarray(write))
        return {
            r: (
                np.asarray(out[here[i] : here[i + 1]].astype(jnp.float32)),
                np.asarray(after[LAYER, write[i, lengths[r] - 1]].astype(jnp.float32)),
            )
            for i, r in enumerate(rows)
        }

    wanted = results([0, 1, 2, 3, 4], 3, 0)
    for rows, window, padding in [
        ([0], 1, 0),
        ([2, 0, 4], 1, 0),
        ([4, 3, 2, 1, 0], 3, 3),
        ([1], 3, 0),
        ([0], 3, 7),
        ([0], 1, 40),
    ]:
        for r, (out, state) in results(rows, window, padding).items():
            np.testing.assert_array_equal(out, wanted[r][0])
            np.testing.assert_array_equal(state, wanted[r][1])


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
        LAYER,
        pack([4]),
        jnp.array([3]),
        jnp.array([[6, 7, 8, 9]]),
        **how(implementation),
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
            LAYER,
            pack([1]),
            jnp.array([3]),
            jnp.array([[3]]),
            **how(implementation),
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
            LAYER,
            pack([1, 1]),
            jnp.array([3, 0]),
            jnp.array([[6], [7]]),
            **how(implementation),
            config=Config(*config),
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
        lambda pool, read, write, way: gated_delta_rule_update(
            qkv, a, b, A_log, dt_bias, pool, 0, pack([1]), read, write, implementation=way
        ),
        static_argnums=3,
        donate_argnums=0,
    )
    out, pool = step(pool, jnp.array([last]), jnp.array([[last]]), implementation)
    wanted, after = gated_delta_rule_update(
        qkv, a, b, A_log, dt_bias, small, LAYER, pack([1]), jnp.array([3]), jnp.array([[3]]), implementation="xla"
    )
    np.testing.assert_allclose(out, wanted, atol=1e-5)
    np.testing.assert_allclose(pool[0, last], after[LAYER, 3], atol=1e-5)
    assert float(pool[0, wrapped].min()) == float(pool[0, wrapped].max()) == 7.0


def test_empty_arrays_return_at_once(rng):
    dims = DIMS["grouped"]
    qkv, a, b, A_log, dt_bias, pool = make(rng, [2], dims)
    none = jnp.zeros((0,), jnp.int32)
    out, after = gated_delta_rule_update(qkv, a, b, A_log, dt_bias, pool, 0, pack([]), none, none[:, None])
    assert not out.any()
    assert after is pool


def test_errors_name_the_bad_argument(rng):
    dims = DIMS["grouped"]
    qkv, a, b, A_log, dt_bias, pool = make(rng, [2], dims)
    row = jnp.array([1])
    update = lambda qkv=qkv, a=a, write=row[None]: gated_delta_rule_update(
        qkv, a, b, A_log, dt_bias, pool, 0, pack([2]), row, write
    )
    with pytest.raises(ValueError, match="qkv must have 2 \\* key_heads \\* 16"):
        update(qkv=qkv[:, :-8])
    with pytest.raises(ValueError, match="b must be Float"):
        update(a=a[:, :2])
    with pytest.raises(ValueError, match="write_blocks must be Int32"):
        update(write=row)
    with pytest.raises(ValueError, match="dt_bias must have the shape"):
        update(a=jnp.zeros((*a.shape, dims.key_dim)))
    with pytest.raises(ValueError, match="lower_bound must be negative or None, got 5"):
        gated_delta_rule_gates(a, b, A_log, dt_bias, lower_bound=5.0)
