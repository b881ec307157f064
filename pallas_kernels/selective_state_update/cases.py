"""Named workloads of selective_state_update, shared by tests, tuning and benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """Row lengths of one call and one layer's dims. Mamba-1 has one head and gives A per channel and state."""

    name: str
    lengths: tuple[int, ...]
    heads: int = 128
    head_dim: int = 64
    state_dim: int = 128
    groups: int = 8
    dtype: str = "bfloat16"
    state_dtype: str = "float32"
    gated: bool = False

    @property
    def is_mamba1(self) -> bool:
        """Whether all parameters are per channel."""
        return self.heads == 1


_MAMBA1 = dict(heads=1, head_dim=8192, state_dim=16, groups=1)
# Nemotron-H-8B's Mamba-2, Falcon-Mamba-7B's Mamba-1, and Granite-4's state of 256.
CASES = (
    *(Case(f"mamba2_update float32 {rows}", (1,) * rows) for rows in (8, 64, 256)),
    *(Case(f"mamba2_update bfloat16 {rows}", (1,) * rows, state_dtype="bfloat16") for rows in (8, 64, 256)),
    *(Case(f"mamba1_update {t} 256", (1,) * 256, state_dtype=t, **_MAMBA1) for t in ("float32", "bfloat16")),
    Case("mamba2_verify float32 64", (3,) * 64),
    Case("mamba2_update float16 granite 8", (1,) * 8, state_dim=256, groups=1, state_dtype="float16"),
    Case("mamba1_verify float32 8", (1, 4, 0, 2, 3, 4, 1, 0), gated=True, **_MAMBA1),
)
