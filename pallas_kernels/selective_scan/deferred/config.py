"""Launch configurations of the kernel of deferred states of Mamba-1."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DeferredConfig:
    """How the kernel cuts a head's state [head_dim, state_dim]. All sizes are powers of two.

    Attributes:
        block_dim: The number of channels per program.
        segment: The number of elements in a segment. Each channel's state is folded into segments.
        num_warps: The number of warps per program.
    """

    block_dim: int
    segment: int
    num_warps: int


def default_config(state_dim: int, itemsize: int) -> DeferredConfig:
    """Returns the configuration for states of `itemsize` bytes: one warp, and sixteen elements of a state per thread.

    It depends on the state alone, because it determines the order of sums. It is not tuned.
    """
    vector = 16 // itemsize  # the number of elements that a thread loads at once
    # The threads of one channel all repeat the work that is done once per channel, so few threads share a channel.
    most = min(max(1, state_dim // 16), 16)
    threads = 1 << (most.bit_length() - 1)  # a power of two
    return DeferredConfig(block_dim=32 // threads, segment=vector * threads, num_warps=1)
