"""The public functions of linear: their contract, checks and dispatch."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels._check import checked, dtype_of, require, sizes_of
from pallas_kernels._run_op import run_op
from pallas_kernels.dispatch import Run
from pallas_kernels.linear import pallas_triton, xla
from pallas_kernels.linear.config import MAX_TOKENS, Config, Options, default_config
from pallas_kernels.quantized import QuantizedWeight


@checked
def linear(
    x: Float[Array, "tokens inputs"],
    weight: Float[Array | QuantizedWeight, "outputs inputs"],
    bias: Float[Array, " outputs"] | None = None,
    *,
    is_gated: bool = False,
    parts: tuple[int, ...] | None = None,
    out_dtype: str | None = None,
    run: Run = Run(),
) -> tuple[Float[Array, "tokens _"], ...]:
    """Multiply every token by weights: y = x weight^T + bias, cut into one array for each of `parts`.

    With `is_gated`, the first half of y is a gate: the result is silu(gate) * up, where up is the second half.

    In a decode step a product is bound by reading its weights. The kernel reads them once, in tiles that keep GMEM busy. A
    call with more than `MAX_TOKENS` tokens runs XLA's product unless `run` names "triton".

    A token's result does not depend on other tokens, to the bit, as long as the number of tokens stays the same.

    Numerics: sums are float32, and so are bias and gate until the result is rounded once. If results of more than
    `MAX_TOKENS` tokens have the weights' dtype, "xla" rounds products to it before bias and gate. float32 products are
    three products of tf32 in "triton", or float32 FMAs in its kernel of a single token, and Precision.HIGHEST in "xla".
    There is no derivative. A quantised weight with activation_dtype "fp8" is multiplied by inputs that are rounded to FP8
    per token and 128 channels: by "mosaic_gpu", whose products are rounded to the weights' dtype before bias and gate, in
    float32 by "xla", and not by "triton".

    Args:
        x: Inputs.
        weight: Weights, in the layout of Hugging Face's files. They have x's dtype, or are float32 where x is narrower. The
            kernel then converts x as it loads it, without a copy. A quantised weight has the results of the array that it
            means.
        bias: Added to the product.
        is_gated: Whether the result is silu(gate) * up.
        parts: Sizes of the results, whose columns lie side by side in y, or in silu(gate) * up. None is one result.
        out_dtype: Dtype of the results; None is the weights' dtype.
        run: How it runs: by "xla", "triton" or "mosaic_gpu", with a `Config` for the Triton kernel.

    Returns:
        One array [tokens, size] for each of `parts`.

    Raises:
        ValueError: if a shape or dtype breaks the contract.
        UnsupportedError: if `run` names "triton" or "mosaic_gpu" and its kernel cannot run these arguments.
    """
    outputs, run = weight.shape[0], run.checked("linear", Config)
    _check_dtypes("linear", x, weight)
    require(not is_gated or outputs % 2 == 0, f"linear: gated weights must have an even number of rows, got {outputs}")
    width = outputs // 2 if is_gated else outputs
    parts = sizes_of("linear", parts, width)
    dtype = dtype_of("linear", "out_dtype", out_dtype, weight.dtype)
    if x.shape[0] == 0:
        return tuple(jnp.zeros((0, size), dtype) for size in parts)
    return run_op(
        "linear",
        (x, weight, bias),
        _run_of(x, weight, run),
        xla=xla.linear,
        triton=pallas_triton.linear,
        unsupported=pallas_triton.unsupported(x, weight, is_gated=is_gated),
        sm90="pallas_kernels.linear.sm90",
        options=Options(is_gated, parts, dtype),
    )


@checked
def linear_sums(
    x: Float[Array, "tokens inputs"],
    weight: Float[Array | QuantizedWeight, "outputs inputs"],
    *,
    run: Run = Run(),
) -> Float[Array, "splits tokens outputs"]:
    """Multiply every token by weights by split-K: the total of the partial sums over the splits is x weight^T.

    A product with few outputs keeps a GPU busy only if several programs divide the inputs of each output among them. The op
    that reads the product, such as `add_rms_norm`, adds their partial sums as it reads them, so no kernel is launched for
    it. The number of splits depends on shapes and `run` only. "xla" puts the whole product into the first split.

    The partial sums are float32. "xla" rounds the sums of more than `MAX_TOKENS` tokens to the weights' dtype, because
    writing and reading float32 would take longer than the rest of the addition.

    See `linear` for the arguments, numerics and errors.
    """
    run = run.checked("linear_sums", Config)
    _check_dtypes("linear_sums", x, weight)
    if x.shape[0] == 0:
        return jnp.zeros((1, 0, weight.shape[0]), jnp.float32)
    splits = 1
    if not _is_rounding(weight) and (run.implementation is not None or x.shape[0] <= MAX_TOKENS):
        splits = (run.config or default_config(x, weight, is_summed=True)).shares
    return run_op(
        "linear_sums",
        (x, weight),
        _run_of(x, weight, run),
        xla=xla.linear_sums,
        triton=pallas_triton.linear_sums,
        unsupported=pallas_triton.unsupported(x, weight, is_gated=False),
        sm90="pallas_kernels.linear.sm90",
        splits=splits,
    )


def _is_rounding(weight: jax.Array | QuantizedWeight) -> bool:
    """Return whether products by a weight round their inputs to FP8."""
    return isinstance(weight, QuantizedWeight) and weight.activation_dtype == "fp8"


def _run_of(x: jax.Array, weight: jax.Array | QuantizedWeight, run: Run) -> Run:
    """Return how a product runs: by XLA, if there are many tokens in 16 bits or more and no implementation is named."""
    is_large = run.implementation is None and x.shape[0] > MAX_TOKENS and not _is_rounding(weight)
    return replace(run, implementation="xla") if is_large else run


def _check_dtypes(name: str, x: jax.Array, weight: jax.Array | QuantizedWeight) -> None:
    wanted = f"x's dtype {x.dtype}" + ("" if x.dtype == jnp.float32 else " or float32")
    require(0 not in weight.shape, f"{name}: weight must have no axis of length 0, got {list(weight.shape)}")
    is_right = weight.dtype in (x.dtype, jnp.float32)
    require(is_right, f"{name}: weight must have {wanted}, got {weight.dtype}")
