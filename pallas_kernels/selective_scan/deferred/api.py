"""The public function of deferred states of Mamba-1: its contract, checks and dispatch."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels._check import check_ring, checked, require
from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.selective_scan.deferred import pallas_triton, xla
from pallas_kernels.selective_scan.deferred.config import DeferredConfig

Pool = Float[Array, "layers blocks heads head_dim state_dim"]
RingX = Float[Array, "layers slots heads places head_dim"]
RingB = Float[Array, "layers slots groups places state_dim"]
RingOfSteps = Float[Array, "layers slots heads places head_dim"]


@checked
def selective_scan_deferred(
    x: Float[Array, "tokens heads head_dim"],
    dt: Float[Array, "tokens heads head_dim"],
    A: Float[Array, "heads head_dim state_dim"],
    B: Float[Array, "tokens groups state_dim"],
    C: Float[Array, "tokens groups state_dim"],
    pool: Pool,
    ring_x: RingX,
    ring_B: RingB,
    ring_dt: RingOfSteps,
    layer: int | Int32[Array, ""],
    query_start_loc: Int32[Array, " rows_plus_1"],
    slot: Int32[Array, " rows"],
    base: Int32[Array, " rows"],
    position: Int32[Array, " rows"],
    read_block: Int32[Array, " rows"],
    fold_block: Int32[Array, " rows"],
    *,
    max_query_tokens: int,
    D: Float[Array, "heads head_dim"] | None = None,
    z: Float[Array, "tokens heads head_dim"] | None = None,
    dt_bias: Float[Array, "heads head_dim"] | None = None,
    dt_softplus: bool = True,
    implementation: Implementation | None = None,
    config: DeferredConfig | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "tokens heads head_dim"], Pool, RingX, RingB, RingOfSteps]:
    """Runs Mamba-1's recurrence over decode and verify rows, and writes a state only where a group of tokens ends.

    It computes what `selective_state_update` computes, which has the equations. Instead of a state after each token it
    keeps an entry for each token in a ring. Positions are cut into groups of L = places // 2 tokens, at the multiples of
    L. An entry is (x, B, dt) as they are given. For one head::

        d[i] = softplus(dt[i] + dt_bias);  S[i + 1] = exp(A * d[i]) * S[i] + (d[i] * x[i]) B[i]^T

    A row has its state S at position `base` in `read_block`, and the entries of the positions from base to position - 1
    in the ring of its slot, position i at place i mod 2 L. Let E = (base // L + 1) * L be the end of base's group. The row
    adds the entries of its own tokens and then

    - if position >= E, it folds the group: S at position E is written to `fold_block` and used by the row's tokens. The
      caller's next `base` is E.
    - if position < E, nothing is written to the pool. Tokens from E on use the same fold, which is not kept, because some
      of its entries may be drafts. `base` remains.

    To reject drafts, the caller gives a smaller position to the next call. Nothing is moved.

    A row whose position is at least E folds even if it has no tokens, if `fold_block` is not NULL_BLOCK. All other rows
    without tokens take no part.

    Numerics: all arithmetic is float32. Entries are exact, and a state is rounded to the pool's dtype by a fold. States
    follow from the entries token by token, in one order. So a state at a multiple of L and the output of an accepted token
    depend, to the bit, on the state from which the row started and on the accepted tokens, and not on how many came with a
    call, which drafts were rejected, or what other rows are.

    A token decays each element of a channel's state by a factor of its own. These factors are as many as the numbers of a
    state, so entries do not hold them. They are computed from the entry's dt, and from A and dt_bias. A call without tokens
    therefore needs A and dt_bias too. An entry with
    x = 0, B = 0 and dt = -inf adds nothing to a state if `dt_softplus` is true.

    Sources: Gu, Dao, "Mamba" (2023); ReplaySSM of the Dao lab for a cache of entries instead of states.

    Args:
        x: Inputs of all rows, packed.
        dt: Raw step sizes, per channel.
        A: -exp(A_log), per channel and state.
        B: Input projections. Head h uses group h // (heads // groups).
        C: Output projections, in the same groups as B.
        pool: States of all layers and blocks. It is updated in place if the enclosing jit donates it, and copied
            otherwise, as the three arrays of the ring are.
        ring_x: Inputs of the entries, in x's dtype.
        ring_B: Input projections of the entries, in B's dtype.
        ring_dt: Raw step sizes of the entries, in dt's dtype. The places of a ring that hold no entry of the row may hold
            anything.
        layer: The layer whose blocks and rings are read and written.
        query_start_loc: Index of each row's first token; the last entry is the end of the last row. Padding rows repeat
            that entry.
        slot: The slot of each row, whose ring it reads and writes. Two rows with tokens have different slots.
        base: The number of tokens that the state in `read_block` has read.
        position: The number of tokens before the row's first one, at least `base`. A row's last token must be before
            position E + L. That holds if every call since `base` had at most `max_query_tokens` tokens per row.
        read_block: The block that holds each row's state at `base`. NULL_BLOCK (0) reads as zeros.
        fold_block: The block that receives the fold, if position >= E. NULL_BLOCK skips the write. It may be the row's
            own read block. The blocks of rows that do not fold are not touched.
        max_query_tokens: The largest number of tokens of any row. Static.
        D: Skip connection, or None.
        z: Raw gate of the outputs, or None.
        dt_bias: Bias that is added to `dt` before the softplus, or None.
        dt_softplus: Whether a softplus is applied to `dt`.
        implementation: "xla" or "triton". None selects Triton if the program is lowered for CUDA and the kernel can run
            the arguments, and XLA otherwise.
        config: Launch configuration of the Triton kernel. None selects the default.
        interpret: Whether to run the Triton kernel's body as plain JAX, on any platform.

    Returns:
        The outputs in x's dtype, which are 0 for tokens after the last row, and the updated pool, ring_x, ring_B and
        ring_dt.

    Raises:
        ValueError: if a shape or dtype breaks the contract, or if 2 * max_query_tokens - 2 is not less than L: a row
            would then write places that it reads.
        UnsupportedError: if `implementation` is "triton" and the kernel cannot run these arguments.
    """
    name = "selective_scan_deferred"
    heads, groups = x.shape[1], B.shape[1]
    require(
        groups > 0 and heads % groups == 0,
        f"{name}: the number of groups of B must divide x's {heads} heads, got {groups}",
    )
    for of, given, ring in (("x", x, ring_x), ("B", B, ring_B), ("dt", dt, ring_dt)):
        require(ring.dtype == given.dtype, f"{name}: ring_{of} must have {of}'s dtype {given.dtype}, got {ring.dtype}")
    require(ring_x.shape[1] > 0, f"{name}: ring_x must have at least one slot, got {list(ring_x.shape)}")
    check_ring(name, "ring_x", ring_x.shape[3], max_query_tokens)
    if slot.shape[0] == 0:
        return jnp.zeros_like(x), pool, ring_x, ring_B, ring_dt
    tokens = x.shape[0]
    if tokens == 0:  # Rows without tokens may fold, but no array of a kernel may be empty.
        x, dt, B, C = (jnp.zeros((1, *v.shape[1:]), v.dtype) for v in (x, dt, B, C))
        z = None
    operands = (x, dt, A, B, C, pool, ring_x, ring_B, ring_dt, jnp.int32(layer), query_start_loc)
    operands += (slot, base, position, read_block, fold_block, D, z, dt_bias)
    out, pool, ring_x, ring_B, ring_dt = _deferred(operands, dt_softplus, implementation, config, interpret)
    return out[:tokens], pool, ring_x, ring_B, ring_dt


@functools.partial(jax.jit, static_argnames=("dt_softplus", "implementation", "config", "interpret"))
def _deferred(operands, dt_softplus, implementation, config, interpret):
    launch = dict(dt_softplus=dt_softplus, config=config, interpret=interpret)
    return dispatch(
        "selective_scan_deferred",
        implementation,
        operands,
        xla=functools.partial(xla.selective_scan_deferred, dt_softplus=dt_softplus),
        triton=functools.partial(pallas_triton.selective_scan_deferred, **launch),
    )
