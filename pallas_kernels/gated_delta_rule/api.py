"""The public functions of gated_delta_rule: their contracts, checks and dispatch."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels._check import check_layout, checked, require
from pallas_kernels._run_op import run_op
from pallas_kernels.blocks import StateLayout, state_dims
from pallas_kernels.chunks import check_chunks
from pallas_kernels.dispatch import Run
from pallas_kernels.gated_delta_rule import pallas_triton, xla
from pallas_kernels.gated_delta_rule._arguments import Options, Projections, Tokens
from pallas_kernels.gated_delta_rule.config import Config, PrefillConfig
from pallas_kernels.gated_delta_rule.gates import Gates
from pallas_kernels.gated_delta_rule.prefill import launch
from pallas_kernels.rows import Rows

Pool = Float[Array, "layers blocks value_heads value_dim key_dim"]
PoolKV = Float[Array, "layers blocks value_heads key_dim value_dim"]


@checked
def gated_delta_rule_gates(
    a: Float[Array, "tokens value_heads"] | Float[Array, "tokens value_heads key_dim"],
    b: Float[Array, "tokens value_heads"],
    A_log: Float[Array, " value_heads"],
    dt_bias: Float[Array, " value_heads"] | Float[Array, "value_heads key_dim"],
    *,
    gates: Gates = Gates(),
) -> tuple[
    Float32[Array, "tokens value_heads"] | Float32[Array, "tokens value_heads key_dim"],
    Float32[Array, "tokens value_heads"],
]:
    """Compute the log decay g (at most 0) and the correction strength beta from raw projections, in float32.

    `gated_delta_rule_update` computes them inside its kernel and has the equations. The other functions take them as
    arrays.

    Args:
        a: Raw decay projection, per head, or per key channel for Kimi delta attention.
        b: Raw projection of beta, per head.
        A_log: Logarithm of the decay rate, per head.
        dt_bias: Bias that is added to `a`. It has the trailing axes of `a`.
        gates: Which gates the model has.

    Returns:
        g, which has the shape of `a`, and beta, which has the shape of `b`.

    Raises:
        ValueError: if a shape breaks the contract, or if `gates.lower_bound` is not negative.
    """
    _check_gates("gated_delta_rule_gates", a, dt_bias, gates)
    A_log = A_log.reshape(-1, *(1,) * (a.ndim - 2))
    return gates.compute(a, b, A_log, dt_bias)


def _check_gates(name: str, a: jax.Array, dt_bias: jax.Array, gates: Gates) -> None:
    require(
        dt_bias.shape == a.shape[1:],
        f"{name}: dt_bias must have the shape {a.shape[1:]} of one token of a, got {dt_bias.shape}",
    )
    gates.checked(name)


@checked
def gated_delta_rule_update(
    qkv: Float[Array, "tokens channels"],
    a: Float[Array, "tokens value_heads"] | Float[Array, "tokens value_heads key_dim"],
    b: Float[Array, "tokens value_heads"],
    A_log: Float[Array, " value_heads"],
    dt_bias: Float[Array, " value_heads"] | Float[Array, "value_heads key_dim"],
    pool: Pool | PoolKV,
    rows: Rows,
    *,
    gates: Gates = Gates(),
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    layout: StateLayout = "VK",
    run: Run = Run(),
) -> tuple[Float[Array, "tokens value_heads value_dim"], Pool | PoolKV]:
    """Run the gated delta rule over decode and verify rows, in one launch, and keep the state after each token.

    It takes the convolution's outputs and the raw gates as the projections give them. The state after token t of row r
    is written to `rows.write[r, t]`.

    For one value head h with key head h // (value_heads // key_heads), its state S [value_dim, key_dim] and one token::

        g = -exp(A_log) * softplus(a + dt_bias)
        g = lower_bound * sigmoid(exp(A_log) * (a + dt_bias))    if lower_bound is given
        beta = sigmoid(b)
        beta = 2 * sigmoid(b)                                    if allow_neg_eigval
        q = q / sqrt(sum(q^2) + 1e-6) * scale
        k = k / sqrt(sum(k^2) + 1e-6)
        S = S * exp(g);  S = S + beta * (v - S k) k^T;  o = S q

    In a gated delta net g is one value per head. In Kimi delta attention it is one value per key channel and scales
    the columns of S.

    Numerics: all arithmetic is float32, and a state is rounded to the pool's dtype only when it is stored. A row's
    results do not depend on other rows, to the bit.

    Sources: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024); Kimi Team, "Kimi Linear" (2025) for the decay per
    key channel; Grazzi et al., "Unlocking State-Tracking" (2024) for beta up to 2.

    Args:
        qkv: Outputs of the convolution, [queries | keys | values] of all rows, packed, the heads in order.
            channels = 2 * key_heads * key_dim + value_heads * value_dim.
        a: Raw decay projection, per head, or per key channel for Kimi delta attention.
        b: Raw projection of beta, per head.
        A_log: Logarithm of the decay rate, per head.
        dt_bias: Bias that is added to `a`. It has the trailing axes of `a`.
        pool: States of all layers and blocks. It is updated in place if the enclosing jit donates it, and copied
            otherwise.
        rows: The rows, with `read` and `write`. The state after token t of row r goes to write[r, t].
        gates: Which gates the model has.
        scale: Factor of the queries. None means key_dim ** -0.5.
        use_qk_l2norm: Whether queries and keys are normalised to unit length first.
        layout: The layout of the states: "VK" [value_heads, value_dim, key_dim] or "KV" [value_heads, key_dim,
            value_dim].
        run: How it runs: by "xla", "triton" or "mosaic_gpu", with a `Config` for the Triton kernel.

    Returns:
        The outputs in qkv's dtype, which are 0 for tokens after the last row, and the updated pool.

    Raises:
        ValueError: if a shape or dtype breaks the contract.
        UnsupportedError: if `run` names a kernel that cannot run these arguments. The "mosaic_gpu" kernel takes
            arrays of 16 or 32 bits, layout "VK", a decay per head, value_dim in multiples of 64, 128, 256 or 512 bytes of
            keys per value dim, and no `config`, and needs JAX 0.11.2 or newer.
    """
    name = "gated_delta_rule_update"
    check_layout(name, layout, StateLayout)
    value_heads, value_dim, key_dim = state_dims(pool, layout)
    key_channels = qkv.shape[1] - value_heads * value_dim
    require(
        key_channels > 0 and key_channels % (2 * key_dim) == 0 and value_heads % (key_channels // (2 * key_dim)) == 0,
        f"{name}: qkv must have 2 * key_heads * {key_dim} + {value_heads} * {value_dim} channels, "
        f"where key_heads divides {value_heads}, got {qkv.shape[1]}",
    )
    _check_gates(name, a, dt_bias, gates)
    wanted = a.shape[2] if a.ndim == 3 else key_dim
    require(key_dim == wanted, f"{name}: pool must have {wanted} key dims as {layout}, got {list(pool.shape)}")
    rows, run = rows.having(name, "read", "write"), run.checked(name, Config)
    if qkv.shape[0] == 0 or rows.num_rows == 0:
        return jnp.zeros((qkv.shape[0], value_heads, value_dim), qkv.dtype), pool
    return run_op(
        name,
        (Projections(qkv, a, b, A_log, dt_bias), pool, rows),
        run,
        xla=xla.gated_delta_rule_update,
        triton=pallas_triton.gated_delta_rule_update,
        sm90="pallas_kernels.gated_delta_rule.sm90",
        options=Options(key_dim**-0.5 if scale is None else scale, use_qk_l2norm, layout, gates),
    )


@checked
def gated_delta_rule_recurrent(
    q: Float[Array, "tokens key_heads key_dim"],
    k: Float[Array, "tokens key_heads key_dim"],
    v: Float[Array, "tokens value_heads value_dim"],
    g: Float32[Array, "tokens value_heads"] | Float32[Array, "tokens value_heads key_dim"],
    beta: Float32[Array, "tokens value_heads"],
    pool: Pool | PoolKV,
    rows: Rows,
    *,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    layout: StateLayout = "VK",
    run: Run = Run(),
) -> tuple[Float[Array, "tokens value_heads value_dim"], Pool | PoolKV]:
    """Run the gated delta rule over decode and verify rows from queries, keys, values, log decays and beta.

    It differs from `gated_delta_rule_update` only in its inputs: they are given separately, and the gates are computed
    already, for example by `gated_delta_rule_gates`.

    Args:
        q: Queries of all rows, packed.
        k: Keys of all rows, packed.
        v: Values of all rows, packed. Value head h uses key head h // (value_heads // key_heads).
        g: Log decay, at most 0, per head, or per key channel for Kimi delta attention.
        beta: Correction strength, in [0, 2].
        pool: States of all layers and blocks. It is updated in place if the enclosing jit donates it, and copied
            otherwise.
        rows: The rows, with `read` and `write`. The state after token t of row r goes to write[r, t].
        scale: Factor of the queries. None means key_dim ** -0.5.
        use_qk_l2norm: Whether queries and keys are normalised to unit length first.
        layout: The layout of the states: "VK" [value_heads, value_dim, key_dim] or "KV" [value_heads, key_dim,
            value_dim].
        run: How it runs: by "xla" or "triton", with a `Config` for the Triton kernel.

    Returns:
        The outputs in v's dtype, which are 0 for tokens after the last row, and the updated pool.

    Raises:
        ValueError: if a shape or dtype breaks the contract.
        UnsupportedError: if `run` names "triton" and the kernel cannot run these arguments.
    """
    name = "gated_delta_rule_recurrent"
    _check_heads(name, k, v, pool, layout)
    rows, run = rows.having(name, "read", "write"), run.checked(name, Config)
    if v.shape[0] == 0 or rows.num_rows == 0:
        return jnp.zeros_like(v), pool
    return run_op(
        name,
        (Tokens(q, k, v, g, beta), pool, rows),
        run,
        xla=xla.gated_delta_rule_recurrent,
        triton=pallas_triton.gated_delta_rule_recurrent,
        options=Options(k.shape[2] ** -0.5 if scale is None else scale, use_qk_l2norm, layout),
    )


def _check_heads(name: str, k: jax.Array, v: jax.Array, pool: jax.Array, layout: StateLayout) -> None:
    check_layout(name, layout, StateLayout)
    require(
        k.shape[1] > 0 and v.shape[1] % k.shape[1] == 0,
        f"{name}: the number of heads of k must divide v's {v.shape[1]}, got {k.shape[1]}",
    )
    wanted = v.shape[2], k.shape[2]
    require(
        state_dims(pool, layout)[1:] == wanted,
        f"{name}: pool must have {wanted[0]} value dims and {wanted[1]} key dims as {layout}, got {list(pool.shape)}",
    )


@checked
def gated_delta_rule_prefill(
    q: Float[Array, "tokens key_heads key_dim"],
    k: Float[Array, "tokens key_heads key_dim"],
    v: Float[Array, "tokens value_heads value_dim"],
    g: Float32[Array, "tokens value_heads"] | Float32[Array, "tokens value_heads key_dim"],
    beta: Float32[Array, "tokens value_heads"],
    pool: Pool | PoolKV,
    rows: Rows,
    *,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    layout: StateLayout = "VK",
    run: Run = Run(),
) -> tuple[Float[Array, "tokens value_heads value_dim"], Pool | PoolKV]:
    """Run the gated delta rule over rows of any length, chunk by chunk, and keep each row's final state.

    The equations are in `gated_delta_rule_update`. Chunks end at multiples of `rows.chunks.chunk_size` in the
    sequence's absolute position. With a float32 pool, states and outputs are the same bits, whether the tokens ran in
    one call, were split at the end of a chunk, or resumed from a block. "xla" can be differentiated.

    Numerics: sums are float32. Decays are exponentials of values that are not positive, or that are bounded, and each
    sum of log decays is as exact as if it were computed alone. The triangular system is solved by forward substitution.
    "xla" multiplies at Precision.HIGHEST. "triton" multiplies bfloat16 inputs exactly with float32 values in two
    bfloat16 terms (a relative error of 2^-16), or in one term where only outputs depend on them. It multiplies other
    inputs as float32, in three products of tf32 (2^-21). With a decay per key channel, "triton" decays bfloat16 keys,
    rounds them to bfloat16 and multiplies them in one term (2^-8) unless `config` asks for two. How small a single
    token's decay can be there is described in docs/kernels.md. "mosaic_gpu" is as exact as "triton".

    Source: the UT transform of Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024).

    Args:
        q: Queries of all rows, packed.
        k: Keys of all rows, packed.
        v: Values of all rows, packed. Value head h uses key head h // (value_heads // key_heads).
        g: Log decay, at most 0, per head, or per key channel for Kimi delta attention.
        beta: Correction strength, in [0, 2].
        pool: States of all layers and blocks. It is updated in place if the enclosing jit donates it, and copied
            otherwise.
        rows: The rows, with `read`, `write` and `chunks`. The state after row r goes to write[r, 0]. `checkpoints` may be
            given: after these numbers of tokens, each the end of a chunk, the state is kept as well.
        scale: Factor of the queries. None means key_dim ** -0.5.
        use_qk_l2norm: Whether queries and keys are normalised to unit length first.
        layout: The layout of the states: "VK" [value_heads, value_dim, key_dim] or "KV" [value_heads, key_dim,
            value_dim].
        run: How it runs: by "xla", "triton" or "mosaic_gpu", with a `PrefillConfig` for the Triton kernels.

    Returns:
        The outputs in v's dtype, which are 0 for tokens after the last row, and the updated pool.

    Raises:
        ValueError: if a shape or dtype breaks the contract, or if the rows lack a field or have chunks of other rows.
        UnsupportedError: if `run` names "triton" and the kernel cannot run these arguments. If it is "mosaic_gpu",
            because q, k or v is not bfloat16, the chunk size is not 64, key_dim is not 64 or 128, value_dim is not a
            multiple of 64, a `config` is given, or JAX is too old.
    """
    name = "gated_delta_rule_prefill"
    _check_heads(name, k, v, pool, layout)
    rows = rows.having(name, "read", "write", "chunks", optional=("checkpoints",))
    run = run.checked(name, PrefillConfig)
    if v.shape[0] == 0 or rows.num_rows == 0:
        return jnp.zeros_like(v), pool
    check_chunks(name, rows.chunks, rows.num_rows, v.shape[0])
    return run_op(
        name,
        (Tokens(q, k, v, g, beta), pool, rows),
        run,
        xla=xla.gated_delta_rule_prefill,
        triton=launch.gated_delta_rule_prefill,
        unsupported=launch.unsupported(rows.chunks.chunk_size, k.shape[-1]),
        sm90="pallas_kernels.gated_delta_rule.prefill.sm90",
        options=Options(k.shape[2] ** -0.5 if scale is None else scale, use_qk_l2norm, layout),
    )
