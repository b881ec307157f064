"""selective_state_update: outputs and states against the oracle, and the bitwise promises."""

import itertools

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
from kernels.state_space_rows import DIMS, LAYER, Dims, assert_rows_match_the_oracle, make, rows_at, state_of
from oracles.ops import selective_state_update as oracle

from pallas_kernels import Run, selective_state_update
from pallas_kernels.selective_state_update.config import Config


@pytest.mark.parametrize(("window", "implementation"), [*WINDOWS, (1, "interpret")])
@pytest.mark.parametrize(
    ("dims", "dtype", "state_dtype"),
    [
        ("mamba2", jnp.float32, jnp.float32),
        # float32 outputs would show if a narrow state were rounded between tokens.
        ("mamba2", jnp.float32, jnp.bfloat16),
        ("mamba2", jnp.bfloat16, jnp.float16),
        ("mamba2 128", jnp.bfloat16, jnp.bfloat16),
        ("mamba2 256", jnp.float32, jnp.float32),
        ("mamba2 odd", jnp.float32, jnp.float32),
        ("mamba1", jnp.float32, jnp.float32),
        ("mamba1", jnp.bfloat16, jnp.bfloat16),
        ("mamba1 odd", jnp.float32, jnp.float32),
    ],
)
def test_update_matches_the_oracle(rng, dims, dtype, state_dtype, window, implementation):
    lengths, read, write = mixed_rows(window)
    arguments, pool, options = make(rng, lengths, DIMS[dims], dtype, state_dtype)
    rows = rows_at(pack(lengths, padding_rows=2), jnp.array([*read, 5, 0]), jnp.asarray(write))
    out, after = selective_state_update(*arguments, pool, rows, **options, run=run_by(implementation))
    assert_rows_match_the_oracle(lengths, read, write, out, pool, after, arguments, options)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [
        (jnp.bfloat16, jnp.float32),
        (jnp.bfloat16, jnp.bfloat16),
        (jnp.float16, jnp.float16),
        (jnp.float32, jnp.float32),
        (jnp.float32, jnp.bfloat16),
    ],
)
@pytest.mark.parametrize("dims", ["64 x 128", "128 x 64"])
def test_update_by_mosaic_gpu_matches_the_oracle(rng, dims, dtype, state_dtype, window):
    test_update_matches_the_oracle(rng, dims, dtype, state_dtype, window, "mosaic_gpu")


