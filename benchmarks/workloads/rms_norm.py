"""Named cases of add_rms_norm, which tests and benchmarks share."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A call: its tokens, channels and split-K partial sums."""

    name: str
    tokens: int
    channels: int
    splits: int
    dtype: str = "bfloat16"
    addend_dtype: str = "float32"


CASES = (
    *(Case(f"add_rms_norm {tokens}", tokens, 2560, 4) for tokens in (1, 16, 64)),
    # The experts of a token of Qwen3.5-35B-A3B.
    *(Case(f"add_rms_norm experts {tokens}", tokens, 2048, 9, addend_dtype="bfloat16") for tokens in (1, 64)),
    Case("add_rms_norm 2048", 2048, 2560, 1),
    Case("add_rms_norm odd 5", 5, 1000, 3, dtype="float32"),
)
