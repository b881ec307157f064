"""Heads that are normed, rotated and stored, and what must come of them."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from kernels.common import assert_close
from oracles.ops import rotate as oracle

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
