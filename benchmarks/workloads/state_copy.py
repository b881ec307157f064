"""Named cases of state_copy, which tests, tuning and benchmarks share."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One call of the op per pool: the number of the batch's rows that copy a state, and the states' shapes.

    Attributes:
        name: The case's name.
        rows: The number of rows in the batch.
        crossing: The number of rows that cross a block boundary in this step and so copy their states.
        layers: The number of layers in each pool.
        states: Shape and dtype of one layer's state, for each pool. States with two axes are convolution windows.
        offset: The first window row that is copied.
    """

    name: str
    rows: int
    crossing: int
    layers: int = 30
    states: tuple[tuple[tuple[int, ...], str], ...] = (((3, 8192), "bfloat16"), ((32, 128, 128), "float32"))
    offset: int = 0


# The 30 linear-attention layers of Qwen3.5-35B-A3B. The odd case has the heads of OLMo-Hybrid, 192 x 96, and windows
# with room for three drafts.
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
