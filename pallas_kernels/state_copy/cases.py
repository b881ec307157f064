"""Named workloads of state_copy, shared by tests, tuning and benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """Pools of all layers' (state, dtype), and how many rows of a batch cross a boundary at once.

    States with two axes are windows, of which the rows from `offset` on are copied.
    """

    name: str
    rows: int
    crossing: int
    layers: int = 30
    states: tuple[tuple[tuple[int, ...], str], ...] = (((3, 8192), "bfloat16"), ((32, 128, 128), "float32"))
    offset: int = 0


# Qwen3.5-35B-A3B's 30 linear-attention layers; heads of 96 x 192 (OLMo-Hybrid) and windows wide enough for three drafts.
CASES = (
    Case("state_copy idle 64", rows=64, crossing=0),
    *(Case(f"state_copy {rows}", rows=rows, crossing=rows) for rows in (1, 8, 64)),
    Case(
        "state_copy odd 5",
        rows=5,
        crossing=3,
        layers=3,
        states=(((6, 1000), "float16"), ((30, 192, 96), "float32")),
        offset=1,
    ),
)
