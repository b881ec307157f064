"""rotate_and_store: queries and stored keys against float64, values and everything else in the pages to the bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.common import IMPLEMENTATIONS, assert_close, how
from oracles.ops import rotate as oracle

from pallas_kernels import rotate, rotate_and_store
from pallas_kernels.rotary.config import Config

LAYER, LAYERS, PAGES = 1, 2, 5
EPSILON, OFFSET = 1e-2, 0.75


@dataclasses.dataclass(frozen=True)
class Dims:
    heads: int
    kv_heads: int
    dim: int
    pairs: int
    is_normed: bool = True
    gate: int = 0  # dims after each query
    value_dim: int | None = None


DIMS = {
    "part, normed and gated": Dims(4, 2, 32, 4, gate=32),
    "whole, not normed": Dims(3, 1, 16, 8, is_normed=False),
    "no rotation, normed": Dims(2, 2, 24, 0),
    "neither": Dims(2, 1, 8, 0, is_normed=False, gate=8),
    "odd": Dims(7, 7, 21, 5, gate=3, value_dim=13),
    "8 of 128": Dims(32, 8, 128, 64, is_normed=False),
    "4 of 256": Dims(16, 4, 256, 32, gate=256),
    "1 of 80": Dims(5, 1, 80, 40),
}


def make(rng, dims, tokens=5, dtype=jnp.float32, pool_dtype=None, page_size=6):
    """Pages and gates are NaN. The last three tokens are padding: their pages do not exist, and their queries are NaN."""
    total, value_dim = tokens + 3, dims.value_dim or dims.dim
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    inputs = dict(
        q=draw(total, dims.heads, dims.dim + dims.gate),
        k=draw(total, dims.kv_heads, dims.dim),
        v=draw(total, dims.kv_heads, value_dim),
    )
    inputs["q"][..., dims.dim :] = np.nan
    inputs["q"][tokens:] = np.nan
    place = rng.permutation(PAGES * page_size)[:tokens]
    angle = rng.uniform(0, 6, (total, dims.pairs)).astype(np.float32)
    pool = lambda dim: jnp.full((LAYERS, PAGES, page_size, dims.kv_heads, dim), jnp.nan, pool_dtype or dtype)
    arguments = {name: jnp.asarray(x, dtype) for name, x in inputs.items()} | dict(
        cos=jnp.cos(angle) if dims.pairs else None,
        sin=jnp.sin(angle) if dims.pairs else None,
        keys=pool(dims.dim),
        values=pool(value_dim),
        layer=LAYER,
        kv_page=jnp.asarray([*place // page_size, PAGES, -1, 2**31 - 1], jnp.int32),
        kv_offset=jnp.asarray([*place % page_size, 0, 1, 2], jnp.int32),
    )
    weights = dict(q_weight=jnp.asarray(draw(dims.dim)), k_weight=jnp.asarray(draw(dims.dim)))
    return arguments | (dict(weights, epsilon=EPSILON, offset=OFFSET) if dims.is_normed else {})


def assert_is_right(arguments, results):
    """Checks the queries, each token's key and value, and that nothing else in the pages has changed."""
    queries, keys, values = (np.array(x) for x in results)
    dim, pages = arguments["k"].shape[2], np.asarray(arguments["kv_page"])
    assert queries.shape == (*arguments["q"].shape[:2], dim)
    assert queries.dtype == arguments["q"].dtype
    cos, sin = (None if arguments[name] is None else np.asarray(arguments[name]) for name in ("cos", "sin"))

    def assert_head(actual, name, token, head):
        angles = (None, None) if cos is None else (cos[token], sin[token])
        x = np.asarray(arguments[name][token, head, :dim], np.float64)
        norm = arguments.get(f"{name}_weight"), arguments.get("epsilon"), arguments.get("offset")
        assert_close(actual, oracle(x, *angles, *norm), actual.dtype, dim, f"{name}, token {token}, head {head}")

    for token in range(len(pages) - 3):
        place = LAYER, pages[token], arguments["kv_offset"][token]
        for head in range(queries.shape[1]):
            assert_head(queries[token, head], "q", token, head)
        for head in range(keys.shape[3]):
            assert_head(keys[place][head], "k", token, head)
        stored = np.asarray(arguments["v"][token].astype(arguments["values"].dtype))
        np.testing.assert_array_equal(values[place].view(np.uint8), stored.view(np.uint8))
        keys[place], values[place] = (np.asarray(arguments[name][place]) for name in ("keys", "values"))
    same_bits(keys, arguments["keys"])
    same_bits(values, arguments["values"])


