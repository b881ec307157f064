"""linear in plain jax.numpy."""

import jax
import jax.numpy as jnp
from jax.lax import Precision

from pallas_kernels import _math
from pallas_kernels.linear.config import MAX_TOKENS, Options
from pallas_kernels.quantized import QuantizedWeight, dequantized, operands
from pallas_kernels.rows import cut_columns


def linear(
    x: jax.Array, weight: jax.Array | QuantizedWeight, bias: jax.Array | None, *, options: Options
) -> tuple[jax.Array, ...]:
    """See api.py."""
    x = x.astype(weight.dtype)
    total = product(x, weight, dtype_of_sums(x) if options.out_dtype == x.dtype else jnp.float32)
    return finish(total.astype(jnp.float32), bias, options)


def linear_sums(x: jax.Array, weight: jax.Array | QuantizedWeight, *, splits: int) -> jax.Array:
    """See api.py."""
    x = x.astype(weight.dtype)
    total = product(x, weight, dtype_of_sums(x))[None]
    return total if splits == 1 else jnp.pad(total, ((0, splits - 1), (0, 0), (0, 0)))


def dtype_of_sums(x: jax.Array) -> jnp.dtype:
    """Return the dtype of a product. cuBLAS rounds products of many tokens, because writing float32 would take long."""
    return x.dtype if x.shape[0] > MAX_TOKENS else jnp.dtype(jnp.float32)


def product(x: jax.Array, weight: jax.Array | QuantizedWeight, dtype: jnp.dtype) -> jax.Array:
    """Return x weight^T in a dtype, [tokens, outputs]."""
    if isinstance(weight, QuantizedWeight) and weight.activation_dtype == "fp8":
        pairs = operands(x, weight)
        return jnp.concatenate([product(*pair, jnp.dtype(jnp.float32)) for pair in pairs], axis=1).astype(dtype)
    # XLA would else fuse the producer of x into the product, which then is slower than cuBLAS.
    x = jax.lax.optimization_barrier(x)
    return jax.lax.dot_general(
        x,
        dequantized(weight),
        (((1,), (1,)), ((), ())),
        precision=Precision.HIGHEST if x.dtype == jnp.float32 else Precision.DEFAULT,
        preferred_element_type=dtype,
    )


def finish(total: jax.Array, bias: jax.Array | None, options: Options) -> tuple[jax.Array, ...]:
    """Compute the op's results from the product, float32 [tokens, outputs]."""
    if bias is not None:
        total = total + bias.astype(jnp.float32)[None]
    if options.is_gated:
        gate, up = jnp.split(total, 2, axis=1)
        total = _math.silu(gate) * up
    return cut_columns(total.astype(options.out_dtype), options.parts)
