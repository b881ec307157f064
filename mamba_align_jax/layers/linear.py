"""The dense product of all layers, exact in float32 models, and the taps of their convolutions."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.lax import Precision


def precision(dtype: str) -> Precision:
    """Of a model's products. float32 models take HIGHEST: a GPU would round to TF32 otherwise."""
    return Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else Precision.DEFAULT


def linear(in_features: int, out_features: int, dtype: str, rngs: nnx.Rngs, *, bias: bool = False) -> nnx.Linear:
    """A product, with a bias if asked for."""
    return nnx.Linear(
        in_features,
        out_features,
        use_bias=bias,
        dtype=dtype,
        param_dtype=dtype,
        precision=precision(dtype),
        rngs=rngs,
    )


class ConvTaps(nnx.Module):
    """Weights of a depthwise causal convolution: `weight` [width, channels], and `bias` [channels] or None."""

    def __init__(self, width: int, channels: int, dtype: str, rngs: nnx.Rngs, *, bias: bool = False) -> None:
        taps = jax.random.uniform(rngs.params(), (width, channels), jnp.float32, -1.0, 1.0) * width**-0.5
        self.weight = nnx.Param(taps.astype(dtype))
        self.bias = nnx.Param(jnp.zeros(channels, jnp.float32)) if bias else None
