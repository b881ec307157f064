"""Named workloads of product_chain, shared by tests and benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pallas_kernels.product_chain import Convolution, Experts, GateActivation, GatedNorm, Norm, Product

EPSILON, OFFSET, SCALE = 1e-6, 1.0, 0.5  # of all norms


@dataclass(frozen=True)
class Mixture:
    """The sizes of a mixture of experts: see `Experts`. `size` is the number of channels between an expert's products."""

    routed: int
    top_k: int
    size: int
    outputs: int
    shared: int = 1
    shared_gate: bool = True
    renormalise: bool = True

    def arguments(self, make: Callable[..., Any], channels: int, dtype: str, tokens: int) -> Experts:
        """Return the step for tokens without padding: see `Case.arguments`."""
        experts = self.routed + self.shared
        return Experts(
            make((self.routed + self.shared_gate, channels), dtype, channels**-0.5),
            make((experts, 2 * self.size, channels), dtype, channels**-0.5),
            make((experts, self.outputs, self.size), dtype, self.size**-0.5),
            make((tokens,), "bool", 1.0),  # values that are not 0, so True
            top_k=self.top_k,
            shared=self.shared,
            shared_gate=self.shared_gate,
            renormalise=self.renormalise,
        )


@dataclass(frozen=True)
class Taps:
    """The width of a convolution of the first array of `parts`: see `Convolution`."""

    width: int

    def arguments(self, make: Callable[..., Any], channels: int, dtype: str, tokens: int) -> Convolution:
        """Return the step for windows of layer 1 of 2, each in a block of its own: see `Case.arguments`."""
        pool = make((2, 1 + 2 * tokens, self.width - 1, channels), dtype, 1.0)
        weight = make((self.width, channels), dtype, self.width**-0.5)
        starts = jnp.arange(tokens + 1, dtype=jnp.int32)
        read, write = 1 + starts[:-1], 1 + tokens + starts[:-1]
        return Convolution(pool, jnp.int32(1), weight, starts, read, jnp.zeros_like(read), write)


@dataclass(frozen=True)
class Case:
    """A chain of any number of tokens.

    Attributes:
        name: The case's name.
        steps: The kind of each step: "norm", or a product's outputs, or "gated" and the outputs of each half, or a
            `Mixture`, or a gated norm's activation and the channels of its heads, or the `Taps` of a convolution at the end.
        inputs: Number of inputs.
        parts: Sizes of the results; None returns partial sums or normed values.
        splits: The number of partial sums of the inputs; None for inputs without this axis.
        dtype: Dtype of inputs, weights and residual stream.
    """

    name: str
    steps: "tuple[str | int | tuple[str, int] | Mixture | Taps, ...]"
    inputs: int
    parts: tuple[int, ...] | None = None
    splits: int | None = None
    dtype: str = "bfloat16"

    @property
    def is_convolved(self) -> bool:
        """Whether there is a convolution at the end."""
        return isinstance(self.steps[-1], Taps)

    def arguments(self, make: Callable[..., Any], tokens: int = 1) -> tuple[Any, tuple[Any, ...], Any]:
        """Return the inputs, the steps and the residual stream.

        Args:
            make: make(shape, dtype, deviation) makes an array whose elements have that standard deviation.
            tokens: The number of tokens.
        """
        splits = () if self.splits is None else (self.splits,)
        channels, steps, residual = self.inputs, [], None
        for step in self.steps:
            if step == "norm":
                steps.append(Norm(make((channels,), "float32", 0.1), EPSILON, OFFSET, SCALE))
                residual = tokens, channels
                continue
            if isinstance(step, Taps):
                assert self.parts is not None
                steps.append(step.arguments(make, self.parts[0], self.dtype, tokens))
                continue
            if isinstance(step, Mixture):
                steps.append(step.arguments(make, channels, self.dtype, tokens))
                channels = step.outputs
                continue
            if isinstance(step, tuple) and step[0] != "gated":
                activation: GateActivation = "silu" if step[0] == "silu" else "sigmoid"
                gate, weight = make((tokens, channels), self.dtype, 1.0), make((step[1],), "float32", 1.0)
                steps.append(GatedNorm(gate, weight, EPSILON, activation))
                continue
            is_gated = isinstance(step, tuple)
            outputs = int(step[1] if isinstance(step, tuple) else step)
            steps.append(Product(make((outputs * (1 + is_gated), channels), self.dtype, channels**-0.5), is_gated))
            channels = outputs
        x = make((*splits, tokens, self.inputs), self.dtype, 1.0)
        return x, tuple(steps), None if residual is None else make(residual, self.dtype, 1.0)


_EXPERTS = Mixture(256, 8, 512, 2048)
_MLP = ("norm", ("gated", 9216), 2560, "norm")
CASES = (
    # The layers of Qwen3.5-4B, from the end of one mixer to the beginning of the next.
    Case("to a delta net", (2560, *_MLP, 12352), 4096, (8192, 4096, 32, 32)),
    Case("to attention", (2560, *_MLP, 10240), 4096, (8192, 1024, 1024)),
    Case("to the head", (2560, *_MLP), 4096),
    Case("to the last norm", (2560, *_MLP[:-1]), 4096),
    # The layers of Qwen3.5-35B-A3B.
    Case("experts", (2048, "norm", _EXPERTS, "norm", 12352), 4096, (8192, 4096, 32, 32)),
    Case("experts to the head", (2048, "norm", _EXPERTS, "norm"), 4096),
    # The same as the first one, with the gated norm of the mixer that it begins at.
    Case("from a delta net", (("silu", 128), 2560, *_MLP, 12352), 4096, (8192, 4096, 32, 32)),
    # The same with the convolution of the mixer that it ends at.
    Case("to a convolution", (("silu", 128), 2560, *_MLP, 12352, Taps(4)), 4096, (8192, 4096, 32, 32)),
    Case("wide", (4096, "norm", ("gated", 14336), 4096, "norm", 6144), 4096, (4096, 1024, 1024)),
    Case("small sums", (256, "norm", 512), 512, dtype="float16"),
    Case("product after product", (512, 768, "norm"), 256),
)
