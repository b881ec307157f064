"""mixture_of_experts in plain jax.numpy, a few tiles of pairs at a time."""

import math

import jax
import jax.numpy as jnp

from pallas_kernels.mixture_of_experts import _router
from pallas_kernels.mixture_of_experts._activations import ACTIVATIONS
from pallas_kernels.mixture_of_experts._tiles import tiles
from pallas_kernels.mixture_of_experts.routing import Routing
from pallas_kernels.quantized import QuantizedWeight, dequantized, operands

# The most elements of weights that are gathered at once: 128 MiB of bfloat16.
_ELEMENTS = 1 << 26


def _weighted(outputs, chosen, weights, experts: int):
    """Multiply the outputs [tokens * top_k, hidden] of pairs by their routing weights, in float32.

    The outputs of pairs without an expert are undefined, and the results [tokens, top_k, hidden] are 0.
    """
    each = outputs.reshape(*chosen.shape, -1).astype(jnp.float32) * weights[..., None]
    exists = (chosen >= 0) & (chosen < experts)
    return jnp.where(exists[..., None], each, 0.0)


def weighted_sum(outputs, chosen, weights, experts: int, out_dtype: str):
    """Add up the weighted outputs of each token's experts in float32, to [tokens, hidden].

    `out_dtype` is the dtype of the result. See `_weighted` for the other arguments.
    """
    return jnp.sum(_weighted(outputs, chosen, weights, experts), axis=1).astype(out_dtype)


def _product(x, weight):
    """Multiply rows [rows, inputs] by a weight [outputs, inputs], an array or a quantised one, to float32."""
    if isinstance(weight, QuantizedWeight) and weight.activation_dtype == "fp8":
        return jnp.concatenate([_product(*pair) for pair in operands(x, weight)], axis=1)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    options = dict(precision=precision, preferred_element_type=jnp.float32)
    return jnp.einsum("rk,nk->rn", x, dequantized(weight), **options)


def _outputs(x, up, down, chosen, activation: str, dtype):
    """Compute the outputs [tokens * top_k, hidden] of all pairs in `dtype`."""
    (experts, hidden, _), top_k = down.shape, chosen.shape[1]
    pairs, (projections, activate) = chosen.size, ACTIVATIONS[activation]
    # In a decode step most experts have one pair, so larger tiles would consist of padding.
    rows = min(128, max(8, 1 << (pairs // experts).bit_length()))
    cut = tiles(chosen.reshape(-1), experts, rows)
    lane = jnp.arange(rows, dtype=jnp.int32)

    def run(tile):
        expert, start, _ = tile
        token = cut.order.at[start + lane].get(mode="clip") // top_k
        middle = activate(*jnp.split(_product(x[token], up[expert]), projections, axis=1)).astype(x.dtype)
        return _product(middle, down[expert]).astype(dtype)

    batch = max(1, _ELEMENTS // (math.prod(up.shape[1:]) + math.prod(down.shape[1:])))
    each = cut.expert, cut.start, cut.length
    out = jax.vmap(run)(each) if cut.start.size <= batch else jax.lax.map(run, each, batch_size=batch)
    pair = cut.order.at[cut.start[:, None] + lane[None]].get(mode="clip")
    pair = jnp.where(lane[None] < cut.length[:, None], pair, pairs)
    return jnp.zeros((pairs, hidden), dtype).at[pair].set(out, mode="drop", unique_indices=False)


def mixture_of_experts(x, up, down, chosen, weights, *, activation: str, out_dtype: str):
    """See api.py."""
    outputs = _outputs(x, up, down, chosen, activation, x.dtype)
    return weighted_sum(outputs, chosen, weights, down.shape[0], out_dtype)


def mixture_of_experts_sums(x, up, down, chosen, weights, *, activation: str):
    """See api.py. There is a partial sum for each expert of a token, and only one for a single token."""
    outputs = _outputs(x, up, down, chosen, activation, jnp.float32)
    if x.shape[0] == 1:
        return weighted_sum(outputs, chosen, weights, down.shape[0], "float32")[None]
    return _weighted(outputs, chosen, weights, down.shape[0]).astype(x.dtype).transpose(1, 0, 2)


def routed_experts_sums(x, logits, up, down, bias, valid, *, routing: Routing, activation: str):
    """See api.py."""
    chosen, weights = _router.xla(logits, bias, valid, routing=routing)
    return mixture_of_experts_sums(x, up, down, chosen, weights, activation=activation)
