"""Deferred states as a Pallas kernel.

A program has some value dims of one head of one row, in tiles, and all keys of them. The vectors of a row's tokens, keys
first and then queries, are the rows of one tile. One product multiplies them all by a tile of the state, and one by the keys
of the group. Each token then needs one sum over the group's corrections. Coefficients that do not depend on values are
computed once for all tiles of a program.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels._dot import dot, operand
from pallas_kernels._pallas_triton import Lanes, Refs
from pallas_kernels._tiles import iota, key_lanes
from pallas_kernels.blocks import NULL_BLOCK
from pallas_kernels.dispatch import Run
from pallas_kernels.gated_delta_rule._arguments import Options, Projections
from pallas_kernels.gated_delta_rule.deferred._factors import sizes
from pallas_kernels.gated_delta_rule.deferred.config import DeferredConfig, default_config
from pallas_kernels.gated_delta_rule.deferred.entries import DeltaRuleEntries
from pallas_kernels.gated_delta_rule.xla import L2_EPSILON
from pallas_kernels.rows import Rows


class _Group(NamedTuple):
    """A group's entries of accepted tokens and of this call's, without corrections. Everything else is 0.

    Attributes:
        k: Raw keys, a tile [group_slots, keys] for each tile of keys.
        g: Log decays, [group_slots].
        new: Which slots belong to tokens of this call, [group_slots].
        at: The slots' indices in the ring, [group_slots].
    """

    k: list[jax.Array]
    g: jax.Array
    new: jax.Array
    at: jax.Array


def _row(tile: jax.Array, index: jax.Array) -> jax.Array:
    """Return row `index` of a tile."""
    return jnp.sum(jnp.where(iota(tile.shape, 0) == index, tile, 0.0), axis=0)


def _kernel(refs: Refs, *, max_query_tokens: int, config: DeferredConfig, options: Options, interpret: bool) -> None:
    """Handle one row, value head and block of value dims.

    Reads the arguments of `gated_delta_rule_deferred`, updates `pool` and the ring, and writes `out`.
    """
    tokens, rows, value_heads = refs.qkv.shape[0], refs.slot.shape[0], refs.A_log.shape[0]
    key_heads, ring_slots, key_dim = refs.ring_k.shape[2:]
    length, repeats, key_channels = ring_slots // 2, value_heads // key_heads, key_heads * key_dim
    value_dim = (refs.qkv.shape[1] - 2 * key_channels) // value_heads
    value_block, head, row = pt.program_id(0), pt.program_id(1), pt.program_id(2)
    key_head = jax.lax.div(head, jnp.int32(repeats))
    # Everything that addresses depend on is loaded here, before any branch.
    start, end, total = refs.query_start_loc[row], refs.query_start_loc[row + 1], refs.query_start_loc[rows]
    layer, slot, base, position = refs.layer[...], refs.slot[row], refs.base[row], refs.position[row]
    read, fold_to = refs.read_block[row], refs.fold_block[row]
    A_log, dt_bias = refs.A_log[head], refs.dt_bias[head]

    count = end - start
    first_group = jax.lax.div(base, jnp.int32(length)) * length
    boundary = first_group + length
    vectors, group_slots = sizes(max_query_tokens, length)
    index, vector, half = iota((group_slots,), 0), iota((vectors,), 0), vectors // 2
    is_key, offset = vector < half, vector & (half - 1)
    size = min(config.tile_key, key_lanes(key_dim))
    keys = [pt.lanes(n, size, key_dim) for n in range(-(-key_dim // size))]
    tiles = config.block_value // config.tile_value
    product = functools.partial(dot, interpret=interpret)
    narrow = 2 if refs.qkv.dtype.itemsize == 2 else 3  # bfloat16 terms of operands that only outputs depend on

    def ring_slot(position: jax.Array) -> jax.Array:
        return jax.lax.rem(position, jnp.int32(ring_slots))

    def values(tile: jax.Array) -> Lanes:
        return pt.lanes(value_block * tiles + tile, config.tile_value, value_dim)

    def states_at(block: jax.Array, value: Lanes):
        """Yield a block's state for some values, by tiles of keys, and which of its elements exist."""
        for key, inside in keys:
            mask = value[1][:, None] & inside[None, :] & (block != NULL_BLOCK)
            yield refs.pool.at[layer, block, head, value[0][:, None], key[None, :]], mask

    def load_group(first: jax.Array, low: jax.Array) -> _Group:
        """Load the entries from position `low` on of the group that starts at position `first`."""
        of = first + index
        inside = (index < length) & (of >= low)
        old, new = inside & (of < position), inside & (of >= position) & (of < position + count)
        at, token = ring_slot(first) + index, start + of - position
        k = []
        for key, exists in keys:
            ring_at = refs.ring_k.at[layer, slot, key_head, at[:, None], key[None, :]]
            call_at = refs.qkv.at[token[:, None], key_channels + key_head * key_dim + key[None, :]]
            ring = pt.load(ring_at, mask=old[:, None] & exists[None, :], other=0.0)
            call = pt.load(call_at, mask=new[:, None] & exists[None, :], other=0.0)
            k.append(jnp.where(new[:, None], call, ring))
        a = pt.load(refs.a.at[token, head], mask=new, other=0.0)
        g, _ = options.gates.compute(a, a, A_log, dt_bias)
        g = jnp.where(new, g, pt.load(refs.ring_g.at[layer, slot, head, at], mask=old, other=0.0))
        return _Group(k, g, new, at)

    def corrections_at(first: jax.Array, low: jax.Array, high: jax.Array, value: Lanes):
        """Return the corrections [group_slots, values] at positions low .. high - 1 of the group that starts at `first`."""
        of = first + index
        inside = ((index < length) & (of >= low) & (of < high))[:, None] & value[1][None, :]
        return refs.ring_u.at[layer, slot, head, (ring_slot(first) + index)[:, None], value[0][None, :]], inside

    def fold(states: list[jax.Array], value: Lanes) -> list[jax.Array]:
        """Return the state at the end of the first group, and keep it if all of the group is accepted."""
        group = load_group(first_group, base)
        at, mask = corrections_at(first_group, base, position + count, value)
        later = index[None, :] > index[:, None]
        decays = jnp.exp(jnp.sum(jnp.where(later, group.g[None, :], 0.0), axis=1))
        decayed = decays[:, None] * pt.load(at, mask=mask, other=0.0).astype(jnp.float32)
        decayed, decay = operand(decayed, config.pieces), jnp.exp(jnp.sum(group.g))
        folded = []
        for state, k, (at, mask) in zip(states, group.k, states_at(fold_to, value), strict=True):
            added = product(decayed, operand(k), contract=(0, 0))
            folded.append((decay * state.astype(jnp.float32) + added).astype(state.dtype))
            pt.store(at, folded[-1], mask=mask & (position >= boundary))
        return folded

    def multiply(x: list[jax.Array], states: list[jax.Array]) -> jax.Array:
        """Multiply the vectors x with the state. Return [vectors, values]."""
        total = None
        for vectors, state in zip(x, states, strict=True):
            vectors, state = operand(vectors), operand(state, config.pieces)
            left, right = (state, vectors) if config.values_first else (vectors, state)
            partial = product(left, right, contract=(1, 1))
            total = partial if total is None else total + partial
        assert total is not None
        return total.T if config.values_first else total

    def store_entries(group: _Group) -> None:
        """Store the keys and log decays of this call's tokens, each by one program."""
        first_program = value_block == 0
        pt.store(refs.ring_g.at[layer, slot, head, group.at], group.g, mask=group.new & first_program)
        stores = group.new & first_program & (head == key_head * repeats)
        for (key, inside), k in zip(keys, group.k, strict=True):
            at = refs.ring_k.at[layer, slot, key_head, group.at[:, None], key[None, :]]
            pt.store(at, k, mask=stores[:, None] & inside[None, :])

    def coefficients(
        x: list[jax.Array], group: _Group, inside: jax.Array, token: jax.Array, slot: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Compute the coefficients of vectors x, by tiles of keys, of which `inside` exist, and store the new entries.

        Returns the factors of the corrections [vectors, group_slots], of the state, and, for keys, of their own correction.
        """
        store_entries(group)
        factor = jnp.where(is_key, 1.0, options.scale)
        if options.use_qk_l2norm:
            squares = [jnp.sum(each * each, axis=1) for each in (each.astype(jnp.float32) for each in x)]
            factor = factor * jax.lax.rsqrt(sum(squares[1:], squares[0]) + L2_EPSILON)
        b = pt.load(refs.b.at[token, head], mask=inside, other=0.0)
        beta = options.gates.compute(b, b, A_log, dt_bias)[1]
        # A sum of log decays is a product with zeros and ones, which three bfloat16 terms make exact but for the sum itself.
        until = index[None, :] <= slot[:, None]
        later = jnp.where(index[None, :] > index[:, None], group.g[None, :], 0.0)
        between = product(until.astype(jnp.bfloat16), operand(later), contract=(1, 1))
        of_state = jnp.exp(jnp.sum(jnp.where(until, group.g[None, :], 0.0), axis=1)) * factor
        # A key sees the slots before its own, and a query sees its token's slot too.
        seen = index[None, :] < jnp.where(is_key, slot, slot + 1)[:, None]
        products = [product(operand(a), operand(b), contract=(1, 1)) for a, b in zip(x, group.k, strict=True)]
        of_corrections = jnp.where(seen, sum(products[1:], products[0]) * jnp.exp(between), 0.0) * factor[:, None]
        return of_corrections, of_state, jnp.where(is_key, beta * factor, 0.0)

    def stage(n: jax.Array, nothing: None) -> None:
        """Run the tokens in the first group (n = 0), or fold that group and run the tokens in the next one (n = 1)."""
        if not interpret:
            pt.barrier()  # A fold reads the corrections that the stage before it has written.
        folds = n == 1
        first = first_group + n * length
        low = jnp.where(folds, first, base)
        inside = (offset < count) & (position + offset >= low) & (position + offset < first + length)
        token, in_group = start + offset, position + offset - first

        def load_values(tile):
            """Load a tile of the state, its values [vectors, values], and its corrections of earlier calls."""
            value = values(jnp.minimum(tile, tiles - 1))
            exists = value[1] & (tile < tiles)
            value = value[0], exists
            states = [pt.load(at, mask=mask, other=0.0) for at, mask in states_at(read, value)]
            channel = 2 * key_channels + head * value_dim + value[0][None, :]
            v = pt.load(
                refs.qkv.at[token[:, None], channel], mask=(inside & is_key)[:, None] & exists[None, :], other=0.0
            )
            at, mask = corrections_at(first, low, position, value)
            return states, v, pt.load(at, mask=mask, other=0.0)

        ahead = load_values(jnp.int32(0))
        channel = (jnp.where(is_key, key_channels, 0) + key_head * key_dim)[:, None]
        x = [
            pt.load(
                refs.qkv.at[token[:, None], channel + key[None, :]], mask=inside[:, None] & exists[None, :], other=0.0
            )
            for key, exists in keys
        ]
        of_corrections, of_state, of_key = coefficients(x, load_group(first, low), inside, token, in_group)
        of_state, of_key = of_state[:, None], of_key[:, None]
        of_u, of_out = -of_key * of_corrections, operand(of_corrections, narrow)

        def run_tile(tile, ahead):
            states, v, u = ahead
            value = values(tile)
            following = load_values(tile + 1) if tiles > 1 else ahead
            # Both branches multiply. If one returned a folded state, the compiler would hold it in several layouts.
            from_state = jax.lax.cond(folds, lambda: multiply(x, fold(states, value)), lambda: multiply(x, states))
            from_state, u = of_state * from_state, u.astype(jnp.float32)
            own = of_key * (v.astype(jnp.float32) - from_state)

            def correct(n, u):
                """Add the correction of token n."""
                new = _row(own, n) + jnp.sum(_row(of_u, n)[:, None] * u, axis=0)
                new = new.astype(refs.ring_u.dtype).astype(jnp.float32)
                return jnp.where((index == position + n - first)[:, None], new[None, :], u)

            # From the first token in this group to the first one after it.
            u = jax.lax.fori_loop(
                jnp.clip(first - position, 0, count), jnp.clip(first + length - position, 0, count), correct, u
            )
            at, mask = corrections_at(first, jnp.maximum(low, position), position + count, value)
            pt.store(at, u.astype(refs.ring_u.dtype), mask=mask)
            out = from_state + product(of_out, operand(u, narrow))
            mask = (inside & ~is_key)[:, None] & value[1][None, :]
            pt.store(refs.out.at[token[:, None], head, value[0][None, :]], out.astype(refs.out.dtype), mask=mask)
            return following

        jax.lax.fori_loop(0, tiles, run_tile, ahead)

    @pt.when((count > 0) | ((position >= boundary) & (fold_to != NULL_BLOCK)))
    def _():
        last = jnp.maximum(position, position + count - 1)
        stages = (position >= boundary).astype(jnp.int32), (last >= boundary).astype(jnp.int32)
        jax.lax.fori_loop(stages[0], stages[1] + 1, stage, None)

    def clear(n: jax.Array, _: None) -> None:
        """Write zeros to the n-th padding token that this row clears."""
        value, inside = pt.lanes(value_block, config.block_value, value_dim)
        zeros = jnp.zeros(value.shape, refs.out.dtype)
        pt.store(refs.out.at[total + row + n * rows, head, value], zeros, mask=inside)

    padding = jnp.maximum(tokens - total - row + rows - 1, 0)
    jax.lax.fori_loop(0, jax.lax.div(padding, jnp.int32(rows)), clear, None)


def gated_delta_rule_deferred(
    inputs: Projections, pool: jax.Array, ring: DeltaRuleEntries, rows: Rows, *, options: Options, run: Run
) -> tuple[jax.Array, jax.Array, DeltaRuleEntries]:
    """Launch the kernel. See api.py."""
    value_heads, value_dim = pool.shape[2:4]
    config = run.config or default_config(rows.num_rows, pool.dtype.itemsize)
    of_rows = dict(read_block=rows.read, fold_block=rows.fold.block, layer=rows.layer)
    of_rows |= dict(query_start_loc=rows.query_start_loc, slot=rows.fold.slot, base=rows.fold.base)
    of_rows |= dict(position=rows.num_computed_tokens)
    shape = inputs.qkv.shape[0], value_heads, value_dim
    results = pt.call(
        functools.partial(
            _kernel, max_query_tokens=rows.max_query_tokens, config=config, options=options, interpret=run.interpret
        ),
        name="gated_delta_rule_deferred",
        grid=(-(-value_dim // config.block_value), value_heads, rows.num_rows),
        inputs=inputs._asdict() | of_rows,
        outputs=dict(out=jax.ShapeDtypeStruct(shape, inputs.qkv.dtype)),
        updates=dict(pool=pool) | ring.by_name,
        num_warps=config.num_warps,
        interpret=run.interpret,
    )
    return results["out"], results["pool"], DeltaRuleEntries.of(results)
