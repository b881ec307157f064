"""Named cases of deferred states of Mamba-1, which tests, tuning and benchmarks share."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One call of the op: the lengths of its rows, the tokens of a group, and the sizes and dtypes of one layer."""

    name: str
    lengths: tuple[int, ...]
    group: int = 16
    heads: int = 1
    head_dim: int = 8192
    state_dim: int = 16
    groups: int = 1
    dtype: str = "bfloat16"
    state_dtype: str = "float32"
    gated: bool = True

    def pool_shapes(self, layers: int, blocks: int, slots: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """The shapes and dtypes of the pool and the ring, by the names of the op's arguments."""
        places = 2 * self.group
        return dict(
            pool=((layers, blocks, self.heads, self.head_dim, self.state_dim), self.state_dtype),
            ring_x=((layers, slots, self.heads, places, self.head_dim), self.dtype),
            ring_B=((layers, slots, self.groups, places, self.state_dim), self.dtype),
            ring_dt=((layers, slots, self.heads, places, self.head_dim), self.dtype),
        )


# The Mamba-1 layers of Falcon-Mamba-7B.
CASES = (
    *(
        Case(f"mamba1 {rows}x{tokens} {state}", (tokens,) * rows, state_dtype=state)
        for state in ("float32", "bfloat16")
        for rows in (8, 64)
        for tokens in (1, 4)
    ),
    Case("mamba1 8x4 float16", (4,) * 8, state_dtype="float16"),
    Case("mamba1 odd", (1, 4, 0, 2, 3, 4, 1, 0), head_dim=1000, gated=False),
    Case("mamba1 heads and groups", (4,) * 8, heads=4, head_dim=96, state_dim=20, groups=2),
    Case("mamba1 states of 48", (4, 1, 0), state_dim=48),
    Case("mamba1 float32 inputs", (4,) * 8, dtype="float32"),
    Case("mamba1 groups of 8", (4,) * 8, group=8),
)