@pytest.mark.parametrize(
    ("dims", "implementation"),
    [
        *itertools.product(("mamba2", "mamba1"), IMPLEMENTATIONS[:2]),
        *(pytest.param(dims, "triton", marks=pytest.mark.gpu) for dims in ("mamba2", "mamba1")),
        pytest.param("64 x 128", "mosaic_gpu", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize(("given", "dt_softplus"), [((), True), (("D",), False), (("z", "dt_bias"), True)], ids=str)
def test_optional_arguments_match_the_oracle(rng, dims, given, dt_softplus, implementation):
    dims, lengths = DIMS[dims], [2, 1]
    (x, dt, A, B, C), pool, options = make(rng, lengths, dims, extra_tokens=0)
    options = {name: options[name] for name in given}
    dt = dt if dt_softplus else jnp.abs(dt)
    rows = rows_at(pack(lengths), jnp.array([3, 4]), jnp.array([[6, 7], [8, 0]]))
    out, after = selective_state_update(
        x, dt, A, B, C, pool, rows, **options, dt_softplus=dt_softplus, run=run_by(implementation)
    )
    for r, tokens in enumerate((slice(0, 2), slice(2, 3))):
        per_row = options | ({"z": options["z"][tokens]} if "z" in options else {})
        wanted, states = oracle(
            x[tokens], dt[tokens], A, B[tokens], C[tokens], state_of(pool, 3 + r), **per_row, dt_softplus=dt_softplus
        )
        assert_close(out[tokens], wanted, jnp.float32, 12 * dims.state_dim, f"row {r}")
        assert_close(state_of(after, (7, 8)[r]), states[-1], jnp.float32, 12 * dims.state_dim, f"state {r}")


# On the GPU the sizes fill a warp's tiles, and the default configurations depend on rows and window.
ALONE = [
    *(("mamba2", jnp.float32, how) for how in IMPLEMENTATIONS[:2]),
    *(
        pytest.param(dims, dtype, "triton", marks=pytest.mark.gpu)
        for dims in ("mamba2", "mamba2 128", "mamba1")
        for dtype in (jnp.float32, jnp.bfloat16)
    ),
    *(
        pytest.param(dims, dtype, "mosaic_gpu", marks=pytest.mark.gpu)
        for dims in ("64 x 128", "128 x 64")
        for dtype in (jnp.float32, jnp.bfloat16)
    ),
]


@pytest.mark.parametrize(("dims", "state_dtype", "implementation"), ALONE)
def test_update_of_a_row_depends_on_that_row_alone(rng, dims, state_dtype, implementation):
    """A row gives the same bits alone, among others, in another order, with padding, and as decode or verify row."""
    lengths = [1, 3, 1, 2, 1]
    (x, dt, A, B, C), pool, options = make(rng, lengths, DIMS[dims], jnp.bfloat16, state_dtype, clean=(1, 2, 3, 4, 5))
    loc = np.asarray(pack(lengths))
    z = options.pop("z")
    run = jax.jit(
        lambda x, dt, B, C, z, *rows: selective_state_update(
            x, dt, A, B, C, pool, rows_at(*rows), z=z, **options, run=run_by(implementation)
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
        out, after = run(*(v[tokens] for v in (x, dt, B, C, z)), here, read, jnp.asarray(write))
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


@pytest.mark.parametrize("implementation", ["interpret", pytest.param("triton", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dims", ["mamba2", "mamba1"])
def test_every_config_computes_the_same_numbers(rng, dims, implementation):
    dims = DIMS[dims]
    arguments, pool, options = make(rng, [1, 1], dims)
    rows = rows_at(pack([1, 1]), jnp.array([3, 0]), jnp.array([6, 7]))
    results = [
        selective_state_update(*arguments, pool, rows, **options, run=run_by(implementation, Config(*config)))
        for config in ((4, 4, 16, 1), (16, 4, 16, 1), (16, 2, 8, 2), (32, 32, 32, 4))
    ]
    for out, after in results[1:]:
        assert_close(out, np.asarray(results[0][0], np.float64), jnp.float32, dims.state_dim, "outputs")
        for block in (6, 7):
            assert_close(state_of(after, block), state_of(results[0][1], block), jnp.float32, dims.state_dim, "state")


@pytest.mark.gpu
@pytest.mark.large_pool
@pytest.mark.parametrize("implementation", ["triton", "mosaic_gpu"])
def test_update_reaches_blocks_beyond_2_to_the_31_elements(rng, implementation):
    skip_if_unavailable(implementation)
    dims, blocks = Dims(8, 128, 128), 16500
    arguments, small, options = make(rng, [1], dims, extra_tokens=0)
    last = blocks - 1
    wrapped = last - 2**31 // (8 * 128 * 128)
    fill = lambda: jnp.zeros((1, blocks, 8, 128, 128)).at[0, last].set(small[LAYER, 3]).at[0, wrapped].set(7.0)
    step = jax.jit(
        lambda pool, block: selective_state_update(
            *arguments, pool, rows_at(pack([1]), block, block, layer=0), **options, run=run_by(implementation)
        ),
        donate_argnums=0,
    )
    out, pool = step(jax.jit(fill)(), jnp.array([last]))
    rows = rows_at(pack([1]), jnp.array([3]), jnp.array([3]))
    wanted, after = selective_state_update(*arguments, small, rows, **options, run=run_by("xla"))
    np.testing.assert_allclose(out, wanted, atol=1e-4)
    np.testing.assert_allclose(pool[0, last], after[LAYER, 3], atol=1e-5)
    assert float(pool[0, wrapped].min()) == float(pool[0, wrapped].max()) == 7.0


def test_empty_arrays_return_at_once(rng):
    arguments, pool, options = make(rng, [2], DIMS["mamba2"])
    none = jnp.zeros((0,), jnp.int32)
    out, after = selective_state_update(*arguments, pool, rows_at(pack([]), none, none), **options)
    assert not out.any()
    assert after is pool


def test_errors_name_the_bad_argument(rng):
    (x, dt, A, B, C), pool, _ = make(rng, [2], DIMS["mamba2"])
    row = jnp.array([1])
    update = lambda dt=dt, B=B, C=C, **options: selective_state_update(
        x, dt, A, B, C, pool, rows_at(pack([2]), row, row), **options
    )
    with pytest.raises(ValueError, match=r"dt must be Float.* or Float"):
        update(dt=dt[:, :2])
    with pytest.raises(ValueError, match="C must be Float"):
        update(C=C[:, :1])
    with pytest.raises(ValueError, match="the number of groups of B must divide x's 4 heads, got 3"):
        update(B=jnp.concatenate([B, B[:, :1]], 1), C=jnp.concatenate([C, C[:, :1]], 1))
    with pytest.raises(ValueError, match="D must be Float"):
        update(D=jnp.zeros(3))
    with pytest.raises(ValueError, match="implementation must be"):
        update(run=Run(implementation="cuda"))
