"""The public function of deferred states of Mamba-2: its contract, checks and dispatch."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels._check import check_ring, checked, require
from pallas_kernels._mosaic_available import unavailable
from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.selective_state_update.deferred import pallas_triton, xla
from pallas_kernels.selective_state_update.deferred.config import DeferredConfig

Pool = Float[Array, "layers blocks heads head_dim state_dim"]
RingX = Float[Array, "layers slots heads places head_dim"]
RingB = Float[Array, "layers slots groups places state_dim"]
RingOfHead = Float32[Array, "layers slots heads places"]


@checked
def selective_state_deferred(
    xBC: Float[Array, "tokens channels"],
    dt: Float[Array, "tokens heads"],
    A: Float[Array, " heads"],
    pool: Pool,
    ring_x: RingX,
    ring_B: RingB,
    ring_dt: RingOfHead,
    ring_g: RingOfHead,
    layer: int | Int32[Array, ""],
    query_start_loc: Int32[Array, " rows_plus_1"],
    slot: Int32[Array, " rows"],
    base: Int32[Array, " rows"],
    position: Int32[Array, " rows"],
    read_block: Int32[Array, " rows"],
    fold_block: Int32[Array, " rows"],
    *,
    max_query_tokens: int,
    D: Float[Array, " heads"] | None = None,
    dt_bias: Float[Array, " heads"] | None = None,
    dt_softplus: bool = True,
    implementation: Implementation | None = None,
    config: DeferredConfig | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "tokens heads head_dim"], Pool, RingX, RingB, RingOfHead, RingOfHead]:
    """Runs Mamba-2's recurrence over decode and verify rows, and writes a state only where a group of tokens ends.

    It computes what `selective_state_update` computes, which has the equations. Instead of a state after each token it
    keeps an entry for each token in a ring. Positions are cut into groups of L = places // 2 tokens, at the multiples of
    L. An entry is (x, B, dt, g), where dt is the step size after bias and softplus, and g = A dt. For one head::

        S[p] = exp(g[base] + .. + g[p - 1]) S[base]
             + the sum over base <= i < p of exp(g[i + 1] + .. + g[p - 1]) dt[i] x[i] B[i]^T

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

    Numerics: sums are float32. Entries are exact, and a state is rounded to the pool's dtype by a fold. Every sum over a
    group has the order of the group's places. So a state at a multiple of L and the output of an accepted token depend, to
    the bit, on the state from which the row started and on the accepted tokens, and not on how many came with a call,
    what other rows are, or which drafts were rejected, as long as those are finite. The kernels multiply on tensor cores,
    bfloat16 values as they are and float32 values in pieces of bfloat16: three for a float32 pool (a relative error of
    2^-24), two otherwise, or as many as the `config` of "triton" says.

    Sources: Dao, Gu, "Transformers are SSMs" (2024), for the sum over entries; ReplaySSM of the Dao lab for a cache of
    entries instead of states.

    Args:
        xBC: Outputs of the convolution, [x | B | C] of all rows, packed: x by heads, B and C by groups. Head h uses group
            h // (heads // groups). channels = heads * head_dim + 2 * groups * state_dim.
        dt: Raw step sizes, per head.
        A: -exp(A_log), per head.
        pool: States of all layers and blocks. It is updated in place if the enclosing jit donates it, and copied
            otherwise, as the four arrays of the ring are.
        ring_x: Inputs of the entries, in xBC's dtype.
        ring_B: Input projections of the entries, in xBC's dtype.
        ring_dt: Step sizes of the entries.
        ring_g: Log decays of the entries. The places of a ring that hold no entry of the row may hold anything.
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
        D: Skip connection, per head, or None.
        dt_bias: Bias that is added to `dt` before the softplus, per head, or None.
        dt_softplus: Whether a softplus is applied to `dt`.
        implementation: "xla", "triton" or "mosaic_gpu". None selects XLA if the program is not lowered for CUDA, Mosaic GPU
            if JAX's default device is a Hopper GPU and the kernel can run the arguments, and Triton otherwise. "mosaic_gpu"
            needs JAX 0.11.2, bfloat16 inputs, head_dim and state_dim that are multiples of 64 (state_dim at most 256),
            groups of 16 or 32 tokens, and no `config`.
        config: Launch configuration of the Triton kernel. None selects the default.
        interpret: Whether to run the Triton kernel's body as plain JAX, on any platform.

    Returns:
        The outputs in xBC's dtype, which are 0 for tokens after the last row, and the updated pool, ring_x, ring_B,
        ring_dt and ring_g.

    Raises:
        ValueError: if a shape or dtype breaks the contract, or if 2 * max_query_tokens - 2 is not less than L: a row
            would then write places that it reads.
        UnsupportedError: if `implementation` is "mosaic_gpu" and the kernel cannot run these arguments.
    """
    name = "selective_state_deferred"
    heads, head_dim, state_dim = pool.shape[2:]
    groups = ring_B.shape[2]
    channels = heads * head_dim + 2 * groups * state_dim
    require(
        groups > 0 and heads % groups == 0,
        f"{name}: the groups of ring_B must divide the {heads} heads, got {groups}",
    )
    require(
        xBC.shape[1] == channels,
        f"{name}: xBC must have {heads} * {head_dim} + 2 * {groups} * {state_dim} channels, got {xBC.shape[1]}",
    )
    for ring_name, ring in (("ring_x", ring_x), ("ring_B", ring_B)):
        require(ring.dtype == xBC.dtype, f"{name}: {ring_name} must have xBC's dtype {xBC.dtype}, got {ring.dtype}")
    require(ring_x.shape[1] > 0, f"{name}: ring_x must have at least one slot, got {list(ring_x.shape)}")
    check_ring(name, "ring_x", ring_x.shape[3], max_query_tokens)
    if slot.shape[0] == 0:
        return jnp.zeros((xBC.shape[0], heads, head_dim), xBC.dtype), pool, ring_x, ring_B, ring_dt, ring_g
    tokens = xBC.shape[0]
    if tokens == 0:  # Rows without tokens may fold, but no array of a kernel may be empty.
        xBC, dt = (jnp.zeros((1, x.shape[1]), x.dtype) for x in (xBC, dt))
    operands = (xBC, dt, A, pool, ring_x, ring_B, ring_dt, ring_g, jnp.int32(layer), query_start_loc)
    operands += (slot, base, position, read_block, fold_block, D, dt_bias)
    options = max_query_tokens, dt_softplus, implementation, config, interpret
    out, pool, ring_x, ring_B, ring_dt, ring_g = _deferred(operands, *options)
    return out[:tokens], pool, ring_x, ring_B, ring_dt, ring_g


_STATIC = ("max_query_tokens", "dt_softplus", "implementation", "config", "interpret")


@functools.partial(jax.jit, static_argnames=_STATIC)
def _deferred(operands, max_query_tokens, dt_softplus, implementation, config, interpret):
    launch = dict(max_query_tokens=max_query_tokens, config=config, interpret=interpret)
    return dispatch(
        "selective_state_deferred",
        implementation,
        operands,
        xla=functools.partial(xla.selective_state_deferred, dt_softplus=dt_softplus),
        triton=functools.partial(pallas_triton.selective_state_deferred, dt_softplus=dt_softplus, **launch),
        mosaic_gpu=_mosaic_gpu(operands, max_query_tokens, dt_softplus, implementation, config, interpret),
    )


def _mosaic_gpu(operands, max_query_tokens, dt_softplus, implementation, config, interpret):
    """Returns the Mosaic GPU kernel, or the reason why it cannot run. It is imported only where it may run."""
    if reason := unavailable(implementation, config, interpret):
        return reason
    from pallas_kernels.selective_state_update.deferred import sm90

    xBC, pool, ring_x = operands[0], operands[3], operands[4]
    options = dict(max_query_tokens=max_query_tokens, dt_softplus=dt_softplus)
    reason = sm90.unsupported(xBC, pool, ring_x)
    return reason or functools.partial(sm90.selective_state_deferred, **options)
