"""The public function of deferred states of Mamba-2: its contract, checks and dispatch."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels._check import check_ring, checked, require
from pallas_kernels._run_op import run_op
from pallas_kernels.dispatch import Run
from pallas_kernels.rows import Rows
from pallas_kernels.selective_state_update.deferred import pallas_triton, xla
from pallas_kernels.selective_state_update.deferred.config import DeferredConfig
from pallas_kernels.selective_state_update.deferred.entries import Inputs, Mamba2Entries

Pool = Float[Array, "layers blocks heads head_dim state_dim"]


@checked
def selective_state_deferred(
    xBC: Float[Array, "tokens channels"],
    dt: Float[Array, "tokens heads"],
    A: Float[Array, " heads"],
    pool: Pool,
    ring: Mamba2Entries,
    rows: Rows,
    *,
    D: Float[Array, " heads"] | None = None,
    dt_bias: Float[Array, " heads"] | None = None,
    dt_softplus: bool = True,
    run: Run = Run(),
) -> tuple[Float[Array, "tokens heads head_dim"], Pool, Mamba2Entries]:
    """Run Mamba-2's recurrence over decode and verify rows, and write a state only where a group of tokens ends.

    It computes the recurrence of `selective_state_update`, which has the equations, and keeps an entry for each token in a
    ring instead of a state: see `Fold`, which says what a row reads and writes. An entry is (x, B, dt, g), where dt is the
    step size after bias and softplus, and g = A dt. For one head::

        S[p] = exp(g[base] + .. + g[p - 1]) S[base]
             + the sum over base <= i < p of exp(g[i + 1] + .. + g[p - 1]) dt[i] x[i] B[i]^T

    Numerics: sums are float32. Entries are exact, and a state is rounded to the pool's dtype by a fold. Every sum over a
    group has the order of the group's positions. So a state at a multiple of L and the output of an accepted token
    depend, to the bit, on the state from which the row started and on the accepted tokens, and not on how many came with
    a call, the other rows, or rejected drafts, as long as these are finite. The kernels multiply on tensor cores,
    bfloat16 values as they are and float32 values in bfloat16 terms: three for a float32 pool (a relative error of
    2^-24), two otherwise, or as many as the configuration of "triton" says.

    Sources: Dao, Gu, "Transformers are SSMs" (2024), for the sum over entries; ReplaySSM of the Dao lab for a cache of
    entries instead of states.

    Args:
        xBC: Outputs of the convolution, [x | B | C] of all rows, packed: x by heads, B and C by groups. Head h uses group
            h // (heads // groups). channels = heads * head_dim + 2 * groups * state_dim.
        dt: Raw step sizes, per head.
        A: -exp(A_log), per head.
        pool: States of all layers and blocks. It is updated in place if the enclosing jit donates it, and copied
            otherwise, as the four arrays of the ring are.
        ring: The entries of all layers and slots.
        rows: The rows, with `read`, `num_computed_tokens`, `fold` and `max_query_tokens`.
        D: Skip connection, per head, or None.
        dt_bias: Bias that is added to `dt` before the softplus, per head, or None.
        dt_softplus: Whether a softplus is applied to `dt`.
        run: How it runs: by "xla", "triton" or "mosaic_gpu", with a `DeferredConfig` for the Triton kernel. Mosaic GPU is
            selected if JAX's default device is a Hopper GPU. It needs JAX 0.11.2, bfloat16 inputs, head_dim and state_dim
            that are multiples of 64 (state_dim at most 256), groups of 16 or 32 tokens, and no configuration.

    Returns:
        The outputs in xBC's dtype, which are 0 for tokens after the last row, and the updated pool and ring.

    Raises:
        ValueError: if a shape or dtype breaks the contract, if the rows lack a field, or if 2 * max_query_tokens - 2 is not
            less than L: a row would then write ring slots that it reads.
        UnsupportedError: if `run` names "mosaic_gpu" and the kernel cannot run these arguments.
    """
    name = "selective_state_deferred"
    rows = rows.having(name, "read", "num_computed_tokens", "fold", "max_query_tokens")
    run = run.checked(name, DeferredConfig)
    heads, head_dim, state_dim = pool.shape[2:]
    groups = ring.B.shape[2]
    channels = heads * head_dim + 2 * groups * state_dim
    require(
        groups > 0 and heads % groups == 0,
        f"{name}: the groups of ring.B must divide the {heads} heads, got {groups}",
    )
    require(
        xBC.shape[1] == channels,
        f"{name}: xBC must have {heads} * {head_dim} + 2 * {groups} * {state_dim} channels, got {xBC.shape[1]}",
    )
    for field, array in (("x", ring.x), ("B", ring.B)):
        require(array.dtype == xBC.dtype, f"{name}: ring.{field} must have xBC's dtype {xBC.dtype}, got {array.dtype}")
    require(ring.x.shape[1] > 0, f"{name}: ring.x must have at least one slot, got {list(ring.x.shape)}")
    check_ring(name, "ring.x", ring.x.shape[3], rows.max_query_tokens)
    if rows.num_rows == 0:
        return jnp.zeros((xBC.shape[0], heads, head_dim), xBC.dtype), pool, ring
    tokens = xBC.shape[0]
    if tokens == 0:  # Rows without tokens may fold, but no array of a kernel may be empty.
        xBC, dt = (jnp.zeros((1, x.shape[1]), x.dtype) for x in (xBC, dt))
    out, pool, ring = run_op(
        name,
        (Inputs(xBC, dt, A, D, dt_bias), pool, ring, rows),
        run,
        xla=xla.selective_state_deferred,
        triton=pallas_triton.selective_state_deferred,
        sm90="pallas_kernels.selective_state_update.deferred.sm90",
        dt_softplus=dt_softplus,
    )
    return out[:tokens], pool, ring
