"""selective_scan: outputs and states against the oracle, and the bitwise promises."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.common import IMPLEMENTATIONS, assert_close, assert_untouched, dirty_pool, pack, run_by
from kernels.state_space_rows import rows_at
from oracles.ops import selective_state_update as oracle

from pallas_kernels import RowCheckpoints, Run, selective_scan, selective_state_update
from pallas_kernels.selective_scan.config import Config, default_config

LAYER, LAYERS, BLOCKS = 1, 2, 24
# (heads, head_dim, state_dim, groups)
DIMS = {"mamba1": (1, 37, 16, 1), "odd": (1, 10, 20, 1), "heads": (4, 8, 16, 2)}


def make(
    rng, lengths, dims=DIMS["mamba1"], dtype=jnp.float32, state_dtype=jnp.float32, extra_tokens=3, clean=(3, 4, 5)
):
    """Returns the arguments up to C, a dirty pool, and the optional arguments."""
    heads, head_dim, state_dim, groups = dims
    tokens = sum(lengths) + extra_tokens

    def draw(*shape):
        x = rng.normal(size=(tokens, *shape)).astype(np.float32)
        x[sum(lengths) :] = np.nan  # padding tokens may hold anything
        return jnp.asarray(x).astype(dtype)

    channel = (heads, head_dim)
    fixed = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    A = -jnp.exp(fixed(*channel, state_dim))
    arguments = draw(*channel), draw(*channel), A, draw(groups, state_dim), draw(groups, state_dim)
    pool = dirty_pool(rng, (LAYERS, BLOCKS, *channel, state_dim), state_dtype, clean)
    return arguments, pool, dict(D=fixed(*channel), z=draw(*channel), dt_bias=fixed(*channel))


def how_scan(implementation, unroll=2):
    # In interpret mode the tokens of a turn are unrolled at compile time, so few of them compile faster.
    return run_by(implementation, Config(32, 4, unroll, 1) if implementation == "interpret" else None)


def state_of(pool, block):
    state = np.asarray(pool.astype(jnp.float32), np.float64)[LAYER, block]
    return state if block else np.zeros_like(state)


def in_float64(tree):
    return jax.tree.map(lambda v: np.asarray(v).astype(np.float64), tree)


def of_tokens(tokens, arguments, options):
    """Returns the arguments and options of a call over those tokens alone."""
    x, dt, A, B, C = arguments
    z = {name: v[tokens] for name, v in options.items() if name == "z"}
    return (x[tokens], dt[tokens], A, B[tokens], C[tokens]), options | z


def assert_scan_matches_the_oracle(
    rng, implementation, dims, dtype, state_dtype, rows, saved=(), given=("D", "z", "dt_bias"), **options
):
    """Checks rows (tokens, read block, write block) with checkpoints (row, column, tokens, block)."""
    lengths, read, write = zip(*rows, strict=True)
    arguments, pool, fixed = make(rng, lengths, dims, dtype, state_dtype, extra_tokens=5)
    fixed = {name: fixed[name] for name in given}
    # An offset without a block may be anything.
    offsets, blocks = np.tile(np.int32([10**6, 1]), (len(rows) + 1, 1)), np.zeros((len(rows) + 1, 2), np.int32)
    for r, column, offset, block in saved:
        offsets[r, column], blocks[r, column] = offset, block
    offsets[-1], blocks[-1] = 1, BLOCKS - 2  # a padding row
    checkpoints = RowCheckpoints(offset=jnp.asarray(offsets), block=jnp.asarray(blocks)) if saved else None
    at = rows_at(pack(lengths, 1), jnp.array([*read, 5]), jnp.array([*write, BLOCKS - 1]), checkpoints=checkpoints)
    out, after = selective_scan(*arguments, pool, at, **fixed, **options, run=how_scan(implementation))
    assert out.dtype == dtype
    out, arguments, fixed, written = *in_float64((out, arguments, fixed)), []
    for r, (n, first) in enumerate(zip(lengths, at.query_start_loc, strict=False)):
        tokens = slice(int(first), int(first) + n)
        alone, kept = of_tokens(tokens, arguments, fixed)
        initial = state_of(pool, read[r])
        wanted, states = oracle(*alone, initial, **kept, **options)
        # A token's output sums state_dim products of a state, to which n tokens have added one product each.
        terms = 4 * (n + 1) * dims[2]
        assert_close(out[tokens], wanted, dtype, terms, f"row {r}")
        stores = [(offset, block) for row, _, offset, block in saved if row == r] + [(n, write[r])] * (n > 0)
        for offset, block in stores:
            if block:
                written.append(block)
                state = [initial, *states][offset]
                assert_close(state_of(after, block), state, state_dtype, terms, f"state {r} after {offset}")
    assert not out[sum(lengths) :].any()
    assert_untouched(pool, after, written)
    assert_untouched(pool[:LAYER], after[:LAYER], written=())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("dims", "dtype", "state_dtype"),
    [
        ("mamba1", jnp.float32, jnp.float32),
        # float32 outputs would show if a narrow state were rounded between tokens.
        ("mamba1", jnp.float32, jnp.bfloat16),
        ("odd", jnp.bfloat16, jnp.float16),
        ("heads", jnp.bfloat16, jnp.float32),
    ],
)
def test_scan_matches_the_oracle(rng, dims, dtype, state_dtype, implementation):
    # A row with blocks of its own, fresh rows, an empty row, a skipped write, a row that writes its read block.
    rows = [(1, 3, 6), (63, 0, 7), (0, 4, 8), (2, 4, 0), (65, 5, 5), (3, 0, 9)]
    assert_scan_matches_the_oracle(rng, implementation, DIMS[dims], dtype, state_dtype, rows)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("state_dtype", [jnp.float32, jnp.bfloat16])
def test_checkpoints_match_the_oracle(rng, state_dtype, implementation):
    # Some checkpoints go to the read block, are at the row's start or end, or belong to a row that writes no final
    # state.
    rows = [(64, 3, 3), (1, 0, 0), (0, 5, 6), (13, 4, 7)]
    saved = [(0, 0, 16, 10), (0, 1, 17, 11), (1, 1, 1, 12), (3, 0, 0, 13), (3, 1, 6, 4)]
    assert_scan_matches_the_oracle(rng, implementation, DIMS["mamba1"], jnp.float32, state_dtype, rows, saved)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("given", "dt_softplus"), [((), True), (("D",), False), (("z", "dt_bias"), True)], ids=str)
def test_optional_arguments_match_the_oracle(rng, given, dt_softplus, implementation):
    rows = [(2, 3, 6), (5, 0, 7)]
    assert_scan_matches_the_oracle(
        rng, implementation, DIMS["odd"], jnp.float32, jnp.float32, rows, given=given, dt_softplus=dt_softplus
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_many_short_rows_match_the_oracle(rng, implementation):
    rows = [(n % 4, 3 * (n % 3 == 0), 6 + n // 2 if n % 2 else 0) for n in range(33)]
    assert_scan_matches_the_oracle(rng, implementation, (1, 5, 4, 1), jnp.float32, jnp.float32, rows)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_split_anywhere_is_bit_identical(rng, implementation):
    """A row gives the same bits in one call, in two calls, and with a checkpoint at the split."""
    n = 37
    arguments, pool, options = make(rng, [n], extra_tokens=0)

    @jax.jit
    def run(arguments, options, pool, length, read, write, offset):
        checkpoints = RowCheckpoints(offset=offset[None, None], block=jnp.array([[9]]))
        rows = rows_at(jnp.stack([length * 0, length]), read[None], write[None], checkpoints=checkpoints)
        # In interpret mode XLA may round one unrolled token differently from another, so a turn has only one.
        return selective_scan(*arguments, pool, rows, **options, run=how_scan(implementation, unroll=1))

    ints = lambda *values: [jnp.int32(v) for v in values]
    whole, after = run(arguments, options, pool, *ints(n, 3, 6, n))
    np.testing.assert_array_equal(after[LAYER, 9], after[LAYER, 6])
    for split in (1, 2, 4, 23, 36):
        first, between = run(arguments, options, pool, *ints(split, 3, 7, split))
        # The rest comes in an array of the same length, in which the tokens after it are padding.
        rest = of_tokens(jnp.roll(jnp.arange(n), -split), arguments, options)
        second, last = run(*rest, between, *ints(n - split, 7, 8, 0))
        np.testing.assert_array_equal(jnp.concatenate([first[:split], second[: n - split]]), whole)
        np.testing.assert_array_equal(last[LAYER, 8], after[LAYER, 6])
        through, kept = run(arguments, options, pool, *ints(n, 3, 6, split))
        np.testing.assert_array_equal(through, whole)
        np.testing.assert_array_equal(kept[LAYER, 9], between[LAYER, 7])
        np.testing.assert_array_equal(kept[LAYER, 6], after[LAYER, 6])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_row_depends_on_that_row_alone(rng, implementation):
    """A row gives the same bits alone, among other rows, in another order, with padding, and beside NaN."""
    lengths = [1, 9, 4, 2, 6]
    arguments, pool, options = make(rng, lengths, dtype=jnp.bfloat16, extra_tokens=0)
    loc = np.asarray(pack(lengths))
    run = jax.jit(
        lambda arguments, options, *rows: selective_scan(
            *arguments, pool, rows_at(*rows), **options, run=how_scan(implementation)
        )
    )

    def results(rows, padding, spoilt=()):
        tokens = np.concatenate([np.arange(loc[r], loc[r + 1]) for r in rows])
        tokens = np.pad(tokens, (0, sum(lengths) + padding - len(tokens)))
        (x, *rest), kept = of_tokens(tokens, *jax.tree.map(np.asarray, (arguments, options)))
        here = pack([lengths[r] for r in rows], len(lengths) + padding - len(rows))
        for i, r in enumerate(rows):
            x[int(here[i]) : int(here[i + 1])] = np.nan if r in spoilt else x[int(here[i]) : int(here[i + 1])]
        read, write = (np.zeros(len(here) - 1, np.int32) for _ in range(2))
        read[: len(rows)], write[: len(rows)] = [r % 3 + 3 for r in rows], [r + 6 for r in rows]
        out, after = jax.tree.map(np.asarray, run((x, *rest), kept, here, read, write))
        return {
            r: (out[here[i] : here[i + 1]].astype(np.float32), after[LAYER, r + 6])
            for i, r in enumerate(rows)
            if r not in spoilt
        }

    wanted = results([0, 1, 2, 3, 4], 0)
    for rows, padding, spoilt in [
        ([0], 0, ()),
        ([4, 3, 2, 1, 0], 3, ()),
        ([1], 3, ()),
        ([0, 1, 2, 3, 4], 0, (0, 2, 4)),
    ]:
        for r, (out, state) in results(rows, padding, spoilt).items():
            np.testing.assert_array_equal(out, wanted[r][0])
            np.testing.assert_array_equal(state, wanted[r][1])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("value", [np.nan, np.inf, 1.0], ids=str)
def test_a_checkpoint_does_not_depend_on_the_tokens_after_it(rng, value, implementation):
    """The kernel's loop runs tokens after a checkpoint in the same turn as the last tokens before it."""
    length, kept = 8, 5
    arguments, pool, options = make(rng, [length], DIMS["odd"], extra_tokens=0)
    spoilt = [v if n == 2 else v.at[kept:].set(value) for n, v in enumerate(arguments)]  # all but A

    @jax.jit
    def run(arguments, length, offset, block):
        checkpoints = RowCheckpoints(offset=offset[None, None], block=block[None, None])
        rows = rows_at(jnp.stack([length * 0, length]), jnp.array([3]), jnp.array([6]), checkpoints=checkpoints)
        return selective_scan(*arguments, pool, rows, **options, run=how_scan(implementation, unroll=4))[1]

    ints = lambda *values: [jnp.int32(v) for v in values]
    wanted = run(arguments, *ints(kept, 0, 0))[LAYER, 6]
    after = run(spoilt, *ints(length, kept, 9))[LAYER, 9]
    np.testing.assert_array_equal(after, wanted)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_chunk_may_follow_a_verify_step(rng, implementation):
    """A chunk after a verify step with two of three tokens accepted continues as if five tokens had run in one call."""
    arguments, pool, options = make(rng, [6], extra_tokens=0)
    one, kind = (lambda v: jnp.array([v])), dict(run=how_scan(implementation))
    given, kept = of_tokens(jnp.array([0, 1, 3, 4, 5]), arguments, options)
    whole, after = selective_scan(*given, pool, rows_at(pack([5]), one(3), one(6)), **kept, **kind)
    given, kept = of_tokens(slice(0, 3), arguments, options)
    rows = rows_at(pack([3]), one(3), jnp.array([[7, 8, 9]]))
    _, pool = selective_state_update(*given, pool, rows, **kept, run=run_by(implementation))
    given, kept = of_tokens(slice(3, 6), arguments, options)
    chunk, pool = selective_scan(*given, pool, rows_at(pack([3]), one(8), one(10)), **kept, **kind)
    assert_close(chunk, np.asarray(whole[2:], np.float64), jnp.float32, 4 * 6 * 16, "outputs")
    assert_close(state_of(pool, 10), state_of(after, 6), jnp.float32, 4 * 6 * 16, "state")


