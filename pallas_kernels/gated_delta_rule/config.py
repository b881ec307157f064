"""Launch configuration of gated_delta_rule's kernels."""

from dataclasses import dataclass

# Tokens of a cell of prefill's grid of absolute positions, whatever a checkpoint's configuration says.
CHUNK_SIZE = 64


@dataclass(frozen=True)
class Config:
    """Value rows of one program's state tile (a power of two) and its warps."""

    block_value: int
    num_warps: int


def default_config(value_dim: int, key_dim: int) -> Config:
    """Small tiles: many programs in flight hide the latency of a kernel that only streams its state.

    Within 2 % of the best of `benchmarks.tune` on an H200 (JAX 0.11.2) at 8 rows and more.
    """
    del value_dim, key_dim
    return Config(block_value=8, num_warps=1)
