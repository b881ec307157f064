"""gated_delta_rule's update as a Pallas kernel: one program per (block of value rows, value head, row of the batch).

Programs of a row share its keys but own disjoint rows of the state, so each may overwrite what it has read.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels._pool import NULL_BLOCK
from pallas_kernels.gated_delta_rule.config import Config, default_config
from pallas_kernels.gated_delta_rule.xla import L2_EPSILON, gates


def _update_kernel(refs, *, config, scale, use_qk_l2norm, gate):
    tokens, rows, window = refs.out.shape[0], refs.read_block.shape[0], refs.write_blocks.shape[1]
    _, _, value_heads, value_dim, key_dim = refs.pool.shape
    block, head, program = pt.program_id(0), pt.program_id(1), pt.program_id(2)
    # All that addresses depend on is loaded here, ahead of any branch: one trip to memory instead of one after another.
    row = jnp.minimum(program, rows - 1)
    start, end, total = refs.query_start_loc[row], refs.query_start_loc[row + 1], refs.query_start_loc[rows]
    layer, read, first_write = refs.layer[...], refs.read_block[row], refs.write_blocks[row, 0]

    key, key_inside = pt.segments(key_dim, min(config.segment, pt.power_of_two(key_dim)))
    num_tiles = config.block_value // config.tile_value
    tiles = [pt.lanes(block * num_tiles + i, config.tile_value, value_dim) for i in range(num_tiles)]

    def vector(ref, *at, offset=0):
        """Keys of one head, folded, in float32."""
        return pt.load(ref.at[(*at, offset + key)], mask=key_inside, other=0.0).astype(jnp.float32)

    def of_head(ref, token):
        """A number per head, or per head and key."""
        at = (head,) if token is None else (token, head)
        return vector(ref, *at) if len(ref.shape) > len(at) else ref[at].astype(jnp.float32)

    if refs.qkv is not None:
        key_channels = (refs.qkv.shape[1] - value_heads * value_dim) // 2
        key_base = head // (value_heads // (key_channels // key_dim)) * key_dim
        of_gate = (of_head(refs.A_log, None), of_head(refs.dt_bias, None))

        def take(token):
            q, k = (vector(refs.qkv, token, offset=part * key_channels + key_base) for part in (0, 1))
            first = 2 * key_channels + head * value_dim
            v = [pt.load(refs.qkv.at[token, first + value], mask=inside, other=0.0) for value, inside in tiles]
            return q, k, v, of_head(refs.a, token), of_head(refs.b, token)

        def log_decay_and_beta(a, b):
            return gates(a, b, *of_gate, **gate)
    else:
        key_head = head // (value_heads // refs.k.shape[1])

        def take(token):
            q, k = vector(refs.q, token, key_head), vector(refs.k, token, key_head)
            v = [pt.load(refs.v.at[token, head, value], mask=inside, other=0.0) for value, inside in tiles]
            return q, k, v, of_head(refs.g, token), of_head(refs.beta, token)

        def log_decay_and_beta(g, beta):
            return g, beta

    def states(block):
        for value, inside in tiles:
            at = refs.pool.at[layer, block, head, value[None, :, None], key[:, None, :]]
            yield at, key_inside[:, None, :] & inside[None, :, None] & (block != NULL_BLOCK)

    def normalise(x):
        return x * jax.lax.rsqrt(jnp.sum(x * x) + L2_EPSILON) if use_qk_l2norm else x

    def advance(token, write, tile_states, inputs):
        q, k, v, *raw_gates = inputs
        q, k = normalise(q) * scale, normalise(k)
        g, beta = log_decay_and_beta(*raw_gates)
        decay = jnp.exp(g if g.ndim == 0 else g[:, None, :])
        after = []
        for (value, inside), (at, mask), state, target in zip(tiles, states(write), tile_states, v, strict=True):
            state = state * decay
            correction = beta * (target.astype(jnp.float32) - pt.row_sum(state * k[:, None, :]))
            state = state + correction[None, :, None] * k[:, None, :]
            out = pt.row_sum(state * q[:, None, :]).astype(refs.out.dtype)
            pt.store(at, state.astype(refs.pool.dtype), mask=mask)
            pt.store(refs.out.at[token, head, value], out, mask=inside)
            after.append(state)
        return after

    @pt.when((program < rows) & (end > start))
    def _():
        initial = [pt.load(at, mask=mask, other=0.0).astype(jnp.float32) for at, mask in states(read)]
        inputs = take(start)
        if window == 1:
            advance(start, first_write, initial, inputs)
            return

        def step(token, carry):
            # The next token's inputs are on their way while this one's are used.
            following = jnp.minimum(token + 1, end - 1)
            upcoming = (refs.write_blocks[row, following - start], take(following))
            write, inputs, tile_states = carry
            return *upcoming, advance(token, write, tile_states, inputs)

        jax.lax.fori_loop(start, end, step, (first_write, inputs, initial))

    # Tokens behind the last row have no row of their own.
    @pt.when((program < tokens) & (program >= total))
    def _():
        for value, inside in tiles:
            pt.store(refs.out.at[program, head, value], jnp.zeros(value.shape, refs.out.dtype), mask=inside)


def _update(inputs, pool, query_start_loc, out, *, config, scale, use_qk_l2norm, gate, interpret):
    rows = inputs["read_block"].shape[0]
    _, _, value_heads, value_dim, _ = pool.shape
    config = config or default_config(rows, inputs["write_blocks"].shape[1], pool.dtype.itemsize)
    results = pt.call(
        functools.partial(_update_kernel, config=config, scale=scale, use_qk_l2norm=use_qk_l2norm, gate=gate),
        name="gated_delta_rule_update",
        grid=(-(-value_dim // config.block_value), value_heads, max(out.shape[0], rows)),
        inputs=inputs | {"query_start_loc": query_start_loc},
        outputs={"out": out},
        updates={"pool": pool},
        num_warps=config.num_warps,
        interpret=interpret,
    )
    return results["out"], results["pool"]


def gated_delta_rule_update(
    qkv,
    a,
    b,
    A_log,
    dt_bias,
    pool,
    layer,
    query_start_loc,
    read_block,
    write_blocks,
    *,
    scale: float,
    use_qk_l2norm: bool,
    lower_bound: float | None,
    allow_neg_eigval: bool,
    config: Config | None = None,
    interpret: bool = False,
):
    """See api.py."""
    inputs = dict(qkv=qkv, a=a, b=b, A_log=A_log, dt_bias=dt_bias)
    return _update(
        inputs | dict(layer=layer, read_block=read_block, write_blocks=write_blocks),
        pool,
        query_start_loc,
        jax.ShapeDtypeStruct((qkv.shape[0], *pool.shape[2:4]), qkv.dtype),
        config=config,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm,
        gate=dict(lower_bound=lower_bound, allow_neg_eigval=allow_neg_eigval),
        interpret=interpret,
    )


def gated_delta_rule_recurrent(
    q,
    k,
    v,
    g,
    beta,
    pool,
    layer,
    query_start_loc,
    read_block,
    write_blocks,
    *,
    scale: float,
    use_qk_l2norm: bool,
    config: Config | None = None,
    interpret: bool = False,
):
    """See api.py."""
    inputs = dict(qkv=None, q=q, k=k, v=v, g=g, beta=beta)
    return _update(
        inputs | dict(layer=layer, read_block=read_block, write_blocks=write_blocks),
        pool,
        query_start_loc,
        jax.ShapeDtypeStruct(v.shape, v.dtype),
        config=config,
        scale=scale,
        use_qk_l2norm=use_qk_l2norm,
        gate=None,
        interpret=interpret,
    )
