"""The dense product of all layers, which is exact in float32 models, and the taps of their convolutions."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.lax import Precision

import pallas_kernels as ops
from mamba_align_jax.layers.chain import Chain, Inputs, settled
from mamba_align_jax.layers.exchange import Outputs, Partial
from pallas_kernels.linear.config import MAX_TOKENS
from pallas_kernels.product_chain import Convolution
from pallas_kernels.rows import cut_columns


def precision(dtype: str) -> Precision:
    """Returns the precision of a model's products. It is HIGHEST for float32, which a GPU would else round to TF32."""
    return Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else Precision.DEFAULT


class Linear(nnx.Module):
    """Computes x weight^T + bias, cut into parts.

    Projections of the same inputs are parts of one product, because a large product reads its weights faster than several
    small ones, and launches fewer kernels.

    Attributes:
        weight: The weights as files hold them, those of all parts one below the other. [out, in]
        bias: [out], or None.
        parts: The outputs of each part.
        axis: The mesh axis over which the inputs are split; None if they are not split.
        implementation: Implementation of the op; None chooses by platform. A product does not take the implementation that
            a step names: see `MixtureOfExperts`.
    """

    def __init__(
        self, in_features: int, out_features: int | Sequence[int], dtype: str, rngs: nnx.Rngs, *, bias: bool = False
    ) -> None:
        """Makes a product with random weights.

        Args:
            in_features: Channels of the inputs.
            out_features: Channels of the outputs, or those of each part.
            dtype: Dtype of weights and outputs.
            rngs: Random numbers for the weights.
            bias: Whether there is a bias.
        """
        self._is_whole = isinstance(out_features, int)
        self.parts: tuple[int, ...] = (out_features,) if isinstance(out_features, int) else tuple(out_features)
        out = sum(self.parts)
        weight = jax.random.normal(rngs.params(), (out, in_features), jnp.float32) * in_features**-0.5
        self.weight = nnx.Param(weight.astype(dtype))
        self.bias = nnx.Param(jnp.zeros(out, dtype)) if bias else None
        self.axis: str | None = None
        self.implementation: ops.Implementation | None = None

    @property
    def run(self) -> ops.Run:
        """How the op runs: by `implementation`."""
        return ops.Run(implementation=self.implementation)

    def _continued(self, x: Inputs, *, is_gated: bool = False, is_summand: bool = False) -> Chain | None:
        """Adds the product to the chain `x`. Returns None if `x` is an array, or if the product cannot be a step.

        With `is_summand` the caller can take a summand on each device instead of the whole product.
        """
        if not isinstance(x, Chain) or self.bias is not None or self.implementation is not None:
            return None
        can_be_step = self.axis is None or (is_summand and x.exchange is not None)
        return x.product(self.weight[...], is_gated=is_gated, axis=self.axis) if can_be_step else None

    def __call__(self, x: Inputs) -> Any:
        """Takes [..., in] to [..., out], or to a tuple of one array per part if the parts were given.

        A chain is launched.
        """
        chain = self._continued(x)
        if chain is not None:
            outs = chain.launch(self.parts)
            return outs[0] if self._is_whole else outs
        x = settled(x)
        rows = self._rows(x)
        if self.axis is None:
            outs = self._product(rows, parts=self.parts)
        else:
            outs = cut_columns(self._whole(rows).astype(rows.dtype), self.parts)
        outs = tuple(out.reshape(*x.shape[:-1], out.shape[1]) for out in outs)
        return outs[0] if self._is_whole else outs

    def with_wide_first(self, x: Inputs, *, is_wide: bool) -> tuple[jax.Array, ...]:
        """Takes [tokens, in] to the parts. With `is_wide`, the first may have the columns of the others after its own.

        Cutting the first part of a long prompt's product off would be a copy. Kernels can do without it.
        """
        if not is_wide or self.axis is not None or isinstance(x, Chain):
            return self(x)
        (whole,) = self._product(self._rows(x))
        return whole, *cut_columns(whole, self.parts)[1:]

    def convolved(self, x: Inputs, convolution: Convolution) -> tuple[jax.Array, ...] | None:
        """Continues and launches the chain `x` with the product and a convolution of its first part.

        Returns the parts and the updated pool of windows; or None if `x` is an array, or if the product cannot be a step.
        """
        chain = self._continued(x)
        return None if chain is None else chain.add(convolution).launch(self.parts)

    def gated(self, x: Inputs) -> Inputs:
        """Computes silu(gate) * up of [tokens, in], where gate and up are the two parts. It continues a chain."""
        chain = self._continued(x, is_gated=True)
        if chain is not None:
            return chain
        (out,) = self._product(self._rows(settled(x)), is_gated=True)
        return out

    def sums(self, x: Inputs) -> Outputs:
        """Computes the product of [tokens, in] as sums [splits, tokens, out], whose total over the splits it is.

        The sums are float32, or of the weights' dtype where `ops.linear_sums` rounds them. If the inputs are split over
        devices, each device has a summand of the product, in float32. A product with a bias is added up at once, so that
        the bias is added once. A chain is continued, and returned.
        """
        chain = self._continued(x, is_summand=True)
        if chain is not None:
            return chain
        rows = self._rows(settled(x))
        if self.bias is not None:
            return self._whole(rows)[None]
        return self.partial_sums(rows) if self.axis is None else self._summand(rows, self.axis)

    def partial_sums(self, x: jax.Array, run: ops.Run = ops.Run()) -> jax.Array:
        """Computes this device's product without the bias, [splits, tokens, out]: see `ops.linear_sums`.

        If `run` names no implementation, it is that of the layer.
        """
        run = self.run if run.implementation is None else run
        return ops.linear_sums(self._rows(x), self.weight[...], run=run)

    def _summand(self, rows: jax.Array, axis: str) -> Partial:
        return Partial(self._float32(rows)[None] if rows.shape[0] > MAX_TOKENS else self.partial_sums(rows), axis)

    def _whole(self, rows: jax.Array) -> jax.Array:
        """Computes the product and adds the bias, float32 [tokens, out], the same bits on all devices."""
        whole = self._float32(rows) if self.axis is None else self._summand(rows, self.axis).total()
        return whole if self.bias is None else whole + self.bias[...].astype(jnp.float32)[None]

    def _float32(self, rows: jax.Array) -> jax.Array:
        (product,) = ops.linear(rows, self.weight[...], out_dtype="float32", run=self.run)
        return product

    def _rows(self, x: jax.Array) -> jax.Array:
        return x.reshape(-1, x.shape[-1]).astype(self.weight.dtype)

    def _product(self, rows: jax.Array, **options: Any) -> tuple[jax.Array, ...]:
        bias = None if self.bias is None else self.bias[...]
        return ops.linear(rows, self.weight[...], bias, run=self.run, **options)


class ConvTaps(nnx.Module):
    """The weights of a depthwise causal convolution.

    Attributes:
        weight: The taps. [width, channels]
        bias: float32 [channels], or None.
    """

    def __init__(self, width: int, channels: int, dtype: str, rngs: nnx.Rngs, *, bias: bool = False) -> None:
        """Makes random taps.

        Args:
            width: Number of inputs that an output sees.
            channels: Number of channels.
            dtype: Dtype of the taps.
            rngs: Random numbers for the taps.
            bias: Whether there is a bias.
        """
        taps = jax.random.uniform(rngs.params(), (width, channels), jnp.float32, -1.0, 1.0) * width**-0.5
        self.weight = nnx.Param(taps.astype(dtype))
        self.bias = nnx.Param(jnp.zeros(channels, jnp.float32)) if bias else None
