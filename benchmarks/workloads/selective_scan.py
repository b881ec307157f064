"""Named cases of selective_scan, which tests, tuning and benchmarks share."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One call of the op: the lengths of its rows, and the sizes and dtypes of one layer. `gated` cases have a z."""

    name: str
    lengths: tuple[int, ...]
    heads: int = 1
    head_dim: int = 8192
    state_dim: int = 16
    groups: int = 1
    dtype: str = "bfloat16"
    state_dtype: str = "float32"
    gated: bool = False


# The Mamba-1 layers of Falcon-Mamba-7B.
CASES = (
    Case("selective_scan 4x2048", (2048,) * 4),
    Case("selective_scan odd", (1, 63, 0, 130, 5), head_dim=1000, gated=True),
    Case("selective_scan state of 96", (5, 130), head_dim=1000, state_dim=96),
)
