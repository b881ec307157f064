"""Public functions of gated_delta_rule: contract, checks, dispatch.

For one value head h with key head h // (value_heads // key_heads), state S [value_dim, key_dim] and token t:

    g = -exp(A_log) * softplus(a + dt_bias)                  or, bounded, lower_bound * sigmoid(exp(A_log) * (a + dt_bias))
    beta = sigmoid(b)                                        or, with negative eigenvalues, 2 * sigmoid(b)
    q, k = q / sqrt(sum(q^2) + 1e-6), likewise k;  q = q * scale
    S = S * exp(g);  S = S + beta * (v - S k) k^T;  o = S q

g is one number per head (gated delta net), or one per key channel (Kimi delta attention), which scales the columns of S.

Sources: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024), with its UT transform for the chunked form; Kimi Team,
"Kimi Linear" (2025) for the decay per channel; Grazzi et al., "Unlocking State-Tracking" (2024) for beta up to 2.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels._check import checked, require
from pallas_kernels.chunks import Chunks, check_prefill
from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.gated_delta_rule import pallas_triton, pallas_triton_prefill, xla
from pallas_kernels.gated_delta_rule.config import Config, PrefillConfig


@checked
def gated_delta_rule_gates(
    a: Float[Array, "tokens value_heads"] | Float[Array, "tokens value_heads key_dim"],
    b: Float[Array, "tokens value_heads"],
    A_log: Float[Array, " value_heads"],
    dt_bias: Float[Array, " value_heads"] | Float[Array, "value_heads key_dim"],
    *,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
) -> tuple[
    Float32[Array, "tokens value_heads"] | Float32[Array, "tokens value_heads key_dim"],
    Float32[Array, "tokens value_heads"],
]:
    """The log decay g (<= 0) and the correction strength beta of raw projections, in float32.

    `gated_delta_rule_update` computes the same inside its kernel; the other functions take these as arrays.

    Args:
        a: Raw decay projection, per head or per key channel.
        b: Raw beta projection.
        A_log: Log decay rate per value head.
        dt_bias: Added to `a`, whose trailing axes it has.
        lower_bound: Least g of the bounded gate, < 0; None for the softplus gate.
        allow_neg_eigval: beta in (0, 2) instead of (0, 1).

    Raises:
        ValueError: a shape breaks the contract, or `lower_bound` isn't negative.
    """
    _check_gates("gated_delta_rule_gates", a, dt_bias, lower_bound)
    A_log = A_log.reshape(-1, *(1,) * (a.ndim - 2))
    return xla.gates(a, b, A_log, dt_bias, lower_bound=lower_bound, allow_neg_eigval=allow_neg_eigval)


def _check_gates(name: str, a: jax.Array, dt_bias: jax.Array, lower_bound: float | None) -> None:
    require(
        dt_bias.shape == a.shape[1:],
        f"{name}: dt_bias must be of a's shape {a.shape[1:]} per token, got {dt_bias.shape}",
    )
    require(lower_bound is None or lower_bound < 0, f"{name}: lower_bound must be negative or None, got {lower_bound}")


@checked
def gated_delta_rule_update(
    qkv: Float[Array, "tokens channels"],
    a: Float[Array, "tokens value_heads"] | Float[Array, "tokens value_heads key_dim"],
    b: Float[Array, "tokens value_heads"],
    A_log: Float[Array, " value_heads"],
    dt_bias: Float[Array, " value_heads"] | Float[Array, "value_heads key_dim"],
    pool: Float[Array, "layers blocks value_heads value_dim key_dim"],
    layer: int | Int32[Array, ""],
    query_start_loc: Int32[Array, " rows_plus_1"],
    read_block: Int32[Array, " rows"],
    write_blocks: Int32[Array, "rows window"],
    *,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    implementation: Implementation | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "tokens value_heads value_dim"], Float[Array, "layers blocks value_heads value_dim key_dim"]]:
    """Advances decode and verify rows token by token, from packed conv outputs and raw gates, in one launch.

    The state after token t of row r goes to write_blocks[r, t]. The equations stand at the top of this file.

    Numerics: float32 throughout, the state rounded to the pool's dtype at each store only. A row's results do not depend
    on other rows, bit for bit. Outside a jit that donates `pool` the call copies the pool.

    Args:
        qkv: Convolved [queries | keys | values], heads in order; channels = 2 * key_heads * key_dim + value_heads *
            value_dim.
        a: Raw decay projection, per head or (Kimi delta attention) per key channel.
        b: Raw beta projection.
        A_log: Log decay rate per value head.
        dt_bias: Added to `a`, whose trailing axes it has.
        pool: States. Donate it: updated in place.
        layer: Layer whose blocks are read and written.
        query_start_loc: First token of each row; the last entry ends the last row. Padding repeats it.
        read_block: Block of each row's state; NULL_BLOCK (0) gives zeros.
        write_blocks: Where the state after each of the row's tokens goes; NULL_BLOCK skips. No row may be longer than
            `window`. A block may be the row's own read block.
        lower_bound: Least g of the bounded gate, < 0; None for the softplus gate.
        allow_neg_eigval: beta in (0, 2) instead of (0, 1).
        scale: Of the queries; None is key_dim ** -0.5.
        use_qk_l2norm: Whether queries and keys are normalised here.
        implementation: "xla" or "triton"; None is Triton on CUDA and XLA elsewhere.
        config: Launch configuration of the Triton kernel; None takes the tuned or heuristic one.
        interpret: Runs the Triton kernel's body as plain JAX, on any platform.

    Returns:
        Outputs in qkv's dtype, 0 for tokens behind the last row, and the pool.

    Raises:
        ValueError: a shape or dtype breaks the contract.
        UnsupportedError: `implementation` was named and can't run these arguments.
    """
    value_heads, value_dim, key_dim = pool.shape[2:]
    key_channels = qkv.shape[1] - value_heads * value_dim
    require(
        key_channels > 0 and key_channels % (2 * key_dim) == 0 and value_heads % (key_channels // (2 * key_dim)) == 0,
        f"gated_delta_rule_update: qkv must have 2 * key_heads * {key_dim} + {value_heads} * {value_dim} channels with "
        f"key_heads dividing {value_heads}, got {qkv.shape[1]}",
    )
    _check_gates("gated_delta_rule_update", a, dt_bias, lower_bound)
    if qkv.shape[0] == 0 or read_block.shape[0] == 0:
        return jnp.zeros((qkv.shape[0], value_heads, value_dim), qkv.dtype), pool
    operands = (qkv, a, b, A_log, dt_bias, pool, jnp.int32(layer), query_start_loc, read_block, write_blocks)
    scale = key_dim**-0.5 if scale is None else scale
    return _update(operands, lower_bound, allow_neg_eigval, scale, use_qk_l2norm, implementation, config, interpret)


@checked
def gated_delta_rule_recurrent(
    q: Float[Array, "tokens key_heads key_dim"],
    k: Float[Array, "tokens key_heads key_dim"],
    v: Float[Array, "tokens value_heads value_dim"],
    g: Float32[Array, "tokens value_heads"] | Float32[Array, "tokens value_heads key_dim"],
    beta: Float32[Array, "tokens value_heads"],
    pool: Float[Array, "layers blocks value_heads value_dim key_dim"],
    layer: int | Int32[Array, ""],
    query_start_loc: Int32[Array, " rows_plus_1"],
    read_block: Int32[Array, " rows"],
    write_blocks: Int32[Array, "rows window"],
    *,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    implementation: Implementation | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "tokens value_heads value_dim"], Float[Array, "layers blocks value_heads value_dim key_dim"]]:
    """`gated_delta_rule_update` from queries, keys, values, log decays and beta as they are.

    Args:
        q: Queries of all rows, packed.
        k: Keys.
        v: Values; value head h uses key head h // (value_heads // key_heads).
        g: Log decay, <= 0, per head or per key channel.
        beta: Correction strength, in [0, 2].
        pool: States. Donate it: updated in place.
        layer: Layer whose blocks are read and written.
        query_start_loc: First token of each row; the last entry ends the last row. Padding repeats it.
        read_block: Block of each row's state; NULL_BLOCK (0) gives zeros.
        write_blocks: Where the state after each of the row's tokens goes; NULL_BLOCK skips. No row may be longer than
            `window`. A block may be the row's own read block.
        scale: Of the queries; None is key_dim ** -0.5.
        use_qk_l2norm: Whether queries and keys are normalised here.
        implementation: "xla" or "triton"; None is Triton on CUDA and XLA elsewhere.
        config: Launch configuration of the Triton kernel; None takes the tuned or heuristic one.
        interpret: Runs the Triton kernel's body as plain JAX, on any platform.

    Returns:
        Outputs in v's dtype, 0 for tokens behind the last row, and the pool.

    Raises:
        ValueError: a shape or dtype breaks the contract.
        UnsupportedError: `implementation` was named and can't run these arguments.
    """
    _check_heads("gated_delta_rule_recurrent", k, v)
    if v.shape[0] == 0 or read_block.shape[0] == 0:
        return jnp.zeros_like(v), pool
    operands = (q, k, v, g, beta, pool, jnp.int32(layer), query_start_loc, read_block, write_blocks)
    scale = k.shape[2] ** -0.5 if scale is None else scale
    return _recurrent(operands, scale, use_qk_l2norm, implementation, config, interpret)


def _check_heads(name: str, k: jax.Array, v: jax.Array) -> None:
    require(
        v.shape[1] % k.shape[1] == 0,
        f"{name}: k must have a number of heads that divides v's {v.shape[1]}, got {k.shape[1]}",
    )


@checked
def gated_delta_rule_prefill(
    q: Float[Array, "tokens key_heads key_dim"],
    k: Float[Array, "tokens key_heads key_dim"],
    v: Float[Array, "tokens value_heads value_dim"],
    g: Float32[Array, "tokens value_heads"] | Float32[Array, "tokens value_heads key_dim"],
    beta: Float32[Array, "tokens value_heads"],
    pool: Float[Array, "layers blocks value_heads value_dim key_dim"],
    layer: int | Int32[Array, ""],
    query_start_loc: Int32[Array, " rows_plus_1"],
    chunks: Chunks,
    read_block: Int32[Array, " rows"],
    write_block: Int32[Array, " rows"],
    checkpoint_offset: Int32[Array, "rows checkpoints"] | None = None,
    checkpoint_block: Int32[Array, "rows checkpoints"] | None = None,
    *,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    implementation: Implementation | None = None,
    config: PrefillConfig | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "tokens value_heads value_dim"], Float[Array, "layers blocks value_heads value_dim key_dim"]]:
    """Runs rows of any length in chunks that end at multiples of `chunks.chunk_size` in the sequence's absolute position.

    The equations stand at the top of this file. With a float32 pool, states and outputs are bit-identical whether the
    tokens ran whole, were split at a multiple of `chunks.chunk_size`, or resumed from a block. "xla" differentiates.

    Numerics: decays as exponentials of numbers that are not positive, or bounded, each sum of them as exact as if alone; the
    triangular system by forward substitution; sums in float32. "xla" multiplies at Precision.HIGHEST. "triton" multiplies
    bfloat16 inputs as they are with float32 values in two pieces of bfloat16 (2^-16; one, where only outputs depend on
    them), and other inputs as float32 in three products of tf32 (2^-21). With a decay per key channel it decays bfloat16
    keys to bfloat16 before it multiplies them, and takes one piece (2^-8) unless `config` says otherwise; section 6 of
    docs/design.md says how little a token can decay there.
    Outside a jit that donates `pool` the call copies the pool.

    Args:
        q: Queries of all rows, packed.
        k: Keys.
        v: Values; value head h uses key head h // (value_heads // key_heads).
        g: Log decay, <= 0, per head or per key channel.
        beta: Correction strength, in [0, 2].
        pool: States. Donate it: updated in place.
        layer: Layer whose blocks are read and written.
        query_start_loc: First token of each row; the last entry ends the last row. Padding repeats it.
        chunks: `chunk_rows` of the same rows.
        read_block: Block of each row's initial state; NULL_BLOCK (0) gives zeros.
        write_block: Where each row's final state goes; NULL_BLOCK skips. It may be the read block.
        checkpoint_offset: Tokens of the row after which the state is kept as well, ends of chunks, rising along a row.
        checkpoint_block: Where each checkpoint goes; NULL_BLOCK for none. It may be the row's read block.
        scale: Of the queries; None is key_dim ** -0.5.
        use_qk_l2norm: Whether queries and keys are normalised here.
        implementation: "xla" or "triton"; None is Triton on CUDA and XLA elsewhere.
        config: Launch configuration of the Triton kernels; None takes the tuned or heuristic one.
        interpret: Runs the Triton kernels' bodies as plain JAX, on any platform.

    Returns:
        Outputs in v's dtype, 0 for tokens behind the last row, and the pool.

    Raises:
        ValueError: a shape or dtype breaks the contract, `chunks` is of other rows, or only one of the checkpoint arguments
            is given.
        UnsupportedError: `implementation` was named and can't run these arguments.
    """
    name = "gated_delta_rule_prefill"
    _check_heads(name, k, v)
    if v.shape[0] == 0 or read_block.shape[0] == 0:
        return jnp.zeros_like(v), pool
    check_prefill(name, v, read_block, chunks, checkpoint_offset, checkpoint_block)
    operands = (q, k, v, g, beta, pool, jnp.int32(layer), query_start_loc, chunks, read_block, write_block)
    operands += (checkpoint_offset, checkpoint_block)
    scale = k.shape[2] ** -0.5 if scale is None else scale
    return _prefill(operands, scale, use_qk_l2norm, implementation, config, interpret)


_STATIC = ("scale", "use_qk_l2norm", "implementation", "config", "interpret")


@functools.partial(jax.jit, static_argnames=("lower_bound", "allow_neg_eigval", *_STATIC))
def _update(operands, lower_bound, allow_neg_eigval, scale, use_qk_l2norm, implementation, config, interpret):
    options = dict(lower_bound=lower_bound, allow_neg_eigval=allow_neg_eigval, scale=scale, use_qk_l2norm=use_qk_l2norm)
    return dispatch(
        "gated_delta_rule_update",
        implementation,
        operands,
        xla=functools.partial(xla.gated_delta_rule_update, **options),
        triton=functools.partial(pallas_triton.gated_delta_rule_update, **options, config=config, interpret=interpret),
    )


@functools.partial(jax.jit, static_argnames=_STATIC)
def _recurrent(operands, scale, use_qk_l2norm, implementation, config, interpret):
    options = dict(scale=scale, use_qk_l2norm=use_qk_l2norm)
    return dispatch(
        "gated_delta_rule_recurrent",
        implementation,
        operands,
        xla=functools.partial(xla.gated_delta_rule_recurrent, **options),
        triton=functools.partial(
            pallas_triton.gated_delta_rule_recurrent, **options, config=config, interpret=interpret
        ),
    )


@functools.partial(jax.jit, static_argnames=_STATIC)
def _prefill(operands, scale, use_qk_l2norm, implementation, config, interpret):
    options = dict(scale=scale, use_qk_l2norm=use_qk_l2norm)
    return dispatch(
        "gated_delta_rule_prefill",
        implementation,
        operands,
        xla=functools.partial(xla.gated_delta_rule_prefill, **options),
        triton=functools.partial(
            pallas_triton_prefill.gated_delta_rule_prefill, **options, config=config, interpret=interpret
        ),
        unsupported=pallas_triton_prefill.unsupported(operands[8].chunk_size),
    )
