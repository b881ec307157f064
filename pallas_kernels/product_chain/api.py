"""The public functions of product_chain: their contract, checks and dispatch."""

import functools
from collections.abc import Sequence
from typing import Any, get_args

import jax
from jaxtyping import Array, Bool, Float, Int, Int32

from pallas_kernels import device
from pallas_kernels._check import check_argument, check_layer, checked, dtype_of, require, sizes_of
from pallas_kernels._mosaic_available import unavailable
from pallas_kernels.all_reduce import Mailboxes
from pallas_kernels.causal_conv1d.api import check as check_convolution
from pallas_kernels.dispatch import Run, dispatch
from pallas_kernels.product_chain import _schedule, _separate
from pallas_kernels.product_chain._steps import (
    Convolution,
    Experts,
    GateActivation,
    GatedNorm,
    Norm,
    Product,
    Step,
    weights_of,
)


@checked
def product_chain(
    x: Float[Array, "tokens inputs"] | Float[Array, "splits tokens inputs"],
    steps: Sequence[Any],
    residual: Float[Array, "tokens channels"] | None = None,
    *,
    parts: tuple[int, ...] | None = None,
    run: Run = Run(),
) -> tuple[Any, Float[Array, "tokens channels"] | None]:
    """Run a chain of norms, products and mixtures of experts: each step takes the results of the step before.

    In a decode step of few requests, these steps are bound by reading their weights. In each launch there are about 3 us in
    which hardly any GMEM is read: until the first weights arrive, and after the last weights have arrived. "mosaic_gpu" runs
    all steps in one launch, and reads the weights of later steps while CTAs wait for each other.

    One launch takes up to `MOST_TOKENS` tokens. With more than one, the first step must be a product or a gated norm, and
    the last one a product or a convolution, and there may be no experts. A convolution of more than `MOST_TOKENS` rows, or
    with windows of the layout "DS" or of another dtype than the results, is an op of its own after the launch.

    Other chains, and chains of fewer than `FEWEST_STEPS` steps, run each step by an op of its own: `linear`, `linear_sums`,
    `add_rms_norm`, `routed_experts_sums` and `causal_conv1d_update`. XLA runs a gated norm then. Neither a gated norm nor a
    convolution counts as a step.

    Numerics: products are summed in float32. Gated norms, gated products, the residual stream and normed values are rounded
    to their dtype, also within the launch, so results differ from separate ops' results by the order of sums only,
    which depends on shapes and not on the GPU. A token's bits do not depend on other tokens. They may differ between one
    token, several in one launch, and separate ops. There is no derivative.

    Args:
        x: The inputs of the first step. Only a norm takes split-K partial sums, whose total are the inputs.
        steps: `GatedNorm`, `Product`, `Norm`, `Experts` and `Convolution` objects. A gated norm is the first step, and a
            product follows it, unless it is also the last step. A norm follows a product or experts, or is the first step.
            A norm follows experts, unless they are the last step. A convolution is the last step, and follows a product.
        residual: The residual stream, to which norms add. It is required if there is a norm.
        parts: If the last step is a product that is not gated, the sizes of the arrays into which its results are cut. They
            have the dtype of the weights. None returns its partial sums. With a convolution they cut the results of the
            product before, of which the first array is convolved.
        run: How it runs: by "mosaic_gpu" in one launch, or by "xla" or "triton", which select the implementation of the
            separate ops. The default is one launch if the GPU and the arguments allow it, else separate ops. There is no
            configuration.

    Returns:
        The results of the last step, and the residual stream after the last norm, or `residual` if there is no norm. Results
        are a tuple with an array [tokens, size] for each of `parts`, which ends with the updated pool of windows if there
        is a convolution; or partial sums [splits, tokens, outputs], as of
        `linear_sums` or `routed_experts_sums`; or an array [tokens, outputs] of a gated product; or values
        [tokens, channels] of a norm or of a gated norm.

    Raises:
        ValueError: if a step cannot follow the one before, or if a shape or dtype breaks the contract.
        UnsupportedError: if `run` names "mosaic_gpu" and the kernel cannot run these arguments.
    """
    run, steps = run.checked("product_chain", None), _steps_of("product_chain", steps)
    parts = _check("product_chain", x, steps, residual, parts)
    is_over = any(isinstance(step, Norm) and step.over_devices for step in steps)
    require(not is_over, "product_chain: only all_reduce_product_chain has norms over devices")
    return _launch(x, steps, residual, None, None, parts, run)[:2]


