"""Shards of a row's keys (split-KV), which different programs can attend."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

_SMS = 132  # of an H200
_KEYS_OF_A_UNIT = 190  # The time that a program takes to begin and end a unit, in keys that it attends meanwhile.


def ceil(x: Any, n: Any) -> Any:
    """Return the quotient x / n of two integers, rounded up."""
    return jax.lax.div(x + (n - 1), jnp.int32(n))


@dataclass(frozen=True)
class Shards:
    """Keys cut into splits of `split` positions, at multiples of it, which `count` shards take round-robin.

    Shard s has the splits s, s + count, s + 2 count and so on. A split is a sequence of blocks, one per product of a tile.
    """

    split: int
    count: int

    def used(self, num_keys: Any) -> Any:
        """Return the number of shards that have any of the first `num_keys` keys."""
        return jnp.minimum(ceil(num_keys, self.split), self.count)

    def blocks_below(self, shard: Any, blocks: Any, block: int) -> Any:
        """Return the number of blocks of a shard among a row's first `blocks` blocks of `block` keys."""
        per_split = self.split // block
        whole = jax.lax.div(blocks, jnp.int32(per_split))
        own = jax.lax.div(whole - shard + (self.count - 1), jnp.int32(self.count))
        last = jax.lax.rem(whole - shard, jnp.int32(self.count)) == 0
        return own * per_split + jnp.where(last, blocks - whole * per_split, 0)

    def begin_of(self, shard: Any, n: Any, block: int) -> Any:
        """Return the position of the first key of a shard's n-th block of `block` keys."""
        per_split = self.split // block
        split = jax.lax.div(n, jnp.int32(per_split))
        return (shard + split * self.count) * self.split + (n - split * per_split) * block


def best_unit(
    num_keys: jax.Array, tiles_of_row: int, programs: int, shards: Shards, units: tuple[int, ...]
) -> jax.Array:
    """Return the number of neighbouring shards that programs should attend as a unit. int32 [].

    Programs fetch the keys of a unit in one go and store one result for it, so few large units take less time in all. But
    many small ones leave fewer SMs idle at the end.

    Args:
        num_keys: The number of keys of each tile of one head of keys. int32 [tiles].
        tiles_of_row: The number of tiles of heads: one or more for each head of keys.
        programs: The number of programs of a tile, among which its units are divided.
        shards: The shards.
        units: The sizes of a unit to choose from, in shards.
    """
    total, longest = tiles_of_row * jnp.sum(num_keys.astype(jnp.float32)), jnp.max(num_keys).astype(jnp.float32)

    def keys_per_sm(unit: int) -> jax.Array:
        per_program = jnp.maximum(longest / min(programs, shards.count // unit), unit * shards.split)
        units_per_program = per_program / (unit * shards.split)
        return (per_program + _KEYS_OF_A_UNIT * units_per_program) * jnp.ceil(total / (_SMS * per_program))

    return jnp.asarray(units, jnp.int32)[jnp.argmin(jnp.stack([keys_per_sm(unit) for unit in units]))]


# Prompts have fewer shards than decode and verify rows: their launches have many programs already, and each shard costs a
# float32 copy of the results.
PROMPT_SHARDS = Shards(split=4096, count=4)
