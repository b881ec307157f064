"""rotate_and_store as a Pallas kernel. A program handles a tile of heads of one token: queries, or keys and values."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels._pallas_triton import Lanes, Refs
from pallas_kernels.dispatch import Run
from pallas_kernels.rotary.arguments import HeadNorms, PageIndices
from pallas_kernels.rotary.config import Config, default_config


def _tiles(dim: int, pairs: int) -> list[Lanes]:
    """Cut a head's dims into three tiles: the first dims of all pairs, their second dims, and the dims not rotated."""
    cuts = [(0, pairs), (pairs, pairs), (2 * pairs, dim - 2 * pairs)]
    found = []
    for begin, size in cuts:
        if size:
            lane, inside = pt.lanes(0, pt.power_of_two(size), size)
            found.append((begin + lane, inside))
    return found


def _rotate(
    refs: Refs,
    token: jax.Array,
    source: Callable[[jax.Array], Any],
    target: Callable[[jax.Array], Any],
    mask: jax.Array,
    weight: Any,
    *,
    epsilon: float,
    offset: float,
) -> None:
    """Normalise and rotate a tile of heads.

    `source` and `target` map indices of dims, [1, dims], to the references [heads, dims] from which they are loaded, and to
    which they are stored. `mask` is False for heads that do not exist, bool [heads, 1].
    """
    dim, pairs = refs.keys.shape[4], 0 if refs.cos is None else refs.cos.shape[1]
    lanes = _tiles(dim, pairs)
    load = lambda at, mask: pt.load(at, mask=mask, other=0.0).astype(jnp.float32)
    # All loads are issued before the first sum, so that their latencies overlap.
    tiles = [load(source(lane[None]), mask & inside[None]) for lane, inside in lanes]
    scales = [] if weight is None else [offset + load(weight.at[lane], inside)[None] for lane, inside in lanes]
    pair, exists = lanes[0]
    angles = [] if refs.cos is None else [load(ref.at[token, pair], exists)[None] for ref in (refs.cos, refs.sin)]
    if scales:
        squares = sum(jnp.sum(tile * tile, axis=1, keepdims=True) for tile in tiles)
        factor = jax.lax.rsqrt(squares / dim + epsilon)
        tiles = [tile * factor * scale for tile, scale in zip(tiles, scales, strict=True)]
    if angles:
        (cos, sin), (first, second, *rest) = angles, tiles
        tiles = [first * cos - second * sin, second * cos + first * sin, *rest]
    for tile, (lane, inside) in zip(tiles, lanes, strict=True):
        at = target(lane[None])
        pt.store(at, tile.astype(at.dtype), mask=mask & inside[None])


def _tile_heads(config: Config, heads: int) -> int:
    """Return the number of heads of a tile."""
    return min(config.heads, pt.power_of_two(heads))


def _kernel(refs: Refs, *, config: Config, epsilon: float, offset: float) -> None:
    """Run one tile of a token's heads. Stores `queries`, or updates `keys` and `values`."""
    heads = refs.queries.shape[1]
    _, pages, _, kv_heads, _ = refs.keys.shape
    q_tiles = -(-heads // _tile_heads(config, heads))
    tile, token = pt.program_id(0), pt.program_id(1)
    layer, page, entry = refs.layer[...], refs.kv_page[token], refs.kv_offset[token]
    rotate = functools.partial(_rotate, refs, token, epsilon=epsilon, offset=offset)

    @pt.when(tile < q_tiles)
    def _():
        head, exists = (x[:, None] for x in pt.lanes(tile, _tile_heads(config, heads), heads))
        source = lambda lane: refs.q.at[token, head, lane]
        target = lambda lane: refs.queries.at[token, head, lane]
        rotate(source, target, exists, refs.q_weight)

    @pt.when((tile >= q_tiles) & (page >= 0) & (page < pages))
    def _():
        head, exists = (x[:, None] for x in pt.lanes(tile - q_tiles, _tile_heads(config, kv_heads), kv_heads))
        lane, inside = (x[None] for x in pt.lanes(0, pt.power_of_two(refs.v.shape[2]), refs.v.shape[2]))
        value = pt.load(refs.v.at[token, head, lane], mask=exists & inside, other=0.0)
        pt.store(
            refs.values.at[layer, page, entry, head, lane],
            value.astype(refs.values.dtype),
            mask=exists & inside,
        )
        source = lambda lane: refs.k.at[token, head, lane]
        target = lambda lane: refs.keys.at[layer, page, entry, head, lane]
        rotate(source, target, exists, refs.k_weight)


def rotate_and_store(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cos: jax.Array | None,
    sin: jax.Array | None,
    keys: jax.Array,
    values: jax.Array,
    indices: PageIndices,
    norms: HeadNorms,
    *,
    heads: int,
    run: Run,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See api.py."""
    tokens, (kv_heads, dim) = q.shape[0], k.shape[1:]
    config = run.config or default_config(dim)
    tiles = [-(-count // _tile_heads(config, count)) for count in (heads, kv_heads)]
    results = pt.call(
        functools.partial(_kernel, config=config, epsilon=norms.epsilon, offset=norms.offset),
        name="rotate_and_store",
        grid=(sum(tiles), tokens),
        inputs=dict(
            q=q,
            k=k,
            v=v,
            cos=cos,
            sin=sin,
            layer=jnp.int32(indices.layer),
            kv_page=indices.page,
            kv_offset=indices.offset,
            q_weight=norms.q_weight,
            k_weight=norms.k_weight,
        ),
        outputs=dict(queries=jax.ShapeDtypeStruct((tokens, heads, dim), q.dtype)),
        updates=dict(keys=keys, values=values),
        num_warps=config.num_warps,
        interpret=run.interpret,
    )
    return results["queries"], results["keys"], results["values"]
