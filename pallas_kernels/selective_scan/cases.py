"""Named workloads of selective_scan, shared by tests, tuning and benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """Row lengths of one call and one layer's dims."""

    name: str
    lengths: tuple[int, ...]
    heads: int = 1
    head_dim: int = 8192
    state_dim: int = 16
    groups: int = 1
    dtype: str = "bfloat16"
    state_dtype: str = "float32"
    gated: bool = False


# Falcon-Mamba-7B's Mamba-1.
CASES = (
    Case("selective_scan 4x2048", (2048,) * 4),
    Case("selective_scan odd", (1, 63, 0, 130, 5), head_dim=1000, gated=True),
)
