"""The public functions of product_chain: their contract, checks and dispatch."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels import device
from pallas_kernels._check import checked, require, sizes_of
from pallas_kernels._mosaic_available import unavailable
from pallas_kernels.all_reduce import Mailboxes
from pallas_kernels.dispatch import Run, dispatch
from pallas_kernels.product_chain import schedule
from pallas_kernels.product_chain.few_tokens import FewTokens
from pallas_kernels.product_chain.launch import launch
from pallas_kernels.product_chain.one_token import OneToken
from pallas_kernels.product_chain.step import Separate, Step, places
from pallas_kernels.product_chain.steps.norm import Norm


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
    last = None
    if steps[-1].takes == "parts":
        *_, last = places(steps, x.shape[-1], parts)
        steps = steps[:-1]
    reason = schedule.unsupported(x, steps, residual, parts, device.sm_count(), capacity) or unavailable(run)
    if run.implementation is None and schedule.is_short(steps):
        reason = "so few steps save less time than the launch costs"
    unable = last and last.step.unsupported(last, schedule.launch_of(x.shape[-2], capacity), x, capacity)
    is_separate = unable is not None and reason is None and run.implementation is None
    if last is not None and not is_separate:
        steps, reason = (*steps, last.step), reason or unable
    results, residual, epoch = _run(x, steps, residual, mailboxes, epoch, parts, run, reason)
    if last is not None and is_separate:
        results = last.step.run_alone(results, last, Separate(residual, mailboxes, epoch, run))
    return results, residual, epoch


def _steps_of(op: str, steps: Any) -> tuple[Any, ...]:
    """Return the steps as a tuple. They must be a sequence."""
    require(isinstance(steps, Sequence), f"{op}: steps must be a sequence of steps, got {steps!r}")
    return tuple(steps)


def _check(
    op: str, x: jax.Array, steps: tuple[Any, ...], residual: jax.Array | None, parts: Any
) -> tuple[int, ...] | None:
    """Check the arguments, and return `parts` as Python integers."""
    require(len(steps) > 0, f"{op}: steps must not be empty")
    require(x.ndim == 2 or x.shape[0] > 0, f"{op}: x must have at least one partial sum, got none")
    for place in places(steps, x.shape[-1], parts):
        name, step = f"{op}: step {place.index}", place.step
        kinds = sorted(kind.__name__ for kind in Step.__subclasses__())
        require(isinstance(step, Step), f"{name}: must be one of {kinds}, got {type(step).__name__}")
        step.check_fields(name)
        are_taken = place.index > 0 or x.ndim == 2 or step.takes == "sums"
        require(are_taken, f"{name}: only a norm takes partial sums, got x {list(x.shape)}")
        if parts is not None and place.after is None:
            require("parts" in step.gives, f"{op}: parts need a last product that is not gated")
            parts = sizes_of(op, parts, step.outputs_of(place.channels))
        step.check(name, place, x, residual)
    return parts


@functools.partial(jax.jit, static_argnames=("parts", "run", "reason"))
def _run(x, steps, residual, mailboxes, epoch, parts, run, reason):
    capacity = None if mailboxes is None else mailboxes.capacity
    kind = OneToken if schedule.launch_of(x.shape[-2], capacity) is OneToken.launch else FewTokens
    separate = functools.partial(_separate, parts=parts, run=run)
    return dispatch(
        "product_chain" if mailboxes is None else "all_reduce_product_chain",
        run.implementation,
        (x, steps, residual, mailboxes, epoch),
        xla=separate,
        triton=separate,
        mosaic_gpu=reason or functools.partial(launch, kind, parts=parts),
    )


def _separate(x, steps, residual, mailboxes, epoch, *, parts, run):
    """Run each step by an op of its own. Return the results, the residual stream, and the next epoch."""
    value, chain = x, Separate(residual, mailboxes, epoch, run)
    for place in places(steps, x.shape[-1], parts):
        value = place.step.run_alone(value, place, chain)
    return value, chain.residual, chain.epoch
