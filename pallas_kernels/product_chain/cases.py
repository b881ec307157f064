"""Named cases of product_chain, which tests and benchmarks share."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A chain of one token.

    Attributes:
        name: The case's name.
        steps: What each step is: "norm", or a product's outputs, or "gated" and the outputs of each half.
        inputs: Number of inputs.
        parts: Sizes of the results; None returns sums or normed values.
        shares: Shares of the inputs; None if they are one array.
        dtype: Dtype of inputs, weights and residual stream.
    """

    name: str
    steps: tuple[str | int | tuple[str, int], ...]
    inputs: int
    parts: tuple[int, ...] | None = None
    shares: int | None = None
    dtype: str = "bfloat16"


_MLP = ("norm", ("gated", 9216), 2560, "norm")
CASES = (
    # The layers of Qwen3.5-4B, from the end of one mixer to the beginning of the next.
    Case("to a delta net", (2560, *_MLP, 12352), 4096, (8192, 4096, 32, 32)),
    Case("to attention", (2560, *_MLP, 10240), 4096, (8192, 1024, 1024)),
    Case("to the head", (2560, *_MLP), 4096),
    # Qwen3.5-35B-A3B: before and after the experts of a layer.
    Case("to experts", (2048, "norm"), 4096),
    Case("from experts", ("norm", 12352), 2048, (8192, 4096, 32, 32), shares=9),
    Case("wide", (4096, "norm", ("gated", 14336), 4096, "norm", 6144), 4096, (4096, 1024, 1024)),
    Case("small sums", (256, "norm", 512), 512, dtype="float16"),
    Case("product after product", (512, 768, "norm"), 256),
)
