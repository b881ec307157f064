"""product_chain with a convolution at its end: results and windows against float64, and what stays as it is."""

import functools
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import programs_in_numpy, threads_in_numpy
from kernels.chains import changed, draw, oracle
from kernels.common import (
    IMPLEMENTATIONS,
    MOSAIC_GPU,
    assert_close,
    assert_untouched,
    dirty_pool,
    pack,
    run_by,
    skip_if_unavailable,
)
from kernels.conv_claims import rows_of
from kernels.threads_in_numpy import Ref, fake, install
from oracles.ops import causal_conv1d

from benchmarks.workloads.product_chain import CASES, Case, Taps
from pallas_kernels import Run, UnsupportedError, causal_conv1d_update, product_chain
from pallas_kernels.product_chain import Convolution, Norm
from pallas_kernels.product_chain.steps import convolution

LAYER, PROGRAMS = 1, 132
MOSAIC = Run(implementation="mosaic_gpu")
CHAINS = [
    Case("four taps", (512, "norm", ("gated", 512), 512, "norm", 56, Taps(4)), 512, (32, 16, 8)),
    Case("two taps, all channels", (256, "norm", 264, Taps(2)), 768, (264,)),
    Case("five taps", (512, 256, "norm", 1152, Taps(5)), 256, (1088, 64), dtype="float16"),
    Case("three taps", (("silu", 128), 512, "norm", 40, Taps(3)), 1024, (8, 32)),
]
# Some of 132 CTAs multiply two blocks of the first product, and so use other stages for the gated product than the rest.
SEVERAL_BLOCKS = Case("several blocks", (1280, "norm", ("gated", 512), 1280, "norm", 56, Taps(4)), 256, (32, 16, 8))
LARGE = [case for case in CASES if case.is_convolved]


def drawn(rng, case, tokens, window=None):
    """Returns the arguments of a case, with windows in blocks as a pool has them after a while.

    A row without a token has blocks too. One row has no window yet, one keeps none, and one writes the block that it reads.
    Of several tokens, the last one is of padding. Blocks that no row reads are full of NaN. The windows may have more rows
    than the convolution reads.
    """
    x, (*steps, step), residual = draw(rng, case, tokens)
    inputs = step.weight.shape[0] - 1
    window = window or inputs
    lengths = [0, 1] if tokens == 1 else [1, 0] + [1] * (tokens - 2)
    rows = len(lengths)
    read, write = np.split(1 + rng.permutation(2 * rows), 2)
    if tokens > 1:
        write[0] = read[0]
        read[2 % rows], write[3 % rows] = 0, 0
    pool = dirty_pool(rng, (2, 1 + 2 * rows, window, step.channels), case.dtype, clean=set(read) - {0})
    row = rng.integers(0, window - inputs + 1, rows)
    at = {
        name: jnp.asarray(x, jnp.int32) for name, x in dict(read_block=read, write_block=write, window_row=row).items()
    }
    return x, (*steps, changed(step, pool=pool, query_start_loc=pack(lengths), **at)), residual


def check(case, arguments, found, total):
    """Compares the results of a chain, a tuple of parts and the pool, with the oracle."""
    x, (*steps, step), residual = arguments
    *parts, pool = found
    rows = step.weight.shape[0] - 1
    wanted, wanted_total, _ = oracle(x, steps, residual, case.dtype)
    inputs, *others = np.split(wanted, np.cumsum(case.parts)[:-1], axis=1)
    roundings, terms = 2 * len(steps) + 2, max(each.shape[-1] for each in jax.tree.leaves(steps) if each.ndim > 1)
    close = lambda found, wanted, what: assert_close(
        np.asarray(found, np.float64) / roundings, wanted / roundings, case.dtype, terms, what
    )
    for part, own in zip(parts[1:], others, strict=True):
        close(part, own, "another part")
    close(total, wanted_total, "residual")
    before, after = (np.asarray(each, np.float64) for each in (step.pool, pool))
    weight, written = np.asarray(step.weight, np.float64), set()
    for n, (token, end) in enumerate(itertools.pairwise(np.asarray(step.query_start_loc))):
        if token == end:
            continue
        read, row, write = (int(each[n]) for each in (step.read_block, step.window_row, step.write_block))
        history = before[LAYER, read, row : row + rows] if read else np.zeros((rows, step.channels))
        (out,), _ = causal_conv1d(inputs[token:end], history, weight, None, step.activation == "silu")
        close(parts[0][token], out, f"token {token}")
        if write:
            written.add(write)
            np.testing.assert_array_equal(after[LAYER, write, : rows - 1], history[1:])
            close(after[LAYER, write, rows - 1], inputs[token], f"the window of token {token}")
    assert_untouched(step.pool, pool, written)
    assert_untouched(step.pool[:LAYER], pool[:LAYER], written=())


