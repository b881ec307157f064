"""gated_delta_rule's update on Hopper GPUs. The state rows of a warp are value dims of one head, and columns are keys.

Products are fused with sums, which a kernel that XLA gives to Triton's compiler cannot do. A token's key and query are
multiplied with the old state, both at once, and not with the state before and after the correction.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import hopper as hp
from pallas_kernels.gated_delta_rule._arguments import Options, Projections
from pallas_kernels.gated_delta_rule._gate_code import beta, log_decay
from pallas_kernels.gated_delta_rule.xla import L2_EPSILON
from pallas_kernels.hopper import state_warps
from pallas_kernels.hopper.state_warps import State, Warp
from pallas_kernels.rows import Rows


def unsupported(inputs: Projections, pool: jax.Array, rows: Rows, *, options: Options) -> str | None:
    """Return the reason why the kernel cannot run these arguments, or None if it can."""
    if options.layout != "VK":
        return f"layout must be 'VK', got {options.layout!r}"
    if inputs.a.ndim != 2:
        return f"a must have a decay per head [tokens, value_heads], got {list(inputs.a.shape)}"
    return state_warps.unsupported(pool, *inputs)


class _DeltaRule:
    """The recurrence of one head. `refs` are `qkv`, `a`, `b`, `A_log` and `dt_bias`."""

    def __init__(self, refs: Any, warp: Warp, options: Options) -> None:
        self.refs, self.warp, self.options, self.head = refs, warp, options, warp.indices.head
        _, _, heads, value_dim, key_dim = warp.pool.shape
        key_channels = (refs.qkv.shape[1] - heads * value_dim) // 2
        key_head = self.head // (heads // (key_channels // key_dim))
        query = key_head * key_dim + warp.column
        value = hp.add(hp.i32(2 * key_channels), self.head * value_dim, warp.own_row)
        self.channels = query, query + key_channels, value
        self.rate, self.bias = (ref[self.head].astype(jnp.float32) for ref in (refs.A_log, refs.dt_bias))

    def take(self, token: Any) -> list[Any]:
        """Load the lane's columns of the query and the key, the value of its own state row, and the gates."""
        *of_keys, of_value = self.channels
        vectors = [self.warp.load_columns(self.refs.qkv, token, channel) for channel in of_keys]
        gates = [ref[token, self.head].astype(jnp.float32) for ref in (self.refs.a, self.refs.b)]
        return [*vectors, self.refs.qkv[token, of_value].astype(jnp.float32), *gates]

    def advance(self, inputs: Sequence[Any], state: State, keep: Callable[[list[Any]], None]) -> Any:
        """Advance the state by one token, and return the output of the lane's own state row."""
        query, key, value, raw, raw_beta = inputs
        query, key, query_of_key = self.scale(*(hp.unpack(x.astype(jnp.float32)) for x in (query, key)))
        decay = hp.exp(log_decay(self.options.gates, raw, self.rate, self.bias))
        known, answer = (self.warp.times(state, [decay * x for x in each]) for each in (key, query))
        correction = beta(self.options.gates, raw_beta) * (value - known)
        for slice_, factor in zip(state, self.warp.of_each_load(correction), strict=True):
            keep([hp.fma(factor, k, decay * x) for k, x in zip(key, slice_, strict=True)])
        return hp.fma(correction, query_of_key, answer)

    def scale(self, query: list[Any], key: list[Any]) -> tuple[list[Any], list[Any], Any]:
        """Return the lane's columns of the query and the key, normalised and scaled, and the whole dot product."""
        of_query, of_key = hp.f32(self.options.scale), hp.f32(1.0)
        if self.options.use_qk_l2norm:
            squares = [self.warp.whole_product(x, x) for x in (query, key)]
            norms = [hp.rsqrt(x + L2_EPSILON) for x in squares]
            of_query, of_key = norms[0] * of_query, norms[1]
        query, key = ([f * x for x in each] for f, each in ((of_query, query), (of_key, key)))
        return query, key, self.warp.whole_product(query, key)


def gated_delta_rule_update(
    inputs: Projections, pool: jax.Array, rows: Rows, *, options: Options
) -> tuple[jax.Array, jax.Array]:
    """Launch the kernel. See api.py."""
    qkv = inputs.qkv
    return state_warps.advance_states(
        "gated_delta_rule_update",
        lambda refs, warp: _DeltaRule(refs, warp, options),
        inputs._asdict(),
        jax.ShapeDtypeStruct((qkv.shape[0], *pool.shape[2:4]), qkv.dtype),
        pool,
        rows,
    )
