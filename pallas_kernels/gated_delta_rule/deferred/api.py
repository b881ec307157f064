"""The public function of deferred states: its contract, checks and dispatch."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels._check import check_ring, checked, require
from pallas_kernels._run_op import run_op
from pallas_kernels.dispatch import Run
from pallas_kernels.gated_delta_rule._arguments import Options, Projections
from pallas_kernels.gated_delta_rule.deferred import pallas_triton, xla
from pallas_kernels.gated_delta_rule.deferred.config import DeferredConfig
from pallas_kernels.gated_delta_rule.deferred.entries import DeltaRuleEntries
from pallas_kernels.gated_delta_rule.gates import Gates
from pallas_kernels.rows import Rows

Pool = Float[Array, "layers blocks value_heads value_dim key_dim"]
_FIELDS = ("read", "num_computed_tokens", "fold", "max_query_tokens")


@checked
def gated_delta_rule_deferred(
    qkv: Float[Array, "tokens channels"],
    a: Float[Array, "tokens value_heads"],
    b: Float[Array, "tokens value_heads"],
    A_log: Float[Array, " value_heads"],
    dt_bias: Float[Array, " value_heads"],
    pool: Pool,
    ring: DeltaRuleEntries,
    rows: Rows,
    *,
    gates: Gates = Gates(),
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    run: Run = Run(),
) -> tuple[Float[Array, "tokens value_heads value_dim"], Pool, DeltaRuleEntries]:
    """Run the gated delta rule over decode and verify rows, and write a state only where a group of tokens ends.

    It computes the recurrence of `gated_delta_rule_update`, which has the equations, with a decay per head, and keeps an
    entry for each token in a ring instead of a state: see `Fold`, which says what a row reads and writes. With the raw key
    k, its factor n = 1 / sqrt(sum(k^2) + 1e-6) and the correction c = beta * (v - S (n k)), an entry is (k, u, g) where
    u = n c::

        S[p] = exp(g[base] + .. + g[p - 1]) S[base]
             + the sum over base <= i < p of exp(g[i + 1] + .. + g[p - 1]) u[i] k[i]^T

    Numerics: sums are float32. A state is rounded to the pool's dtype by a fold, and u to the ring's dtype before it is
    used. Every sum over a group has the order of the group's positions. So a state at a multiple of L and the output of
    an accepted token depend, to the bit, on the state from which the row started and on the accepted tokens, and not on
    how many came with a call, the other rows, or rejected drafts, as long as these are finite. The kernels multiply on
    tensor cores, bfloat16 values as they are and float32 values in bfloat16 terms: three for a float32 pool (a relative
    error of 2^-24), two otherwise, or as many as the configuration of "triton" says. No exponent of a decay is positive.

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
            otherwise, as the arrays of the ring are.
        ring: The entries of all slots.
        rows: The rows, with `read`, `num_computed_tokens`, `fold` and `max_query_tokens`.
        gates: Which gates the model has.
        scale: Factor of the queries. None means key_dim ** -0.5.
        use_qk_l2norm: Whether queries and keys are normalised to unit length first. If not, n is 1.
        run: How it runs: by "xla", "triton" or "mosaic_gpu", with a `DeferredConfig` for the Triton kernel. "mosaic_gpu"
            needs JAX 0.11.2, bfloat16 inputs, key_dim and value_dim that are multiples of 64 (key_dim at most 256), groups
            of 16 or 32 tokens, and no configuration.

    Returns:
        The outputs in qkv's dtype, which are 0 for tokens after the last row, the updated pool, and the updated ring.

    Raises:
        ValueError: if a shape or dtype breaks the contract, if the rows lack a field, or if 2 * max_query_tokens - 2 is not
            less than L: a row would then write ring slots that it reads.
        UnsupportedError: if `run` names "mosaic_gpu" and the kernel cannot run these arguments.
    """
    name = "gated_delta_rule_deferred"
    value_heads, value_dim, key_dim = pool.shape[2:]
    key_heads, ring_slots = ring.k.shape[2:4]
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    require(
        key_heads > 0 and value_heads % key_heads == 0,
        f"{name}: the key heads of ring.k must divide the {value_heads} value heads, got {key_heads}",
    )
    require(
        qkv.shape[1] == channels,
        f"{name}: qkv must have 2 * {key_heads} * {key_dim} + {value_heads} * {value_dim} channels, got {qkv.shape[1]}",
    )
    require(ring.k.dtype == qkv.dtype, f"{name}: ring.k must have qkv's dtype {qkv.dtype}, got {ring.k.dtype}")
    require(ring.k.shape[1] > 0, f"{name}: ring.k must have at least one slot, got {list(ring.k.shape)}")
    rows, run = rows.having(name, *_FIELDS), run.checked(name, DeferredConfig)
    check_ring(name, "ring.k", ring_slots, rows.max_query_tokens)
    gates.checked(name)
    if rows.num_rows == 0:
        return jnp.zeros((qkv.shape[0], value_heads, value_dim), qkv.dtype), pool, ring
    tokens = qkv.shape[0]
    if tokens == 0:  # Rows without tokens may fold, but no array of a kernel may be empty.
        qkv, a, b = (jnp.zeros((1, *x.shape[1:]), x.dtype) for x in (qkv, a, b))
    out, pool, ring = run_op(
        name,
        (Projections(qkv, a, b, A_log, dt_bias), pool, ring, rows),
        run,
        xla=xla.gated_delta_rule_deferred,
        triton=pallas_triton.gated_delta_rule_deferred,
        sm90="pallas_kernels.gated_delta_rule.deferred.sm90",
        options=Options(key_dim**-0.5 if scale is None else scale, use_qk_l2norm, gates=gates),
    )
    return out[:tokens], pool, ring
