"""Deferred states of Mamba-2 as a Pallas kernel. A program has some channels of one head of one row, and reads them once.

The C of a row's tokens are one tile. One product multiplies it by the state, and one by the B of the group's entries. The
products with B, times the decays, are the attention over the entries' x: a product of small tiles.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels._dot import dot, operand
from pallas_kernels._pallas_triton import Refs
from pallas_kernels._state_space import step_size
from pallas_kernels._tiles import BLOCK, iota, key_lanes
from pallas_kernels.blocks import NULL_BLOCK
from pallas_kernels.dispatch import Run
from pallas_kernels.rows import Rows
from pallas_kernels.selective_state_update.deferred.config import DeferredConfig, default_config
from pallas_kernels.selective_state_update.deferred.entries import Inputs, Mamba2Entries


class _Group(NamedTuple):
    """A group's entries of accepted tokens and of this call's. Everything else is 0.

    Attributes:
        x: Inputs, [group_slots, channels].
        B: Input projections, [group_slots, states].
        dt: Step sizes, [group_slots].
        g: Log decays, [group_slots].
        new: Which slots belong to tokens of this call, [group_slots].
        at: The slots' indices in the ring, [group_slots].
    """

    x: jax.Array
    B: jax.Array
    dt: jax.Array
    g: jax.Array
    new: jax.Array
    at: jax.Array


def _kernel(refs: Refs, *, max_query_tokens: int, config: DeferredConfig, dt_softplus: bool, interpret: bool) -> None:
    """Handle one row, head and block of channels.

    Reads the arguments of `selective_state_deferred`, updates `pool` and the ring, and writes `out`.
    """
    tokens, rows = refs.xBC.shape[0], refs.slot.shape[0]
    heads, ring_slots, head_dim = refs.ring_x.shape[2:]
    groups, _, state_dim = refs.ring_B.shape[2:]
    length, repeats = ring_slots // 2, heads // groups
    block, head, row = pt.program_id(0), pt.program_id(1), pt.program_id(2)
    group = jax.lax.div(head, jnp.int32(repeats))
    # Everything that addresses depend on is loaded here, before any branch.
    start, end, total = refs.query_start_loc[row], refs.query_start_loc[row + 1], refs.query_start_loc[rows]
    layer, slot, base, position = refs.layer[...], refs.slot[row], refs.base[row], refs.position[row]
    read, fold_to = refs.read_block[row], refs.fold_block[row]
    rate = refs.A[head].astype(jnp.float32)
    skip = None if refs.D is None else refs.D[head].astype(jnp.float32)
    dt_bias = None if refs.dt_bias is None else refs.dt_bias[head].astype(jnp.float32)

    count = end - start
    first_group = jax.lax.div(base, jnp.int32(length)) * length
    boundary = first_group + length
    index = iota((max(pt.power_of_two(length), BLOCK),), 0)
    vector = iota((max(pt.power_of_two(max_query_tokens), BLOCK),), 0)
    channel, channel_inside = pt.lanes(block, config.block_dim, head_dim)
    column, column_inside = pt.lanes(0, key_lanes(state_dim), state_dim)
    # The first channels of this program's x, and of its group's B and C, in xBC.
    of_x, of_B = head * head_dim, heads * head_dim + group * state_dim
    of_C = of_B + groups * state_dim
    product = functools.partial(dot, interpret=interpret)
    narrow = 2 if refs.xBC.dtype.itemsize == 2 else 3  # bfloat16 terms of operands that only outputs depend on

    def state_at(block):
        """Return the program's tile of a block's state, and which of its elements exist."""
        mask = channel_inside[:, None] & column_inside[None, :] & (block != NULL_BLOCK)
        return refs.pool.at[layer, block, head, channel[:, None], column[None, :]], mask

    def load_group(first: jax.Array, low: jax.Array) -> _Group:
        """Load the entries from position `low` on of the group that starts at position `first`."""
        of = first + index
        inside = (index < length) & (of >= low)
        old, new = inside & (of < position), inside & (of >= position) & (of < position + count)
        at, token = jax.lax.rem(first, jnp.int32(ring_slots)) + index, start + of - position

        def tile(ring, owner, of_call, lane, exists):
            """Load the tile [group_slots, lanes] of `ring`, in which this call's tokens come from xBC."""
            kept = pt.load(
                ring.at[layer, slot, owner, at[:, None], lane[None, :]],
                mask=old[:, None] & exists[None, :],
                other=0.0,
            )
            call = refs.xBC.at[token[:, None], of_call + lane[None, :]]
            return jnp.where(new[:, None], pt.load(call, mask=new[:, None] & exists[None, :], other=0.0), kept)

        x = tile(refs.ring_x, head, of_x, channel, channel_inside)
        B = tile(refs.ring_B, group, of_B, column, column_inside)
        dt = pt.load(refs.dt.at[token, head], mask=new, other=0.0).astype(jnp.float32)
        dt = step_size(dt, dt_bias, dt_softplus)
        # A slot that is neither old nor new gets 0.
        of_head = (pt.load(ring.at[layer, slot, head, at], mask=old, other=0.0) for ring in (refs.ring_dt, refs.ring_g))
        dt, g = (jnp.where(new, call, kept) for call, kept in zip((dt, rate * dt), of_head, strict=True))
        return _Group(x, B, dt, g, new, at)

    def store_entries(entries: _Group) -> None:
        """Store this call's tokens in the ring. Entries that several programs have are stored by one of them."""
        new, once = entries.new, entries.new & (block == 0)
        at = refs.ring_x.at[layer, slot, head, entries.at[:, None], channel[None, :]]
        pt.store(at, entries.x, mask=new[:, None] & channel_inside[None, :])
        pt.store(refs.ring_dt.at[layer, slot, head, entries.at], entries.dt, mask=once)
        pt.store(refs.ring_g.at[layer, slot, head, entries.at], entries.g, mask=once)
        stores = once & (head == group * repeats)
        at = refs.ring_B.at[layer, slot, group, entries.at[:, None], column[None, :]]
        pt.store(at, entries.B, mask=stores[:, None] & column_inside[None, :])

    def fold(state: jax.Array) -> jax.Array:
        """Return the state at the end of the first group, and keep it if all of the group is accepted."""
        entries = load_group(first_group, base)
        g = entries.g
        later = index[None, :] > index[:, None]
        factor = jnp.exp(jnp.sum(jnp.where(later, g[None, :], 0.0), axis=1)) * entries.dt
        decayed = operand(factor[:, None] * entries.x.astype(jnp.float32), config.pieces)
        added = product(decayed, operand(entries.B), contract=(0, 0))
        folded = (jnp.exp(jnp.sum(g)) * state.astype(jnp.float32) + added).astype(state.dtype)
        at, mask = state_at(fold_to)
        pt.store(at, folded, mask=mask & (position >= boundary))
        return folded

    def multiply(C: jax.Array, state: jax.Array) -> jax.Array:
        """Multiply the C of tokens with the state. Return [tokens, channels]."""
        C_, state_ = operand(C), operand(state, config.pieces)
        if config.dims_first:
            return product(state_, C_, contract=(1, 1)).T
        return product(C_, state_, contract=(1, 1))

    def stage(n: jax.Array, nothing: None) -> None:
        """Run the tokens in the first group (n = 0), or fold that group and run the tokens in the next one (n = 1)."""
        folds = n == 1
        first = first_group + n * length
        low = jnp.where(folds, first, base)
        at, mask = state_at(read)
        state = pt.load(at, mask=mask, other=0.0)
        inside = (vector < count) & (position + vector >= low) & (position + vector < first + length)
        token, in_group = start + vector, position + vector - first
        C = refs.xBC.at[token[:, None], of_C + column[None, :]]
        C = pt.load(C, mask=inside[:, None] & column_inside[None, :], other=0.0)
        entries = load_group(first, low)
        store_entries(entries)

        # A sum of log decays is a product with zeros and ones, which three bfloat16 terms make exact but for the sum itself.
        g = entries.g
        until = index[None, :] <= in_group[:, None]
        later = jnp.where(index[None, :] > index[:, None], g[None, :], 0.0)
        between = product(until.astype(jnp.bfloat16), operand(later), contract=(1, 1))
        of_state = jnp.exp(jnp.sum(jnp.where(until, g[None, :], 0.0), axis=1))
        attention = product(operand(C), operand(entries.B), contract=(1, 1)) * entries.dt[None, :]
        attention = jnp.where(until, attention * jnp.exp(between), 0.0)
        if skip is not None:
            attention = attention + jnp.where(index[None, :] == in_group[:, None], skip, 0.0)
        of_entries = product(operand(attention, narrow), operand(entries.x))
        # Both branches multiply. If one returned a folded state, the compiler would hold it in several layouts.
        of_base = jax.lax.cond(folds, lambda: multiply(C, fold(state)), lambda: multiply(C, state))
        out = of_state[:, None] * of_base + of_entries
        mask = inside[:, None] & channel_inside[None, :]
        pt.store(refs.out.at[token[:, None], head, channel[None, :]], out.astype(refs.out.dtype), mask=mask)

    @pt.when((count > 0) | ((position >= boundary) & (fold_to != NULL_BLOCK)))
    def _():
        last = jnp.maximum(position, position + count - 1)
        stages = (position >= boundary).astype(jnp.int32), (last >= boundary).astype(jnp.int32)
        jax.lax.fori_loop(stages[0], stages[1] + 1, stage, None)

    def clear(n: jax.Array, _: None) -> None:
        """Write zeros to the n-th padding token that this row clears."""
        zeros = jnp.zeros(channel.shape, refs.out.dtype)
        pt.store(refs.out.at[total + row + n * rows, head, channel], zeros, mask=channel_inside)

    padding = jnp.maximum(tokens - total - row + rows - 1, 0)
    jax.lax.fori_loop(0, jax.lax.div(padding, jnp.int32(rows)), clear, None)


