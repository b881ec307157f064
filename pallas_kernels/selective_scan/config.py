"""Launch configuration of selective_scan's kernel."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """How the kernel cuts a head's state [head_dim, state_dim]. Sizes are powers of two.

    A program holds `block_dim` channels, whose states are folded into segments of `segment` elements, and runs `unroll`
    tokens per turn of its loop while those of the next turn are on their way.
    """

    block_dim: int
    segment: int
    unroll: int
    num_warps: int


def default_config(state_dim: int, itemsize: int) -> Config:
    """One warp, sixteen elements of a state to a thread, where sums need no exchange. Not tuned."""
    vector = 16 // itemsize  # what a thread loads of a state at once
    # A thread repeats what is done per channel for each other thread of that channel, so few share one.
    threads = min(max(1, state_dim // 16), 16)
    return Config(block_dim=32 // threads, segment=vector * threads, unroll=4, num_warps=1)