@pytest.mark.parametrize("implementation", [IMPLEMENTATIONS[0], IMPLEMENTATIONS[2]])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("case", CHAINS, ids=lambda case: case.name)
def test_separate_launches_match_the_oracle(rng, case, tokens, implementation):
    arguments = drawn(rng, case, tokens)
    x, steps, residual = arguments
    check(case, arguments, *product_chain(x, steps, residual, parts=case.parts, run=run_by(implementation)))


@pytest.mark.parametrize("implementation", [MOSAIC_GPU])
@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 9, 16])
@pytest.mark.parametrize("case", [*CHAINS, *LARGE], ids=lambda case: case.name)
def test_one_launch_matches_the_oracle(rng, case, tokens, implementation):
    arguments = drawn(rng, case, tokens)
    x, steps, residual = arguments
    check(case, arguments, *product_chain(x, steps, residual, parts=case.parts, run=run_by(implementation)))


@pytest.mark.parametrize(
    ("case", "tokens", "window", "activation"),
    [
        pytest.param(CHAINS[0], 16, None, "silu", id="four taps"),
        pytest.param(CHAINS[1], 3, 4, "silu", id="two taps"),
        pytest.param(CHAINS[2], 9, None, None, id="five taps"),
        pytest.param(CHAINS[3], 5, 5, None, id="three taps"),
        pytest.param(SEVERAL_BLOCKS, 3, None, "silu", id="several blocks"),
    ],
)
def test_all_programs_together_match_the_oracle(rng, monkeypatch, case, tokens, window, activation):
    x, (*steps, step), residual = drawn(rng, case, tokens, window)
    arguments = x, (*steps, changed(step, activation=activation)), residual
    found, total = programs_in_numpy.run(monkeypatch, *arguments, case.parts, PROGRAMS)
    check(case, arguments, found, total)


@pytest.mark.parametrize("implementation", [MOSAIC_GPU])
@pytest.mark.parametrize("tokens", [1, 16])
def test_one_launch_does_what_two_do(rng, tokens, implementation):
    """The windows have the same bits, and so do the results that are not convolved."""
    skip_if_unavailable(implementation)
    x, steps, residual = drawn(rng, LARGE[0], tokens)
    run = functools.partial(product_chain, parts=LARGE[0].parts, run=run_by(implementation))
    (_, *others, pool), _ = run(x, steps, residual)
    *before, step = steps
    (first, *wanted), _ = run(x, before, residual)
    rows = rows_of(step.query_start_loc, step.read_block, step.window_row, step.write_block)
    _, wanted_pool = causal_conv1d_update(first, step.pool, step.weight, None, rows)
    for found, own in zip([*others, pool], [*wanted, wanted_pool], strict=True):
        np.testing.assert_array_equal(np.asarray(found).view(np.uint16), np.asarray(own).view(np.uint16))


