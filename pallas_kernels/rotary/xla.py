"""rotate_and_store in plain jax.numpy."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.rotary.arguments import HeadNorms, PageIndices


def rotate(
    x: jax.Array,
    cos: jax.Array | None,
    sin: jax.Array | None,
    weight: jax.Array | None,
    *,
    epsilon: float,
    offset: float,
) -> jax.Array:
    """Compute the equation of api.py. The result is float32."""
    x = x.astype(jnp.float32)
    if weight is not None:
        mean = jnp.mean(x * x, axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(mean + epsilon) * (offset + weight.astype(jnp.float32))[None, None]
    if cos is None or sin is None:
        return x
    pairs = cos.shape[1]
    cos, sin = cos[:, None], sin[:, None]
    first, second, rest = jnp.split(x, [pairs, 2 * pairs], axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def rotate_and_store(
    q,
    k,
    v,
    cos,
    sin,
    keys,
    values,
    indices: PageIndices,
    norms: HeadNorms,
    *,
    heads: int,
):
    """See api.py."""
    finish = functools.partial(rotate, epsilon=norms.epsilon, offset=norms.offset)
    # A negative index would count from the last page.
    page = jnp.where(indices.page < 0, keys.shape[1], indices.page)
    put = lambda pool, x: pool.at[jnp.int32(indices.layer), page, indices.offset].set(x.astype(pool.dtype), mode="drop")
    queries = finish(q[:, :heads, : k.shape[2]], cos, sin, norms.q_weight).astype(q.dtype)
    return queries, put(keys, finish(k, cos, sin, norms.k_weight)), put(values, v)
