"""The dense product of all layers: no bias, and exact in float32 models."""

import jax.numpy as jnp
from flax import nnx
from jax.lax import Precision


def linear(in_features: int, out_features: int, dtype: str, rngs: nnx.Rngs) -> nnx.Linear:
    """A product without bias. float32 models take HIGHEST: a GPU would round to TF32 otherwise."""
    exact = jnp.dtype(dtype) == jnp.float32
    return nnx.Linear(
        in_features,
        out_features,
        use_bias=False,
        dtype=dtype,
        param_dtype=dtype,
        precision=Precision.HIGHEST if exact else Precision.DEFAULT,
        rngs=rngs,
    )
