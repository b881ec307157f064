"""gated_delta_rule's update as a Pallas kernel. The state rows of a program are value dims of one head."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels import _state_rows
from pallas_kernels._pallas_triton import Lanes, Refs
from pallas_kernels.blocks import state_dims
from pallas_kernels.dispatch import Run
from pallas_kernels.gated_delta_rule._arguments import Options, Projections, Tokens
from pallas_kernels.gated_delta_rule.config import default_config
from pallas_kernels.gated_delta_rule.xla import L2_EPSILON
from pallas_kernels.rows import Rows


def _recurrence(
    head: jax.Array, tiles: list[Lanes], keys: Lanes, *, refs: Refs, options: Options
) -> _state_rows.Recurrence:
    """Make the recurrence of one head, for `_state_rows.advance_rows`.

    It reads `qkv`, `a`, `b`, `A_log` and `dt_bias`, or, if `qkv` is None, `q`, `k`, `v`, `g` and `beta`.
    """
    value_heads, value_dim, key_dim = state_dims(refs.pool, options.layout)
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
            return options.gates.compute(a, b, *of_gate)
    else:
        key_head = head // (value_heads // refs.k.shape[1])

        def take(token):
            q, k = vector(refs.q, token, key_head), vector(refs.k, token, key_head)
            v = [pt.load(refs.v.at[token, head, value], mask=inside, other=0.0) for value, inside in tiles]
            return q, k, v, of_head(refs.g, token), of_head(refs.beta, token)

        def log_decay_and_beta(g, beta):
            return g, beta

    def normalise(x):
        return x * jax.lax.rsqrt(jnp.sum(x * x) + L2_EPSILON) if options.use_qk_l2norm else x

    def advance(_, inputs, states):
        q, k, v, *raw_gates = inputs
        q, k = normalise(q) * options.scale, normalise(k)
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
    pool: jax.Array,
    rows: Rows,
    out: jax.ShapeDtypeStruct,
    options: Options,
    run: Run,
) -> tuple[jax.Array, jax.Array]:
    """Launch the update kernel."""
    layout, window = options.layout, rows.write.shape[1]
    config = run.config or default_config(rows.num_rows, window, pool.dtype.itemsize, layout)

    def kernel(refs):
        recurrence = functools.partial(_recurrence, refs=refs, options=options)
        _state_rows.advance_rows(refs, config.block_value, config.tile_value, config.segment, recurrence, layout)

    results = pt.call(
        kernel,
        name="gated_delta_rule_update",
        grid=_state_rows.grid(out, rows.num_rows, config.block_value),
        inputs=inputs | rows.update_inputs,
        outputs={"out": out},
        updates={"pool": pool},
        num_warps=config.num_warps,
        interpret=run.interpret,
    )
    return results["out"], results["pool"]


def gated_delta_rule_update(
    inputs: Projections, pool: jax.Array, rows: Rows, *, options: Options, run: Run
) -> tuple[jax.Array, jax.Array]:
    """Launch the kernel on the convolution's outputs and raw gates. See api.py."""
    shape = inputs.qkv.shape[0], *state_dims(pool, options.layout)[:2]
    return _update(inputs._asdict(), pool, rows, jax.ShapeDtypeStruct(shape, inputs.qkv.dtype), options, run)


def gated_delta_rule_recurrent(
    inputs: Tokens, pool: jax.Array, rows: Rows, *, options: Options, run: Run
) -> tuple[jax.Array, jax.Array]:
    """Launch the kernel on separate queries, keys, values and gates. See api.py."""
    out = jax.ShapeDtypeStruct(inputs.v.shape, inputs.v.dtype)
    return _update(dict(qkv=None) | inputs._asdict(), pool, rows, out, options, run)