@pytest.mark.parametrize("implementation", [MOSAIC_GPU])
@pytest.mark.parametrize("tokens", [1, 4])
def test_the_pool_of_a_launch_is_updated_in_place(rng, tokens, implementation):
    skip_if_unavailable(implementation)
    case = CHAINS[0]
    x, (*steps, step), residual = drawn(rng, case, tokens)

    @functools.partial(jax.jit, donate_argnums=0)
    def run(pool):
        (*_, pool), _ = product_chain(
            x, (*steps, changed(step, pool=pool)), residual, parts=case.parts, run=run_by(implementation)
        )
        return pool

    pool = jnp.array(step.pool)
    assert " copy(" not in run.lower(pool).compile().as_text()
    place = pool.unsafe_buffer_pointer()
    assert run(pool).unsafe_buffer_pointer() == place


@pytest.mark.gpu
@pytest.mark.large_pool
def test_a_launch_reaches_blocks_beyond_2_to_the_31_elements(rng):
    skip_if_unavailable("mosaic_gpu")
    case = Case("large", (256, "norm", 1088, Taps(4)), 256, (1024, 64))
    x, (*steps, step), residual = draw(rng, case, 4)
    blocks = 2**31 // (2 * 3 * 1024) + 64
    at = jnp.array([blocks - 1, blocks - 7, 5, blocks - 3], jnp.int32)

    @functools.partial(jax.jit, donate_argnums=0)
    def run(pool):
        last = changed(step, pool=pool, read_block=at, write_block=at)
        (first, *_, pool), _ = product_chain(x, (*steps, last), residual, parts=case.parts, run=MOSAIC)
        return first, pool

    small = jnp.array(rng.normal(size=(4, 3, 1024)), case.dtype)
    pool = jnp.zeros((2, blocks, 3, 1024), case.dtype).at[LAYER, at].set(small)
    first, pool = run(pool)
    one = jnp.zeros((2, 5, 3, 1024), case.dtype).at[LAYER, 1:].set(small)
    few = changed(step, pool=one, read_block=jnp.arange(1, 5), write_block=jnp.arange(1, 5))
    (wanted, *_, one), _ = product_chain(x, (*steps, few), residual, parts=case.parts, run=MOSAIC)
    np.testing.assert_array_equal(first, wanted)
    np.testing.assert_array_equal(pool[LAYER, at], one[LAYER, 1:])


def test_a_convolution_that_no_launch_can_run_is_an_op_of_its_own(rng):
    case = CHAINS[0]
    x, (*steps, step), residual = drawn(rng, case, 4)
    padded = lambda array: jnp.pad(array, (0, 13), mode="edge")
    rows = {
        name: padded(getattr(step, name)) for name in ("query_start_loc", "read_block", "window_row", "write_block")
    }
    more = changed(step, **rows)  # rows of padding
    reasons = [
        (x, changed(step, pool=step.pool.swapaxes(2, 3), layout="DS"), "must have the layout SD, got DS"),
        (x, changed(step, weight=step.weight.astype("float32")), "must have the dtype bfloat16, got"),
        (x, more, "must have 1 to 16 rows, got 17"),
    ]
    for x, last, said in reasons:
        with pytest.raises(UnsupportedError, match=f"{said}|Mosaic GPU kernels need JAX"):
            product_chain(x, (*steps, last), residual, parts=case.parts, run=MOSAIC)
        *results, pool = product_chain(x, (*steps, last), residual, parts=case.parts)[0]
        pool = pool.swapaxes(2, 3) if last.layout == "DS" else pool
        check(case, (x, (*steps, step), residual), (*results, pool), product_chain(x, steps, residual)[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p, n, c: (p, n, c), r"a convolution must follow a product that is not gated, got \['Product', 'Norm'"),
        (lambda p, n, c: (c,), r"step 0: a convolution must follow a product that is not gated, got \['Convolution'\]"),
        (lambda p, n, c: (p, c, n), "step 1: a convolution must be the last step, got"),
        (lambda p, n, c: (p, changed(c, weight=c.weight[:, 1:])), r"parts must begin with 127 channels, got \(128, 128\)"),
        (lambda p, n, c: (p, changed(c, pool=c.pool[:, :, :2])), "pool must hold at least 3 window rows, got 2"),
        (lambda p, n, c: (p, changed(c, pool=c.pool.astype("float16"))), "must have the pool's dtype float16, got bfloat16"),
        (lambda p, n, c: (p, changed(c, window_row=c.window_row[1:])), r"window_row must be \[3\], got \[2\]"),
        (lambda p, n, c: (p, changed(c, weight=c.weight[0])), r"step 1: weight must be Float\[width channels\], got jax"),
        (lambda p, n, c: (p, changed(c, read_block=[0, 1, 2])), r"read_block must be Int32\[rows\], got \[0, 1, 2\]"),
        (lambda p, n, c: (p, changed(c, layer=c.pool.shape[0])), r"step 1: layer must be in \[0, \d+\), got \d+"),
        (lambda p, n, c: (p, changed(c, layer=1.0)), r"step 1: layer must be Int32\[\] or int, got 1.0"),
        (lambda p, n, c: (p, changed(c, layout="SS")), "layout must be 'SD' or 'DS', got 'SS'"),
        (lambda p, n, c: (p, changed(c, activation="relu")), "activation must be 'silu' or None, got 'relu'"),
    ],
)  # fmt: skip
def test_bad_convolutions_are_refused(rng, change, message):
    case = Case("bad", (256, Taps(4)), 256, (128, 128))
    x, (product, step), _ = draw(rng, case, 3)
    steps = change(product, Norm(jnp.ones(256), 1e-6), step)
    with pytest.raises(ValueError, match=message):
        product_chain(x, steps, jnp.zeros((3, 256), x.dtype), parts=case.parts)


