"""Named workloads of state_copy, shared by tests, tuning and benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A pool and how many rows of a batch cross a boundary at once."""

    name: str
    layers: int
    state: tuple[int, ...]
    dtype: str
    rows: int
    crossing: int
    shift: bool = False


# Qwen3.5-35B-A3B: 30 linear-attention layers, 32 heads of 128 x 128, 8192 conv channels.
_RECURRENT = dict(layers=30, state=(32, 128, 128), dtype="float32")
_CONV = dict(layers=30, state=(3, 8192), dtype="bfloat16", shift=True)
CASES = (
    Case("state_copy idle 64 recurrent", rows=64, crossing=0, **_RECURRENT),
    Case("state_copy idle 64 conv", rows=64, crossing=0, **_CONV),
    Case("state_copy 1 recurrent", rows=1, crossing=1, **_RECURRENT),
    Case("state_copy 8 recurrent", rows=8, crossing=8, **_RECURRENT),
    Case("state_copy 64 recurrent", rows=64, crossing=64, **_RECURRENT),
    Case("state_copy 64 conv", rows=64, crossing=64, **_CONV),
    # Heads of 96 x 192 (OLMo-Hybrid) and windows wide enough for three drafts.
    Case("state_copy odd recurrent", rows=5, crossing=3, layers=3, state=(30, 192, 96), dtype="float32"),
    Case("state_copy odd conv", rows=5, crossing=3, layers=3, state=(6, 1000), dtype="float16", shift=True),
)
