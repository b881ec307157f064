"""The second Triton kernel for a decay per key channel: corrections, outputs and folds.

A program has some value dims of one head of one row, and all keys of them. It holds its part of the state in registers and
goes from token to token: two products with the state, and two sums over the group's corrections. Products are sums of
float32 products, without tensor cores: so the state need not be split into pieces, and stays where it was loaded.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels._pallas_triton import Refs
from pallas_kernels._tiles import iota
from pallas_kernels.blocks import NULL_BLOCK
from pallas_kernels.gated_delta_rule.deferred._factors import Factors
from pallas_kernels.gated_delta_rule.deferred.config import ChannelConfig


def _kernel(refs: Refs, *, config: ChannelConfig, interpret: bool) -> None:
    """Handles one row, value head and tile of value dims.

    Args:
        refs: Reads the arguments of `values`, updates `pool` and `ring_u`, and writes `out`.
        config: The launch configuration.
        interpret: Whether the kernel runs as plain JAX.
    """
    tokens, rows, (value_heads, value_dim, key_dim) = refs.qkv.shape[0], refs.slot.shape[0], refs.pool.shape[2:]
    ring_places, (vectors, places) = refs.ring_u.shape[3], refs.weight.shape[3:]
    length, values_from = ring_places // 2, refs.qkv.shape[1] - value_heads * value_dim
    head, row = pt.program_id(1), pt.program_id(2)
    # Everything that addresses depend on is loaded here, before any branch.
    start, end, total = refs.query_start_loc[row], refs.query_start_loc[row + 1], refs.query_start_loc[rows]
    layer, slot, base, position = refs.layer[...], refs.slot[row], refs.base[row], refs.position[row]
    read, fold_to = refs.read_block[row], refs.fold_block[row]

    count = end - start
    first_group = jax.lax.div(base, jnp.int32(length)) * length
    boundary = first_group + length
    index, place_in = iota((places,), 0), Factors.of(vectors, places)
    value, value_inside = pt.lanes(pt.program_id(0), config.tile_value, value_dim)
    key, key_inside = pt.segments(key_dim, min(config.segment, pt.power_of_two(key_dim)))
    inside = key_inside[:, None, :] & value_inside[None, :, None]

    def wide(x: jax.Array) -> jax.Array:
        return x.astype(jnp.float32)

    def state_at(block: jax.Array):
        """Returns the program's part of a block's state, [segments, values, segment], and which elements exist."""
        at = refs.pool.at[layer, block, head, value[None, :, None], key[:, None, :]]
        return at, inside & (block != NULL_BLOCK)

    def vector(ref, *at: jax.Array) -> jax.Array:
        """Loads the keys of one vector, [segments, 1, segment]."""
        return wide(pt.load(ref.at[(*at, key)], mask=key_inside, other=0.0))[:, None, :]

    def entry(first: jax.Array, place: jax.Array, value: jax.Array = value):
        """Returns the corrections at places of the group that starts at position `first`."""
        return refs.ring_u.at[layer, slot, head, jax.lax.rem(first, jnp.int32(ring_places)) + place, value]

    def fold(state: jax.Array, folds: jax.Array) -> jax.Array:
        """Returns the state at the end of the first group, and keeps it if all of the group is accepted.

        If `folds` is false it returns the state as it is.
        """

        def add(place, added):
            u = wide(pt.load(entry(first_group, place), mask=value_inside, other=0.0))
            return added + u[None, :, None] * vector(refs.fold_k, row, head, place)

        begin = base - first_group
        added = jax.lax.fori_loop(begin, jnp.where(folds, length, begin), add, jnp.zeros_like(state))
        mask = key_inside & folds
        decay = pt.load(refs.decay.at[row, head, key], mask=mask, other=0.0)[:, None, :]
        folded = (decay * state + added).astype(refs.pool.dtype)
        at, exists = state_at(fold_to)
        pt.store(at, folded, mask=exists & folds & (position >= boundary))
        return jnp.where(folds, wide(folded), state)

    def stage(n: jax.Array, state: jax.Array) -> jax.Array:
        """Runs the tokens in the first group (n = 0), or folds that group and runs the tokens in the next one (n = 1)."""
        if not interpret:
            pt.barrier()  # A fold reads the corrections that the stage before it has written.
        state, first = fold(state, n == 1), first_group + n * length
        of = first + index
        known = (index < length) & (of >= jnp.maximum(base, first)) & (of < position)
        at = entry(first, index[:, None], value[None, :])
        u = wide(pt.load(at, mask=known[:, None] & value_inside[None, :], other=0.0))

        def answer(number: jax.Array, u: jax.Array) -> jax.Array:
            """Returns what the state before a token, or after it, gives for vector `number`, [values]."""
            weight = pt.load(refs.weight.at[row, head, n, number, index])
            of_state = refs.factors[row, head, place_in.of_state + n * vectors + number]
            from_state = pt.row_sum(state * vector(refs.x, row, head, number))
            return of_state * from_state + jnp.sum(weight[:, None] * u, axis=0)

        def run(t: jax.Array, u: jax.Array) -> jax.Array:
            """Runs token t and returns the corrections with its own."""
            token, place = start + t, position + t - first
            at = refs.qkv.at[token, values_from + head * value_dim + value]
            v = wide(pt.load(at, mask=value_inside, other=0.0))
            of_key = refs.factors[row, head, place_in.of_key + n * vectors + t]
            new = (of_key * (v - answer(t, u))).astype(refs.ring_u.dtype)
            pt.store(entry(first, place), new, mask=value_inside)
            u = jnp.where((index == place)[:, None], wide(new)[None, :], u)
            out = answer(vectors // 2 + t, u).astype(refs.out.dtype)
            pt.store(refs.out.at[token, head, value], out, mask=value_inside)
            return u

        # From the first token in this group to the first one after it.
        stop = jnp.clip(first + length - position, 0, count)
        jax.lax.fori_loop(jnp.clip(first - position, 0, count), stop, run, u)
        return state

    @pt.when((count > 0) | ((position >= boundary) & (fold_to != NULL_BLOCK)))
    def _():
        at, mask = state_at(read)
        state = wide(pt.load(at, mask=mask, other=0.0))
        last = jnp.maximum(position, position + count - 1)
        stages = (position >= boundary).astype(jnp.int32), (last >= boundary).astype(jnp.int32)
        jax.lax.fori_loop(stages[0], stages[1] + 1, stage, state)

    def clear(n: jax.Array, _: None) -> None:
        """Writes zeros to the n-th part of the tokens after the last row that this row clears."""
        zeros = jnp.zeros(value.shape, refs.out.dtype)
        pt.store(refs.out.at[total + row + n * rows, head, value], zeros, mask=value_inside)

    shares = jnp.maximum(tokens - total - row + rows - 1, 0)
    jax.lax.fori_loop(0, jax.lax.div(shares, jnp.int32(rows)), clear, None)


def values(
    given: dict[str, jax.Array],
    qkv: jax.Array,
    pool: jax.Array,
    ring_u: jax.Array,
    layer: jax.Array,
    query_start_loc: jax.Array,
    slot: jax.Array,
    base: jax.Array,
    position: jax.Array,
    read_block: jax.Array,
    fold_block: jax.Array,
    *,
    config: ChannelConfig,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes outputs, folds and corrections.

    Args:
        given: The results of `channel_weights`.
        qkv: The argument of `gated_delta_rule_deferred`.
        pool: The argument of `gated_delta_rule_deferred`.
        ring_u: The argument of `gated_delta_rule_deferred`.
        layer: The argument of `gated_delta_rule_deferred`.
        query_start_loc: The argument of `gated_delta_rule_deferred`.
        slot: The argument of `gated_delta_rule_deferred`.
        base: The argument of `gated_delta_rule_deferred`.
        position: The argument of `gated_delta_rule_deferred`.
        read_block: The argument of `gated_delta_rule_deferred`.
        fold_block: The argument of `gated_delta_rule_deferred`.
        config: The launch configuration.
        interpret: Whether to run the kernel's body as plain JAX.

    Returns:
        The outputs, and the updated `pool` and `ring_u`.
    """
    value_heads, value_dim = pool.shape[2:4]
    rows = dict(layer=layer, query_start_loc=query_start_loc, slot=slot, base=base, position=position)
    taken = {name: given[name] for name in ("x", "weight", "factors", "fold_k", "decay")}
    results = pt.call(
        functools.partial(_kernel, config=config, interpret=interpret),
        name="gated_delta_rule_deferred",
        grid=(-(-value_dim // config.tile_value), value_heads, slot.shape[0]),
        inputs=dict(qkv=qkv, read_block=read_block, fold_block=fold_block) | rows | taken,
        outputs={"out": jax.ShapeDtypeStruct((qkv.shape[0], value_heads, value_dim), qkv.dtype)},
        updates=dict(pool=pool, ring_u=ring_u),
        num_warps=config.num_warps,
        interpret=interpret,
    )
    return results["out"], results["pool"], results["ring_u"]
