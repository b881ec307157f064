"""The dense product of all layers, which is exact in float32 models, and the taps of their convolutions."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.lax import Precision


def precision(dtype: str) -> Precision:
    """Returns the precision of a model's products. It is HIGHEST for float32, which a GPU would else round to TF32."""
    return Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else Precision.DEFAULT


def linear(in_features: int, out_features: int, dtype: str, rngs: nnx.Rngs, *, bias: bool = False) -> nnx.Linear:
    """Makes the product x @ kernel, plus a bias if `bias`, with random weights.

    Args:
        in_features: Channels of the inputs.
        out_features: Channels of the outputs.
        dtype: Dtype of weights and outputs.
        rngs: Random numbers for the weights.
        bias: Whether there is a bias.
    """
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
