"""product_chain with a launch for each step."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._math import silu
from pallas_kernels.all_reduce import Mailboxes, all_reduce_rms_norm
from pallas_kernels.causal_conv1d import causal_conv1d_update
from pallas_kernels.dispatch import Run
from pallas_kernels.linear import linear, linear_sums
from pallas_kernels.mixture_of_experts import Routing, routed_experts_sums
from pallas_kernels.product_chain._steps import Convolution, Experts, GatedNorm, Norm, Step
from pallas_kernels.rms_norm import add_rms_norm
from pallas_kernels.rows import Rows


def product_chain(
    x: jax.Array,
    steps: Sequence[Step],
    residual: jax.Array | None,
    mailboxes: Mailboxes | None,
    epoch: jax.Array | None,
    convolution: Convolution | None,
    *,
    parts: tuple[int, ...] | None,
    run: Run,
) -> tuple[Any, jax.Array | None, jax.Array | None]:
    """See api.py. Returns the results, the residual stream, and the next epoch."""
    value = x
    for index, step in enumerate(steps):
        if isinstance(step, GatedNorm):
            value = _gated_norm(value, step)
            continue
        if isinstance(step, Norm):
            assert residual is not None
            partial_sums = value if value.ndim == 3 else value[None]
            options: dict[str, Any] = dict(epsilon=step.epsilon, offset=step.offset, scale=step.scale)
            options |= dict(out_dtype=step.out_dtype, run=run)
            if step.over_devices:
                assert mailboxes is not None
                assert epoch is not None
                residual, value, epoch = all_reduce_rms_norm(
                    residual, partial_sums, step.weight, mailboxes, epoch, **options
                )
            else:
                residual, value = add_rms_norm(residual, partial_sums, step.weight, **options)
            continue
        if isinstance(step, Experts):
            value = _experts(value.astype(step.router.dtype), step, run)
            continue
        weight, is_last = step.weight, index + 1 == len(steps)
        value = value.astype(weight.dtype)
        if is_last and parts is not None:
            results = linear(value, weight, parts=parts, run=run)
            if convolution is not None:
                results = convolved(results, convolution, run)
            return results, residual, epoch
        if step.is_gated:
            value = linear(value, weight, is_gated=True, run=run)[0]
        elif is_last or isinstance(steps[index + 1], Norm):
            value = linear_sums(value, weight, run=run)
        else:
            value = linear(value, weight, run=run)[0]
    return value, residual, epoch


def convolved(results: tuple[jax.Array, ...], step: Convolution, run: Run) -> tuple[jax.Array, ...]:
    """Convolve the first of a product's results. Returns all results, and the pool of windows."""
    first, *others = results
    rows = Rows(
        query_start_loc=step.query_start_loc,
        layer=step.layer,
        window_read=step.read_block,
        window_row=step.window_row,
        write=step.write_block[:, None],
    )
    options: dict[str, Any] = dict(activation=step.activation, layout=step.layout, run=run)
    first, pool = causal_conv1d_update(first, step.pool, step.weight, None, rows, **options)
    return first, *others, pool


def _gated_norm(x: jax.Array, step: GatedNorm) -> jax.Array:
    """Normalise each head of [tokens, channels], and multiply it by its activated gates."""
    shape = x.shape[0], x.shape[1] // step.weight.shape[0], step.weight.shape[0]
    heads, gate = (each.astype(jnp.float32).reshape(shape) for each in (x, step.gate))
    heads = heads * jax.lax.rsqrt(jnp.mean(heads * heads, axis=-1, keepdims=True) + step.epsilon)
    activation = silu if step.activation == "silu" else jax.nn.sigmoid
    return (heads * step.weight.astype(jnp.float32)[None, None] * activation(gate)).astype(x.dtype).reshape(x.shape)


def _experts(x: jax.Array, step: Experts, run: Run) -> jax.Array:
    """Run a mixture of experts. Returns partial sums [splits, tokens, channels]."""
    return routed_experts_sums(
        x,
        linear_sums(x, step.router, run=run),
        step.up,
        step.down,
        Routing(
            top_k=step.top_k,
            shared=step.shared,
            shared_gate=step.shared_gate,
            renormalise=step.renormalise,
            logits_dtype=str(step.router.dtype),
        ),
        valid=step.valid,
        run=run,
    )
