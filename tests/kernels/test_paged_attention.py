import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.attention_batches import DIMS, LAYER, Dims, assert_is_attention, make, same_bits
from kernels.common import IMPLEMENTATIONS, assert_close, how, pack

from pallas_kernels import Rows, Run, UnsupportedError, paged_attention
from pallas_kernels.paged_attention._shards import Shards, best_unit
from pallas_kernels.paged_attention.config import Config

# Splits so short that a few hundred keys fill all shards, some of them twice.
SMALL = Config(queries=16, block=16, split=32, shares=8, groups=(2, 4), num_warps=4, num_stages=2, programs=2)
SMALL_PROMPT = dataclasses.replace(SMALL, queries=32, shares=4, groups=())


def options_of(implementation, config=SMALL):
    """The small configuration where the kernel runs."""
    return how(implementation) | ({} if implementation == "xla" else dict(config=config))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("dims", "dtype", "page_size"),
    [
        ("4 of 32", jnp.float32, 16),
        ("4 of 32", jnp.bfloat16, 64),
        ("one head of 8", jnp.float32, 24),
        ("6 of 96", jnp.float16, 24),
        ("latent 24 and 8", jnp.bfloat16, 16),
        pytest.param("40 heads", jnp.float32, 8, marks=pytest.mark.deep),
        *(
            pytest.param(dims, dtype, 16, marks=pytest.mark.gpu)
            for dims in ("8 of 64", "8 of 192")
            for dtype in (jnp.float32, jnp.bfloat16)
        ),
    ],
)
@pytest.mark.parametrize("window", [4, None])
def test_paged_attention_is_the_equation(rng, dims, dtype, page_size, window, implementation):
    """One key, ends on either side of a split's edge, wrapped shards, an empty row, and padding rows."""
    lengths, computed = [1, 4, 0, 3, 2, 4, 1, 0], [0, 29, 50, 270, 31, 0, 127, 0]
    if window is None:
        lengths[1], lengths[5], lengths[3] = 40, 33, 9
    batch = make(rng, lengths, computed, DIMS[dims], dtype, page_size)
    config = SMALL if window else SMALL_PROMPT
    out = batch.run(max_query_tokens=window, **options_of(implementation, config))
    assert out.dtype == dtype
    assert_is_attention(batch, out)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("dims", "dtype"), [("4 of 32", jnp.float32), ("6 of 96", jnp.bfloat16), ("latent 24 and 8", jnp.float16)]
)
@pytest.mark.parametrize("window", [4, None])
def test_gates_multiply_the_results(rng, dims, dtype, window, implementation):
    """The gates are a head's last dims. What precedes them is NaN, and so are a head after the last, and padding tokens'."""
    lengths, computed = [1, 4, 0, 3, 2, 1], [0, 29, 50, 270, 31, 127]
    batch = make(rng, lengths, computed, DIMS[dims], dtype)
    config = SMALL if window else SMALL_PROMPT
    run = lambda **given: batch.run(max_query_tokens=window, **given, **options_of(implementation, config))
    plain = run()
    gates = rng.normal(size=plain.shape)
    wide = np.concatenate([np.full((*plain.shape[:2], 5), np.nan), gates], axis=2)
    wide = np.concatenate([wide, np.full((len(wide), 1, wide.shape[2]), np.nan)], axis=1)
    wide[sum(lengths) :] = np.nan
    out, exact = run(gates=jnp.asarray(wide, dtype)), np.asarray(jnp.asarray(gates, dtype), np.float64)
    wanted = np.asarray(plain, np.float64) / (1 + np.exp(-exact))
    assert out.dtype == dtype
    assert_close(out, wanted, dtype, 1, "gated")
    assert not np.asarray(out[sum(lengths) :], np.float32).any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("unit", [None, 2, 4])