@checked
def all_reduce_product_chain(
    x: Float[Array, "tokens inputs"] | Float[Array, "splits tokens inputs"],
    steps: Sequence[Any],
    residual: Float[Array, "tokens channels"] | None,
    mailboxes: Mailboxes,
    epoch: Int[Array, ""],
    *,
    parts: tuple[int, ...] | None = None,
    run: Run = Run(),
) -> tuple[Any, Float[Array, "tokens channels"] | None, Int[Array, ""]]:
    """Run `product_chain` on every device of a mesh axis, with norms that all-reduce their inputs over the devices.

    A norm with `over_devices` adds up the results of the step before over the devices, and then adds the sum to the residual
    stream, which is the same on all devices. It takes an epoch, as a call of `all_reduce` does, and has the same
    requirements. In one launch, some CTAs own some channels of the residual stream each, and send their addends to the same
    CTAs of the other devices. So the all-reduce takes no launch, and a single token takes the launch for several tokens.

    See `product_chain` and `all_reduce` for the numerics, the other arguments, and errors.

    Returns:
        The results of the last step, the residual stream after the last norm, or `residual` if there is no norm, and the
        next call's epoch.
    """
    run, steps = run.checked("all_reduce_product_chain", None), _steps_of("all_reduce_product_chain", steps)
    parts = _check("all_reduce_product_chain", x, steps, residual, parts)
    return _launch(x, steps, residual, mailboxes, epoch, parts, run)


def _launch(
    x: jax.Array,
    steps: tuple[Step, ...],
    residual: jax.Array | None,
    mailboxes: Mailboxes | None,
    epoch: jax.Array | None,
    parts: tuple[int, ...] | None,
    run: Run,
) -> tuple[Any, jax.Array | None, Any]:
    """Return the results, the residual stream, and the next epoch."""
    capacity = None if mailboxes is None else mailboxes.capacity
    steps, convolution = _without_convolution(steps)
    reason = _schedule.unsupported(x, steps, residual, parts, device.sm_count(), capacity)
    reason = reason or unavailable(run)
    if run.implementation is None and _schedule.is_short(steps):
        reason = "so few steps save less time than the launch costs"
    later = None
    if convolution is not None and reason is None:
        from pallas_kernels.product_chain import _convolution

        unable = _convolution.unsupported(convolution, weights_of(steps)[-1].dtype)
        if unable is not None and run.implementation is None:
            convolution, later = None, convolution
        else:
            reason = unable
    results, residual, epoch = _run(x, steps, residual, mailboxes, epoch, convolution, parts, run, reason)
    if later is not None:
        results = _separate.convolved(results, later, run)
    return results, residual, epoch


def _steps_of(op: str, steps: Any) -> tuple[Any, ...]:
    """Return the steps as a tuple. They must be a sequence."""
    require(isinstance(steps, Sequence), f"{op}: steps must be a sequence of steps, got {steps!r}")
    return tuple(steps)


def _without_convolution(steps: tuple[Any, ...]) -> tuple[tuple[Step, ...], Convolution | None]:
    """Return the steps before a convolution, and the convolution, or None if there is none."""
    return (steps[:-1], steps[-1]) if isinstance(steps[-1], Convolution) else (steps, None)


