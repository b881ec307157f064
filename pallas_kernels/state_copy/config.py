"""Launch configuration of state_copy's kernel."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """Elements of a tile (a power of two), programs over all rows together (about: each row gets one), warps."""

    tile: int
    programs: int
    num_warps: int


def default_config(itemsize: int) -> Config:
    """Few programs that each copy many tiles: an idle launch is short, and a busy one still fills the card.

    Best of `benchmarks.tune` on an H200, JAX 0.11.2.
    """
    return Config(tile=32768 // itemsize, programs=1056, num_warps=8)