def test_rows_of_every_length(rng, implementation, unit):
    """Every length around the edges of pages, blocks, splits and shards, in one verify token and two."""
    ends = [*range(2, 36), 63, 64, 65, 95, 96, 97, 127, 128, 129, 159, 160, 161, 255, 256, 257]
    lengths = [1 + end % 2 for end in ends]
    batch = make(rng, lengths, [end - n for end, n in zip(ends, lengths, strict=True)], DIMS["one head of 8"])
    config = dataclasses.replace(SMALL, unit=unit)
    assert_is_attention(batch, batch.run(max_query_tokens=2, **options_of(implementation, config)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [1, None])
def test_scale_and_heads_that_one_tile_cannot_hold(rng, window, implementation):
    batch = make(rng, [1, 1], [40, 3], DIMS["40 heads"])
    out = batch.run(max_query_tokens=window, scale=0.5, **options_of(implementation))
    assert_is_attention(batch, out, scale=0.5)


BITS = [
    ("4 of 32", jnp.float32, "xla"),
    pytest.param("4 of 32", jnp.float32, "interpret", marks=pytest.mark.deep),
    ("latent 24 and 8", jnp.bfloat16, "interpret"),
    *(
        pytest.param(dims, dtype, "triton", marks=pytest.mark.gpu)
        for dims in ("4 of 32", "16 of 256", "latent 576")
        for dtype in (jnp.float32, jnp.bfloat16)
    ),
]


@pytest.mark.parametrize(("dims", "dtype", "implementation"), BITS)
@pytest.mark.parametrize("window", [3, None])
def test_row_does_not_depend_on_other_rows(rng, dims, dtype, implementation, window, optimized_programs):
    """Alone, beside other rows, and in another bucket with a wider table and other pages."""
    lengths, computed = [2, 3, 1], [140, 0, 75]
    batch = make(rng, lengths, computed, DIMS[dims], dtype)
    options = dict(max_query_tokens=window) | options_of(implementation, SMALL if window else SMALL_PROMPT)
    together = batch.run(**options)
    for r in range(3):
        begin, end = np.asarray(pack(lengths))[r : r + 2]
        q = batch.arguments["q"]
        alone = dict(
            # One program runs each of the rows.
            q=jnp.concatenate([q[begin:end], jnp.full((12 - (end - begin), *q.shape[1:]), jnp.nan, dtype)]),
            query_start_loc=pack([end - begin], padding_rows=1),
            num_computed_tokens=jnp.asarray([computed[r], 0], jnp.int32),
            page_table=jnp.pad(batch.arguments["page_table"][r : r + 1], ((0, 1), (0, 40)), constant_values=-7),
        )
        same_bits(batch.run(**alone, **options)[: end - begin], together[begin:end])


@pytest.mark.parametrize(("dims", "dtype", "implementation"), BITS)
@pytest.mark.parametrize("window", [3, None])
def test_slots_say_where_the_pages_of_each_row_are(rng, dims, dtype, implementation, window, optimized_programs):
    """The table has more slots than there are rows, in another order, and an empty row has no slot."""
    batch = make(rng, [2, 0, 3, 1], [140, 0, 0, 75], DIMS[dims], dtype)
    options = dict(max_query_tokens=window) | options_of(implementation, SMALL if window else SMALL_PROMPT)
    slots, table = np.array([5, -1, 0, 3], np.int32), np.asarray(batch.arguments["page_table"])
    tables = np.full((7, table.shape[1]), 2**31 - 1, np.int32)
    tables[slots[slots >= 0]] = table[slots >= 0]
    got = batch.run(page_table=jnp.asarray(tables), slots=jnp.asarray(slots), **options)
    same_bits(got, batch.run(**options))


@pytest.mark.parametrize(("dims", "dtype", "implementation"), BITS)
def test_verify_tokens_have_the_bits_of_decode_rows(rng, dims, dtype, implementation, optimized_programs):
    """A verify row of eight tokens over the edge of a split and of shards that wrap, and each token as a row of its own."""
    for computed in (28, 124, 252):
        batch = make(rng, [8], [computed], DIMS[dims], dtype, extra_tokens=0)
        options = options_of(implementation, dataclasses.replace(SMALL, queries=32))
        verify = batch.run(max_query_tokens=8, **options)
        decode = batch.run(
            query_start_loc=pack([1] * 8),
            num_computed_tokens=computed + jnp.arange(8, dtype=jnp.int32),
            page_table=jnp.tile(batch.arguments["page_table"], (8, 1)),
            max_query_tokens=1,
            **options,
        )
        same_bits(verify, decode)


@pytest.mark.parametrize(("dims", "dtype", "implementation"), BITS)
def test_prompt_has_the_same_bits_however_it_is_cut(rng, dims, dtype, implementation, optimized_programs):
    total = 170
    batch = make(rng, [total], [0], DIMS[dims], dtype, extra_tokens=0)
    options = options_of(implementation, SMALL_PROMPT)
    whole = batch.run(**options)
    for cuts in ([0, 64, total], [0, 1, 7, 50, 129, total]):
        for begin, end in itertools.pairwise(cuts):
            q = jnp.pad(batch.arguments["q"][begin:end], ((0, total - (end - begin)), (0, 0), (0, 0)))
            part = batch.run(
                q=q, query_start_loc=pack([end - begin]), num_computed_tokens=jnp.asarray([begin], jnp.int32), **options
            )
            same_bits(part[: end - begin], whole[begin:end])


def test_xla_has_the_same_bits_for_every_kind_of_row(rng, optimized_programs):
    batch = make(rng, [8], [200], DIMS["4 of 32"])
    same_bits(batch.run(max_query_tokens=8, implementation="xla"), batch.run(implementation="xla"))


@pytest.mark.parametrize(
    ("dims", "dtype", "window", "implementation"),
    [
        *(("4 of 32", jnp.float32, window, "interpret") for window in (3, None)),
        *(pytest.param("4 of 32", jnp.float32, window, "triton", marks=pytest.mark.gpu) for window in (3, None)),
        *(
            # Every pair of two of them.
            pytest.param(dims, dtype, (3, None)[(m + n) % 2], "triton", marks=pytest.mark.gpu)
            for m, dims in enumerate(("16 of 256", "8 of 192", "latent 24 and 8"))
            for n, dtype in enumerate((jnp.float32, jnp.bfloat16, jnp.float16))
        ),
    ],
)
def test_programs_and_joined_groups_change_no_bit(rng, dims, dtype, window, implementation, optimized_programs):
    """Rows that end in each shard of a group, at their edges, and after all shards have wrapped."""
    lengths, computed = [3, 1, 2, 1, 3, 1, 3, 1, 2], [300, 70, 31, 0, 126, 40, 63, 600, 255]
    batch = make(rng, lengths, computed, DIMS[dims], dtype)
    run = lambda n, unit: batch.run(
        max_query_tokens=window, config=dataclasses.replace(SMALL, programs=n, unit=unit), **how(implementation)
    )
    apart = run(1, None)
    for programs in (2, 8):
        same_bits(apart, run(programs, 1))
    for unit in (2, 4):
        together = run(1, unit)
        same_bits(together, run(2, unit))
        assert_is_attention(batch, together)
        if implementation == "triton":  # Interpreted programs are fused in different ways.
            same_bits(apart, together)


DTYPES = jnp.float32, jnp.bfloat16, jnp.float16


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dims", "page_size", "kind", "dtype"),
    [
        # Every pair of two of them.
        (*dims, kind, DTYPES[(m + n) % 3])
        for m, dims in enumerate([("16 of 256", 16), ("8 of 192", 64), ("latent 576", 16), ("8 of 64", 24)])
        for n, kind in enumerate(["decode", "verify", "prompt"])
    ],
)
def test_default_configuration_over_long_rows(rng, dims, page_size, dtype, kind):
    """The kernel's own splits and shards, several times around."""
    lengths, computed = {
        "decode": ([1, 1, 0, 1, 1], [17000, 511, 0, 512, 0]),
        "verify": ([4, 3, 0, 4, 1], [17000, 510, 0, 3000, 0]),
        "prompt": ([9, 3, 0, 66, 33], [20000, 4094, 0, 0, 4080]),
    }[kind]
    batch = make(rng, lengths, computed, DIMS[dims], dtype, page_size)
    window = None if kind == "prompt" else max(lengths)
    assert_is_attention(batch, batch.run(max_query_tokens=window, implementation="triton"))


