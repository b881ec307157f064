"""Products of float32 tiles on tensor cores, as products of their bfloat16 terms."""

import jax
import jax.numpy as jnp

Operand = jax.Array | tuple[jax.Array, ...]


def as_terms(x: jax.Array, count: int) -> tuple[jax.Array, ...]:
    """Split a float32 tile into `count` bfloat16 terms, hi first.

    Their sum has a relative error of at most 2^-(8 count).
    """
    terms = []
    for _ in range(count - 1):
        # The term is x with its lower 16 bits cleared. If x were rounded instead, XLA could keep excess precision and
        # then find that the remainder is 0.
        bits = jax.lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-65536)
        term = jax.lax.bitcast_convert_type(bits, jnp.float32)
        terms.append(term.astype(jnp.bfloat16))
        x = x - term
    return *terms, x.astype(jnp.bfloat16)


def operand(x: jax.Array, count: int = 3) -> Operand:
    """Return a tile as bfloat16 terms: `count` terms of a float32 tile, and as many as are exact of a narrower one."""
    if x.dtype == jnp.bfloat16:
        return x
    return as_terms(x.astype(jnp.float32), count if x.dtype == jnp.float32 else 2)


def dot(a: Operand, b: Operand, *, contract: tuple[int, int] = (1, 0), interpret: bool) -> jax.Array:
    """Multiply two tiles, or their `as_terms`, and return the product in float32.

    bfloat16 tiles are multiplied exactly. float32 tiles are multiplied as three products of tf32 (a relative error of
    2^-21), or in float32 when interpreted. Products of two terms that are smaller than the longer tuple's own error
    are left out.

    Args:
        a: A tile or its terms. No axis may be shorter than 16.
        b: A tile or its terms. No axis may be shorter than 16.
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
