"""The public functions of all_reduce: their contract, checks and dispatch.

Sources: NCCL's protocol "LL" for words of a value and a flag; the all-reduce kernels of vLLM and TensorRT-LLM for the
one-shot algorithm and for the residual stream and its norm in the same kernel.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._check import checked, dtype_of, require
from pallas_kernels._run_op import run_op
from pallas_kernels.all_reduce import pallas_triton, xla
from pallas_kernels.all_reduce.config import Config
from pallas_kernels.all_reduce.mailboxes import Mailboxes
from pallas_kernels.dispatch import Run
from pallas_kernels.rms_norm.config import Norm


@checked
def all_reduce(
    addend: Float[Array, "splits tokens channels"],
    mailboxes: Mailboxes,
    epoch: Int[Array, ""],
    *,
    run: Run = Run(),
) -> tuple[Float[Array, "tokens channels"], Int[Array, ""]]:
    """Add up the addends of all devices of a mesh axis, by a one-shot all-reduce.

    Every device of `mailboxes.axis` must make the same calls in the same order, inside `jax.shard_map` over that axis alone.
    The epoch counts the calls: the first call after `Mailboxes.create` gets 1, and each later call gets the epoch that the
    call before returned, in this program or in the next one. The Triton kernel waits until all devices have made the call.

    Numerics: partial sums are added in float32, and then the devices' sums in the order of the devices. All devices get the
    same bits. "xla" leaves the order to XLA. A token's result does not depend on other tokens, to the bit. There is no
    derivative.

    Args:
        addend: This device's addend as split-K partial sums: see `linear_sums`.
        mailboxes: This device's shard of `Mailboxes.create`. Its memory is written by address.
        epoch: The epoch, an odd integer.
        run: How it runs: by "xla", which is XLA's own all-reduce, or by "triton", with a `Config` for the Triton kernel. If
            the mailboxes do not hold the tokens, the default is "xla". An interpreted kernel adds its own
            partial sums, and XLA the devices' sums.

    Returns:
        The sum, float32, and the next call's epoch.

    Raises:
        ValueError: if a shape or dtype breaks the contract.
        UnsupportedError: if `run` names "triton" and the mailboxes are too small.
    """
    run = run.checked("all_reduce", Config)
    require(addend.shape[0] >= 1, "all_reduce: addend must have at least one partial sum, got none")
    if 0 in addend.shape:
        return jnp.zeros(addend.shape[1:], jnp.float32), epoch
    run, reason = _run_of(addend, mailboxes, run)
    implementations = dict(xla=xla.all_reduce, triton=pallas_triton.all_reduce)
    return run_op("all_reduce", (addend, mailboxes, epoch), run, **implementations, unsupported=reason)


@checked
def all_reduce_rms_norm(
    x: Float[Array, "tokens channels"],
    addend: Float[Array, "splits tokens channels"],
    weight: Float[Array, " channels"],
    mailboxes: Mailboxes,
    epoch: Int[Array, ""],
    *,
    epsilon: float,
    offset: float = 0.0,
    scale: float = 1.0,
    out_dtype: str | None = None,
    run: Run = Run(),
) -> tuple[Float[Array, "tokens channels"], Float[Array, "tokens channels"], Int[Array, ""]]:
    """Add up the addends of all devices, add the sum to the residual stream and normalise it, in one launch.

    See `all_reduce` and `add_rms_norm` for the arguments, numerics and errors.

    Returns:
        The total in x's dtype, the normed values, and the next call's epoch.
    """
    run = run.checked("all_reduce_rms_norm", Config)
    require(addend.shape[0] >= 1, "all_reduce_rms_norm: addend must have at least one partial sum, got none")
    dtype = dtype_of("all_reduce_rms_norm", "out_dtype", out_dtype, x.dtype)
    if x.size == 0:
        return x, x.astype(dtype), epoch
    run, reason = _run_of(addend, mailboxes, run)
    return run_op(
        "all_reduce_rms_norm",
        (x, addend, weight, mailboxes, epoch),
        run,
        xla=xla.all_reduce_rms_norm,
        triton=pallas_triton.all_reduce_rms_norm,
        unsupported=reason,
        norm=Norm(float(epsilon), float(offset), float(scale), dtype),
    )


def _run_of(addend: jax.Array, mailboxes: Mailboxes, run: Run) -> tuple[Run, str | None]:
    """Return how the op runs, which is by XLA if no implementation is named that can run, and why Triton cannot."""
    reason = pallas_triton.unsupported(addend.shape, mailboxes.capacity, run.config)
    return replace(run, implementation="xla") if reason and run.implementation is None else run, reason