@pytest.mark.gpu
@pytest.mark.parametrize("dims", ["4 of 32", "16 of 256", "8 of 192", "latent 576"])
def test_default_configuration_keeps_its_promises_of_bits(rng, dims):
    dtype, computed = jnp.bfloat16, 16380
    batch = make(rng, [8], [computed], DIMS[dims], dtype, extra_tokens=0)
    verify = [batch.run(max_query_tokens=n, implementation="triton") for n in (8, 9)]
    same_bits(*verify)
    for copies in (1, 2):  # 16 rows of 4 heads of keys are enough tiles for programs that join groups.
        decode = batch.run(
            q=jnp.tile(batch.arguments["q"], (copies, 1, 1)),
            query_start_loc=pack([1] * 8 * copies),
            num_computed_tokens=jnp.tile(computed + jnp.arange(8, dtype=jnp.int32), copies),
            page_table=jnp.tile(batch.arguments["page_table"], (8 * copies, 1)),
            max_query_tokens=1,
            implementation="triton",
        )
        for copy in range(copies):
            same_bits(verify[0], decode[8 * copy : 8 * copy + 8])
    batch = make(rng, [300], [4000], DIMS[dims], dtype, extra_tokens=0)
    whole = batch.run(implementation="triton")
    for begin, end in ((0, 95), (95, 97), (97, 300)):
        q = jnp.pad(batch.arguments["q"][begin:end], ((0, 300 - (end - begin)), (0, 0), (0, 0)))
        part = batch.run(
            q=q,
            query_start_loc=pack([end - begin]),
            num_computed_tokens=jnp.asarray([4000 + begin], jnp.int32),
            implementation="triton",
        )
        same_bits(part[: end - begin], whole[begin:end])


