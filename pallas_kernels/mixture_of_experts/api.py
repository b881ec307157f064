"""The public functions of mixture_of_experts: their contracts, checks and dispatch.

An expert e computes e(x) = down[e] @ activation(up[e] @ x). A token whose experts are e_1 .. e_k, with weights w_1 .. w_k,
gets

    out = sum_i w_i e_i(x)

Sources: Shazeer et al., "Outrageously Large Neural Networks" (2017); DeepSeek-AI, "DeepSeek-V3" (2024), for scores by
sigmoid, with groups and a bias; Gale et al., "MegaBlocks" (2022), for products of tiles that have one expert each.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels._check import checked, dtype_of, require
from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.mixture_of_experts import _router, pallas_triton, xla
from pallas_kernels.mixture_of_experts._activations import ACTIVATIONS, Activation
from pallas_kernels.mixture_of_experts._router import Scores
from pallas_kernels.mixture_of_experts.config import Config


@checked
def choose_experts(
    logits: Float[Array, "tokens outputs"] | Float[Array, "shares tokens outputs"],
    top_k: int,
    *,
    scores: Scores = "softmax",
    bias: Float32[Array, " experts"] | None = None,
    shared: int = 0,
    shared_gate: bool = False,
    groups: int = 1,
    top_groups: int = 1,
    renormalise: bool = True,
    scale: float = 1.0,
    logits_dtype: str | None = None,
    valid: Bool[Array, " tokens"] | None = None,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> tuple[Int32[Array, "tokens chosen"], Float32[Array, "tokens chosen"]]:
    """Chooses each token's experts, those with the largest score + bias, and weights them by their scores.

    Of equal sums, that of the lower index is chosen. Shared experts, which every token has, follow the others in number and
    in order. All arithmetic is float32.

    Args:
        logits: The router's outputs, one for each expert that is not shared; or sums whose total over the shares they are:
            see `linear_sums`.
        top_k: The number of experts per token, shared ones not included.
        scores: The function that takes a token's logits to scores: "softmax" over all experts, or "sigmoid" of each.
        bias: Added to the scores for the choice only. None is 0.
        shared: The number of shared experts.
        shared_gate: Whether `logits` has one output more, the last, whose sigmoid is the weight of the shared experts. It is
            1 otherwise.
        groups: The number of groups of consecutive experts, of equal size.
        top_groups: The number of groups from which a token's experts come: those whose two best experts have the largest
            sum of score + bias.
        renormalise: Whether the weights of a token's experts are scaled to the sum 1.
        scale: Factor of the weights, after that.
        logits_dtype: The dtype to which the total of the shares is rounded. None does not round it.
        valid: False for padding tokens, which get no experts. None means that there are none.
        implementation: "xla" or "triton". None selects Triton when the program is lowered for CUDA and XLA elsewhere.
        interpret: Whether to run the Triton kernel's body as plain JAX, on any platform.

    Returns:
        The `top_k + shared` experts of each token, the best one first, and their weights. A padding token's experts are -1.

    Raises:
        ValueError: if a shape, a dtype or a number breaks the contract.
    """
    rule = _rule(
        "choose_experts", logits, bias, top_k, scores=scores, shared=shared, shared_gate=shared_gate, groups=groups,
        top_groups=top_groups, renormalise=renormalise, scale=scale, logits_dtype=logits_dtype,
    )  # fmt: skip
    logits = logits if logits.ndim == 3 else logits[None]
    if logits.shape[1] == 0:
        return jnp.zeros((0, top_k + shared), jnp.int32), jnp.zeros((0, top_k + shared), jnp.float32)
    return _choose(logits, bias, valid, rule, implementation, interpret)


def _rule(
    name: str,
    logits: jax.Array,
    bias: jax.Array | None,
    top_k: int,
    *,
    scores: Scores,
    shared: int,
    shared_gate: bool,
    groups: int,
    top_groups: int,
    renormalise: bool,
    scale: float,
    logits_dtype: str | None,
) -> _router.Rule:
    """Checks the arguments of the op `name`, and collects the static ones."""
    experts = logits.shape[-1] - shared_gate
    require(logits.ndim == 2 or logits.shape[0] >= 1, f"{name}: logits must have at least one share, got none")
    if bias is not None and bias.shape[0] != experts:
        raise ValueError(f"{name}: bias must have an element for each of {experts} experts, got {bias.shape[0]}")
    require(
        shared >= int(shared_gate),
        f"{name}: shared must be at least 0, and at least 1 with shared_gate, got {shared}",
    )
    require(scores in ("softmax", "sigmoid"), f"{name}: scores must be 'softmax' or 'sigmoid', got {scores!r}")
    require(groups >= 1 and experts % groups == 0, f"{name}: groups must divide {experts} experts, got {groups}")
    require(1 <= top_groups <= groups, f"{name}: top_groups must be from 1 to groups = {groups}, got {top_groups}")
    allowed = experts // groups * top_groups
    require(1 <= top_k <= allowed, f"{name}: top_k must be from 1 to {allowed}, got {top_k}")
    require(
        top_groups == groups or experts // groups >= 2,
        f"{name}: a group must have at least 2 experts, got {experts} experts in {groups} groups",
    )
    dtype = dtype_of(name, "logits_dtype", logits_dtype, jnp.float32)
    return _router.Rule(
        experts, top_k, scores, groups, top_groups, renormalise, float(scale), shared, shared_gate, dtype
    )


@functools.partial(jax.jit, static_argnames=("rule", "implementation", "interpret"))
def _choose(logits, bias, valid, rule, implementation, interpret):
    return dispatch(
        "choose_experts",
        implementation,
        (logits, bias, valid),
        xla=functools.partial(_router.xla, rule=rule),
        triton=functools.partial(_router.triton, rule=rule, interpret=interpret),
    )


@checked
def mixture_of_experts(
    x: Float[Array, "tokens hidden"],
    up: Float[Array, "experts up_size hidden"],
    down: Float[Array, "experts hidden size"],
    chosen: Int32[Array, "tokens top_k"],
    weights: Float32[Array, "tokens top_k"],
    *,
    activation: Activation = "swiglu",
    out_dtype: str | None = None,
    implementation: Implementation | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "tokens hidden"]:
    """Computes the weighted sum of each token's experts.

    The equation is at the top of this file. A token's result does not depend on other tokens, to the bit, and not on where
    it stands among them. An expert's weights are read only if a token has chosen it, and "triton" reads them once for each
    tile of pairs of that expert: see `config.Config`. The number of tokens selects the configuration, so a token may have
    other bits in a call of another size. What a token without experts holds, NaN included, never reaches a result.

    Numerics: products, activations and the weighted sum are float32; the activation's result and an expert's output are
    rounded to the dtype of `x`, and the sum to `out_dtype`. "triton" does not round the outputs of a single token's experts.
    float32 products are three products of tf32 in "triton", or of float32 for a single token, and Precision.HIGHEST in
    "xla". There is no derivative in "triton".

    Args:
        x: Inputs.
        up: First weights of all experts, [gate; up] along `up_size` for "swiglu".
        down: Second weights of all experts.
        chosen: The experts of each token, which may repeat. An index that no expert has, such as -1, stands for none.
        weights: The weight of each of them.
        activation: "swiglu", silu(gate) * up, for which `up_size` is 2 * size; or "relu2", relu(up) ** 2, for which it is
            size.
        out_dtype: Dtype of the result; None is that of `x`.
        implementation: "xla" or "triton". None selects Triton when the program is lowered for CUDA and XLA elsewhere.
        config: Launch configuration of the Triton kernels. None selects the default.
        interpret: Whether to run the Triton kernels' bodies as plain JAX, on any platform.

    Returns:
        The weighted sums. They are 0 for tokens without experts.

    Raises:
        ValueError: if a shape or dtype breaks the contract.
        UnsupportedError: if `implementation` is "triton" and the kernels cannot run these arguments.
    """
    _check("mixture_of_experts", x, up, down, activation)
    dtype = str(dtype_of("mixture_of_experts", "out_dtype", out_dtype, x.dtype))
    if 0 in chosen.shape or 0 in up.shape:
        return jnp.zeros(x.shape, dtype)
    options = dict(activation=activation, out_dtype=dtype)
    return _mix(
        "mixture_of_experts", (x, up, down, chosen, weights), tuple(options.items()), implementation, config, interpret
    )


@checked
def mixture_of_experts_sums(
    x: Float[Array, "tokens hidden"],
    up: Float[Array, "experts up_size hidden"],
    down: Float[Array, "experts hidden size"],
    chosen: Int32[Array, "tokens top_k"],
    weights: Float32[Array, "tokens top_k"],
    *,
    activation: Activation = "swiglu",
    implementation: Implementation | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "shares tokens hidden"]:
    """Computes the weighted sum of the outputs of each token's experts, in shares that the caller adds up.

    What reads the weighted sum, such as `add_rms_norm`, adds the shares on the way, and no kernel is launched for it. There
    is a share for each of a token's experts, in order: its weighted output, in x's dtype, which is rounded once. It is 0
    for none. A single token has one share, its whole sum in float32, and its experts' outputs are not rounded. Otherwise
    arguments, numerics and errors are those of `mixture_of_experts`.
    """
    _check("mixture_of_experts_sums", x, up, down, activation)
    if 0 in chosen.shape or 0 in up.shape:
        return jnp.zeros((1, *x.shape), jnp.float32)
    operands, options = (x, up, down, chosen, weights), (("activation", activation),)
    return _mix("mixture_of_experts_sums", operands, options, implementation, config, interpret)


@checked
def routed_experts_sums(
    x: Float[Array, "tokens hidden"],
    logits: Float[Array, "tokens outputs"] | Float[Array, "shares tokens outputs"],
    up: Float[Array, "experts up_size hidden"],
    down: Float[Array, "experts hidden size"],
    top_k: int,
    *,
    scores: Scores = "softmax",
    bias: Float32[Array, " routed"] | None = None,
    shared: int = 0,
    shared_gate: bool = False,
    groups: int = 1,
    top_groups: int = 1,
    renormalise: bool = True,
    scale: float = 1.0,
    logits_dtype: str | None = None,
    valid: Bool[Array, " tokens"] | None = None,
    activation: Activation = "swiglu",
    implementation: Implementation | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "shares tokens hidden"]:
    """Chooses each token's experts, and computes the weighted sum of their outputs, in shares that the caller adds up.

    It is `mixture_of_experts_sums` of what `choose_experts` returns: see there. With a single token, "triton" launches no
    kernel for the choice: every program of the first product chooses its expert for itself.

    Raises:
        ValueError: if a shape, a dtype or a number breaks the contract.
        UnsupportedError: if `implementation` is "triton" and the kernels cannot run these arguments.
    """
    options = dict(
        scores=scores, shared=shared, shared_gate=shared_gate, groups=groups, top_groups=top_groups,
        renormalise=renormalise, scale=scale, logits_dtype=logits_dtype,
    )  # fmt: skip
    how = dict(implementation=implementation, interpret=interpret)
    if x.shape[0] != 1 or 0 in up.shape:
        chosen, weights = choose_experts(logits, top_k, bias=bias, valid=valid, **options, **how)
        return mixture_of_experts_sums(x, up, down, chosen, weights, activation=activation, config=config, **how)
    _check("routed_experts_sums", x, up, down, activation)
    rule = _rule("routed_experts_sums", logits, bias, top_k, **options)
    operands = x, logits if logits.ndim == 3 else logits[None], up, down, bias, valid
    options = dict(rule=rule, activation=activation)
    return _mix("routed_experts_sums", operands, tuple(options.items()), implementation, config, interpret)


def _check(name: str, x: jax.Array, up: jax.Array, down: jax.Array, activation: str) -> None:
    require(
        activation in ACTIVATIONS,
        f"{name}: activation must be one of {sorted(ACTIVATIONS)}, got {activation!r}",
    )
    parts = ACTIVATIONS[activation].parts
    require(
        up.shape[1] == parts * down.shape[2],
        f"{name}: up must have {parts} x {down.shape[2]} outputs for {activation!r}, got {up.shape[1]}",
    )
    require(
        up.dtype == x.dtype and down.dtype == x.dtype,
        f"{name}: up and down must have the dtype of x, {x.dtype}, got {up.dtype} and {down.dtype}",
    )


@functools.partial(jax.jit, static_argnames=("op", "options", "implementation", "config", "interpret"))
def _mix(op, operands, options, implementation, config, interpret):
    return dispatch(
        op,
        implementation,
        operands,
        xla=functools.partial(getattr(xla, op), **dict(options)),
        triton=functools.partial(getattr(pallas_triton, op), config=config, interpret=interpret, **dict(options)),
        unsupported=pallas_triton.unsupported(operands[0]),
    )
