"""rotate_and_store: queries and stored keys against float64, values and everything else in the pages to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.common import IMPLEMENTATIONS, assert_close, how
from kernels.grouped import call
from kernels.rotations import DIMS, EPSILON, LAYER, OFFSET, assert_is_right, make, same_bits

from pallas_kernels import rotate, rotate_and_store
from pallas_kernels.rotary.config import Config


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("dims", [pytest.param(name, marks=pytest.mark.gpu if " of " in name else ()) for name in DIMS])
def test_heads_are_normed_rotated_and_stored(rng, dims, dtype, implementation):
    arguments = make(rng, DIMS[dims], dtype=dtype)
    assert_is_right(arguments, call(rotate_and_store, **arguments, **how(implementation)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_heads_after_the_queries_are_not_read(rng, implementation):
    arguments = make(rng, DIMS["part, normed and gated"])
    wide = jnp.pad(arguments["q"], ((0, 0), (0, 2), (0, 0)), constant_values=jnp.nan)
    results = call(rotate_and_store, **arguments | dict(q=wide, heads=4), **how(implementation))
    assert_is_right(arguments, results)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_pages_may_have_another_dtype(rng, implementation):
    arguments = make(rng, DIMS["odd"], dtype=jnp.float32, pool_dtype=jnp.bfloat16)
    assert_is_right(arguments, call(rotate_and_store, **arguments, **how(implementation)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
@pytest.mark.parametrize("config", [Config(1, 1), Config(2, 2), Config(64, 4)], ids=str)
def test_every_configuration_is_right(rng, config, implementation):
    for dims in ("part, normed and gated", "odd"):
        arguments = make(rng, DIMS[dims])
        assert_is_right(arguments, call(rotate_and_store, **arguments, config=config, **how(implementation)))


@pytest.mark.parametrize(
    ("dims", "implementation"),
    [
        ("part, normed and gated", "xla"),
        ("part, normed and gated", "interpret"),
        *(pytest.param(dims, "triton", marks=pytest.mark.gpu) for dims in ("4 of 256", "8 of 128", "odd")),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_token_does_not_depend_on_other_tokens(rng, dims, dtype, implementation, optimized_programs):
    """Each token alone, and among many: the same bits."""
    arguments = make(rng, DIMS[dims], tokens=20, dtype=dtype)
    queries, keys, values = call(rotate_and_store, **arguments, **how(implementation))
    of_tokens = "q", "k", "v", "cos", "sin", "kv_page", "kv_offset"
    for token in (0, 7, 19):
        alone = {name: arguments[name][token : token + 1] for name in of_tokens}
        query, key, value = call(rotate_and_store, **arguments | alone, **how(implementation))
        place = LAYER, alone["kv_page"][0], alone["kv_offset"][0]
        same_bits(query[0], queries[token])
        same_bits(key[place], keys[place])
        same_bits(value[place], values[place])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_donated_pages_are_updated_in_place(rng, implementation):
    arguments = make(rng, DIMS["whole, not normed"])
    pools = {name: arguments.pop(name) for name in ("keys", "values")}
    run = jax.jit(
        lambda pools, arguments: call(rotate_and_store, **pools, **arguments, **how(implementation)), donate_argnums=0
    )
    memory = run.lower(pools, arguments).compile().memory_analysis()
    assert memory.alias_size_in_bytes == sum(pool.nbytes for pool in pools.values())


@pytest.mark.gpu
@pytest.mark.large_pool
def test_pages_beyond_2_to_the_31_elements(rng):
    """The last page of pools of more than 2^31 elements is written, and not the one whose offset is smaller by 2^31."""
    dims, page_size = DIMS["8 of 128"], 512
    page_elements = page_size * dims.kv_heads * dims.dim
    pages = 2**31 // page_elements + 4
    arguments = make(rng, dims, tokens=1, dtype=jnp.bfloat16, page_size=page_size)
    page, place = arguments["kv_page"][0], arguments["kv_offset"][0]
    _, *small = call(rotate_and_store, **arguments, implementation="xla")
    kv_page = jnp.asarray([pages - 1, pages, -1, 2**31 - 1], jnp.int32)
    pools = {
        name: jnp.zeros((1, pages, page_size, dims.kv_heads, dims.dim), jnp.bfloat16) for name in ("keys", "values")
    }
    arguments = {name: x for name, x in arguments.items() if name not in pools} | dict(kv_page=kv_page, layer=0)
    run = jax.jit(
        lambda pools, arguments: call(rotate_and_store, **pools, **arguments, implementation="triton"), donate_argnums=0
    )
    _, *large = run(pools, arguments)
    wrapped = ((pages - 1) * page_elements - 2**31) // page_elements
    for before, after in zip(small, large, strict=True):
        assert_close(after[0, -1, place], np.asarray(before[LAYER, page, place], np.float64), jnp.bfloat16, 1, "place")
        assert not after[0, wrapped].any()
        assert int(jnp.count_nonzero(after[0, -1])) == int(jnp.count_nonzero(after[0, -1, place]))


def test_calls_without_tokens(rng):
    arguments = make(rng, DIMS["odd"])
    of_tokens = "q", "k", "v", "cos", "sin", "kv_page", "kv_offset"
    queries, keys, values = call(rotate_and_store, **arguments | {name: arguments[name][:0] for name in of_tokens})
    assert queries.shape == (0, 7, 21)
    same_bits(keys, arguments["keys"])
    same_bits(values, arguments["values"])


def test_rotate_computes_the_same_heads(rng):
    arguments = make(rng, DIMS["part, normed and gated"])
    _, keys, _ = call(rotate_and_store, **arguments, implementation="xla")
    k, cos, sin, weight = (arguments[name] for name in ("k", "cos", "sin", "k_weight"))
    rotated = rotate(k, cos, sin, weight, epsilon=EPSILON, offset=OFFSET)
    stored = np.asarray(keys[LAYER, arguments["kv_page"][:5], arguments["kv_offset"][:5]], np.float64)
    assert_close(rotated[:5], stored, keys.dtype, 1, "rotated keys")
    same_bits(rotate(k), k)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q=jnp.zeros((8, 4, 31))), "q must have at least 32 dims per head, got 31"),
        (dict(heads=5), "heads must be None or from 1 to q's 4 heads, got 5"),
        (dict(heads=0), "heads must be None or from 1 to q's 4 heads, got 0"),
        (dict(sin=None), "cos and sin must be given together, got only cos"),
        (dict(cos=None), "cos and sin must be given together, got only sin"),
        (dict(cos=jnp.zeros((8, 17)), sin=jnp.zeros((8, 17))), "cos must have from 1 to 16 pairs, got 17"),
        (dict(cos=jnp.zeros((8, 0)), sin=jnp.zeros((8, 0))), "cos must have from 1 to 16 pairs, got 0"),
        (dict(kv_page=jnp.zeros(7, jnp.int32)), "indices.page must be Int32"),
        (dict(q_weight=jnp.zeros(31)), "norms.q_weight must be Float"),
        (dict(layer=1.5), "indices.layer must be"),
        (dict(layer=2), r"indices.layer must be in \[0, 2\), got 2"),
        (dict(epsilon="1"), "norms.epsilon must be float, got '1'"),
        (dict(implementation="cuda"), "run.implementation must be 'xla', 'triton', 'mosaic_gpu' or None, got 'cuda'"),
    ],
)
def test_bad_arguments(rng, change, message):
    with pytest.raises(ValueError, match=message):
        call(rotate_and_store, **make(rng, DIMS["part, normed and gated"]) | change)
