"""The residual stream: a value, and a layer's outputs that are still to be added to it.

An addition waits for the norm that follows it, so that one kernel does both.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from mamba_align_jax.layers.norm import RMSNorm


def total(outputs: jax.Array, dtype: Any) -> jax.Array:
    """Returns outputs of a layer as one array [tokens, hidden] of `dtype`.

    Args:
        outputs: [tokens, hidden], or sums [shares, tokens, hidden] whose total the outputs are: see `Linear.sums`.
        dtype: The dtype.
    """
    if outputs.ndim == 2:
        return outputs.astype(dtype)
    summed = outputs[0].astype(jnp.float32)
    for share in range(1, outputs.shape[0]):
        summed = summed + outputs[share].astype(jnp.float32)
    return summed.astype(dtype)


@dataclass(frozen=True)
class Residual:
    """The residual stream within a step.

    Attributes:
        value: The stream without what waits. [tokens, hidden]
        waiting: Outputs that are still to be added: see `total`; None if nothing waits.
        scale: Factor of what waits.
    """

    value: jax.Array
    waiting: jax.Array | None = None
    scale: float = 1.0

    def add(self, outputs: jax.Array, scale: float = 1.0) -> "Residual":
        """Adds `scale` times outputs, which are [tokens, hidden] or sums [shares, tokens, hidden]."""
        return Residual(self.settled(), outputs, scale)

    def settled(self) -> jax.Array:
        """Returns the stream, [tokens, hidden], with everything added."""
        if self.waiting is None:
            return self.value
        return (self.value.astype(jnp.float32) + self.scale * total(self.waiting, jnp.float32)).astype(self.value.dtype)

    def normed(self, norm: RMSNorm, dtype: Any = None) -> tuple[jax.Array, "Residual"]:
        """Normalises the stream.

        Args:
            norm: The norm.
            dtype: Dtype of the normed values; None is that of the stream.

        Returns:
            The normed values [tokens, hidden], and the stream, to which nothing is left to add.
        """
        if self.waiting is None:
            return norm(self.value).astype(dtype or self.value.dtype), self
        addend = self.waiting if self.waiting.ndim == 3 else self.waiting[None]
        value, normed = norm.after(self.value, addend, scale=self.scale, dtype=dtype)
        return normed, Residual(value)