@pytest.mark.parametrize("implementation", ["interpret", pytest.param("triton", marks=pytest.mark.gpu)])
def test_every_config_computes_the_same_numbers(rng, implementation):
    arguments, pool, options = make(rng, [1, 7], DIMS["odd"])
    rows = rows_at(pack([1, 7]), jnp.array([3, 0]), jnp.array([6, 7]))
    results = [
        selective_scan(*arguments, pool, rows, **options, run=run_by(implementation, Config(*config)))
        for config in ((4, 16, 1, 1), (8, 32, 3, 2))
    ]
    for out, after in results[1:]:
        assert_close(out, np.asarray(results[0][0], np.float64), jnp.float32, 4 * 8 * 20, "outputs")
        for block in (6, 7):
            assert_close(state_of(after, block), state_of(results[0][1], block), jnp.float32, 4 * 8 * 20, "state")


@pytest.mark.parametrize("implementation", ["interpret", pytest.param("triton", marks=pytest.mark.gpu)])
def test_a_state_whose_dims_are_no_power_of_two_matches_the_oracle_by_default(rng, implementation):
    arguments, pool, options = make(rng, [3], (1, 5, 120, 1), extra_tokens=0)
    row = rows_at(pack([3]), jnp.array([3]), jnp.array([6]))
    out, after = selective_scan(*arguments, pool, row, **options, run=run_by(implementation))
    wanted, states = oracle(*in_float64(arguments), state_of(pool, 3), **in_float64(options))
    assert_close(out, wanted, jnp.float32, 4 * 4 * 120, "outputs")
    assert_close(state_of(after, 6), states[-1], jnp.float32, 4 * 4 * 120, "state")


