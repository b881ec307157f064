"""Products of tiles on tensor cores, each with as much of float32 as it needs."""

import jax
import jax.numpy as jnp


def pieces(x: jax.Array, n: int) -> tuple[jax.Array, ...]:
    """Splits a float32 tile into `n` bfloat16 tiles, largest first, that sum to it up to a relative 2^-(8n)."""
    parts = []
    for _ in range(n - 1):
        # The upper half of the bits: what a rounding took away, XLA's excess precision may take for nothing.
        bits = jax.lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-65536)
        top = jax.lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(top.astype(jnp.bfloat16))
        x = x - top
    return (*parts, x.astype(jnp.bfloat16))


def dot(a: jax.Array | tuple[jax.Array, ...], b: jax.Array | tuple[jax.Array, ...], *, interpret: bool) -> jax.Array:
    """The product of two tiles, or of the sums of two tuples of `pieces`, in float32.

    bfloat16 and float16 tiles multiply exactly; float32 tiles as three products of tf32, or as float32 when interpreted.
    Of two tuples, the products that the longer one's precision leaves out are left out.
    """
    a, b = (x if isinstance(x, tuple) else (x,) for x in (a, b))
    most = max(len(a), len(b))
    pairs = [(i, j) for i in range(len(a)) for j in range(len(b)) if i + j < most]
    total = None
    # The smallest first: the others then lose nothing of them.
    for i, j in sorted(pairs, key=sum, reverse=True):
        product = _product(a[i], b[j], interpret)
        total = product if total is None else total + product
    assert total is not None
    return total


def _product(a: jax.Array, b: jax.Array, interpret: bool) -> jax.Array:
    if interpret:  # CPUs have no presets, and may round the products of narrow types.
        a, b, precision = a.astype(jnp.float32), b.astype(jnp.float32), jax.lax.Precision.HIGHEST
    elif a.dtype == jnp.float32:
        precision = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    else:
        precision = jax.lax.Precision.DEFAULT
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)
