"""One step of a delta-rule layer over a server's own pools, in which each request has one block that it reads and writes.

Such a server holds one pool of windows and one of states per layer, and decides itself which blocks are copied, cached
and freed. What it needs of this library is the arithmetic between two projections.
"""

from dataclasses import replace
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

import pallas_kernels as ops
from pallas_kernels import Implementation, RowCheckpoints, Rows, Run


class BlockRows(NamedTuple):
    """The rows of a step, and the block of each. NULL_BLOCK (0) reads as zeros and is never written.

    Attributes:
        query_start_loc: Index of each row's first token; the last entry is the end of the last row.
        block: The block that each row reads and writes, NULL_BLOCK for padding rows.
        fresh: Whether the row starts a sequence, so that its block is not read. None means that no row does.
        num_computed_tokens: Absolute position of each row's first token, for steps of prefill rows.
        kept_block: The block that receives a copy of a window and a state after they were computed, NULL_BLOCK for none.
            None keeps no copies.
        kept_source: The block that is copied to `kept_block`. None means the row's own block.
        token_blocks: For steps of verify rows, the block that receives the window and the state after each of the row's
            tokens. `block` is then only read. None means that no step of this shape has verify rows.
    """

    query_start_loc: Int[Array, " rows_plus_1"]
    block: Int[Array, " rows"]
    fresh: Bool[Array, " rows"] | None = None
    num_computed_tokens: Int[Array, " rows"] | None = None
    kept_block: Int[Array, " rows"] | None = None
    kept_source: Int[Array, " rows"] | None = None
    token_blocks: Int[Array, "rows window"] | None = None


class Taps(NamedTuple):
    """A layer's weights between its projections.

    Attributes:
        conv: Taps of the convolution over queries, keys and values; the last one is for the current token.
        A_log: Logarithm of the decay rate, per value head.
        dt_bias: Bias of the raw decay, per value head, or per value head and key channel.
    """

    conv: Float[Array, "channels width"]
    A_log: Float[Array, " value_heads"]
    dt_bias: Float[Array, " value_heads"] | Float[Array, "value_heads key_dim"]