def test_sizes_of_the_default_configuration_are_powers_of_two():
    for state_dim, itemsize in itertools.product(range(1, 513), (2, 4)):
        config = default_config(state_dim, itemsize)
        threads = config.segment * itemsize // 16
        for size in (config.block_dim, config.segment, threads):
            assert size > 0, (state_dim, config)
            assert size & (size - 1) == 0, (state_dim, config)
        # The threads of all channels are those of one warp.
        assert config.block_dim * threads == 32, (state_dim, config)
        # A thread has sixteen elements or more, and fewer than 32 unless the state is large.
        assert threads == 1 or 16 * threads <= state_dim, (state_dim, config)
        assert threads == 16 or state_dim < 32 * threads, (state_dim, config)


@pytest.mark.gpu
@pytest.mark.large_pool
def test_scan_reaches_blocks_beyond_2_to_the_31_elements(rng):
    arguments, small, options = make(rng, [5], (1, 8192, 16, 1), extra_tokens=0)
    blocks = 16500
    last = blocks - 1
    wrapped = last - 2**31 // (8192 * 16)
    fill = lambda: jnp.zeros((1, blocks, 1, 8192, 16)).at[0, last].set(small[LAYER, 3]).at[0, wrapped].set(7.0)
    step = jax.jit(
        lambda pool, block: selective_scan(
            *arguments, pool, rows_at(pack([5]), block, block, layer=0), **options, run=run_by("triton")
        ),
        donate_argnums=0,
    )
    out, pool = step(jax.jit(fill)(), jnp.array([last]))
    rows = rows_at(pack([5]), jnp.array([3]), jnp.array([3]))
    wanted, after = selective_scan(*arguments, small, rows, **options, run=run_by("xla"))
    assert_close(out, np.asarray(wanted, np.float64), jnp.float32, 4 * 6 * 16, "outputs")
    assert_close(pool[0, last], state_of(after, 3), jnp.float32, 4 * 6 * 16, "state")
    assert float(pool[0, wrapped].min()) == float(pool[0, wrapped].max()) == 7.0


