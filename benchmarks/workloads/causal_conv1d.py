"""Named cases of causal_conv1d, which tests, tuning and benchmarks share."""

from dataclasses import dataclass

from pallas_kernels import WindowLayout


@dataclass(frozen=True)
class Case:
    """One call of the op: the lengths of its rows, the sizes and dtype of its arrays, and the layout of its windows.

    The first `boundaries` rows keep a boundary's window; None calls the op without the arguments for boundaries.
    """

    name: str
    lengths: tuple[int, ...]
    channels: int = 8192
    width: int = 4
    dtype: str = "bfloat16"
    num_speculative_tokens: int = 0
    layout: WindowLayout = "SD"
    boundaries: int | None = None

    @property
    def block_shape(self) -> tuple[int, int]:
        """The shape of a block, in the order of `layout`."""
        window = self.width - 1 + self.num_speculative_tokens
        return (window, self.channels) if self.layout == "SD" else (self.channels, window)


# 8192 channels are q, k and v of Qwen3.5-35B-A3B's linear attention.
UPDATE_CASES = (
    *(Case(f"conv_update {rows}", (1,) * rows) for rows in (1, 8, 64, 256)),
    Case("conv_verify 64", (3,) * 64, num_speculative_tokens=2),
    Case("conv_verify odd 3", (9, 0, 9), channels=1000, width=5, dtype="float16", num_speculative_tokens=8),
    Case("conv_update_ds 64", (1,) * 64, layout="DS"),
    Case("conv_verify_ds 64", (3,) * 64, num_speculative_tokens=2, layout="DS"),
    *(Case(f"conv_verify_k3 {rows}", (4,) * rows, num_speculative_tokens=3) for rows in (8, 64)),
    # Rows of policy "deferred": no boundary in most steps, or one in every fourth row.
    *(
        Case(f"conv_verify_k3 {rows}, {n} boundaries", (4,) * rows, num_speculative_tokens=3, boundaries=n)
        for rows in (8, 64)
        for n in (0, rows // 4)
    ),
    Case("conv_verify_ds 64, 16 boundaries", (3,) * 64, num_speculative_tokens=2, layout="DS", boundaries=16),
)
PREFILL_CASES = (
    Case("conv_prefill 1x8192", (8192,)),
    Case("conv_prefill 16x128", (128,) * 16),
    Case("conv_prefill ragged", (1, 130, 0, 700, 63)),
    Case("conv_prefill_ds 1x8192", (8192,), layout="DS"),
    Case("conv_prefill_ds 16x128", (128,) * 16, layout="DS"),
)