@pytest.mark.gpu
def test_rows_have_the_same_bits_in_batches_whose_programs_join_and_in_others(rng):
    """Programs attend single shards of one row, groups of eight shards of eight rows, and groups of four of ten rows."""
    batch = make(rng, [1] * 10, [4100 - r for r in range(10)], DIMS["8 of 64"], jnp.bfloat16, 64, extra_tokens=0)
    ten = batch.run(max_query_tokens=1, implementation="triton")
    assert_is_attention(batch, ten)
    for count in (1, 8):
        given = {name: batch.arguments[name][:count] for name in ("q", "num_computed_tokens", "page_table")}
        some = batch.run(**given, query_start_loc=pack([1] * count), max_query_tokens=1, implementation="triton")
        same_bits(some, ten[:count])


@pytest.mark.parametrize(
    ("lengths", "programs", "unit"),
    [
        ([4096] * 4, 128, 1),  # 128 shards keep all SMs busy, 32 groups do not
        ([4096] * 16, 16, 4),  # 128 groups do, 64 larger ones do not
        ([4096] * 64, 16, 8),  # 3.9 rounds of groups, 1.9 of larger ones
        ([4096] * 80, 16, 4),  # 4.8, or 2.4, whose last one takes as long as two of groups
        ([4096] * 1024, 16, 8),
        ([32768] * 4, 128, 4),  # 128 groups of eight splits each
        ([32768] * 8, 16, 8),  # either way there are 128 programs
        ([0] * 64 + [4096] * 64, 16, 8),
    ],
)
def test_units_fill_the_sms(lengths, programs, unit):
    assert best_unit(jnp.asarray(lengths, jnp.int32), 1, programs, Shards(128, 128), (1, 4, 8)) == unit


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(shares=3), "config.shares must be a power of two, got 3"),
        (dict(queries=0), "config.queries must be a power of two of at least 16, got 0"),
        (dict(block=64), "config.block must divide config.split = 32, got 64"),
        (dict(groups=(3,)), "config.groups must be a power of two, got 3"),
        (dict(groups=(4, 2)), r"config.groups must grow from 2 to at most 8, got \[4, 2\]"),
        (dict(groups=(2, 16)), r"config.groups must grow from 2 to at most 8, got \[2, 16\]"),
        (dict(unit=8), r"config.unit must be None, 1 or one of \[2, 4\], got 8"),
    ],
)
def test_bad_sizes_of_a_configuration(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [1, None])
@pytest.mark.large_pool
def test_pages_beyond_2_to_the_31_elements(rng, window):
    """8.6 GB of keys: the last page is read, and not the one whose offset is smaller by 2^31."""
    page_size, dims = 512, Dims(4, 2, 128)
    pages = 2**31 // (page_size * dims.kv_heads * dims.key_dim) + 4
    batch = make(rng, [1], [300], dims, jnp.bfloat16, page_size)
    page = batch.arguments["page_table"][0, 0]
    grow = lambda pool: jnp.zeros((1, pages, *pool.shape[2:]), pool.dtype).at[0, pages - 1].set(pool[LAYER, page])
    keys = jax.jit(grow)(batch.arguments["keys"])
    # Latent attention reads values from the same pool.
    batch.rows = [(batch.rows[0][0], batch.rows[0][0])]
    out = batch.run(
        keys=keys,
        values=None,
        value_dim=dims.key_dim,
        layer=0,
        page_table=jnp.full((1, 2), pages - 1, jnp.int32),
        max_query_tokens=window,
        implementation="triton",
    )
    assert_is_attention(batch, out)