def test_scan_differentiates(rng):
    (x, dt, A, B, C), pool, options = make(rng, [5, 2], (1, 4, 4, 1), extra_tokens=2)
    rows = rows_at(pack([5, 2], 1), jnp.array([3, 4, 0]), jnp.array([6, 7, 0]))

    def loss(x, A):
        out, after = selective_scan(x, dt, A, B, C, pool, rows, **options, run=run_by("xla"))
        return jnp.sum(out**2) + jnp.sum(after[LAYER, 6] ** 2)

    at = x[:7], A
    of = lambda x, A: loss(jnp.concatenate([x, jnp.full_like(x[:2], jnp.nan)]), A)
    step = jax.tree.map(lambda v: 1e-2 * jnp.ones_like(v), at)
    forth, back = (jax.tree.map(lambda v, s, sign=sign: v + sign * s, at, step) for sign in (1, -1))
    slope = sum(jnp.vdot(g, s) for g, s in zip(jax.grad(of, (0, 1))(*at), step, strict=True))
    np.testing.assert_allclose(slope, (of(*forth) - of(*back)) / 2, rtol=1e-3)


def test_empty_arrays_return_at_once(rng):
    arguments, pool, options = make(rng, [2])
    none = jnp.zeros((0,), jnp.int32)
    out, after = selective_scan(*arguments, pool, rows_at(pack([]), none, none), **options)
    assert out.shape == arguments[0].shape
    assert not out.any()
    assert after is pool