def test_parts_are_needed(rng):
    x, (product, step), _ = draw(rng, Case("bad", (256, Taps(4)), 256, (256,)), 3)
    with pytest.raises(ValueError, match="parts must begin with 256 channels, got None"):
        product_chain(x, (product, step))


@pytest.mark.parametrize(("width", "activation", "is_kept"), [(4, "silu", True), (2, None, True), (5, None, False)])
def test_each_warp_of_a_program_of_one_token_convolves_a_result(rng, monkeypatch, width, activation, is_kept):
    """The code of single threads runs in NumPy, as it does for a block of four results."""
    programs, channels, first = threads_in_numpy.Threads(), 16, 8
    install(monkeypatch, programs, fake(programs), [convolution])
    drawn = lambda *shape: np.array(jnp.asarray(rng.normal(size=shape), jnp.bfloat16))
    pool, weight = drawn(2, 3, width, channels), drawn(width, channels)
    values, before = rng.normal(size=4).astype(np.float32), pool.copy()
    # The second row has the token. It reads from row 1 of block 2.
    arrays = pool, [1], weight, [0, 0, 1], [0, 2], [0, 1], [0, int(is_kept)]
    rows = tuple(int(n) for n in Convolution(*map(jnp.array, arrays), activation).rows_of_one_token())
    step, cta = Convolution(*(Ref(np.asarray(array)) for array in arrays), activation), SimpleNamespace(sink_rows=rows)
    out = Ref(np.full(channels, np.nan, pool.dtype))
    by_warp = threads_in_numpy.Held([np.repeat(np.tile(values, 2), 32)[:, None]])
    held = step.load_one_token(cta, first)
    step.store_one_token(cta, out, by_warp, held, first)
    inputs = np.concatenate([before[1, 2, 1:, 8:12], values[None].astype(pool.dtype)]).astype(np.float64)
    wanted = (inputs * weight[:, 8:12].astype(np.float64)).sum(axis=0)
    wanted = wanted / (1 + np.exp(-wanted)) if activation else wanted
    assert_close(out.array[8:12], wanted, "bfloat16", width, "results")
    assert np.isnan(np.delete(out.array, np.s_[8:12]).astype(np.float32)).all()
    if is_kept:
        before[1, 1, : width - 1, 8:12] = inputs[1:]
    np.testing.assert_array_equal(pool, before)