def same_bits(one, other):
    np.testing.assert_array_equal(np.asarray(one).view(np.uint8), np.asarray(other).view(np.uint8))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("dims", [pytest.param(name, marks=pytest.mark.gpu if " of " in name else ()) for name in DIMS])
def test_heads_are_normed_rotated_and_stored(rng, dims, dtype, implementation):
    arguments = make(rng, DIMS[dims], dtype=dtype)
    assert_is_right(arguments, rotate_and_store(**arguments, **how(implementation)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_heads_after_the_queries_are_not_read(rng, implementation):
    arguments = make(rng, DIMS["part, normed and gated"])
    wide = jnp.pad(arguments["q"], ((0, 0), (0, 2), (0, 0)), constant_values=jnp.nan)
    results = rotate_and_store(**arguments | dict(q=wide, heads=4), **how(implementation))
    assert_is_right(arguments, results)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_pages_may_have_another_dtype(rng, implementation):
    arguments = make(rng, DIMS["odd"], dtype=jnp.float32, pool_dtype=jnp.bfloat16)
    assert_is_right(arguments, rotate_and_store(**arguments, **how(implementation)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
@pytest.mark.parametrize("config", [Config(1, 1), Config(2, 2), Config(64, 4)], ids=str)
def test_every_configuration_is_right(rng, config, implementation):
    for dims in ("part, normed and gated", "odd"):
        arguments = make(rng, DIMS[dims])
        assert_is_right(arguments, rotate_and_store(**arguments, config=config, **how(implementation)))


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
    queries, keys, values = rotate_and_store(**arguments, **how(implementation))
    of_tokens = "q", "k", "v", "cos", "sin", "kv_page", "kv_offset"
    for token in (0, 7, 19):
        alone = {name: arguments[name][token : token + 1] for name in of_tokens}
        query, key, value = rotate_and_store(**arguments | alone, **how(implementation))
        place = LAYER, alone["kv_page"][0], alone["kv_offset"][0]
        same_bits(query[0], queries[token])
        same_bits(key[place], keys[place])
        same_bits(value[place], values[place])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_donated_pages_are_updated_in_place(rng, implementation):
    arguments = make(rng, DIMS["whole, not normed"])
    pools = {name: arguments.pop(name) for name in ("keys", "values")}
    run = jax.jit(
        lambda pools, arguments: rotate_and_store(**pools, **arguments, **how(implementation)), donate_argnums=0
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
    _, *small = rotate_and_store(**arguments, implementation="xla")
    kv_page = jnp.asarray([pages - 1, pages, -1, 2**31 - 1], jnp.int32)
    pools = {
        name: jnp.zeros((1, pages, page_size, dims.kv_heads, dims.dim), jnp.bfloat16) for name in ("keys", "values")
    }
    arguments = {name: x for name, x in arguments.items() if name not in pools} | dict(kv_page=kv_page, layer=0)
    run = jax.jit(
        lambda pools, arguments: rotate_and_store(**pools, **arguments, implementation="triton"), donate_argnums=0
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
    queries, keys, values = rotate_and_store(**arguments | {name: arguments[name][:0] for name in of_tokens})
    assert queries.shape == (0, 7, 21)
    same_bits(keys, arguments["keys"])
    same_bits(values, arguments["values"])


def test_rotate_computes_the_same_heads(rng):
    arguments = make(rng, DIMS["part, normed and gated"])
    _, keys, _ = rotate_and_store(**arguments, implementation="xla")
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
        (dict(kv_page=jnp.zeros(7, jnp.int32)), "kv_page must be Int32"),
        (dict(q_weight=jnp.zeros(31)), "q_weight must be Float"),
        (dict(layer=1.5), "layer must be"),
        (dict(implementation="cuda"), "implementation must be 'xla', 'triton', 'mosaic_gpu' or None, got 'cuda'"),
    ],
)
def test_bad_arguments(rng, change, message):
    with pytest.raises(ValueError, match=message):
        rotate_and_store(**make(rng, DIMS["part, normed and gated"]) | change)
