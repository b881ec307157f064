"""Named cases of selective_state_update, which tests, tuning and benchmarks share."""

from dataclasses import dataclass

from benchmarks.workloads.mamba2 import Mamba2Case


@dataclass(frozen=True)
class Case(Mamba2Case):
    """One call of the op: the lengths of its rows, and the sizes and dtypes of one layer. `gated` cases have a z."""

    gated: bool = False

    @property
    def is_mamba1(self) -> bool:
        """True if the layer is Mamba-1's: it has one head, and its parameters are per channel."""
        return self.heads == 1


_MAMBA1 = dict(heads=1, head_dim=8192, state_dim=16, groups=1)
# The Mamba-2 layers of Nemotron-H-8B, the Mamba-1 layers of Falcon-Mamba-7B, and Granite-4's state_dim of 256.
CASES = (
    *(Case(f"mamba2_update float32 {rows}", (1,) * rows) for rows in (8, 64, 256)),
    *(Case(f"mamba2_update bfloat16 {rows}", (1,) * rows, state_dtype="bfloat16") for rows in (8, 64, 256)),
    *(Case(f"mamba1_update {t} 256", (1,) * 256, state_dtype=t, **_MAMBA1) for t in ("float32", "bfloat16")),
    Case("mamba2_verify float32 64", (3,) * 64),
    Case("mamba2_update float16 granite 8", (1,) * 8, state_dim=256, groups=1, state_dtype="float16"),
    Case("mamba1_verify float32 8", (1, 4, 0, 2, 3, 4, 1, 0), gated=True, **_MAMBA1),
)
