"""ssd: outputs and states against the oracle, and the bitwise promises at the ends of chunks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.common import IMPLEMENTATIONS, MOSAIC_GPU, assert_close, assert_untouched, dirty_pool, pack, run_by
from kernels.state_space_rows import rows_at
from oracles.ops import selective_state_update as oracle

from pallas_kernels import RowCheckpoints, Run, UnsupportedError, chunk_rows, selective_state_update, ssd
from pallas_kernels.ssd.config import Config

LAYER, LAYERS, BLOCKS = 1, 2, 24


@dataclasses.dataclass(frozen=True)
class Dims:
    heads: int
    head_dim: int
    state_dim: int
    groups: int = 1
    skip_per_channel: bool = False


DIMS = {
    "grouped": Dims(4, 16, 32, 2),
    "odd": Dims(3, 20, 24, 3, skip_per_channel=True),
    "24 x 96": Dims(2, 24, 96),
    "64 x 128": Dims(2, 64, 128),
    "80 x 256": Dims(1, 80, 256),
    "128 x 64": Dims(4, 128, 64, 2, skip_per_channel=True),
}


def make(
    rng, lengths, dims, dtype=jnp.float32, state_dtype=jnp.float32, extra_tokens=3, clean=(3, 4, 5), blocks=BLOCKS
):
    """Returns the arrays with a row per token, the arrays that all tokens share, and a dirty pool.

    The arrays are NumPy's, because slicing them compiles nothing.
    """
    tokens = sum(lengths) + extra_tokens

    def draw(*shape):
        x = rng.normal(size=(tokens, *shape)).astype(np.float32)
        x[sum(lengths) :] = np.nan  # padding tokens may hold anything
        return x.astype(dtype)

    head, channel, group = (dims.heads,), (dims.heads, dims.head_dim), (dims.groups, dims.state_dim)
    fixed = lambda *shape: rng.normal(size=shape).astype(np.float32)
    packed = dict(x=draw(*channel), dt=draw(*head), B=draw(*group), C=draw(*group), z=draw(*channel))
    skip = channel if dims.skip_per_channel else head
    pool = dirty_pool(rng, (LAYERS, blocks, *channel, dims.state_dim), state_dtype, clean)
    return packed, dict(A=-np.exp(fixed(*head)), D=fixed(*skip), dt_bias=fixed(*head)), pool


def prefill(inputs, pool, lengths, computed, read, write, checkpoints=None, chunk_size=64, **options):
    ints, loc = lambda x: jnp.asarray(x, jnp.int32), pack(lengths)
    chunks = chunk_rows(loc, ints(computed), inputs["x"].shape[0], chunk_size)
    inputs = {name: jnp.asarray(v) for name, v in inputs.items()}
    if checkpoints is not None:
        offset, block = map(ints, checkpoints)
        checkpoints = RowCheckpoints(offset=offset, block=block)
    rows = rows_at(loc, ints(read), ints(write), chunks=chunks, checkpoints=checkpoints)
    return ssd(**inputs, pool=pool, rows=rows, **options)


def in_float64(tree):
    return jax.tree.map(lambda v: np.asarray(v).astype(np.float64), tree)


def state_of(pool, block):
    state = np.asarray(pool)[LAYER, block].astype(np.float64)
    return state if block else np.zeros_like(state)


def tokens_of(packed, start, stop):
    return {name: v[start:stop] for name, v in packed.items()}


def assert_rows_match_the_oracle(packed, fixed, lengths, read, kept, before, out, after, **options):
    """Checks the outputs, the states in `kept` (row, tokens, block), and that nothing else in the pool changed."""
    loc, state_dim = np.asarray(pack(lengths)), before.shape[-1]
    packed, fixed, out = *in_float64((packed, fixed)), np.asarray(out)
    # A token's output sums state_dim products of the state, and for each token of the chunk a product of sums of
    # state_dim.
    terms = 16 * (64 + state_dim)
    for r, n in enumerate(lengths):
        wanted, states = oracle(
            **tokens_of(packed, loc[r], loc[r + 1]), **fixed, state=state_of(before, read[r]), **options
        )
        assert_close(out[loc[r] : loc[r + 1]], wanted, out.dtype, terms, f"row {r}")
        for _, tokens, block in (k for k in kept if k[0] == r and n):
            assert_close(state_of(after, block), states[tokens - 1], after.dtype, terms, f"state {r} after {tokens}")
    assert not out[loc[-1] :].astype(np.float32).any()
    assert_untouched(before, after, [block for r, _, block in kept if lengths[r]])
    assert_untouched(before[:LAYER], after[:LAYER], written=())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("dims", "dtype", "state_dtype"),
    [
        ("grouped", jnp.float32, jnp.float32),
        # float32 outputs would show if a narrow state were rounded between chunks.
        ("grouped", jnp.float32, jnp.bfloat16),
        ("odd", jnp.bfloat16, jnp.float32),
        ("24 x 96", jnp.float16, jnp.float16),
        pytest.param("24 x 96", jnp.bfloat16, jnp.float32, marks=pytest.mark.gpu),
        ("64 x 128", jnp.bfloat16, jnp.float32),
        pytest.param("64 x 128", jnp.float32, jnp.float32, marks=pytest.mark.gpu),
        pytest.param("80 x 256", jnp.bfloat16, jnp.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_ssd_matches_the_oracle(rng, dims, dtype, state_dtype, implementation):
    check_rows(rng, dims, dtype, state_dtype, implementation)


@pytest.mark.parametrize("implementation", [MOSAIC_GPU])
@pytest.mark.parametrize("state_dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("dims", ["64 x 128", "128 x 64"])
def test_mosaic_gpu_matches_the_oracle(rng, dims, state_dtype, implementation):
    check_rows(rng, dims, jnp.bfloat16, state_dtype, implementation)


def check_rows(rng, dims, dtype, state_dtype, implementation):
    """Rows start between ends of chunks. One is fresh, some are empty or padding, some write their own read block."""
    lengths, computed = [1, 63, 0, 64, 65, 130, 5, 0, 0], [0, 1, 64, 64, 37, 128, 63, 0, 7]
    read, write = [0, 3, 4, 4, 5, 3, 5, 5, 0], [6, 3, 7, 8, 9, 10, 0, 20, 20]
    offsets, blocks = np.zeros((2, 9, 2), np.int32)
    offsets[4, 0], blocks[4, 0] = 27, 5
    offsets[5], blocks[5] = (64, 128), (12, 13)
    offsets[3], offsets[4, 1], offsets[1] = (-5, 10**6), 20, 7  # offsets without a block may be anything
    kept = [(r, n, write[r]) for r, n in enumerate(lengths) if write[r]] + [(4, 27, 5), (5, 64, 12), (5, 128, 13)]
    # Within one call row 6 must not read what row 4 writes, nor row 5 what row 1 writes.
    read[6], read[5] = 0, 4
    packed, fixed, pool = make(rng, lengths, DIMS[dims], dtype, state_dtype)
    out, after = prefill(
        packed | fixed, pool, lengths, computed, read, write, (offsets, blocks), run=run_by(implementation)
    )
    assert out.dtype == dtype
    assert_rows_match_the_oracle(packed, fixed, lengths, read, kept, pool, out, after)


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, MOSAIC_GPU])
def test_rows_of_every_length_match_the_oracle(rng, implementation):
    """Rows have every length modulo the chunk size and start anywhere within a chunk."""
    lengths, dtype = [*range(67), 127, 128, 129], jnp.float32
    rows, dims = len(lengths), Dims(1, 4, 8)
    if implementation == "mosaic_gpu":
        dims, dtype = Dims(2, 64, 64), jnp.bfloat16
    computed, read = rng.integers(0, 200, rows), np.arange(1, rows + 1) * (rng.random(rows) < 0.7)
    write = np.arange(rows + 1, 2 * rows + 1)
    packed, fixed, pool = make(
        rng, lengths, dims, dtype, extra_tokens=100, clean=range(1, rows + 1), blocks=2 * rows + 1
    )
    out, after = prefill(packed | fixed, pool, lengths, computed, read, write, run=run_by(implementation))
    kept = [(r, n, write[r]) for r, n in enumerate(lengths)]
    assert_rows_match_the_oracle(packed, fixed, lengths, read, kept, pool, out, after)


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, MOSAIC_GPU])
@pytest.mark.parametrize(("given", "dt_softplus"), [((), True), (("D",), False), (("z", "dt_bias"), True)], ids=str)
def test_optional_arguments_match_the_oracle(rng, given, dt_softplus, implementation):
    lengths = [70, 3]
    mosaic_gpu = ("64 x 128", jnp.bfloat16)
    dims, dtype = mosaic_gpu if implementation == "mosaic_gpu" else ("grouped", jnp.float32)
    packed, fixed, pool = make(rng, lengths, DIMS[dims], dtype, extra_tokens=0)
    packed["dt"] = packed["dt"] if dt_softplus else np.abs(packed["dt"])
    keep = lambda tree: {name: v for name, v in tree.items() if name in (*"xABC", "dt", *given)}
    packed, fixed = keep(packed), keep(fixed)
    options = dict(dt_softplus=dt_softplus)
    out, after = prefill(packed | fixed, pool, lengths, [0, 0], [3, 4], [6, 7], **options, run=run_by(implementation))
    kept = [(0, 70, 6), (1, 3, 7)]
    assert_rows_match_the_oracle(packed, fixed, lengths, [3, 4], kept, pool, out, after, **options)


@pytest.mark.parametrize(
    ("chunk_size", "implementation"),
    [
        (48, "xla"),
        (128, "xla"),
        (16, "interpret"),
        (128, "interpret"),
        *(pytest.param(size, "triton", marks=pytest.mark.gpu) for size in (16, 32, 128)),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.gpu)])
def test_other_chunk_sizes_match_the_oracle(rng, chunk_size, implementation, dtype):
    lengths = [150, 3]
    packed, fixed, pool = make(rng, lengths, Dims(2, 16, 16), dtype)
    how_ = dict(chunk_size=chunk_size, run=run_by(implementation))
    out, after = prefill(packed | fixed, pool, lengths, [20, 0], [3, 4], [6, 7], **how_)
    assert_rows_match_the_oracle(packed, fixed, lengths, [3, 4], [(0, 150, 6), (1, 3, 7)], pool, out, after)


SPLITS = [
    *(("grouped", jnp.float32, implementation) for implementation in ("xla", "interpret")),
    ("grouped", jnp.bfloat16, "interpret"),
    *(
        pytest.param(dims, dtype, "triton", marks=pytest.mark.gpu)
        for dims in ("grouped", "64 x 128")
        for dtype in (jnp.float32, jnp.bfloat16)
    ),
    *(pytest.param(dims, jnp.bfloat16, "mosaic_gpu", marks=pytest.mark.gpu) for dims in ("64 x 128", "128 x 64")),
]


@pytest.mark.parametrize(("dims", "dtype", "implementation"), SPLITS)
def test_split_on_the_grid_is_bit_identical(rng, dims, dtype, implementation):
    """A row gives the same bits in one call, split, resumed from a block or checkpoint, and beside other rows."""
    start, total, bucket, options = 100, 250, 320, dict(run=run_by(implementation))
    ends = (28, 92, 156, 220)  # where chunks end
    packed, fixed, pool = make(rng, [total + 50], DIMS[dims], dtype, extra_tokens=0)
    row, others = tokens_of(packed, 0, total), tokens_of(packed, total, total + 50)

    def run(pool, parts, computed, read, write, checkpoints=((0,) * 4, (0,) * 4)):
        """Runs the parts as rows of one call, padded to three rows and a fixed number of tokens."""
        lengths = [len(part["x"]) for part in parts]
        fill = lambda x: np.full((bucket - sum(lengths), *x.shape[1:]), np.nan, x.dtype)
        inputs = {name: np.concatenate([*(p[name] for p in parts), fill(packed[name])]) for name in packed}
        pad = lambda values, n=3: [*values, *[0] * (n - len(values))]
        plans = np.zeros((2, 3, 4), np.int32)
        plans[:, 0] = checkpoints
        at = pad(computed), pad(read), pad(write), tuple(plans)
        out, after = prefill(inputs | fixed, jnp.asarray(pool), pad(lengths), *at, **options)
        return np.asarray(out), np.asarray(after)

    whole, after = run(pool, [row], [start], [3], [6], (ends, (10, 11, 12, 13)))
    alone, after_alone = prefill(row | fixed, pool, [total], [start], [3], [6], **options)
    np.testing.assert_array_equal(alone, whole[:total])
    np.testing.assert_array_equal(np.asarray(after_alone)[LAYER, 6], after[LAYER, 6])
    for n, end in enumerate(ends):
        first, between = run(pool, [tokens_of(row, 0, end)], [start], [3], [7])
        np.testing.assert_array_equal(first[:end], whole[:end])
        np.testing.assert_array_equal(between[LAYER, 7], after[LAYER, 10 + n])
        rest, last = run(between, [others, tokens_of(row, end, total)], [3, start + end], [4, 7], [9, 8])
        np.testing.assert_array_equal(rest[50 : 50 + total - end], whole[end:total])
        np.testing.assert_array_equal(last[LAYER, 8], after[LAYER, 6])
        resumed, last = run(after, [tokens_of(row, end, total)], [start + end], [10 + n], [10 + n])
        np.testing.assert_array_equal(resumed[: total - end], whole[end:total])
        np.testing.assert_array_equal(last[LAYER, 10 + n], after[LAYER, 6])
    # If the row is split elsewhere, the sums are different ones, and results differ within the error of the recurrence.
    for split in (1, 60, 155):
        first, between = run(pool, [tokens_of(row, 0, split)], [start], [3], [7])
        rest, last = run(between, [tokens_of(row, split, total)], [start + split], [7], [8])
        out = np.concatenate([first[:split], rest[: total - split]])
        terms = 16 * (64 + DIMS[dims].state_dim)
        assert_close(out, in_float64(whole[:total]), dtype, terms, "outputs")
        assert_close(last[LAYER, 8], in_float64(after[LAYER, 6]), jnp.float32, terms, "state")


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, MOSAIC_GPU])
@pytest.mark.parametrize("strong_first", [False, True])
def test_extreme_decays_match_the_oracle(rng, strong_first, implementation):
    """The difference of two large sums of decays would lose the small decay between two tokens close to each other."""
    lengths, dims, dtype = [130], DIMS["grouped"], jnp.float32
    if implementation == "mosaic_gpu":
        dims, dtype = DIMS["128 x 64"], jnp.bfloat16
    packed, fixed, pool = make(rng, lengths, dims, dtype, extra_tokens=0)
    fixed = {"A": np.float32([-1e4, -1e-7, -30.0, -0.1])}
    packed = {name: v for name, v in packed.items() if name != "z"} | {"dt": np.ones((130, 4), np.float32)}
    if strong_first:
        fixed = {"A": -np.ones(4, np.float32)}
        packed["dt"] = np.where(np.arange(130)[:, None] % 64 < 32, np.float32(300), 1e-3 * np.abs(packed["x"][:, :, 0]))
    out, after = prefill(packed | fixed, pool, lengths, [0], [3], [6], dt_softplus=False, run=run_by(implementation))
    assert_rows_match_the_oracle(packed, fixed, lengths, [3], [(0, 130, 6)], pool, out, after, dt_softplus=False)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ssd_then_update_continues_one_recurrence(rng, implementation):
    """Both ops use the same layout of states, [head_dim, state_dim], and take the same arguments."""
    lengths = [70]
    packed, fixed, pool = make(rng, lengths, DIMS["grouped"], extra_tokens=0)
    _, after = prefill(tokens_of(packed, 0, 69) | fixed, pool, [69], [0], [3], [7], run=run_by(implementation))
    inputs = {name: jnp.asarray(v) for name, v in (tokens_of(packed, 69, 70) | fixed).items()}
    rows = rows_at(pack([1]), jnp.array([7]), jnp.array([6]))
    last, after = selective_state_update(**inputs, pool=after, rows=rows, run=run_by(implementation))
    wanted, states = oracle(**in_float64(packed), **in_float64(fixed), state=state_of(pool, 3))
    assert_close(last, wanted[-1:], jnp.float32, 16 * (64 + 32), "output")
    assert_close(after[LAYER, 6], states[-1], jnp.float32, 16 * (64 + 32), "state")


def test_ssd_differentiates(rng):
    packed, fixed, pool = make(rng, [40], Dims(2, 4, 8), extra_tokens=0)
    weights = jnp.asarray(rng.normal(size=packed["x"].shape), jnp.float32)

    @jax.jit
    def loss(inputs):
        out, after = prefill(inputs, pool, [40], [5], [3], [6], chunk_size=16, run=run_by("xla"))
        return jnp.vdot(out, weights) + jnp.vdot(after[LAYER, 6], after[LAYER, 3])

    inputs = jax.tree.map(jnp.asarray, packed | fixed)
    gradients = jax.grad(loss)(inputs)
    for name, gradient in gradients.items():
        assert np.isfinite(gradient).all(), name
        step = 1e-2 * jnp.sign(gradient)
        up, down = (loss(inputs | {name: inputs[name] + s}) for s in (step, -step))
        np.testing.assert_allclose(jnp.vdot(gradient, step), (up - down) / 2, rtol=2e-2, err_msg=name)


@pytest.mark.parametrize("implementation", ["interpret", pytest.param("triton", marks=pytest.mark.gpu)])
def test_every_config_computes_the_same_numbers(rng, implementation):
    packed, fixed, pool = make(rng, [70, 2], Dims(1, 40, 16), jnp.bfloat16)
    configs = [Config(16, 4, 1), Config(64, 8, 3), *([Config(32, 4, 2)] if implementation == "triton" else [])]
    run = lambda config: prefill(
        packed | fixed, pool, [70, 2], [0, 0], [3, 0], [6, 7], run=run_by(implementation, config)
    )
    wanted, state = run(configs[0])
    for config in configs[1:]:
        out, after = run(config)
        assert_close(out[:72], in_float64(wanted[:72]), jnp.bfloat16, 16 * (64 + 16), "outputs")
        for block in (6, 7):
            assert_close(state_of(after, block), state_of(state, block), jnp.float32, 16 * (64 + 16), "state")


@pytest.mark.parametrize("implementation", [pytest.param("triton", marks=pytest.mark.gpu), MOSAIC_GPU])
def test_a_row_is_the_same_alone_and_among_many(rng, implementation):
    """A row gives the same bits alone and as one of 24, for which the default configurations differ."""
    packed, fixed, pool = make(rng, [200], Dims(16, 64, 128), jnp.bfloat16, extra_tokens=0)
    alone, after = prefill(packed | fixed, pool, [200], [0], [3], [6], run=run_by(implementation))
    many = {name: np.concatenate([x] * 24) for name, x in packed.items()}
    out, pool = prefill(many | fixed, pool, [200] * 24, [0] * 24, [3] * 24, [6] + [0] * 23, run=run_by(implementation))
    for n in range(24):
        np.testing.assert_array_equal(out[200 * n : 200 * (n + 1)], alone)
    np.testing.assert_array_equal(pool[LAYER, 6], after[LAYER, 6])


@pytest.mark.parametrize("kernel", [pytest.param("triton", marks=pytest.mark.gpu), MOSAIC_GPU])
def test_a_kernel_matches_xla_on_a_long_row(rng, kernel):
    n = 65536
    packed, fixed, pool = make(rng, [n], Dims(2, 64, 128), jnp.bfloat16, extra_tokens=0)
    fixed["A"] = np.float32([-1e-4, -1.0])  # one head remembers 10,000 tokens, the other one forgets
    results = [
        prefill(packed | fixed, pool, [n], [0], [3], [6], run=run_by(implementation))
        for implementation in (kernel, "xla")
    ]
    (out, after), (wanted, state) = in_float64(results)
    # The slow head's state holds the decays of a thousand chunks, each with an error of 2^-22 on the GPU.
    terms = 16 * (64 + 128) + 1024 * 4
    assert_close(out, wanted, jnp.bfloat16, terms, "outputs")
    assert_close(after[LAYER, 6], state[LAYER, 6], jnp.float32, terms, "state")


@pytest.mark.parametrize("implementation", [pytest.param("triton", marks=pytest.mark.gpu), MOSAIC_GPU])
@pytest.mark.large_pool
def test_ssd_reaches_blocks_beyond_2_to_the_31_elements(rng, implementation):
    dims, blocks, dtype = Dims(8, 128, 128), 16500, jnp.bfloat16 if implementation == "mosaic_gpu" else jnp.float32
    packed, fixed, small = make(rng, [70], dims, dtype, extra_tokens=0)
    last = blocks - 1
    wrapped = last - 2**31 // (8 * 128 * 128)
    fill = lambda: jnp.zeros((2, blocks // 2, 8, 128, 128)).at[1, blocks // 2 - 1].set(small[LAYER, 3])
    pool = jax.jit(lambda: fill().at[divmod(wrapped, blocks // 2)].set(7.0))()
    end = blocks // 2 - 1
    step = jax.jit(
        lambda pool: prefill(packed | fixed, pool, [70], [0], [end], [end], run=run_by(implementation)),
        donate_argnums=0,
    )
    out, pool = step(pool)
    wanted, after = prefill(packed | fixed, small, [70], [0], [3], [3], run=run_by("xla"))
    terms = 16 * (64 + 128)
    assert_close(out, in_float64(wanted), dtype, terms, "outputs")
    assert_close(pool[1, end], in_float64(after[LAYER, 3]), jnp.float32, terms, "state")
    sentinel = pool[divmod(wrapped, blocks // 2)]
    assert float(sentinel.min()) == float(sentinel.max()) == 7.0


def test_empty_arrays_return_at_once(rng):
    packed, fixed, pool = make(rng, [2], DIMS["grouped"])
    chunks = chunk_rows(pack([2]), jnp.array([0]), 5)
    none = jnp.zeros((0,), jnp.int32)
    positional = [jnp.asarray((packed | fixed)[name]) for name in ("x", "dt", "A", "B", "C")]
    out, after = ssd(*positional, pool, rows_at(pack([]), none, none, chunks=chunks))
    assert not out.any()
    assert after is pool


def test_errors_name_the_bad_argument(rng):
    packed, fixed, pool = make(rng, [2], DIMS["grouped"])
    inputs = packed | fixed
    run = lambda lengths=(2,), how_=None, **changed: prefill(
        inputs | changed, pool, lengths, [0], [3], [6], **(how_ or {})
    )
    with pytest.raises(ValueError, match="dt must be Float"):
        run(dt=inputs["dt"][:, :2])
    with pytest.raises(ValueError, match="C must be Float"):
        run(C=inputs["C"][:, :1])
    with pytest.raises(ValueError, match="D must be Float"):
        run(D=jnp.zeros(3))
    three = np.concatenate([inputs["B"], inputs["B"][:, :1]], 1)
    with pytest.raises(ValueError, match="the number of groups of B must divide x's 4 heads, got 3"):
        run(B=three, C=three)
    chunks, row = chunk_rows(pack([2, 3]), jnp.array([0, 0]), 5), jnp.array([1])
    positional = [jnp.asarray((packed | fixed)[name]) for name in ("x", "dt", "A", "B", "C")]
    with pytest.raises(ValueError, match="chunks must be chunk_rows of 1 rows in 5 tokens \\(2 chunks\\), got 2 rows"):
        ssd(*positional, pool, rows_at(pack([2]), row, row, chunks=chunks))
    with pytest.raises(ValueError, match=r"rows\.chunks must be given, got None"):
        ssd(*positional, pool, rows_at(pack([2]), row, row))
    with pytest.raises(ValueError, match=r"rows\.checkpoints\.block must be Int32\[rows checkpoints\], got None"):
        ssd(*positional, pool, rows_at(pack([2]), row, row, checkpoints=RowCheckpoints(offset=row[None], block=None)))
    with pytest.raises(ValueError, match="implementation must be"):
        run(how_=dict(run=Run(implementation="cuda")))
    with pytest.raises(UnsupportedError, match="chunk_size must be a power of two from 16 to 256, got 48"):
        run(how_=dict(run=Run(implementation="triton"), chunk_size=48))
    wide = np.zeros((5, 2, 4096), np.float32)
    with pytest.raises(UnsupportedError, match=r"chunks of 64 tokens and states of 4096 need \d+ bytes"):
        prefill(inputs | dict(B=wide, C=wide), jnp.zeros((2, 2, 4, 16, 4096)), [2], [0], [0], [1], run=run_by("triton"))


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="Mosaic GPU kernels need JAX 0.11.2")
@pytest.mark.parametrize(
    ("dims", "changes", "message"),
    [
        ("64 x 128", dict(dtype=jnp.float32), "x, B and C must be bfloat16, got float32, float32 and float32"),
        ("64 x 128", dict(chunk_size=32), "chunk_size must be 64, got 32"),
        ("64 x 128", dict(config=Config(64, 4, 1)), "a configuration of the Triton kernel is given"),
        ("80 x 256", {}, "head_dim must be a multiple of 64 and state_dim 64 or 128, got 80 and 256"),
    ],
)
def test_what_the_mosaic_gpu_kernel_cannot_run_is_refused(rng, dims, changes, message):
    options = dict(changes)
    packed, fixed, pool = make(rng, [2], DIMS[dims], options.pop("dtype", jnp.bfloat16))
    run = Run(implementation="mosaic_gpu", config=options.pop("config", None))
    with pytest.raises(UnsupportedError, match=message):
        prefill(packed | fixed, pool, [2], [0], [3], [6], run=run, **options)


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="Mosaic GPU kernels need JAX 0.11.2")
def test_a_gate_of_another_dtype_is_refused_by_the_mosaic_gpu_kernel(rng):
    packed, fixed, pool = make(rng, [2], DIMS["64 x 128"], jnp.bfloat16)
    gate = np.zeros(packed["x"].shape, np.float32)
    with pytest.raises(UnsupportedError, match="z must be bfloat16, got float32"):
        prefill(packed | fixed | dict(z=gate), pool, [2], [0], [3], [6], run=Run(implementation="mosaic_gpu"))
