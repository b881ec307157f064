"""Named workloads of mixture_of_experts, shared by tests, tuning and benchmarks."""

from dataclasses import dataclass
from typing import Any

from pallas_kernels import Activation


@dataclass(frozen=True)
class Case:
    """One call. Each token chooses `top_k` different experts."""

    name: str
    tokens: int
    experts: int = 256
    top_k: int = 8
    hidden: int = 2048
    size: int = 512
    activation: Activation = "swiglu"
    dtype: str = "bfloat16"

    @property
    def up_size(self) -> int:
        """The number of outputs of an expert's first product."""
        return 2 * self.size if self.activation == "swiglu" else self.size


_JAMBA: dict[str, Any] = dict(experts=16, top_k=2, hidden=4096, size=14336)
_NEMOTRON: dict[str, Any] = dict(experts=128, top_k=6, hidden=2688, size=1856, activation="relu2")
# Qwen3.5-35B-A3B's experts.
QWEN_CASES = tuple(Case(f"experts {tokens}", tokens) for tokens in (1, 16, 64, 2048, 8192))
# Sizes and dtypes that other models have.
ODD_CASES = (
    Case("experts Jamba 16", 16, **_JAMBA),
    Case("experts Jamba 2048", 2048, **_JAMBA),
    Case("experts Nemotron-H 16", 16, **_NEMOTRON),
    Case("experts Nemotron-H 2048", 2048, **_NEMOTRON),
    Case("experts 16 float32", 16, dtype="float32"),
    Case("experts 2048 float32", 2048, dtype="float32"),
    Case("experts 16 float16", 16, dtype="float16"),
    Case("experts odd 3", 3, experts=5, top_k=3, hidden=72, size=40),
)
# A single token chooses its experts in the kernel of the first product.
ONE_TOKEN_CASES = (
    QWEN_CASES[0],
    Case("experts Jamba 1", 1, **_JAMBA),
    Case("experts Nemotron-H 1", 1, **_NEMOTRON),
    Case("experts 1 float32", 1, dtype="float32"),
)
CASES = QWEN_CASES + ODD_CASES
