"""Named cases of deferred states of Mamba-2, which tests, tuning and benchmarks share."""

from dataclasses import dataclass

from benchmarks.workloads.mamba2 import Mamba2Case


@dataclass(frozen=True)
class Case(Mamba2Case):
    """One call of the op: the lengths of its rows, the tokens of a group, and the sizes and dtypes of one layer."""

    group: int = 16

    @property
    def channels(self) -> int:
        """The channels of a token's x, B and C."""
        return self.heads * self.head_dim + 2 * self.groups * self.state_dim

    def pool_shapes(self, layers: int, blocks: int, slots: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """The shapes and dtypes of the pool and the ring, by the names of the op's arguments."""
        ring_slots = 2 * self.group
        return dict(
            pool=((layers, blocks, self.heads, self.head_dim, self.state_dim), self.state_dtype),
            ring_x=((layers, slots, self.heads, ring_slots, self.head_dim), self.dtype),
            ring_B=((layers, slots, self.groups, ring_slots, self.state_dim), self.dtype),
            ring_dt=((layers, slots, self.heads, ring_slots), "float32"),
            ring_g=((layers, slots, self.heads, ring_slots), "float32"),
        )


# The Mamba-2 layers of Nemotron-H-8B, Bamba-9B (one group), Falcon-H1 (states of 256) and Zamba2 (states of 64).
CASES = (
    *(
        Case(f"mamba2 {rows}x{tokens} {state}", (tokens,) * rows, state_dtype=state)
        for state in ("float32", "bfloat16")
        for rows in (8, 64, 256)
        for tokens in (1, 4)
    ),
    Case("mamba2 8x4 float16", (4,) * 8, state_dtype="float16"),
    Case("mamba2 one group", (1, 4, 0, 2, 3, 4, 1, 0), groups=1),
    Case("mamba2 states of 256", (4,) * 8, heads=48, state_dim=256, groups=1),
    Case("mamba2 states of 64", (4,) * 8, heads=80, state_dim=64, groups=1),
    Case("mamba2 float32 inputs", (4,) * 8, dtype="float32"),
    Case("mamba2 groups of 8", (4,) * 8, group=8),
    Case("mamba2 groups of 32", (12,) * 8, group=32),
)
