"""The residual stream: a value, and a layer's outputs that are still to be added to it.

An addition waits for the norm that follows it, so that one kernel does both.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from mamba_align_jax.layers.chain import Chain, Inputs
from mamba_align_jax.layers.exchange import Exchange, Outputs, Partial
from mamba_align_jax.layers.norm import RMSNorm
from pallas_kernels.product_chain import MOST_TOKENS, Norm
from pallas_kernels.rms_norm.xla import sum_over_splits


def total(outputs: Outputs, dtype: Any) -> jax.Array:
    """Returns outputs of a layer, of any kind, as one array [tokens, hidden] of `dtype`. A chain is launched."""
    outputs = launched(outputs)
    if isinstance(outputs, Partial):
        return outputs.total().astype(dtype)
    if outputs.ndim == 2:
        return outputs.astype(dtype)
    return sum_over_splits(outputs).astype(dtype)


def launched(outputs: Outputs) -> jax.Array | Partial:
    """Returns outputs of a layer without a chain that is still to be launched."""
    if not isinstance(outputs, Chain):
        return outputs
    axis, out = outputs.axis, outputs.launch()
    return out if axis is None else Partial(out, axis)


@dataclass(frozen=True)
class Residual:
    """The residual stream within a step.

    Attributes:
        value: The stream without what waits, [tokens, hidden], or the chain whose last norm computes it.
        waiting: Outputs that are still to be added: see `total`; None if nothing waits.
        scale: Factor of what waits.
        exchange: Adds up the summands of all devices; None leaves that to XLA.
    """

    value: jax.Array | Chain
    waiting: Outputs | None = None
    scale: float = 1.0
    exchange: Exchange | None = None

    def add(self, outputs: Outputs, scale: float = 1.0) -> "Residual":
        """Adds `scale` times outputs, which are [tokens, hidden], sums [splits, tokens, hidden], a summand, or a chain."""
        is_continued = isinstance(outputs, Chain) and outputs is self.value
        return self.after(self.value if is_continued else self.settled(), outputs, scale)

    def after(self, value: jax.Array | Chain, outputs: Outputs, scale: float = 1.0) -> "Residual":
        """Returns the stream of which a layer has computed the value itself, with outputs that are to be added to it."""
        return replace(self, value=value, waiting=outputs, scale=scale)

    def total(self, outputs: Outputs, dtype: Any) -> jax.Array:
        """Returns outputs of a layer as one array [tokens, hidden] of `dtype`."""
        outputs = launched(outputs)
        if isinstance(outputs, Partial) and self.exchange is not None:
            return self.exchange.total(outputs).astype(dtype)
        return total(outputs, dtype)

    def settled(self) -> jax.Array:
        """Returns the stream, [tokens, hidden], with everything added."""
        value = self._own_value()
        if self.waiting is None:
            return value
        summed = self.total(self.waiting, jnp.float32)
        return (value.astype(jnp.float32) + self.scale * summed).astype(value.dtype)

    def normed(self, norm: RMSNorm, dtype: Any = None) -> tuple[jax.Array, "Residual"]:
        """Normalises the stream. `dtype` is that of the normed values; None is that of the stream.

        Returns:
            The normed values [tokens, hidden], and the stream, to which nothing is left to add.
        """
        if self.waiting is None:
            value = self._own_value()
            return norm(value).astype(dtype or value.dtype), replace(self, value=value)
        if isinstance(self.waiting, Chain):
            chain = self._continued(self.waiting, norm.step(self.scale, dtype))
            return chain.launch(), Residual(chain.total(), exchange=self.exchange)
        options = dict(scale=self.scale, dtype=dtype, exchange=self.exchange)
        value, normed = norm.after(self._own_value(), self.waiting, **options)
        return normed, Residual(value, exchange=self.exchange)

    def chained(self, norm: RMSNorm) -> tuple[Inputs, "Residual"]:
        """Normalises the stream of few tokens later, together with what follows: see `Chain`.

        Returns:
            The chain that computes the normed values, and the stream, whose value it computes too. If nothing waits to be
            added, the chain begins with the normed values. With more than `MOST_TOKENS` tokens, or where XLA adds up sums
            over devices, they are those of `normed`.
        """
        waiting = self.waiting
        if waiting is None:
            # There is nothing to launch together with the norm, but outputs of a layer that gets a chain are one.
            normed, after = self.normed(norm)
            return self._begun(normed) or normed, after
        if isinstance(waiting, Partial) and self.exchange is not None:
            waiting = self._begun(waiting.sums, waiting.axis)
        elif not isinstance(waiting, Partial | Chain):
            waiting = self._begun(waiting if waiting.ndim == 3 else waiting[None])
        if not isinstance(waiting, Chain):
            return self.normed(norm)
        chain = self._continued(waiting, norm.step(self.scale))
        return chain, replace(self, value=chain, waiting=None, scale=1.0)

    def _begun(self, x: jax.Array, axis: str | None = None) -> Chain | None:
        """Returns a chain that begins with values or sums, or None if there are too many tokens."""
        return Chain(x, exchange=self.exchange, axis=axis) if x.shape[-2] <= MOST_TOKENS else None

    def _continued(self, chain: Chain, step: Norm) -> Chain:
        """Lets a chain add what it computes to the stream and normalise it."""
        return chain.norm(step, None if self.value is chain else self._own_value())

    def _own_value(self) -> jax.Array:
        """Returns the stream without what waits, [tokens, hidden]. It launches the chain that computes it."""
        return self.value.total() if isinstance(self.value, Chain) else self.value
