"""The public functions of the rotary embedding (RoPE): their contract, checks and dispatch.

For one head x of one token::

    y = x / sqrt(mean(x^2) + epsilon) * (offset + weight)       (y = x without weights)
    z[i]         = y[i] * cos[i] - y[i + pairs] * sin[i]        for i < pairs
    z[i + pairs] = y[i + pairs] * cos[i] + y[i] * sin[i]        for i < pairs
    z[i]         = y[i]                                         for i >= 2 * pairs

Sources: Su et al., "RoFormer" (2021) for the rotation; Zhang, Sennrich, "Root Mean Square Layer Normalization" (2019).
"""

from dataclasses import replace

import jax
from jaxtyping import Array, Float, Float32

from pallas_kernels._check import checked, require
from pallas_kernels._run_op import run_op
from pallas_kernels.dispatch import Run
from pallas_kernels.rotary import pallas_triton, xla
from pallas_kernels.rotary.arguments import HeadNorms, PageIndices
from pallas_kernels.rotary.config import Config


@checked
def rotate(
    x: Float[Array, "tokens heads dim"],
    cos: Float32[Array, "tokens pairs"] | None = None,
    sin: Float32[Array, "tokens pairs"] | None = None,
    weight: Float[Array, " dim"] | None = None,
    *,
    epsilon: float = 0.0,
    offset: float = 0.0,
) -> Float[Array, "tokens heads dim"]:
    """Normalise each head and rotate its pairs of dims, as `rotate_and_store` does.

    It is plain JAX on every platform and can be differentiated. It is for callers without pages.

    Args:
        x: Queries or keys.
        cos: Cosine of each pair's angle. None rotates nothing.
        sin: Sine of each pair's angle, if and only if `cos` is given.
        weight: Weights of the norm. None leaves the heads as they are.
        epsilon: Added to the mean square.
        offset: Added to the weights.

    Returns:
        The results in x's dtype. They are computed in float32 and rounded once.

    Raises:
        ValueError: if a shape or dtype breaks the contract.
    """
    _check_angles("rotate", x.shape[2], cos, sin)
    return xla.rotate(x, cos, sin, weight, epsilon=epsilon, offset=offset).astype(x.dtype)


@checked
def rotate_and_store(
    q: Float[Array, "tokens q_heads q_dim"],
    k: Float[Array, "tokens kv_heads key_dim"],
    v: Float[Array, "tokens kv_heads value_dim"],
    cos: Float32[Array, "tokens pairs"] | None,
    sin: Float32[Array, "tokens pairs"] | None,
    keys: Float[Array, "layers pages page_size kv_heads key_dim"],
    values: Float[Array, "layers pages page_size kv_heads value_dim"],
    indices: PageIndices,
    norms: HeadNorms = HeadNorms(),
    *,
    heads: int | None = None,
    run: Run = Run(),
) -> tuple[
    Float[Array, "tokens heads key_dim"],
    Float[Array, "layers pages page_size kv_heads key_dim"],
    Float[Array, "layers pages page_size kv_heads value_dim"],
]:
    """Normalise and rotate queries and keys, and store keys and values in their pages, in one launch.

    The equation is at the top of this file. Weights and angles may each be left out. The caller computes `cos` and `sin`
    once per step, and all layers with the same rotation share them.

    A token's result does not depend on other tokens, to the bit, nor on their number.

    Numerics: everything is computed in float32. Queries are rounded once to q's dtype, and keys and values once to the
    dtype of their pages. There is no derivative.

    Args:
        q: Queries. A head's first `key_dim` dims are its query. Dims after them, such as a gate, are not read, and neither
            are heads after the first `heads`.
        k: Keys.
        v: Values.
        cos: Cosine of each pair's angle. None rotates nothing.
        sin: Sine of each pair's angle, if and only if `cos` is given.
        keys: Keys of all layers and pages. They are updated in place if the enclosing jit donates them, and copied
            otherwise.
        values: Values of all layers and pages, which are updated as `keys`.
        indices: The layer, page and offset of each token's key and value.
        norms: The norms of queries and keys. The default leaves both as they are.
        heads: The number of queries of a token; None for all heads of q.
        run: How it runs: by "xla" or "triton", with a `Config` for the Triton kernel.

    Returns:
        The queries in q's dtype, and the updated pages of keys and of values. No other entry of the pages has changed.

    Raises:
        ValueError: if a shape or dtype breaks the contract.
    """
    key_dim, run = k.shape[2], run.checked("rotate_and_store", Config)
    require(q.shape[2] >= key_dim, f"rotate_and_store: q must have at least {key_dim} dims per head, got {q.shape[2]}")
    _check_angles("rotate_and_store", key_dim, cos, sin)
    require(
        heads is None or 1 <= heads <= q.shape[1],
        f"rotate_and_store: heads must be None or from 1 to q's {q.shape[1]} heads, got {heads}",
    )
    heads = heads or q.shape[1]
    if q.shape[0] == 0:
        return q[:, :heads, :key_dim], keys, values
    norms = replace(norms, epsilon=float(norms.epsilon), offset=float(norms.offset))
    return run_op(
        "rotate_and_store",
        (q, k, v, cos, sin, keys, values, indices, norms),
        run,
        xla=xla.rotate_and_store,
        triton=pallas_triton.rotate_and_store,
        heads=heads,
    )


def _check_angles(name: str, dim: int, cos: jax.Array | None, sin: jax.Array | None) -> None:
    given = "sin" if cos is None else "cos"
    require((cos is None) == (sin is None), f"{name}: cos and sin must be given together, got only {given}")
    require(
        cos is None or 1 <= cos.shape[1] <= dim // 2,
        f"{name}: cos must have from 1 to {dim // 2} pairs, got {0 if cos is None else cos.shape[1]}",
    )
