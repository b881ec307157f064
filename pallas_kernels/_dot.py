"""Products of tiles on tensor cores, with as much of float32 as each needs."""

import jax
import jax.numpy as jnp

Operand = jax.Array | tuple[jax.Array, ...]


def pieces(x: jax.Array, count: int) -> tuple[jax.Array, ...]:
    """Splits a float32 tile into bfloat16 tiles, largest first, that sum to it up to a relative 2^-(8 count)."""
    parts = []
    for _ in range(count - 1):
        # The upper half of the bits: a rounding and what it took away, XLA's excess precision may take for nothing.
        bits = jax.lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-65536)
        part = jax.lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return *parts, x.astype(jnp.bfloat16)


def dot(a: Operand, b: Operand, *, contract: tuple[int, int] = (1, 0), interpret: bool) -> jax.Array:
    """The float32 product, over the axes `contract`, of two tiles or tuples of `pieces`. No axis may be shorter than 16.

    bfloat16 tiles multiply exactly; float32 tiles as three products of tf32 (2^-21), or as they are when interpreted. Of
    two tuples, the products that the longer one's error covers are left out.
    """
    a, b = (x if isinstance(x, tuple) else (x,) for x in (a, b))
    pairs = [(i, j) for i in range(len(a)) for j in range(len(b)) if i + j < max(len(a), len(b))]
    total = None
    # The smallest first: the others then lose nothing of them.
    for i, j in sorted(pairs, key=sum, reverse=True):
        product = _product(a[i], b[j], contract, interpret)
        total = product if total is None else total + product
    assert total is not None
    return total


def _product(a: jax.Array, b: jax.Array, contract: tuple[int, int], interpret: bool) -> jax.Array:
    assert min(*a.shape, *b.shape) >= 16, (a.shape, b.shape)
    if interpret:  # CPUs have no presets, and may round the products of narrow types.
        a, b, precision = a.astype(jnp.float32), b.astype(jnp.float32), jax.lax.Precision.HIGHEST
    elif a.dtype == jnp.float32:
        precision = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    else:
        precision = jax.lax.Precision.DEFAULT
    dimensions = ((contract[:1], contract[1:]), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
