"""Named cases of rotate_and_store, which tests, tuning and benchmarks share."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One call of the op.

    Attributes:
        name: The case's name.
        tokens: The number of tokens.
        heads: The number of query heads.
        kv_heads: The number of key heads.
        dim: Dims of a head.
        pairs: Pairs of dims that are rotated; 0 rotates none.
        is_normed: Whether queries and keys are normalised.
        is_gated: Whether each query is followed by a gate of `dim` dims.
        page_size: Tokens of a page.
        dtype: Dtype of all arrays but the angles and the weights.
    """

    name: str
    tokens: int
    heads: int = 16
    kv_heads: int = 4
    dim: int = 256
    pairs: int = 32
    is_normed: bool = True
    is_gated: bool = True
    page_size: int = 64
    dtype: str = "bfloat16"


# Qwen3.5-4B's attention, a head of 128 dims that is rotated as a whole, and one that is not rotated.
CASES = (
    *(Case(f"rotary {tokens}", tokens) for tokens in (1, 16, 64, 256, 8192)),
    *(
        Case(f"rotary whole 128 {tokens}", tokens, 32, 8, 128, 64, is_normed=False, is_gated=False)
        for tokens in (16, 8192)
    ),
    Case("rotary none 128 16", 16, 32, 8, 128, 0, is_normed=False, is_gated=False),
    Case("rotary odd 5", 5, 6, 3, 20, 5, page_size=24, dtype="float16"),
    Case("rotary one head float32", 3, 1, 1, 80, 40, is_gated=False, dtype="float32"),
)
