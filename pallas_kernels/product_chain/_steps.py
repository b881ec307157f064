"""The steps of a chain: products with weights, and norms of the residual stream."""

from dataclasses import dataclass, field
from typing import TypeAlias

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Product:
    """Multiplies by weights: x weight^T, or silu(gate) * up of its halves.

    Attributes:
        weight: The weights. [outputs, inputs]
        is_gated: Whether the first half of the outputs is a gate of the second half.
    """

    weight: jax.Array
    is_gated: bool = field(default=False, metadata=dict(static=True))

    @property
    def outputs(self) -> int:
        """The number of results."""
        return self.weight.shape[0] // (1 + self.is_gated)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Norm:
    """Adds what the step before has computed to the residual stream, and normalises the sum: see `add_rms_norm`.

    Attributes:
        weight: Weights of the norm. [channels]
        epsilon: Added to the mean square.
        offset: Added to the weights.
        scale: Factor of what is added.
        out_dtype: Dtype of the normed values; None is that of the residual stream.
    """

    weight: jax.Array
    epsilon: float = field(metadata=dict(static=True))
    offset: float = field(default=0.0, metadata=dict(static=True))
    scale: float = field(default=1.0, metadata=dict(static=True))
    out_dtype: str | None = field(default=None, metadata=dict(static=True))


Step: TypeAlias = Product | Norm
