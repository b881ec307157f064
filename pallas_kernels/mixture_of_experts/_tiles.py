"""Sorts pairs of a token and one of its experts by expert, and cuts them into tiles of one expert each."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32


class Tiles(NamedTuple):
    """Tiles of pairs, each of one expert. A tile without pairs has length 0.

    Attributes:
        expert: The tile's expert.
        start: The place of the tile's first pair in `order`.
        length: The number of the tile's pairs.
        order: All pairs, sorted by expert. Pairs without an expert come last.
    """

    expert: Int32[Array, " tiles"]
    start: Int32[Array, " tiles"]
    length: Int32[Array, " tiles"]
    order: Int32[Array, " pairs"]


def tiles(chosen: jax.Array, experts: int, rows: int) -> Tiles:
    """Cuts each expert's pairs into tiles of `rows` pairs; its last tile may be shorter.

    Args:
        chosen: The expert of each pair; any other number for none. int32 [pairs]
        experts: The number of experts.
        rows: The most pairs of a tile.
    """
    pairs = chosen.shape[0]
    key = jnp.where((chosen >= 0) & (chosen < experts), chosen, experts)
    order = jax.lax.sort_key_val(key, jnp.arange(pairs, dtype=jnp.int32))[1]
    each = jnp.sum(key == jnp.arange(experts, dtype=jnp.int32)[:, None], axis=1, dtype=jnp.int32)
    end = jnp.cumsum(each, dtype=jnp.int32)
    last = jnp.cumsum(-(-each // rows), dtype=jnp.int32)
    tile = jnp.arange(min(pairs, experts) + pairs // rows, dtype=jnp.int32)
    # Tiles after the last one get a start after their expert's end.
    expert = jnp.searchsorted(last, tile, side="right", method="compare_all").astype(jnp.int32)
    expert = jnp.minimum(expert, experts - 1)
    start = (end - each)[expert] + (tile - (last - -(-each // rows))[expert]) * rows
    return Tiles(expert, start, jnp.clip(end[expert] - start, 0, rows), order)