def selective_state_deferred(
    inputs: Inputs, pool: jax.Array, ring: Mamba2Entries, rows: Rows, *, dt_softplus: bool, run: Run
) -> tuple[jax.Array, jax.Array, Mamba2Entries]:
    """Launch the kernel. See api.py."""
    heads, head_dim, state_dim = pool.shape[2:]
    config = run.config or default_config(state_dim, pool.dtype.itemsize)
    of_rows = dict(layer=rows.layer, query_start_loc=rows.query_start_loc, slot=rows.fold.slot, base=rows.fold.base)
    of_rows |= dict(position=rows.num_computed_tokens, read_block=rows.read, fold_block=rows.fold.block)
    options = dict(max_query_tokens=rows.max_query_tokens, dt_softplus=dt_softplus, interpret=run.interpret)
    results = pt.call(
        functools.partial(_kernel, config=config, **options),
        name="selective_state_deferred",
        grid=(-(-head_dim // config.block_dim), heads, rows.num_rows),
        inputs=inputs._asdict() | of_rows,
        outputs={"out": jax.ShapeDtypeStruct((inputs.xBC.shape[0], heads, head_dim), inputs.xBC.dtype)},
        updates=dict(pool=pool) | ring.by_name,
        num_warps=config.num_warps,
        interpret=run.interpret,
    )
    return results["out"], results["pool"], Mamba2Entries.of(results)
