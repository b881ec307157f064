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
        is_summed: Whether the call is of `linear_sums`, by split-K.
        dtype: Dtype of the inputs, and of the weights unless `own_dtype` is given.
        out_dtype: Dtype of the result; None is the weights' dtype.
        own_dtype: Dtype of the weights; None is `dtype`.
    """

    name: str
    tokens: int
    inputs: int
    outputs: int
    is_gated: bool = False
    is_summed: bool = False
    dtype: str = "bfloat16"
    out_dtype: str | None = None
    own_dtype: str | None = None

    @property
    def weight_dtype(self) -> str:
        """Dtype of the weights."""
        return self.own_dtype or self.dtype


def products(tokens: int, devices: int = 1) -> tuple[Case, ...]:
    """Return the products of a step of Qwen3.5-4B, or of the shard of one of `devices` devices."""
    name = f"{tokens}" if devices == 1 else f"{tokens} of {devices}"
    return (
        Case(f"delta net in {name}", tokens, 2560, 12352 // devices),
        Case(f"attention in {name}", tokens, 2560, 10240 // devices),
        Case(f"mixer out {name}", tokens, 4096 // devices, 2560, is_summed=True),
        Case(f"gate up {name}", tokens, 2560, 18432 // devices, is_gated=True),
        Case(f"down {name}", tokens, 9216 // devices, 2560, is_summed=True),
        Case(f"logits {name}", tokens, 2560, 248320 // devices, out_dtype="float32"),
    )


CASES = (
    *(case for tokens in (1, 16, 32, 64) for case in products(tokens)),
    *(case for devices in (2, 4) for case in products(16, devices)),
    Case("odd 5", 5, 1000, 333, dtype="float32"),
    # A router of Kimi Linear.
    *(Case(f"router {tokens}", tokens, 2304, 256, is_summed=True, own_dtype="float32") for tokens in (16, 64)),
)
