"""The public functions of mixture_of_experts: their contracts, checks and dispatch.

An expert e computes e(x) = down[e] @ activation(up[e] @ x). A token whose experts are e_1 .. e_k, with weights w_1 .. w_k,
gets

    out = sum_i w_i e_i(x)

Sources: Shazeer et al., "Outrageously Large Neural Networks" (2017); DeepSeek-AI, "DeepSeek-V3" (2024), for scores by
sigmoid, with groups and a bias; Gale et al., "MegaBlocks" (2022), for products of tiles that have one expert each.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels._check import checked, dtype_of, require
from pallas_kernels._run_op import run_op
from pallas_kernels.dispatch import Run
from pallas_kernels.mixture_of_experts import _router, pallas_triton, xla
from pallas_kernels.mixture_of_experts._activations import ACTIVATIONS, Activation
from pallas_kernels.mixture_of_experts.config import Config
from pallas_kernels.mixture_of_experts.routing import Routing
from pallas_kernels.quantized import QuantizedWeight


@checked
def choose_experts(
    logits: Float[Array, "tokens outputs"] | Float[Array, "splits tokens outputs"],
    routing: Routing,
    *,
    bias: Float32[Array, " experts"] | None = None,
    valid: Bool[Array, " tokens"] | None = None,
    run: Run = Run(),
) -> tuple[Int32[Array, "tokens chosen"], Float32[Array, "tokens chosen"]]:
    """Choose each token's experts, which have the largest score + bias, and weight them by their scores.

    Of experts with equal sums, the lower index is chosen first. Shared experts, which every token has, come after the others
    in index and in order. All arithmetic is float32.

    Args:
        logits: The router's outputs, one for each expert that is not shared; or their split-K partial sums: see
            `linear_sums`.
        routing: The number of a token's experts, the function from logits to scores, and from scores to weights.
        bias: Added to the scores for the choice only. None is 0.
        valid: False for padding tokens, which get no experts. None if no token is padding.
        run: How it runs: by "xla" or "triton". There is no configuration.

    Returns:
        The `routing.chosen` experts of each token, the best one first, and their weights. A padding token's experts are -1.

    Raises:
        ValueError: if a shape, a dtype or a field of `routing` breaks the contract.
    """
    run = run.checked("choose_experts", None)
    routing = routing.checked("choose_experts", logits, bias)
    logits = logits if logits.ndim == 3 else logits[None]
    if logits.shape[1] == 0:
        return jnp.zeros((0, routing.chosen), jnp.int32), jnp.zeros((0, routing.chosen), jnp.float32)
    implementations = dict(xla=_router.xla, triton=_router.triton)
    return run_op("choose_experts", (logits, bias, valid), run, **implementations, routing=routing)


@checked
def mixture_of_experts(
    x: Float[Array, "tokens hidden"],
    up: Float[Array | QuantizedWeight, "experts up_size hidden"],
    down: Float[Array | QuantizedWeight, "experts hidden size"],
    chosen: Int32[Array, "tokens top_k"],
    weights: Float32[Array, "tokens top_k"],
    *,
    activation: Activation = "swiglu",
    out_dtype: str | None = None,
    run: Run = Run(),
) -> Float[Array, "tokens hidden"]:
    """Compute the weighted sum of the outputs of each token's experts.

    The equation is at the top of this file. A token's result does not depend on other tokens, to the bit, nor on its
    index among them. An expert's weights are read only if a token has chosen it, and "triton" reads them once for each
    tile of pairs of that expert: see `config.Config`. The number of tokens selects the configuration, so a token may have
    other bits in a call of another size. The inputs of a token without experts, NaN included, never reach a result.

    Numerics: products, activations and the weighted sum are float32; the activation's result and an expert's output are
    rounded to the dtype of `x`, and the sum to `out_dtype`. "triton" does not round the outputs of a single token's experts.
    float32 products are three products of tf32 in "triton", or of float32 for a single token, and Precision.HIGHEST in
    "xla". There is no derivative in "triton".

    Args:
        x: Inputs.
        up: First weights of all experts, [gate; up] along `up_size` for "swiglu". Quantised weights give the results of
            the arrays that they mean.
        down: Second weights of all experts.
        chosen: The experts of each token, which may repeat. An index out of range, such as -1, stands for none.
        weights: The routing weight of each expert in `chosen`.
        activation: "swiglu", silu(gate) * up, for which `up_size` is 2 * size; or "relu2", relu(up) ** 2, for which it is
            size.
        out_dtype: Dtype of the result; None is x's dtype.
        run: How it runs: by "xla" or "triton", with a `Config` for the Triton kernels.

    Returns:
        The weighted sums. They are 0 for tokens without experts.

    Raises:
        ValueError: if a shape or dtype breaks the contract.
        UnsupportedError: if `run` names "triton" and the kernels cannot run these arguments.
    """
    run = run.checked("mixture_of_experts", Config)
    _check("mixture_of_experts", x, up, down, activation)
    dtype = str(dtype_of("mixture_of_experts", "out_dtype", out_dtype, x.dtype))
    if 0 in chosen.shape or 0 in up.shape:
        return jnp.zeros(x.shape, dtype)
    return run_op(
        "mixture_of_experts",
        (x, up, down, chosen, weights),
        run,
        xla=xla.mixture_of_experts,
        triton=pallas_triton.mixture_of_experts,
        unsupported=pallas_triton.unsupported(x, up, down, activation),
        activation=activation,
        out_dtype=dtype,
    )


@checked
def mixture_of_experts_sums(
    x: Float[Array, "tokens hidden"],
    up: Float[Array | QuantizedWeight, "experts up_size hidden"],
    down: Float[Array | QuantizedWeight, "experts hidden size"],
    chosen: Int32[Array, "tokens top_k"],
    weights: Float32[Array, "tokens top_k"],
    *,
    activation: Activation = "swiglu",
    run: Run = Run(),
) -> Float[Array, "splits tokens hidden"]:
    """Compute the weighted sum of the outputs of each token's experts, in partial sums that the caller adds up.

    The op that reads the weighted sum, such as `add_rms_norm`, adds the partial sums as it reads them, so no kernel is
    launched for it. There is one for each of a token's experts, in order: the expert's weighted output, rounded once to x's
    dtype, or 0 for no expert. A single token has one, the whole sum in float32, and its experts' outputs are not rounded.
    See `mixture_of_experts` for the arguments and errors, and for all other numerics.
    """
    run = run.checked("mixture_of_experts_sums", Config)
    _check("mixture_of_experts_sums", x, up, down, activation)
    if 0 in chosen.shape or 0 in up.shape:
        return jnp.zeros((1, *x.shape), jnp.float32)
    return run_op(
        "mixture_of_experts_sums",
        (x, up, down, chosen, weights),
        run,
        xla=xla.mixture_of_experts_sums,
        triton=pallas_triton.mixture_of_experts_sums,
        unsupported=pallas_triton.unsupported(x, up, down, activation),
        activation=activation,
    )


@checked
def routed_experts_sums(
    x: Float[Array, "tokens hidden"],
    logits: Float[Array, "tokens outputs"] | Float[Array, "splits tokens outputs"],
    up: Float[Array | QuantizedWeight, "experts up_size hidden"],
    down: Float[Array | QuantizedWeight, "experts hidden size"],
    routing: Routing,
    *,
    bias: Float32[Array, " routed"] | None = None,
    valid: Bool[Array, " tokens"] | None = None,
    activation: Activation = "swiglu",
    run: Run = Run(),
) -> Float[Array, "splits tokens hidden"]:
    """Choose each token's experts, and compute `mixture_of_experts_sums` of them.

    See `choose_experts` and `mixture_of_experts_sums` for the arguments and numerics. With a single token, "triton" launches
    no kernel for the choice: every program of the first product chooses its expert for itself.

    Raises:
        ValueError: if a shape, a dtype or a field of `routing` breaks the contract.
        UnsupportedError: if `run` names "triton" and the kernels cannot run these arguments.
    """
    run = run.checked("routed_experts_sums", Config)
    if x.shape[0] != 1 or 0 in up.shape:
        chosen, weights = choose_experts(logits, routing, bias=bias, valid=valid, run=replace(run, config=None))
        return mixture_of_experts_sums(x, up, down, chosen, weights, activation=activation, run=run)
    _check("routed_experts_sums", x, up, down, activation)
    routing = routing.checked("routed_experts_sums", logits, bias)
    return run_op(
        "routed_experts_sums",
        (x, logits if logits.ndim == 3 else logits[None], up, down, bias, valid),
        run,
        xla=xla.routed_experts_sums,
        triton=pallas_triton.routed_experts_sums,
        unsupported=pallas_triton.unsupported(x, up, down, activation),
        routing=routing,
        activation=activation,
    )


def _check(
    name: str, x: jax.Array, up: jax.Array | QuantizedWeight, down: jax.Array | QuantizedWeight, activation: str
) -> None:
    require(
        activation in ACTIVATIONS,
        f"{name}: activation must be one of {sorted(ACTIVATIONS)}, got {activation!r}",
    )
    projections = ACTIVATIONS[activation].projections
    require(
        up.shape[1] == projections * down.shape[2],
        f"{name}: up must have {projections} x {down.shape[2]} outputs for {activation!r}, got {up.shape[1]}",
    )
    require(
        up.dtype == x.dtype and down.dtype == x.dtype,
        f"{name}: up and down must have the dtype of x, {x.dtype}, got {up.dtype} and {down.dtype}",
    )
