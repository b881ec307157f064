"""Prompts by the Mosaic GPU kernel, which can only run on a GPU."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import grouped
from kernels.attention_batches import LAYER, Dims, assert_is_attention, make, same_bits
from kernels.common import assert_close, how, pack

from pallas_kernels import UnsupportedError, paged_attention

DIMS = {
    "16 of 256": Dims(16, 4, 256),
    "8 of 64": Dims(8, 8, 64),
    "6 of 128": Dims(6, 2, 128),
    "8 of 192": Dims(8, 1, 192),
}
GPU = pytest.mark.gpu


def run(batch, **options):
    return batch.run(**options, **how("mosaic_gpu"))


@GPU
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize(("dtype", "page_size"), [(jnp.bfloat16, 16), (jnp.float16, 64), (jnp.bfloat16, 512)])
def test_prompts_are_the_equation(rng, dims, dtype, page_size):
    """Lengths around the edges of tiles, an empty row, padding, and positions around the edges of blocks and shards."""
    lengths = [1, 63, 64, 65, 0, 130, 3, 66, 9, 40]
    computed = [0, 0, 1, 127, 50, 4030, 4094, 16300, 20000, 8191]
    batch = make(rng, lengths, computed, DIMS[dims], dtype, page_size)
    out = run(batch)
    assert out.dtype == dtype
    assert_is_attention(batch, out)


@GPU
@pytest.mark.parametrize("dims", DIMS)
def test_gates_multiply_the_results(rng, dims):
    """The gates are a head's last dims. What precedes them is NaN, and so are a head after the last, and padding tokens'."""
    lengths, dtype = [70, 0, 130, 5], jnp.bfloat16
    batch = make(rng, lengths, [0, 0, 4000, 9000], DIMS[dims], dtype)
    plain = run(batch)
    gates = rng.normal(size=plain.shape)
    wide = np.concatenate([np.full((*plain.shape[:2], 64), np.nan), gates], axis=2)
    wide = np.concatenate([wide, np.full((len(wide), 1, wide.shape[2]), np.nan)], axis=1)
    wide[sum(lengths) :] = np.nan
    out, exact = run(batch, gates=jnp.asarray(wide, dtype)), np.asarray(jnp.asarray(gates, dtype), np.float64)
    wanted = np.asarray(plain, np.float64) / (1 + np.exp(-exact))
    assert_close(out, wanted, dtype, 1, "gated")
    assert not np.asarray(out[sum(lengths) :], np.float32).any()


@GPU
@pytest.mark.parametrize("dims", DIMS)
def test_row_does_not_depend_on_other_rows(rng, dims):
    """Alone, beside other rows, and in another bucket with a wider table and other pages."""
    lengths, computed, dtype = [70, 3, 200, 1], [140, 4095, 4000, 75], jnp.bfloat16
    batch = make(rng, lengths, computed, DIMS[dims], dtype)
    together = run(batch)
    for r in range(4):
        begin, end = np.asarray(pack(lengths))[r : r + 2]
        q = batch.arguments["q"]
        alone = dict(
            q=jnp.concatenate([q[begin:end], jnp.full((9, *q.shape[1:]), jnp.nan, dtype)]),
            query_start_loc=pack([end - begin], padding_rows=1),
            num_computed_tokens=jnp.asarray([computed[r], 0], jnp.int32),
            page_table=jnp.pad(batch.arguments["page_table"][r : r + 1], ((0, 1), (0, 40)), constant_values=-7),
        )
        same_bits(run(batch, **alone)[: end - begin], together[begin:end])


@GPU
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("first", [0, 3990, 16200])
def test_prompt_has_the_same_bits_however_it_is_cut(rng, dims, first):
    total = 330
    batch = make(rng, [total], [first], DIMS[dims], jnp.bfloat16, extra_tokens=0)
    whole = run(batch)
    for cuts in ([0, 64, total], [0, 1, 7, 50, 129, 300, total]):
        for begin, end in itertools.pairwise(cuts):
            q = jnp.pad(batch.arguments["q"][begin:end], ((0, total - (end - begin)), (0, 0), (0, 0)))
            loc, computed = pack([end - begin]), jnp.asarray([first + begin], jnp.int32)
            part = run(batch, q=q, query_start_loc=loc, num_computed_tokens=computed)
            same_bits(part[: end - begin], whole[begin:end])


@GPU
def test_the_number_of_programs_changes_no_bit(rng):
    """One tile's shards are attended by four CTAs, and the shards of many tiles by one."""
    batch = make(rng, [64], [16400], DIMS["16 of 256"], jnp.bfloat16)
    copies = 40
    many = dict(
        q=jnp.tile(batch.arguments["q"][:64], (copies, 1, 1)),
        query_start_loc=pack([64] * copies),
        num_computed_tokens=jnp.full((copies,), 16400, jnp.int32),
        page_table=jnp.tile(batch.arguments["page_table"], (copies, 1)),
    )
    together = run(batch, **many)
    same_bits(together[:64], run(batch)[:64])
    same_bits(together[-64:], together[:64])


