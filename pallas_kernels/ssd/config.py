"""Launch configuration of ssd's kernel."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """How the kernel cuts a head's state [head_dim, state_dim]: a program holds `block_dim` rows, a power of two >= 16."""

    block_dim: int
    num_warps: int
    num_stages: int


def default_config(state_dim: int, chunk_size: int, itemsize: int) -> Config:
    """By reasoning and from compiled code, not yet timed: two programs to an SM, each waiting while the other multiplies.

    Sets the order of sums, so it depends neither on the number of rows nor on that of tokens. `itemsize` is that of the
    products' operands.
    """
    tile_bytes = chunk_size * state_dim * itemsize  # of B, and of C
    if itemsize == 4:
        return Config(block_dim=32 if tile_bytes <= 2**15 else 16, num_warps=4, num_stages=1)
    if tile_bytes <= 2**14:
        return Config(block_dim=32, num_warps=4, num_stages=2)
    return Config(block_dim=32, num_warps=8, num_stages=1)
