"""Deferred states of Mamba-2 as a Pallas kernel. A program has some channels of one head of one row, and reads them once.

The C of a row's tokens are one tile. One product multiplies it by the state, and one by the B of the group's entries. The
products with B, times the decays, are the attention over the entries' x: a product of small tiles.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels._deferred_rows import DeferredRow
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


class _Program:
    """The work of a program: one row, head and block of channels. The row has at most `max_query_tokens` tokens.

    It reads the arguments of `selective_state_deferred`, updates `pool` and the ring, and writes `out`.
    """

    def __init__(
        self, refs: Refs, max_query_tokens: int, config: DeferredConfig, dt_softplus: bool, interpret: bool
    ) -> None:
        self.refs, self.config, self.dt_softplus = refs, config, dt_softplus
        heads, ring_slots, head_dim = refs.ring_x.shape[2:]
        groups, _, state_dim = refs.ring_B.shape[2:]
        self.block, self.head, row = (pt.program_id(axis) for axis in range(3))
        self.repeats = heads // groups
        self.group = jax.lax.div(self.head, jnp.int32(self.repeats))
        loaded = DeferredRow.load(refs, row)
        of_head = lambda ref: None if ref is None else ref[self.head].astype(jnp.float32)
        self.rate = refs.A[self.head].astype(jnp.float32)
        self.skip, self.dt_bias = of_head(refs.D), of_head(refs.dt_bias)
        self.row = DeferredRow(loaded, row, refs.slot.shape[0], ring_slots // 2)
        self.index = iota((max(pt.power_of_two(ring_slots // 2), BLOCK),), 0)
        self.vector = iota((max(pt.power_of_two(max_query_tokens), BLOCK),), 0)
        self.channel, self.channel_inside = pt.lanes(self.block, config.block_dim, head_dim)
        self.column, self.column_inside = pt.lanes(0, key_lanes(state_dim), state_dim)
        # The first channels of this program's x, and of its group's B and C, in xBC.
        self.of_x, self.of_B = self.head * head_dim, heads * head_dim + self.group * state_dim
        self.of_C = self.of_B + groups * state_dim
        self.product = functools.partial(dot, interpret=interpret)
        # The number of bfloat16 terms of operands that only outputs depend on.
        self.narrow = 2 if refs.xBC.dtype.itemsize == 2 else 3

    def run(self) -> None:
        """Run the row, and store zeros in outputs of padding tokens."""
        self.row.run_stages(self.run_stage)
        jax.lax.fori_loop(0, self.row.num_padding(self.refs.xBC.shape[0]), self.clear, None)

    def clear(self, n: jax.Array, _: None) -> None:
        """Write zeros to the n-th padding token that this row clears."""
        zeros = jnp.zeros(self.channel.shape, self.refs.out.dtype)
        at = self.refs.out.at[self.row.padding_token(n), self.head, self.channel]
        pt.store(at, zeros, mask=self.channel_inside)

    def state_at(self, block: jax.Array) -> tuple[Any, jax.Array]:
        """Return the program's tile of a block's state, and which of its elements exist."""
        mask = self.channel_inside[:, None] & self.column_inside[None, :] & (block != NULL_BLOCK)
        return self.refs.pool.at[self.row.layer, block, self.head, self.channel[:, None], self.column[None, :]], mask

    def load_group(self, first: jax.Array, low: jax.Array) -> _Group:
        """Load the entries from position `low` on of the group that starts at position `first`."""
        refs, row, head = self.refs, self.row, self.head
        old, new, at, token = row.entries(self.index, first, low)

        def tile(ring, owner, of_call, lane, exists):
            """Load the tile [group_slots, lanes] of `ring`, in which this call's tokens come from xBC."""
            kept = ring.at[row.layer, row.slot, owner, at[:, None], lane[None, :]]
            kept = pt.load(kept, mask=old[:, None] & exists[None, :], other=0.0)
            call = refs.xBC.at[token[:, None], of_call + lane[None, :]]
            return jnp.where(new[:, None], pt.load(call, mask=new[:, None] & exists[None, :], other=0.0), kept)

        x = tile(refs.ring_x, head, self.of_x, self.channel, self.channel_inside)
        B = tile(refs.ring_B, self.group, self.of_B, self.column, self.column_inside)
        dt = pt.load(refs.dt.at[token, head], mask=new, other=0.0).astype(jnp.float32)
        dt = step_size(dt, self.dt_bias, self.dt_softplus)
        # A slot that is neither old nor new gets 0.
        rings = (ring.at[row.layer, row.slot, head, at] for ring in (refs.ring_dt, refs.ring_g))
        of_head = (pt.load(ring, mask=old, other=0.0) for ring in rings)
        dt, g = (jnp.where(new, call, kept) for call, kept in zip((dt, self.rate * dt), of_head, strict=True))
        return _Group(x, B, dt, g, new, at)

    def store_entries(self, entries: _Group) -> None:
        """Store this call's tokens in the ring. Entries that several programs have are stored by one of them."""
        refs, here, new = self.refs, (self.row.layer, self.row.slot), entries.new
        once = new & (self.block == 0)
        at = refs.ring_x.at[(*here, self.head, entries.at[:, None], self.channel[None, :])]
        pt.store(at, entries.x, mask=new[:, None] & self.channel_inside[None, :])
        pt.store(refs.ring_dt.at[(*here, self.head, entries.at)], entries.dt, mask=once)
        pt.store(refs.ring_g.at[(*here, self.head, entries.at)], entries.g, mask=once)
        stores = once & (self.head == self.group * self.repeats)
        at = refs.ring_B.at[(*here, self.group, entries.at[:, None], self.column[None, :])]
        pt.store(at, entries.B, mask=stores[:, None] & self.column_inside[None, :])

    def fold(self, state: jax.Array) -> jax.Array:
        """Return the state at the end of the first group, and keep it if all of the group is accepted."""
        row = self.row
        entries = self.load_group(row.first_group, row.base)
        g = entries.g
        later = self.index[None, :] > self.index[:, None]
        factor = jnp.exp(jnp.sum(jnp.where(later, g[None, :], 0.0), axis=1)) * entries.dt
        decayed = operand(factor[:, None] * entries.x.astype(jnp.float32), self.config.pieces)
        added = self.product(decayed, operand(entries.B), contract=(0, 0))
        folded = (jnp.exp(jnp.sum(g)) * state.astype(jnp.float32) + added).astype(state.dtype)
        at, mask = self.state_at(row.fold_to)
        pt.store(at, folded, mask=mask & (row.position >= row.boundary))
        return folded

    def multiply(self, C: jax.Array, state: jax.Array) -> jax.Array:
        """Multiply the C of tokens with the state. Return [tokens, channels]."""
        C_, state_ = operand(C), operand(state, self.config.pieces)
        if self.config.dims_first:
            return self.product(state_, C_, contract=(1, 1)).T
        return self.product(C_, state_, contract=(1, 1))

    def run_stage(self, n: jax.Array) -> None:
        """Run the tokens in the first group (n = 0), or fold that group and run the tokens in the next one (n = 1)."""
        refs, index = self.refs, self.index
        folds, first, low = self.row.group(n)
        at, mask = self.state_at(self.row.read)
        state = pt.load(at, mask=mask, other=0.0)
        inside, token, slot = self.row.tokens_in(self.vector, first, low)
        C = refs.xBC.at[token[:, None], self.of_C + self.column[None, :]]
        C = pt.load(C, mask=inside[:, None] & self.column_inside[None, :], other=0.0)
        entries = self.load_group(first, low)
        self.store_entries(entries)

        # A sum of log decays is a product with zeros and ones, which three bfloat16 terms make exact but for the sum itself.
        g = entries.g
        until = index[None, :] <= slot[:, None]
        later = jnp.where(index[None, :] > index[:, None], g[None, :], 0.0)
        between = self.product(until.astype(jnp.bfloat16), operand(later), contract=(1, 1))
        of_state = jnp.exp(jnp.sum(jnp.where(until, g[None, :], 0.0), axis=1))
        attention = self.product(operand(C), operand(entries.B), contract=(1, 1)) * entries.dt[None, :]
        attention = jnp.where(until, attention * jnp.exp(between), 0.0)
        if self.skip is not None:
            attention = attention + jnp.where(index[None, :] == slot[:, None], self.skip, 0.0)
        of_entries = self.product(operand(attention, self.narrow), operand(entries.x))
        # Both branches multiply. If one returned a folded state, the compiler would hold it in several layouts.
        of_base = jax.lax.cond(folds, lambda: self.multiply(C, self.fold(state)), lambda: self.multiply(C, state))
        out = of_state[:, None] * of_base + of_entries
        mask = inside[:, None] & self.channel_inside[None, :]
        pt.store(refs.out.at[token[:, None], self.head, self.channel[None, :]], out.astype(refs.out.dtype), mask=mask)


def selective_state_deferred(
    inputs: Inputs, pool: jax.Array, ring: Mamba2Entries, rows: Rows, *, dt_softplus: bool, run: Run
) -> tuple[jax.Array, jax.Array, Mamba2Entries]:
    """Launch the kernel. See api.py."""
    heads, head_dim, state_dim = pool.shape[2:]
    config = run.config or default_config(state_dim, pool.dtype.itemsize)
    of_rows = rows.fold_inputs | dict(read_block=rows.read, fold_block=rows.fold.block)
    results = pt.call(
        lambda refs: _Program(refs, rows.max_query_tokens, config, dt_softplus, run.interpret).run(),
        name="selective_state_deferred",
        grid=(-(-head_dim // config.block_dim), heads, rows.num_rows),
        inputs=inputs._asdict() | of_rows,
        outputs={"out": jax.ShapeDtypeStruct((inputs.xBC.shape[0], heads, head_dim), inputs.xBC.dtype)},
        updates=dict(pool=pool) | ring.by_name,
        num_warps=config.num_warps,
        interpret=run.interpret,
    )
    return results["out"], results["pool"], Mamba2Entries.of(results)