def test_heads_may_have_fewer_dims_than_a_program_has_threads(rng):
    """Both implementations are traced, and the kernel in its default configuration."""
    batch = make(rng, [1, 1], [3, 40], Dims(2, 1, 4), extra_tokens=0)
    assert_is_attention(batch, batch.run(max_query_tokens=1))


def test_calls_without_tokens_or_rows(rng):
    batch = make(rng, [1], [3], DIMS["4 of 32"], extra_tokens=0)
    assert batch.run(q=batch.arguments["q"][:0]).shape == (0, 4, 32)
    none = dict(query_start_loc=pack([]), num_computed_tokens=jnp.zeros(0, jnp.int32))
    out = batch.run(page_table=batch.arguments["page_table"][:0], **none)
    np.testing.assert_array_equal(out, np.zeros((1, 4, 32), np.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q=jnp.zeros((4, 3, 32))), "number of heads of keys must divide q's 3 heads, got 2"),
        (dict(q=jnp.zeros((4, 0, 32))), "number of heads of keys must divide q's 0 heads, got 2"),
        (dict(value_dim=16), "value_dim must be given if and only if values is None, got 16"),
        (dict(values=None), "value_dim must be given if and only if values is None, got None"),
        (dict(values=None, value_dim=33), "value_dim must be from 1 to key_dim = 32, got 33"),
        (dict(max_query_tokens=0), "max_query_tokens must be None or at least 1, got 0"),
        (dict(scale=-1.0), "scale must be None or positive, got -1.0"),
        (dict(page_table=jnp.zeros((1, 3), jnp.float32)), "page_table must be Int32"),
        (dict(page_table=jnp.zeros((2, 3), jnp.int32)), "page_table must have 1 rows if slots is None, got 2"),
        (dict(slots=jnp.zeros(2, jnp.int32)), "must be Int32"),
        (dict(layer=1.5), "layer must be"),
        (dict(gates=jnp.zeros((4, 4, 31))), "gates must have at least 32 dims per head, got 31"),
        (dict(gates=jnp.zeros((4, 3, 32))), "gates must have at least q's 4 heads, got 3"),
    ],
)
def test_bad_arguments(rng, change, message):
    batch = make(rng, [1], [3], DIMS["4 of 32"])
    with pytest.raises(ValueError, match=message):
        batch.run(**change)


def test_heads_that_are_too_wide_run_as_xla():
    array = lambda *shape: jnp.zeros(shape, jnp.float32)
    rows = Rows(query_start_loc=pack([1]), layer=0, num_computed_tokens=jnp.zeros(1, jnp.int32))
    pages = array(1, 2, 16, 1, 2048)
    run = lambda **how: paged_attention(
        array(1, 1, 2048), pages, pages, rows, jnp.ones((1, 1), jnp.int32), run=Run(**how)
    )
    with pytest.raises(UnsupportedError, match="keys of 2048 and values of 2048 dims"):
        run(implementation="triton")
    assert not np.asarray(run()).any()
