"""Launch configuration of paged_attention's kernels."""

import itertools
from dataclasses import dataclass

from pallas_kernels import device
from pallas_kernels._check import LaunchConfig, require
from pallas_kernels.paged_attention._shards import PROMPT_SHARDS


@dataclass(frozen=True)
class Config(LaunchConfig, op="paged_attention", queries=16, block=16, split=1, shares=1):
    """How the kernels cut queries and keys. Sizes are powers of two.

    The keys of a row are cut into splits, which shards take round-robin (`Shards`). A program attends a tile of queries to
    one shard after another, and a second kernel merges the shards of each token: it joins neighbouring shards to groups,
    these to larger groups, and adds up the largest groups. In decode and verify rows, a program that attends a whole group
    can join it. Every field but the last three can change bits, so only these follow the number of rows and their lengths.

    Attributes:
        queries: The most queries of a tile, which are tokens times heads. At least 16.
        block: The number of keys that are multiplied at a time. At least 16; divides `split`.
        split: The number of positions of a split.
        shares: The number of shards of a row.
        groups: The sizes of groups of neighbouring shards, in increasing order.
        num_warps: Warps of a program.
        num_stages: The software-pipelining depth of the loop over blocks.
        programs: The number of programs that attend the shards of a tile, at most `shares`. None is `default_programs`.
        unit: The number of neighbouring shards that a program attends, joins and stores as one: 1 or one of `groups`.
            Programs of prompts attend single shards. None decides by the rows' lengths, on the device (`best_unit`), among
            `possible_units`; it is 1 in latent attention and in interpret mode, where two programs that join differ by
            rounding.

    Raises:
        ValueError: if `queries`, `block`, `split`, `shares` or one of `groups` is no power of two, if `block` does not
            divide `split`, if `groups` do not grow from 2 to at most `shares`, or if `unit` is neither None nor
            1 nor one of `groups`.
    """

    queries: int
    block: int
    split: int
    shares: int
    groups: tuple[int, ...]
    num_warps: int
    num_stages: int
    programs: int | None = None
    unit: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for size in self.groups:
            is_right = size >= 1 and size & (size - 1) == 0
            require(is_right, f"paged_attention: config.groups must be a power of two, got {size}")
        is_right = self.programs is None or self.programs >= 1
        require(is_right, f"paged_attention: config.programs must be None or at least 1, got {self.programs}")
        if self.split % self.block:
            raise ValueError(f"paged_attention: config.block must divide config.split = {self.split}, got {self.block}")
        grows = all(small < large for small, large in itertools.pairwise((1, *self.groups)))
        if not grows or max(self.groups, default=1) > self.shares:
            raise ValueError(
                f"paged_attention: config.groups must grow from 2 to at most {self.shares}, got {list(self.groups)}"
            )
        if self.unit not in (None, 1, *self.groups):
            raise ValueError(
                f"paged_attention: config.unit must be None, 1 or one of {list(self.groups)}, got {self.unit}"
            )


def default_config(dims: int, itemsize: int, *, is_prompt: bool, is_latent: bool) -> Config:
    """Return the configuration for decode and verify rows or for prompts.

    For bfloat16 heads of 256 and latents of 576, it has the best settings of a prototype on an H200 (JAX 0.11.2). Other
    settings were derived from compiled code: they fit into shared memory and registers. GPUs with little shared memory have
    smaller tiles, and so other bits. `dims` are the dims of a key and a value together, or of a key alone in latent
    attention, where values are the first dims of the keys. An element has `itemsize` bytes.
    """
    row_bytes = dims * itemsize
    split, shards = (PROMPT_SHARDS.split, PROMPT_SHARDS.count) if is_prompt else (512, 32) if is_latent else (128, 128)
    groups = () if is_prompt else (2,) if is_latent else (4, 8)
    num_warps = 8 if is_prompt or is_latent else 4
    if itemsize == 4:
        queries, block, num_stages = 16 if is_latent else 32, 32 if row_bytes <= 1024 else 16, 2
    else:
        queries = 32 if not is_prompt else 64 if is_latent else 128
        block = 64 if row_bytes <= 1024 else 32
        num_stages = 3 if row_bytes <= 1024 and not is_prompt else 2
    if device.has_little_shared_memory():
        num_stages = 2
        if itemsize == 4 and row_bytes > 1536:
            queries = 16
        elif itemsize == 2 and row_bytes > 512 and is_prompt:
            queries, block = queries // 2, 32
    return Config(queries, block, split, shards, groups, num_warps, num_stages)


def default_stages(config: Config, num_tiles: int) -> int:
    """Return the pipelining depth for `num_tiles` tiles, at most the configuration's.

    The programs of a few tiles need depth to keep the memory busy. With many tiles, the programs of an SM do so together,
    and less depth lets more of them fit on it: from 64 tiles on, two stages were up to 6 % faster than three on an H200.
    """
    return min(config.num_stages, 2) if num_tiles >= 64 else config.num_stages


def possible_units(groups: tuple[int, ...], sums_per_thread: int, num_tiles: int) -> tuple[int, ...]:
    """Return the possible numbers of shards of a unit of decode and verify rows.

    Where there are few tiles, their keys must be cut as finely as possible to fill all SMs. With more tiles, single shards
    would only take time and memory. A program that joins holds another set of sums for each size of groups, so these must
    be few: a thread has `sums_per_thread` sums for one shard.
    """
    fitting = groups[: max(0, 128 // sums_per_thread - 1)]
    return (1, *fitting[:1]) if num_tiles < 12 or not fitting else fitting


def default_programs(units: int, num_tiles: int, *, is_prompt: bool) -> int:
    """Return the number of programs that attend the units of each of `num_tiles` tiles, at most the number of units.

    They are enough to fill an H200's 132 SMs. More would take time even where a row is too short to give them work. A tile
    of decode and verify rows has at least 16, so that a launch does not wait for the single long row of many.
    """
    programs, wanted, least = 1, 264 if is_prompt else 528, 1 if is_prompt else 16
    while programs < units and (programs < least or programs * num_tiles < wanted):
        programs *= 2
    return min(programs, units)