def _check(
    op: str, x: jax.Array, steps: tuple[Any, ...], residual: jax.Array | None, parts: Any
) -> tuple[int, ...] | None:
    """Check the arguments, and return `parts` as Python integers."""
    require(len(steps) > 0, f"{op}: steps must not be empty")
    require(x.ndim == 2 or x.shape[0] > 0, f"{op}: x must have at least one partial sum, got none")
    steps, convolution = _without_convolution(steps)
    channels, can_norm = x.shape[-1], True
    for index, step in enumerate(steps):
        name = f"{op}: step {index}"
        _check_fields(name, step)
        if isinstance(step, Norm):
            require(can_norm, f"{name}: a norm must be the first step or follow a product that is not gated")
            require(residual is not None, f"{name}: a norm needs a residual stream, got residual=None")
            if residual is not None:
                wanted = (x.shape[-2], channels)
                require(
                    residual.shape == wanted, f"{name}: residual must be {list(wanted)}, got {list(residual.shape)}"
                )
            require(
                step.weight.shape == (channels,), f"{name}: weight must be [{channels}], got {list(step.weight.shape)}"
            )
            dtype_of(name, "out_dtype", step.out_dtype, x.dtype)
            can_norm = False
        elif isinstance(step, Product):
            require(index > 0 or x.ndim == 2, f"{name}: a product takes no partial sums, got x {list(x.shape)}")
            shape = step.weight.shape
            require(shape[1] == channels, f"{name}: weight must be [outputs, {channels}], got {list(shape)}")
            require(not step.is_gated or shape[0] % 2 == 0, f"{name}: gated weights must have an even number of rows")
            channels, can_norm = step.outputs, not step.is_gated
        elif isinstance(step, Experts):
            _check_experts(name, step, channels)
            require(index > 0 or x.ndim == 2, f"{name}: experts take no partial sums, got x {list(x.shape)}")
            is_followed = index + 1 == len(steps) or isinstance(steps[index + 1], Norm)
            require(is_followed, f"{name}: a norm must follow experts, got {_names(steps)}")
            channels, can_norm = step.outputs, True
        elif isinstance(step, GatedNorm):
            require(index == 0, f"{name}: a gated norm must be the first step")
            _check_gated_norm(name, step, x)
            is_followed = len(steps) == 1 or isinstance(steps[1], Product)
            require(is_followed, f"{name}: a product must follow a gated norm, got {_names(steps)}")
        else:
            wanted = "a GatedNorm, a Product, a Norm, Experts or, at the end, a Convolution"
            raise ValueError(f"{name}: must be {wanted}, got {type(step).__name__}")
    last = steps[-1] if steps else None
    is_cut = isinstance(last, Product) and not last.is_gated
    if convolution is not None:
        name = f"{op}: step {len(steps)}"
        require(is_cut, f"{name}: a convolution must follow a product that is not gated, got {_names(steps)}")
    if parts is not None:
        require(is_cut, f"{op}: parts need a last product that is not gated")
        parts = sizes_of(op, parts, channels)
    if convolution is not None and isinstance(last, Product):
        _check_convolution(f"{op}: step {len(steps)}", x, last, convolution, parts)
    return parts


# The shapes and dtypes that the fields of each kind of step must have. They are checked like the arguments of an op.
_FIELDS: dict[type, dict[str, Any]] = {
    GatedNorm: dict(gate=Float[Array, "tokens channels"], weight=Float[Array, " head"]),
    Product: dict(weight=Float[Array, "outputs inputs"]),
    Norm: dict(weight=Float[Array, " channels"], out_dtype=str | None),
    Experts: dict(
        router=Float[Array, "outputs inputs"],
        up=Float[Array, "experts up_size inputs"],
        down=Float[Array, "experts channels size"],
        valid=Bool[Array, " tokens"] | None,
    ),
    Convolution: dict(
        pool=Float[Array, "layers blocks window channels"],
        weight=Float[Array, "width channels"],
        query_start_loc=Int32[Array, " rows_plus_1"],
        read_block=Int32[Array, " rows"],
        window_row=Int32[Array, " rows"],
        write_block=Int32[Array, " rows"],
    ),
}


