"""The public function of deferred states: its contract, checks and dispatch."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels._check import check_ring, checked, require
from pallas_kernels._mosaic_available import unavailable
from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.gated_delta_rule.deferred import pallas_triton, xla
from pallas_kernels.gated_delta_rule.deferred.config import DeferredConfig

Pool = Float[Array, "layers blocks value_heads value_dim key_dim"]
RingK = Float[Array, "layers slots key_heads places key_dim"]
RingU = Float[Array, "layers slots value_heads places value_dim"]
RingG = Float32[Array, "layers slots value_heads places"]


@checked
def gated_delta_rule_deferred(
    qkv: Float[Array, "tokens channels"],
    a: Float[Array, "tokens value_heads"],
    b: Float[Array, "tokens value_heads"],
    A_log: Float[Array, " value_heads"],
    dt_bias: Float[Array, " value_heads"],
    pool: Pool,
    ring_k: RingK,
    ring_u: RingU,
    ring_g: RingG,
    layer: int | Int32[Array, ""],
    query_start_loc: Int32[Array, " rows_plus_1"],
    slot: Int32[Array, " rows"],
    base: Int32[Array, " rows"],
    position: Int32[Array, " rows"],
    read_block: Int32[Array, " rows"],
    fold_block: Int32[Array, " rows"],
    *,
    max_query_tokens: int,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    implementation: Implementation | None = None,
    config: DeferredConfig | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "tokens value_heads value_dim"], Pool, RingK, RingU, RingG]:
    """Runs the gated delta rule over decode and verify rows, and writes a state only where a group of tokens ends.

    It computes what `gated_delta_rule_update` computes, which has the equations, with a decay per head. Instead of a
    state after each token it keeps an entry for each token in a ring. Positions are cut into groups of L = places //
    2 tokens, at the multiples of L. With the raw key k, its factor n = 1 / sqrt(sum(k^2) + 1e-6) and the correction c
    = beta * (v - S (n k)), an entry is (k, u, g) where u = n c::

        S[p] = exp(g[base] + .. + g[p - 1]) S[base]
             + the sum over base <= i < p of exp(g[i + 1] + .. + g[p - 1]) u[i] k[i]^T

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

    Numerics: sums are float32. A state is rounded to the pool's dtype by a fold, and u to the ring's dtype before it is
    used. Every sum over a group has the order of the group's places. So a state at a multiple of L and the output of an
    accepted token depend, to the bit, on the state from which the row started and on the accepted tokens, and not on how
    many came with a call, what other rows are, or which drafts were rejected, as long as those are finite. The kernels
    multiply on tensor cores, bfloat16 values as they are and float32 values in pieces of bfloat16: three for a float32
    pool (a relative error of 2^-24), two otherwise, or as many as the `config` of "triton" says. No exponent of a decay
    is positive.

    Sources: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024), for the sum over entries; ReplaySSM of the
    Dao lab for a cache of entries instead of states.

    Args:
        qkv: Outputs of the convolution, [queries | keys | values] of all rows, packed, the heads in order.
            channels = 2 * key_heads * key_dim + value_heads * value_dim.
        a: Raw decay projection, per head.
        b: Raw projection of beta, per head.
        A_log: Logarithm of the decay rate, per head.
        dt_bias: Bias that is added to `a`.
        pool: States of all layers and blocks. It is updated in place if the enclosing jit donates it, and copied
            otherwise, as the three arrays of the ring are.
        ring_k: Raw keys of the entries, in qkv's dtype.
        ring_u: Corrections of the entries.
        ring_g: Log decays of the entries. The slots of a ring that hold no entry of the row may hold anything.
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
        lower_bound: Lower bound of g for the bounded gate, negative. None selects the softplus gate.
        allow_neg_eigval: Whether beta lies in (0, 2) instead of (0, 1).
        scale: Factor of the queries. None means key_dim ** -0.5.
        use_qk_l2norm: Whether queries and keys are normalised to unit length first. If not, n is 1.
        implementation: "xla", "triton" or "mosaic_gpu". None selects XLA if the program is not lowered for CUDA, Mosaic GPU
            if JAX's default device is a Hopper GPU and the kernel can run the arguments, and Triton otherwise. "mosaic_gpu"
            needs JAX 0.11.2, bfloat16 inputs, key_dim and value_dim that are multiples of 64 (key_dim at most 256), groups
            of 16 or 32 tokens, and no `config`.
        config: Launch configuration of the Triton kernel. None selects the default.
        interpret: Whether to run the Triton kernel's body as plain JAX, on any platform.

    Returns:
        The outputs in qkv's dtype, which are 0 for tokens after the last row, and the updated pool, ring_k, ring_u and
        ring_g.

    Raises:
        ValueError: if a shape or dtype breaks the contract, or if 2 * max_query_tokens - 2 is not less than L: a row
            would then write places that it reads.
        UnsupportedError: if `implementation` is "mosaic_gpu" and the kernel cannot run these arguments.
    """
    name = "gated_delta_rule_deferred"
    value_heads, value_dim, key_dim = pool.shape[2:]
    key_heads, places = ring_k.shape[2:4]
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    require(
        key_heads > 0 and value_heads % key_heads == 0,
        f"{name}: the key heads of ring_k must divide the {value_heads} value heads, got {key_heads}",
    )
    require(
        qkv.shape[1] == channels,
        f"{name}: qkv must have 2 * {key_heads} * {key_dim} + {value_heads} * {value_dim} channels, got {qkv.shape[1]}",
    )
    require(ring_k.dtype == qkv.dtype, f"{name}: ring_k must have qkv's dtype {qkv.dtype}, got {ring_k.dtype}")
    require(ring_k.shape[1] > 0, f"{name}: ring_k must have at least one slot, got {list(ring_k.shape)}")
    check_ring(name, "ring_k", places, max_query_tokens)
    require(lower_bound is None or lower_bound < 0, f"{name}: lower_bound must be negative or None, got {lower_bound}")
    if slot.shape[0] == 0:
        return jnp.zeros((qkv.shape[0], value_heads, value_dim), qkv.dtype), pool, ring_k, ring_u, ring_g
    tokens = qkv.shape[0]
    if tokens == 0:  # Rows without tokens may fold, but no array of a kernel may be empty.
        qkv, a, b = (jnp.zeros((1, *x.shape[1:]), x.dtype) for x in (qkv, a, b))
    operands = (qkv, a, b, A_log, dt_bias, pool, ring_k, ring_u, ring_g, jnp.int32(layer), query_start_loc)
    operands += (slot, base, position, read_block, fold_block)
    scale = key_dim**-0.5 if scale is None else scale
    gate = lower_bound, allow_neg_eigval
    options = max_query_tokens, *gate, scale, use_qk_l2norm, implementation, config, interpret
    out, pool, ring_k, ring_u, ring_g = _deferred(operands, *options)
    return out[:tokens], pool, ring_k, ring_u, ring_g


_STATIC = ("max_query_tokens", "lower_bound", "allow_neg_eigval", "scale", "use_qk_l2norm")


@functools.partial(jax.jit, static_argnames=(*_STATIC, "implementation", "config", "interpret"))
def _deferred(
    operands,
    max_query_tokens,
    lower_bound,
    allow_neg_eigval,
    scale,
    use_qk_l2norm,
    implementation,
    config,
    interpret,
):
    gate = dict(lower_bound=lower_bound, allow_neg_eigval=allow_neg_eigval)
    options = dict(gate=gate, scale=scale, use_qk_l2norm=use_qk_l2norm)
    launch = dict(max_query_tokens=max_query_tokens, config=config, interpret=interpret)
    return dispatch(
        "gated_delta_rule_deferred",
        implementation,
        operands,
        xla=functools.partial(xla.gated_delta_rule_deferred, **options),
        triton=functools.partial(pallas_triton.gated_delta_rule_deferred, **options, **launch),
        mosaic_gpu=_mosaic_gpu(
            operands, dict(max_query_tokens=max_query_tokens, **options), implementation, config, interpret
        ),
    )


def _mosaic_gpu(operands, options, implementation, config, interpret):
    """Returns the Mosaic GPU kernel, or the reason why it cannot run. It is imported only where it may run."""
    if reason := unavailable(implementation, config, interpret):
        return reason
    from pallas_kernels.gated_delta_rule.deferred import sm90

    qkv, a, pool, ring_u = operands[0], operands[1], operands[5], operands[7]
    reason = sm90.unsupported(qkv, a, pool, ring_u)
    return reason or functools.partial(sm90.gated_delta_rule_deferred, **options)
