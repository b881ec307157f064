"""Named cases of all_reduce, which tests and benchmarks share."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A call: its tokens, channels, split-K partial sums and devices. `is_normed` means `all_reduce_rms_norm`."""

    name: str
    tokens: int
    channels: int
    splits: int
    devices: int = 2
    is_normed: bool = True
    dtype: str = "bfloat16"
    addend_dtype: str = "float32"


CASES = (
    *(Case(f"all_reduce_rms_norm {tokens}", tokens, 2560, 4) for tokens in (1, 16, 64, 256)),
    Case("all_reduce_rms_norm 16 on 8", 16, 2560, 4, devices=8),
    Case("all_reduce_rms_norm 8192 channels", 3, 8192, 1, devices=4),
    Case("all_reduce embeddings 16", 16, 2560, 1, is_normed=False, addend_dtype="bfloat16"),
    Case("all_reduce tokens 16", 16, 4, 1, is_normed=False),
    Case("all_reduce_rms_norm odd 5", 5, 1000, 3, dtype="float32"),
)