@GPU
def test_slots_say_where_the_pages_of_each_row_are(rng):
    """The table has more slots than there are rows, in another order, and an empty row has no slot."""
    batch = make(rng, [2, 0, 3, 100], [140, 0, 0, 75], DIMS["16 of 256"], jnp.bfloat16)
    slots, table = np.array([5, -1, 0, 3], np.int32), np.asarray(batch.arguments["page_table"])
    tables = np.full((7, table.shape[1]), 2**31 - 1, np.int32)
    tables[slots[slots >= 0]] = table[slots >= 0]
    same_bits(run(batch, page_table=jnp.asarray(tables), slots=jnp.asarray(slots)), run(batch))


@GPU
@pytest.mark.large_pool
def test_pages_beyond_2_to_the_31_elements(rng):
    """Keys and values of 4.3 GB each: the last page is read, and not the one whose offset is smaller by 2^31."""
    page_size, dims = 512, Dims(4, 2, 128)
    pages = 2**31 // (page_size * dims.kv_heads * dims.key_dim) + 4
    batch = make(rng, [200], [100], dims, jnp.bfloat16, page_size)
    page = batch.arguments["page_table"][0, 0]
    grow = lambda pool: jnp.zeros((1, pages, *pool.shape[2:]), pool.dtype).at[0, pages - 1].set(pool[LAYER, page])
    pools = {name: jax.jit(grow)(batch.arguments[name]) for name in ("keys", "values")}
    out = run(batch, **pools, layer=0, page_table=jnp.full((1, 2), pages - 1, jnp.int32))
    assert_is_attention(batch, out)


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="Mosaic GPU kernels need JAX 0.11.2")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(max_query_tokens=1), "the kernel is for prompts"),
        (dict(values=None, value_dim=64), "not for latent attention"),
        (
            dict(q=jnp.zeros((4, 4, 64), jnp.float16)),
            "must all be bfloat16 or all float16, got float16, bfloat16, bfloat16",
        ),
        (dict(dim=96), "64, 128, 192 or 256 dims, got 96 and 96"),
        (dict(page_size=24), "page_size must be a multiple of 16 and a multiple or divisor of 128, got 24"),
        (dict(page_size=8), "page_size must be a multiple of 16 .*, got 8"),
        (dict(page_size=96), "page_size must be a multiple of 16 and a multiple or divisor of 128, got 96"),
        (dict(values=jnp.zeros((2, 3, 64, 2, 128), jnp.bfloat16)), "64, 128, 192 or 256 dims, got 64 and 128"),
        (
            dict(gates=jnp.zeros((4, 4, 96), jnp.bfloat16)),
            "gates must have 64 dims and a multiple of 64 before them, got 96",
        ),
        (dict(gates=jnp.zeros((4, 4, 64), jnp.float32)), "all float16, got bfloat16, bfloat16, bfloat16, float32"),
        (dict(interpret=True), "the kernels cannot be interpreted"),
    ],
)
def test_what_the_kernel_cannot_run_is_refused(options, message):
    dim = options.pop("dim", 64)
    pool = jnp.zeros((2, 3, options.pop("page_size", 64), 2, dim), jnp.bfloat16)
    arguments = dict(q=jnp.zeros((4, 4, dim), jnp.bfloat16), keys=pool, values=pool, layer=1) | options
    indices = dict(query_start_loc=pack([4]), num_computed_tokens=jnp.zeros(1, jnp.int32))
    table = jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(UnsupportedError, match=message):
        grouped.call(paged_attention, **arguments, **indices, page_table=table, implementation="mosaic_gpu")
