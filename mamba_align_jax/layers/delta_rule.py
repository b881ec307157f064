"""What delta-rule layers run between their projections: convolution, gates and recurrence, over both kinds of rows."""

import jax
import jax.numpy as jnp

from mamba_align_jax.metadata.rows import Rows, RowSplit
from pallas_kernels import (
    Chunks,
    Implementation,
    causal_conv1d_prefill,
    causal_conv1d_update,
    gated_delta_rule_gates,
    gated_delta_rule_prefill,
    gated_delta_rule_update,
)


def convolved_delta_rule(
    qkv: jax.Array,
    a: jax.Array,
    b: jax.Array,
    conv_weight: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    split: RowSplit,
    chunks: Chunks | None,
    conv: jax.Array,
    recurrent: jax.Array,
    layer: jax.Array,
    *,
    group: int = 0,
    num_decode_tokens: int = 0,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs packed tokens, decode and verify rows first.

    Args:
        qkv: Projected [queries | keys | values], before the convolution. [tokens, channels]
        a: Raw decay projection, [tokens, value_heads] or, with a decay per key channel, [tokens, value_heads, key_dim].
        b: Raw beta projection. [tokens, value_heads]
        conv_weight: Taps. [width, channels]
        A_log: Log decay rate per value head.
        dt_bias: Added to `a`, whose trailing axes it has.
        split: The step's rows.
        chunks: `chunk_rows` of the prefill rows; None without such rows.
        conv: Pool of windows. Donate it.
        recurrent: Pool of states. Donate it.
        layer: The layer's place in the pools.
        group: The layer's place among the groups of block ids.
        num_decode_tokens: Static bound on the tokens of decode and verify rows.
        lower_bound: Least log decay of the bounded gate; None for the softplus gate.
        allow_neg_eigval: beta in (0, 2) instead of (0, 1).
        implementation: Of the ops.

    Returns:
        [tokens, value_heads, value_dim] and the pools.
    """
    value_heads, value_dim, key_dim = recurrent.shape[2:]
    keys = (qkv.shape[1] - value_heads * value_dim) // 2
    gates = dict(lower_bound=lower_bound, allow_neg_eigval=allow_neg_eigval)

    def decode(rows: Rows, qkv, a, b, conv, recurrent):
        loc, write = rows.query_start_loc, rows.write[group]
        qkv, conv = causal_conv1d_update(
            qkv, conv, layer, conv_weight, None, loc, rows.conv_read[group], rows.window_row, write[:, 0],
            implementation=implementation,
        )  # fmt: skip
        out, recurrent = gated_delta_rule_update(
            qkv, a, b, A_log, dt_bias, recurrent, layer, loc, rows.recurrent_read[group], write,
            **gates, implementation=implementation,
        )  # fmt: skip
        return out, conv, recurrent

    def prefill(rows: Rows, qkv, a, b, conv, recurrent):
        loc, write = rows.query_start_loc, rows.write[group, :, 0]
        qkv, conv = causal_conv1d_prefill(
            qkv, conv, layer, conv_weight, None, loc, rows.conv_read[group], rows.window_row, write,
            implementation=implementation,
        )  # fmt: skip
        heads = lambda x, dim: x.reshape(x.shape[0], -1, dim)
        q, k, v = jnp.split(qkv, [keys, 2 * keys], axis=1)
        g, beta = gated_delta_rule_gates(a, b, A_log, dt_bias, **gates)
        assert chunks is not None
        out, recurrent = gated_delta_rule_prefill(
            heads(q, key_dim), heads(k, key_dim), heads(v, value_dim), g, beta, recurrent, layer, loc, chunks,
            rows.recurrent_read[group], write, implementation=implementation,
        )  # fmt: skip
        return out, conv, recurrent

    out, conv, recurrent = split.apply(decode, prefill, (qkv, a, b), (conv, recurrent), num_decode_tokens)
    return out, conv, recurrent
