"""The public function of add_rms_norm: its contract, checks and dispatch.

Source: Zhang, Sennrich, "Root Mean Square Layer Normalization" (2019).
"""

from jaxtyping import Array, Float

from pallas_kernels._check import checked, dtype_of, require
from pallas_kernels._run_op import run_op
from pallas_kernels.dispatch import Run
from pallas_kernels.rms_norm import pallas_triton, xla
from pallas_kernels.rms_norm.config import Config, Norm


@checked
def add_rms_norm(
    x: Float[Array, "tokens channels"],
    addend: Float[Array, "splits tokens channels"],
    weight: Float[Array, " channels"],
    *,
    epsilon: float,
    offset: float = 0.0,
    scale: float = 1.0,
    out_dtype: str | None = None,
    run: Run = Run(),
) -> tuple[Float[Array, "tokens channels"], Float[Array, "tokens channels"]]:
    """Add a layer's outputs to the residual stream and normalise the sum.

    The results are::

        total = x + scale * sum of addend over its splits
        normed = total / sqrt(mean(total^2) + epsilon) * (offset + weight)

    A token's result does not depend on other tokens, to the bit.

    Numerics: both lines are computed in float32. The total is rounded to x's dtype before it is normalised. There is no
    derivative.

    Args:
        x: The residual stream.
        addend: The layer's outputs as split-K partial sums: see `linear_sums`.
        weight: Weights of the norm.
        epsilon: Added to the mean square.
        offset: Added to the weights.
        scale: Factor of the addend.
        out_dtype: Dtype of the normed values; None is x's dtype.
        run: How it runs: by "xla" or "triton", with a `Config` for the Triton kernel.

    Returns:
        The total in x's dtype, and the normed values.

    Raises:
        ValueError: if a shape or dtype breaks the contract.
        UnsupportedError: if `run` names "triton" and the kernel cannot run these arguments, because a token has too
            many channels.
    """
    run = run.checked("add_rms_norm", Config)
    require(addend.shape[0] >= 1, "add_rms_norm: addend must have at least one partial sum, got none")
    dtype = dtype_of("add_rms_norm", "out_dtype", out_dtype, x.dtype)
    if x.size == 0:
        return x, x.astype(dtype)
    return run_op(
        "add_rms_norm",
        (x, addend, weight),
        run,
        xla=xla.add_rms_norm,
        triton=pallas_triton.add_rms_norm,
        unsupported=pallas_triton.unsupported(x.shape[1]),
        norm=Norm(float(epsilon), float(offset), float(scale), dtype),
    )