def delta_rule_step(
    qkv: Float[Array, "tokens channels"],
    a: Float[Array, "tokens value_heads"] | Float[Array, "tokens value_heads key_dim"],
    b: Float[Array, "tokens value_heads"],
    weights: Taps,
    rows: BlockRows,
    windows: Float[Array, "blocks channels window"],
    states: Float[Array, "blocks value_heads key_dim value_dim"],
    *,
    decode: bool,
    sigmoid_b: bool = True,
    scale: float | None = None,
    activation: Literal["silu"] | None = "silu",
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "tokens value_heads value_dim"], Float[Array, "..."], Float[Array, "..."]]:
    """Runs the convolution and the delta rule of a step's packed tokens, and keeps each row's new window and state.

    The equations are those of `pallas_kernels.causal_conv1d_update` and `gated_delta_rule_update`. Prefill rows are cut
    into chunks at absolute positions, so a state has the same bits however the server split the prompt at chunk ends.

    Args:
        qkv: Projected queries, keys and values side by side, before the convolution.
        a: Raw decay projection.
        b: Raw projection of beta, or beta itself.
        weights: The layer's taps and gates.
        rows: The step's rows and their blocks.
        windows: The layer's pool of windows, the oldest input first. It is updated in place if the enclosing jit
            donates it.
        states: The layer's pool of states. It is updated in place if the enclosing jit donates it.
        decode: Whether every row has one token. Otherwise rows have any number of tokens, of which verify rows have at
            most as many as `rows.token_blocks`.
        sigmoid_b: Whether beta is the sigmoid of `b`. Otherwise it is `b`.
        scale: Factor of the queries. None means key_dim ** -0.5.
        activation: Activation of the convolution, "silu" or None.
        implementation: "xla" or "triton" for all ops. None lets each op choose.

    Returns:
        The outputs in qkv's dtype, and the updated pools of windows and states.

    Raises:
        ValueError: if a shape or dtype breaks an op's contract, or if a prefill step lacks `num_computed_tokens`.
    """
    query_start_loc, block = rows.query_start_loc.astype(jnp.int32), rows.block.astype(jnp.int32)
    read = block if rows.fresh is None else jnp.where(rows.fresh, 0, block)
    convolve = ops.causal_conv1d_update if decode else ops.causal_conv1d_prefill
    # Each row's own window is written to `last`, and a verify row's windows after its other tokens are its checkpoints.
    last, token_blocks = block, rows.token_blocks
    checkpoints = None
    if token_blocks is not None:
        token_blocks, length = token_blocks.astype(jnp.int32), jnp.diff(query_start_loc)
        last = jnp.take_along_axis(token_blocks, jnp.maximum(length - 1, 0)[:, None], axis=1)[:, 0]
        checkpoints = window_checkpoints(token_blocks, length)
    run = Run(implementation=implementation)
    where = Rows(
        query_start_loc=query_start_loc,
        layer=0,
        read=read,
        window_read=read,
        window_row=jnp.zeros_like(block),
        write=last[:, None],
        checkpoints=checkpoints,
    )
    qkv, conv_pool = convolve(
        qkv, windows[None], weights.conv.T, None, where, activation=activation, layout="DS", run=run
    )
    heads, key_dim, value_dim = states.shape[1:]
    keys = (qkv.shape[1] - heads * value_dim) // 2
    q, k, v = jnp.split(qkv, [keys, 2 * keys], axis=1)
    q, k, v = _heads(q, key_dim), _heads(k, key_dim), _heads(v, value_dim)
    g, beta = ops.gated_delta_rule_gates(a, b, weights.A_log, weights.dt_bias)
    beta = beta if sigmoid_b else b.astype(jnp.float32)
    if decode or token_blocks is not None:
        op = ops.gated_delta_rule_recurrent
        where = replace(where, write=where.write if token_blocks is None else token_blocks)
    else:
        if rows.num_computed_tokens is None:
            raise ValueError("rows.num_computed_tokens must be the positions of a prefill step's rows, got None")
        chunks = ops.chunk_rows(query_start_loc, rows.num_computed_tokens.astype(jnp.int32), qkv.shape[0])
        op, where = ops.gated_delta_rule_prefill, replace(where, chunks=chunks)
    out, state_pool = op(q, k, v, g, beta, states[None], where, scale=scale, layout="KV", run=run)
    if rows.kept_block is not None:
        kept = rows.kept_block.astype(jnp.int32)
        source = block if rows.kept_source is None else rows.kept_source.astype(jnp.int32)
        conv_pool = ops.state_copy(conv_pool, source, kept, run=run)
        state_pool = ops.state_copy(state_pool, source, kept, run=run)
    return out, conv_pool[0], state_pool[0]


def window_checkpoints(token_blocks: Int[Array, "rows window"], length: Int[Array, " rows"]) -> RowCheckpoints | None:
    """Names the windows that verify rows keep besides their last one, as checkpoints of `causal_conv1d_prefill`.

    A server with windows of width - 1 inputs keeps one after each token. Here a verify row has a longer window instead.
    `token_blocks` receive the window after each of a row's `length` tokens. If rows have one token the result is None.
    """
    rows, window = token_blocks.shape
    if window == 1:
        return None
    offset = jnp.broadcast_to(jnp.arange(1, window, dtype=jnp.int32), (rows, window - 1))
    block = jnp.where(offset < length[:, None], token_blocks[:, :-1], 0)
    return RowCheckpoints(offset=offset, block=block)


def _heads(x: jax.Array, dim: int) -> jax.Array:
    """Splits channels [tokens, heads * dim] into heads [tokens, heads, dim]."""
    return x.reshape(x.shape[0], -1, dim)