def _check_fields(name: str, step: Any) -> None:
    """Check the dtypes and the numbers of axes of a step's arrays."""
    for field, annotation in _FIELDS.get(type(step), {}).items():
        check_argument(name, field, getattr(step, field), annotation)


def _names(steps: Sequence[Step]) -> list[str]:
    return [type(step).__name__ for step in steps]


def _check_gated_norm(name: str, step: GatedNorm, x: jax.Array) -> None:
    require(x.ndim == 2, f"{name}: a gated norm takes no partial sums, got x {list(x.shape)}")
    require(step.gate.shape == x.shape, f"{name}: gate must be {list(x.shape)}, got {list(step.gate.shape)}")
    weight, channels = step.weight.shape, x.shape[-1]
    is_right = weight[0] > 0 and channels % weight[0] == 0
    require(is_right, f"{name}: weight must be [a divisor of {channels}], got {list(weight)}")
    activations = get_args(GateActivation)
    is_known = step.activation in activations
    require(is_known, f"{name}: activation must be one of {list(activations)}, got {step.activation!r}")


def _check_convolution(
    name: str, x: jax.Array, before: Product, step: Convolution, parts: tuple[int, ...] | None
) -> None:
    _check_fields(name, step)
    convolved = None if parts is None else parts[0]
    require(convolved == step.channels, f"{name}: parts must begin with {step.channels} channels, got {parts}")
    inputs = jax.ShapeDtypeStruct((x.shape[-2], step.channels), before.weight.dtype)
    check_convolution(name, inputs, step.pool, step.weight, step.activation, step.layout)
    layer = check_argument(name, "layer", step.layer, int | Int32[Array, ""])
    check_layer(name, layer, step.pool.shape[0])
    rows = len(step.query_start_loc) - 1
    for field in ("read_block", "window_row", "write_block"):
        shape = getattr(step, field).shape
        require(shape == (rows,), f"{name}: {field} must be [{rows}], got {list(shape)}")


def _check_experts(name: str, step: Experts, channels: int) -> None:
    router, up, down = step.router.shape, step.up.shape, step.down.shape
    require(router[1] == channels, f"{name}: router must be [outputs, {channels}], got {list(router)}")
    wanted = (step.routed + step.shared, 2 * down[2], channels)
    require(up == wanted, f"{name}: up must be {list(wanted)}, got {list(up)}")
    require(down[0] == wanted[0], f"{name}: down must be of {wanted[0]} experts, got {list(down)}")
    least = 1 if step.shared_gate else 0
    require(step.shared >= least, f"{name}: shared must be at least {least}, got {step.shared}")
    require(1 <= step.top_k <= step.routed, f"{name}: top_k must be from 1 to {step.routed}, got {step.top_k}")


@functools.partial(jax.jit, static_argnames=("parts", "run", "reason"))
def _run(x, steps, residual, mailboxes, epoch, convolution, parts, run, reason):
    separate = functools.partial(_separate.product_chain, parts=parts, run=run)
    return dispatch(
        "product_chain" if mailboxes is None else "all_reduce_product_chain",
        run.implementation,
        (x, steps, residual, mailboxes, epoch, convolution),
        xla=separate,
        triton=separate,
        mosaic_gpu=reason or _one_launch(x, mailboxes, parts),
    )


def _one_launch(x, mailboxes, parts):
    """Return the kernel for a single token, or for several tokens. Mosaic GPU has been found importable before."""
    from pallas_kernels.product_chain import _few_tokens, sm90

    capacity = None if mailboxes is None else mailboxes.capacity
    kernels = sm90 if _schedule.is_of_one_token(x, capacity) else _few_tokens
    return functools.partial(kernels.product_chain, parts=parts)
