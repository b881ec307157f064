"""What delta-rule layers run between their projections: convolution, gates and recurrence, for both kinds of rows.

The equations and their sources are in the docstrings of `pallas_kernels.gated_delta_rule_update` and
`gated_delta_rule_gates`.
"""

import jax

from mamba_align_jax.layers.chain import Chain, Inputs
from mamba_align_jax.layers.linear import Linear
from mamba_align_jax.metadata.layer_step import LayerStep
from pallas_kernels import (
    DeltaRuleEntries,
    Gates,
    Rows,
    StateLayout,
    WindowLayout,
    causal_conv1d_prefill,
    causal_conv1d_update,
    gated_delta_rule_gates,
    gated_delta_rule_prefill,
    gated_delta_rule_update,
)
from pallas_kernels.blocks import state_dims
from pallas_kernels.gated_delta_rule.deferred import gated_delta_rule_deferred
from pallas_kernels.product_chain import Convolution


def project(
    in_proj: Linear, x: Inputs, conv_weight: jax.Array, at: LayerStep, conv: jax.Array, layout: WindowLayout
) -> tuple[tuple[jax.Array, ...], jax.Array, bool]:
    """Projects a layer's inputs. The first part is convolved too if that can be part of the launch.

    Args:
        in_proj: The projection, whose first part are queries, keys and values.
        x: Its inputs.
        conv_weight: See `convolved_delta_rule`, as for the next three.
        at: The step's rows.
        conv: Pool of windows. `conv` is donated.
        layout: Layout of `conv`.

    Returns:
        The parts, the pool, and whether the first part has been convolved, and its windows kept.
    """
    rows = at.single_token_rows
    if rows is not None and isinstance(x, Chain):
        where = rows.query_start_loc, rows.window_read, rows.window_row, rows.write[:, 0]
        found = in_proj.convolved(x, Convolution(conv, at.layer, conv_weight, *where, layout=layout))
        if found is not None:
            *parts, conv = found
            return tuple(parts), conv, True
    return in_proj.with_wide_first(x, is_wide=not at.has_decode_rows), conv, False


def convolved_delta_rule(
    qkv: jax.Array,
    a: jax.Array,
    b: jax.Array,
    conv_weight: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    at: LayerStep,
    conv: jax.Array,
    recurrent: jax.Array,
    *ring: jax.Array,
    is_convolved: bool = False,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
    window_layout: WindowLayout = "SD",
    state_layout: StateLayout = "VK",
) -> tuple[jax.Array, ...]:
    """Runs the convolution and the delta rule of a step's packed tokens, in one pass over each kind of rows.

    Args:
        qkv: Projected queries, keys and values side by side, before the convolution or after it. In a step without decode
            and verify rows, other channels may follow, which are ignored. [tokens, channels]
        a: Raw decay projection. [tokens, value_heads], or [tokens, value_heads, key_dim] for a decay per key channel.
        b: Raw beta projection. [tokens, value_heads]
        conv_weight: Taps of the convolution. [width, channels]
        A_log: Logarithm of the decay rate of each value head. [value_heads]
        dt_bias: Bias that is added to `a`. It has the shape of one token of `a`.
        at: The step's rows, and the layer's index in the pools.
        conv: Pool of windows [layers, blocks, *window]. `conv` is donated.
        recurrent: Pool of states [layers, blocks, *state]. `recurrent` is donated.
        *ring: Keys, corrections and log decays of the slots, under policy "deferred": see `StatePool.rings`. They are
            donated.
        is_convolved: Whether `qkv` has been convolved, and its windows kept. See `project`.
        lower_bound: Smallest log decay of the bounded gate. None selects the softplus gate.
        allow_neg_eigval: Whether beta lies in (0, 2) instead of (0, 1).
        window_layout: Layout of `conv`: "SD" [window, channels] or "DS" [channels, window].
        state_layout: Layout of `recurrent`: "VK" [value_heads, value_dim, key_dim] or "KV" [value_heads, key_dim,
            value_dim].

    Returns:
        The outputs [tokens, value_heads, value_dim], the updated pools, and the updated ring.
    """
    value_heads, value_dim, key_dim = state_dims(recurrent, state_layout)
    keys = (conv_weight.shape[1] - value_heads * value_dim) // 2
    gates = Gates(lower_bound=lower_bound, allow_neg_eigval=allow_neg_eigval)

    def decode(rows: Rows, qkv, a, b, conv, recurrent, *ring):
        if not is_convolved:
            qkv, conv = causal_conv1d_update(qkv, conv, conv_weight, None, rows, layout=window_layout, run=at.run)
        if rows.fold is not None:
            entries = DeltaRuleEntries(*ring)
            out, recurrent, entries = gated_delta_rule_deferred(
                qkv, a, b, A_log, dt_bias, recurrent, entries, rows, gates=gates, run=at.run
            )
            return out, conv, recurrent, *entries.arrays
        out, recurrent = gated_delta_rule_update(
            qkv, a, b, A_log, dt_bias, recurrent, rows, gates=gates, layout=state_layout, run=at.run
        )
        return out, conv, recurrent, *ring

    def prefill(rows: Rows, qkv, a, b, conv, recurrent, *ring):
        parts = keys, keys, value_heads * value_dim
        (q, k, v), conv = causal_conv1d_prefill(
            qkv, conv, conv_weight, None, rows, parts=parts, layout=window_layout, run=at.run
        )
        q, k, v = _heads(q, key_dim), _heads(k, key_dim), _heads(v, value_dim)
        g, beta = gated_delta_rule_gates(a, b, A_log, dt_bias, gates=gates)
        out, recurrent = gated_delta_rule_prefill(q, k, v, g, beta, recurrent, rows, layout=state_layout, run=at.run)
        return out, conv, recurrent, *ring

    return at.apply(decode, prefill, (qkv, a, b), (conv, recurrent, *ring))


def _heads(x: jax.Array, dim: int) -> jax.Array:
    """Splits channels [tokens, heads * dim] into heads [tokens, heads, dim]."""
    return x.reshape(x.shape[0], -1, dim)
