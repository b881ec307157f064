"""The public function of least_kept: its contract, checks and dispatch."""

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from pallas_kernels._check import checked, require
from pallas_kernels._run_op import run_op
from pallas_kernels.dispatch import Run
from pallas_kernels.least_kept import pallas_triton, xla
from pallas_kernels.least_kept.config import Config


@checked
def least_kept(
    weights: Float32[Array, "rows tokens"],
    top_k: Int32[Array, " rows"],
    top_p: Float32[Array, " rows"],
    *,
    run: Run = Run(),
) -> Float32[Array, " rows"]:
    """Return the least probability of the tokens that `top_k` and `top_p` keep in each row.

    `top_k` keeps a token if fewer than `top_k` tokens have a higher probability. Of the tokens that are left, `top_p` keeps
    a token if all tokens of higher probability have less than `top_p` of the total. So tokens of equal probability are kept
    or dropped together, and the most likely token is always kept. The definitions are vLLM's, but for equal probabilities.

    It is a radix select: probabilities have the order of the bits of their floats, and the result is found from its highest
    bits to its lowest bits, in passes over all tokens. A pass adds up, for each possible value of the next bits, the
    probabilities of at least that value. There is no sort.

    Numerics: sums are float32. Their order follows the sizes of the arrays, and may decide whether a token at the very limit
    of `top_p` is kept. A row's result does not depend on the values of other rows, to the bit.

    Args:
        weights: Probabilities, times a factor per row that makes the largest one 1. From 0 to 1.
        top_k: The number of tokens that are kept; 0 for all.
        top_p: The fraction of the total that is kept, more than 0; 1 for all.
        run: How it runs: by "xla" or "triton", with a `Config` for the Triton kernel.

    Returns:
        The least probability, with the row's factor; 0 where all tokens are kept, or all but some below 2^-126.

    Raises:
        ValueError: if a shape or dtype breaks the contract.
    """
    run = run.checked("least_kept", Config)
    require(weights.shape[1] >= 1, "least_kept: weights must have at least one token, got none")
    if weights.shape[0] == 0:
        return jnp.zeros((0,), jnp.float32)
    operands, implementations = (weights, top_k, top_p), dict(xla=xla.least_kept, triton=pallas_triton.least_kept)
    return run_op("least_kept", operands, run, **implementations)
