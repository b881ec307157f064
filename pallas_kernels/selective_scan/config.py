"""Launch configuration of selective_scan's kernel."""

from dataclasses import dataclass

from pallas_kernels._check import LaunchConfig


@dataclass(frozen=True)
class Config(LaunchConfig, op="selective_scan", positive=("unroll",), block_dim=1, segment=1):
    """How the kernel cuts a head's state [head_dim, state_dim]. All sizes are powers of two.

    Attributes:
        block_dim: The number of channels per program.
        segment: The number of elements in a segment. Each channel's state is folded into segments.
        unroll: The number of tokens per iteration of the loop. The next iteration's tokens are loaded meanwhile.
        num_warps: The number of warps per program.
    """

    block_dim: int
    segment: int
    unroll: int
    num_warps: int


def default_config(state_dim: int, itemsize: int) -> Config:
    """Return the configuration for states of `itemsize` bytes: one warp, and sixteen elements of a state per thread.

    Sums then need little exchange between threads. It is not tuned.
    """
    vector = 16 // itemsize  # the number of elements that a thread loads at once
    # The threads of one channel all repeat the work that is done once per channel, so few threads share a channel.
    most = min(max(1, state_dim // 16), 16)
    threads = 1 << (most.bit_length() - 1)  # a power of two
    return Config(block_dim=32 // threads, segment=vector * threads, unroll=4, num_warps=1)
