"""Named cases of ssd, which tests, tuning and benchmarks share."""

from dataclasses import dataclass

from benchmarks.workloads.mamba2 import Mamba2Case


@dataclass(frozen=True)
class Case(Mamba2Case):
    """One call of the op: the lengths of its rows, and the sizes and dtypes of one layer.

    Every row starts at position 0 and keeps `checkpoints` checkpoints. `gated` cases have a z.
    """

    gated: bool = False
    checkpoints: int = 0
    chunk_size: int = 64


# The layers of Nemotron-H-8B, Granite-4's state_dim of 256, and odd sizes.
CASES = (
    Case("ssd_prefill 1x8192", (8192,)),
    Case("ssd_prefill 4x2048", (2048,) * 4),
    Case("ssd_prefill 16x128", (128,) * 16),
    Case("ssd_prefill checkpoints 1x8192", (8192,), checkpoints=15),
    Case("ssd_prefill bfloat16 state 1x8192", (8192,), state_dtype="bfloat16"),
    Case("ssd_prefill gated 4x2048", (2048,) * 4, gated=True),
    Case("ssd_prefill float32 4x2048", (2048,) * 4, dtype="float32"),
    Case("ssd_prefill float16 4x2048", (2048,) * 4, dtype="float16"),
    Case("ssd_prefill granite 4x2048", (2048,) * 4, state_dim=256, groups=1),
    Case("ssd_prefill chunks of 128 4x2048", (2048,) * 4, chunk_size=128),
    Case("ssd_prefill odd", (130, 0, 65, 1), heads=6, head_dim=24, state_dim=96, groups=2, gated=True, checkpoints=2),
)
