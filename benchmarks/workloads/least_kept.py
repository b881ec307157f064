"""Named cases of least_kept, which tests and benchmarks share."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A call: its rows and tokens."""

    name: str
    rows: int
    tokens: int


CASES = (
    # The vocabulary of Qwen3.5.
    *(Case(f"least_kept {rows}", rows, 248320) for rows in (1, 16, 64)),
    Case("least_kept odd 3", 3, 1001),
)
