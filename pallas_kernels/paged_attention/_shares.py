"""Cuts the keys of a row into shares, which different programs can attend."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

_CORES = 132  # of an H200
_KEYS_OF_A_UNIT = 190  # Beginning and ending a unit takes a program as long as so many keys.


def ceil(x: Any, n: Any) -> Any:
    """Divides an integer by a number, and rounds up."""
    return jax.lax.div(x + (n - 1), jnp.int32(n))


@dataclass(frozen=True)
class Shares:
    """How keys are cut into splits of `split` positions, at multiples of it, which are dealt out to `shares` shares.

    Share s has the splits s, s + shares, s + 2 shares and so on. A split has blocks, which are multiplied at a time.
    """

    split: int
    shares: int

    def used(self, num_keys: Any) -> Any:
        """Returns how many shares `num_keys` keys have."""
        return jnp.minimum(ceil(num_keys, self.split), self.shares)

    def blocks_below(self, share: Any, count: Any, block: int) -> Any:
        """Returns how many of a row's first `count` blocks of `block` keys belong to a share."""
        per_split = self.split // block
        whole = jax.lax.div(count, jnp.int32(per_split))
        own = jax.lax.div(whole - share + (self.shares - 1), jnp.int32(self.shares))
        last = jax.lax.rem(whole - share, jnp.int32(self.shares)) == 0
        return own * per_split + jnp.where(last, count - whole * per_split, 0)

    def begin_of(self, share: Any, n: Any, block: int) -> Any:
        """Returns the position of the first key of a share's n-th block of `block` keys."""
        per_split = self.split // block
        turn = jax.lax.div(n, jnp.int32(per_split))
        return (share + turn * self.shares) * self.split + (n - turn * per_split) * block


def best_unit(
    num_keys: jax.Array, tiles_of_row: int, programs: int, shares: Shares, units: tuple[int, ...]
) -> jax.Array:
    """Returns how many neighbouring shares programs should attend as a unit. int32 [].

    Programs fetch the keys of a unit in one go and store one result for it, so few large units take less time in all. But
    many small ones leave fewer cores without work at the end.

    Args:
        num_keys: The number of keys of each tile of one head of keys. int32 [tiles].
        tiles_of_row: How many tiles of heads there are: one or more for each head of keys.
        programs: The number of programs of a tile, among which its units are divided.
        shares: The shares.
        units: The numbers of shares to choose from.
    """
    total, longest = tiles_of_row * jnp.sum(num_keys.astype(jnp.float32)), jnp.max(num_keys).astype(jnp.float32)

    def keys_of_a_core(unit: int) -> jax.Array:
        piece = jnp.maximum(longest / min(programs, shares.shares // unit), unit * shares.split)
        units_of_piece = piece / (unit * shares.split)
        return (piece + _KEYS_OF_A_UNIT * units_of_piece) * jnp.ceil(total / (_CORES * piece))

    return jnp.asarray(units, jnp.int32)[jnp.argmin(jnp.stack([keys_of_a_core(unit) for unit in units]))]


# Prompts have fewer shares than decode and verify rows: their launches have many programs already, and each share costs a
# float32 copy of the results.
PROMPT_SHARES = Shares(split=4096, shares=4)
