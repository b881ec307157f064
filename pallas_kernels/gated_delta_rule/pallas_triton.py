"""gated_delta_rule's update as a Pallas kernel. The state rows of a program are value dims of one head."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels import _state_rows
from pallas_kernels._pallas_triton import Lanes, Refs
from pallas_kernels.blocks import StateLayout, state_dims
from pallas_kernels.dispatch import Run
from pallas_kernels.gated_delta_rule.config import default_config
from pallas_kernels.gated_delta_rule.gates import Gates
from pallas_kernels.gated_delta_rule.xla import L2_EPSILON
from pallas_kernels.rows import Rows


def _recurrence(
    head: jax.Array,
    tiles: list[Lanes],
    keys: Lanes,
    *,
    refs: Refs,
    scale: float,
    use_qk_l2norm: bool,
    gates: Gates,
    layout: StateLayout,
) -> _state_rows.Recurrence:
    """Make the recurrence of one head, for `_state_rows.advance_rows`.

    Args:
        head: The value head.
        tiles: The value dims of each tile.
        keys: The key dims, folded into segments.
        refs: Reads `qkv`, `a`, `b`, `A_log` and `dt_bias`, or, if `qkv` is None, `q`, `k`, `v`, `g` and `beta`.
        scale: Factor of the queries.
        use_qk_l2norm: Whether queries and keys are normalised.
        gates: How g and beta are computed if `qkv` is given.
        layout: The layout of the states in the pool.
    """
    value_heads, value_dim, key_dim = state_dims(refs.pool, layout)
    key, key_inside = keys

    def vector(ref, *at, offset=0):
        """Load the keys of one head, folded into segments, in float32."""
        return pt.load(ref.at[(*at, offset + key)], mask=key_inside, other=0.0).astype(jnp.float32)

    def of_head(ref, *token):
        """Load the head's value, or its vector of keys if the array has one value per key channel."""
        at = (*token, head)
        return vector(ref, *at) if len(ref.shape) > len(at) else ref[at].astype(jnp.float32)

    if refs.qkv is not None:
        key_channels = (refs.qkv.shape[1] - value_heads * value_dim) // 2
        key_base = head // (value_heads // (key_channels // key_dim)) * key_dim
        of_gate = of_head(refs.A_log), of_head(refs.dt_bias)

        def take(token):
            q, k = (vector(refs.qkv, token, offset=n * key_channels + key_base) for n in (0, 1))
            first = 2 * key_channels + head * value_dim
            v = [pt.load(refs.qkv.at[token, first + value], mask=inside, other=0.0) for value, inside in tiles]
            return q, k, v, of_head(refs.a, token), of_head(refs.b, token)

        def log_decay_and_beta(a, b):
            return gates.compute(a, b, *of_gate)
    else:
        key_head = head // (value_heads // refs.k.shape[1])

        def take(token):
            q, k = vector(refs.q, token, key_head), vector(refs.k, token, key_head)
            v = [pt.load(refs.v.at[token, head, value], mask=inside, other=0.0) for value, inside in tiles]
            return q, k, v, of_head(refs.g, token), of_head(refs.beta, token)

        def log_decay_and_beta(g, beta):
            return g, beta

    def normalise(x):
        return x * jax.lax.rsqrt(jnp.sum(x * x) + L2_EPSILON) if use_qk_l2norm else x

    def advance(_, inputs, states):
        q, k, v, *raw_gates = inputs
        q, k = normalise(q) * scale, normalise(k)
        g, beta = log_decay_and_beta(*raw_gates)
        decay = jnp.exp(g if g.ndim == 0 else g[:, None, :])
        for state, target in zip(states, v, strict=True):
            state = state * decay
            correction = beta * (target.astype(jnp.float32) - pt.row_sum(state * k[:, None, :]))
            state = state + correction[None, :, None] * k[:, None, :]
            yield pt.row_sum(state * q[:, None, :]).astype(refs.out.dtype), state

    return _state_rows.Recurrence(take, lambda: None, advance)


def _update(
    inputs: dict[str, jax.Array | None],
    rows: Rows,
    pool: jax.Array,
    out: jax.ShapeDtypeStruct,
    *,
    layout: StateLayout,
    run: Run,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Launch the update kernel."""
    config = run.config or default_config(rows.num_rows, rows.write.shape[1], pool.dtype.itemsize, layout)
    where = dict(query_start_loc=rows.query_start_loc, read_block=rows.read, write_blocks=rows.write)

    def kernel(refs):
        recurrence = functools.partial(_recurrence, refs=refs, layout=layout, **options)
        _state_rows.advance_rows(refs, config.block_value, config.tile_value, config.segment, recurrence, layout)

    results = pt.call(
        kernel,
        name="gated_delta_rule_update",
        grid=_state_rows.grid(out, rows.num_rows, config.block_value),
        inputs=inputs | dict(layer=rows.layer) | where,
        outputs={"out": out},
        updates={"pool": pool},
        num_warps=config.num_warps,
        interpret=run.interpret,
    )
    return results["out"], results["pool"]


def gated_delta_rule_update(
    qkv: jax.Array,
    a: jax.Array,
    b: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    pool: jax.Array,
    rows: Rows,
    *,
    scale: float,
    use_qk_l2norm: bool,
    layout: StateLayout,
    gates: Gates,
    run: Run,
) -> tuple[jax.Array, jax.Array]:
    """Launch the kernel on the convolution's outputs and raw gates. See api.py."""
    return _update(
        dict(qkv=qkv, a=a, b=b, A_log=A_log, dt_bias=dt_bias),
        rows,
        pool,
        jax.ShapeDtypeStruct((qkv.shape[0], *state_dims(pool, layout)[:2]), qkv.dtype),
        layout=layout,
        run=run,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm,
        gates=gates,
    )


def gated_delta_rule_recurrent(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    pool: jax.Array,
    rows: Rows,
    *,
    scale: float,
    use_qk_l2norm: bool,
    layout: StateLayout,
    run: Run,
) -> tuple[jax.Array, jax.Array]:
    """Launch the kernel on separate queries, keys, values and gates. See api.py."""
    return _update(
        dict(qkv=None, q=q, k=k, v=v, g=g, beta=beta),
        rows,
        pool,
        jax.ShapeDtypeStruct(v.shape, v.dtype),
        layout=layout,
        run=run,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm,
        gates=Gates(),
    )
