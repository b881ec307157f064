"""Products of tiles on tensor cores, each with as many bits of float32 as the caller asks for."""

import jax
import jax.numpy as jnp

Operand = jax.Array | tuple[jax.Array, ...]


def pieces(x: jax.Array, count: int) -> tuple[jax.Array, ...]:
    """Splits a float32 tile into `count` bfloat16 tiles, the largest first.

    Their sum has a relative error of at most 2^-(8 count).
    """
    parts = []
    for _ in range(count - 1):
        # The part is cut from the upper half of the bits. If it were rounded instead, XLA could keep excess precision
        # and then find that the rounding has left no rest.
        bits = jax.lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-65536)
        part = jax.lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return *parts, x.astype(jnp.bfloat16)


def operand(x: jax.Array, count: int = 3) -> Operand:
    """Returns a tile in pieces of bfloat16, float32 tiles in `count` of them and narrower ones without an error."""
    if x.dtype == jnp.bfloat16:
        return x
    return pieces(x.astype(jnp.float32), count if x.dtype == jnp.float32 else 2)


def dot(a: Operand, b: Operand, *, contract: tuple[int, int] = (1, 0), interpret: bool) -> jax.Array:
    """Multiplies two tiles, or tuples of `pieces` of tiles, and returns the product in float32.

    bfloat16 tiles are multiplied exactly. float32 tiles are multiplied as three products of tf32 (a relative error of
    2^-21), or in float32 when interpreted. Products of two pieces that are smaller than the longer tuple's own error
    are left out.

    Args:
        a: A tile or its pieces. No axis may be shorter than 16.
        b: A tile or its pieces. No axis may be shorter than 16.
        contract: The axis of `a` and the axis of `b` that are summed over.
        interpret: Whether the kernel runs as plain JAX.
    """
    a, b = (x if isinstance(x, tuple) else (x,) for x in (a, b))
    pairs = [(i, j) for i in range(len(a)) for j in range(len(b)) if i + j < max(len(a), len(b))]
    total = None
    # The smallest products are added first, so that the larger ones do not round them away.
    for i, j in sorted(pairs, key=sum, reverse=True):
        product = _product(a[i], b[j], contract, interpret)
        total = product if total is None else total + product
    assert total is not None
    return total


def _product(a: jax.Array, b: jax.Array, contract: tuple[int, int], interpret: bool) -> jax.Array:
    assert min(*a.shape, *b.shape) >= 16, (a.shape, b.shape)
    if interpret:  # CPUs have no algorithm presets and may round the products of narrow types.
        a, b, precision = a.astype(jnp.float32), b.astype(jnp.float32), jax.lax.Precision.HIGHEST
    elif a.dtype == jnp.float32:
        precision = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    else:
        precision = jax.lax.Precision.DEFAULT
    dimensions = ((contract[:1], contract[1:]), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
