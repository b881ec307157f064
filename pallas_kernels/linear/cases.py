"""Named cases of linear, which tests and benchmarks share."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A product.

    Attributes:
        name: The case's name.
        tokens: Number of tokens.
        inputs: Number of inputs.
        outputs: Rows of the weights.
        is_gated: Whether the result is silu(gate) * up.
        is_summed: Whether it is a call of `linear_sums`.
        dtype: Dtype of inputs and weights.
        out_dtype: Dtype of the result; None is `dtype`.
    """

    name: str
    tokens: int
    inputs: int
    outputs: int
    is_gated: bool = False
    is_summed: bool = False
    dtype: str = "bfloat16"
    out_dtype: str | None = None


def products(tokens: int) -> tuple[Case, ...]:
    """Returns the products of a step of Qwen3.5-4B."""
    return (
        Case(f"delta net in {tokens}", tokens, 2560, 12352),
        Case(f"attention in {tokens}", tokens, 2560, 10240),
        Case(f"mixer out {tokens}", tokens, 4096, 2560, is_summed=True),
        Case(f"gate up {tokens}", tokens, 2560, 18432, is_gated=True),
        Case(f"down {tokens}", tokens, 9216, 2560, is_summed=True),
        Case(f"logits {tokens}", tokens, 2560, 248320, out_dtype="float32"),
    )


CASES = (
    *(case for tokens in (1, 16, 32, 64) for case in products(tokens)),
    Case("odd 5", 5, 1000, 333, dtype="float32"),
)
