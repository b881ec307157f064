"""The residual stream: a value, and a layer's outputs that are still to be added to it.

An addition waits for the norm that follows it, so that one kernel does both.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from mamba_align_jax.layers.exchange import Exchange, Outputs, Partial
from mamba_align_jax.layers.norm import RMSNorm
from pallas_kernels.rms_norm.xla import sum_of_shares


def total(outputs: Outputs, dtype: Any) -> jax.Array:
    """Returns outputs of a layer as one array [tokens, hidden] of `dtype`.

    Args:
        outputs: [tokens, hidden], or sums [shares, tokens, hidden] whose total the outputs are, or a summand of them:
            see `Linear.sums`.
        dtype: The dtype.
    """
    if isinstance(outputs, Partial):
        return outputs.total().astype(dtype)
    if outputs.ndim == 2:
        return outputs.astype(dtype)
    return sum_of_shares(outputs).astype(dtype)


@dataclass(frozen=True)
class Residual:
    """The residual stream within a step.

    Attributes:
        value: The stream without what waits. [tokens, hidden]
        waiting: Outputs that are still to be added: see `total`; None if nothing waits.
        scale: Factor of what waits.
        exchange: Adds up the summands of all devices; None leaves that to XLA.
    """

    value: jax.Array
    waiting: Outputs | None = None
    scale: float = 1.0
    exchange: Exchange | None = None

    def add(self, outputs: Outputs, scale: float = 1.0) -> "Residual":
        """Adds `scale` times outputs, which are [tokens, hidden], sums [shares, tokens, hidden], or a summand."""
        return self.after(self.settled(), outputs, scale)

    def after(self, value: jax.Array, outputs: Outputs, scale: float = 1.0) -> "Residual":
        """Returns the stream of which a layer has computed the value itself, with outputs that are to be added to it."""
        return replace(self, value=value, waiting=outputs, scale=scale)

    def total(self, outputs: Outputs, dtype: Any) -> jax.Array:
        """Returns outputs of a layer as one array [tokens, hidden] of `dtype`."""
        if isinstance(outputs, Partial) and self.exchange is not None:
            return self.exchange.total(outputs).astype(dtype)
        return total(outputs, dtype)

    def settled(self) -> jax.Array:
        """Returns the stream, [tokens, hidden], with everything added."""
        if self.waiting is None:
            return self.value
        summed = self.total(self.waiting, jnp.float32)
        return (self.value.astype(jnp.float32) + self.scale * summed).astype(self.value.dtype)

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
        options = dict(scale=self.scale, dtype=dtype, exchange=self.exchange)
        value, normed = norm.after(self.value, self.waiting, **options)
        return normed, Residual(value, exchange=self.exchange)
