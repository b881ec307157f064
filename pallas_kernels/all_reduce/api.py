"""The public functions of all_reduce: their contract, checks and dispatch.

Source: NCCL's protocol "LL" for the words that carry a number and a flag; and the all-reduce kernels of vLLM and
TensorRT-LLM, for sending everything to every device at once and for adding the residual stream and its norm.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._check import checked, dtype_of, require
from pallas_kernels.all_reduce import pallas_triton, xla
from pallas_kernels.all_reduce.config import Config
from pallas_kernels.all_reduce.mailboxes import Mailboxes
from pallas_kernels.dispatch import Run, dispatch


@checked
def all_reduce(
    addend: Float[Array, "shares tokens channels"],
    mailboxes: Mailboxes,
    turn: Int[Array, ""],
    *,
    run: Run = Run(),
) -> tuple[Float[Array, "tokens channels"], Int[Array, ""]]:
    """Adds up what the devices of a mesh axis have, in one step of communication.

    Every device of `mailboxes.axis` must make the same calls in the same order, inside `jax.shard_map` over that axis alone.
    The turn counts the calls: the first one after `Mailboxes.create` gets 1, and each further one gets what the call before
    returned, in this program or in the next one. The Triton kernel waits until all devices have made the call.

    Numerics: shares are added in float32, and then the devices' sums in the order of the devices. All devices get the same
    bits. "xla" leaves the order to XLA. A token's result does not depend on other tokens, to the bit. There is no
    derivative.

    Args:
        addend: What this device has, in shares: see `linear_sums`.
        mailboxes: This device's part of `Mailboxes.create`. Its memory is written by address.
        turn: The turn. It is odd.
        run: How it runs: by "xla", which is XLA's own all-reduce, or by "triton", with a `Config` for the Triton kernel. If
            the mailboxes do not hold the tokens, the default is "xla". An interpreted kernel leaves only what is sent
            between devices to XLA.

    Returns:
        The sum, float32, and the next call's turn.

    Raises:
        ValueError: if a shape or dtype breaks the contract.
        UnsupportedError: if `run` names "triton" and the mailboxes do not hold as many numbers.
    """
    run = run.checked("all_reduce", Config)
    require(addend.shape[0] >= 1, "all_reduce: addend must have at least one share, got none")
    if 0 in addend.shape:
        return jnp.zeros(addend.shape[1:], jnp.float32), turn
    return _run("all_reduce", (addend, mailboxes, turn), addend.shape, (), run)


@checked
def all_reduce_rms_norm(
    x: Float[Array, "tokens channels"],
    addend: Float[Array, "shares tokens channels"],
    weight: Float[Array, " channels"],
    mailboxes: Mailboxes,
    turn: Int[Array, ""],
    *,
    epsilon: float,
    offset: float = 0.0,
    scale: float = 1.0,
    out_dtype: str | None = None,
    run: Run = Run(),
) -> tuple[Float[Array, "tokens channels"], Float[Array, "tokens channels"], Int[Array, ""]]:
    """Adds up what the devices have, adds it to the residual stream and normalises: `all_reduce` and `add_rms_norm` in one.

    See these two for the arguments, numerics and errors.

    Returns:
        The total in x's dtype, the normed values, and the next call's turn.
    """
    run = run.checked("all_reduce_rms_norm", Config)
    require(addend.shape[0] >= 1, "all_reduce_rms_norm: addend must have at least one share, got none")
    dtype = dtype_of("all_reduce_rms_norm", "out_dtype", out_dtype, x.dtype)
    if x.size == 0:
        return x, x.astype(dtype), turn
    options = dict(epsilon=float(epsilon), offset=float(offset), scale=float(scale), out_dtype=dtype)
    operands, options = (x, addend, weight, mailboxes, turn), tuple(options.items())
    return _run("all_reduce_rms_norm", operands, addend.shape, options, run)


@functools.partial(jax.jit, static_argnames=("op", "shape", "options", "run"))
def _run(op, operands, shape, options, run):
    reason = pallas_triton.unsupported(shape, operands[-2].capacity, run.config)
    return dispatch(
        op,
        "xla" if reason and run.implementation is None else run.implementation,
        operands,
        xla=functools.partial(getattr(xla, op), **dict(options)),
        triton=functools.partial(getattr(pallas_triton, op), run=run, **dict(options)),
        unsupported=reason,
    )