def test_errors_name_the_bad_argument(rng):
    (x, dt, A, B, C), pool, _ = make(rng, [2], DIMS["heads"])
    row = jnp.array([1])
    scan = lambda checkpoints=None, dt=dt, A=A, B=B, C=C, **options: selective_scan(
        x, dt, A, B, C, pool, rows_at(pack([2]), row, row, checkpoints=checkpoints), **options
    )
    with pytest.raises(ValueError, match="dt must be Float"):
        scan(dt=dt[:, :2])
    with pytest.raises(ValueError, match="A must be Float"):
        scan(A=A[..., 0])
    with pytest.raises(ValueError, match="C must be Float"):
        scan(C=C[:, :1])
    with pytest.raises(ValueError, match="the number of groups of B must divide x's 4 heads, got 3"):
        scan(B=jnp.concatenate([B, B[:, :1]], 1), C=jnp.concatenate([C, C[:, :1]], 1))
    with pytest.raises(ValueError, match="D must be Float"):
        scan(D=jnp.zeros(3))
    with pytest.raises(ValueError, match=r"rows.checkpoints.block must be Int32\[rows checkpoints\], got None"):
        scan(RowCheckpoints(offset=row[None], block=None))
    with pytest.raises(ValueError, match="implementation must be"):
        scan(run=Run(implementation="cuda"))
