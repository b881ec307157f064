"""The Triton kernel before the Mosaic GPU kernel: the decay-weighted attention of C with B, and the other decays.

They need only B, C and step sizes. It has one program per row and up to 16 heads. It also stores the entries of the
call's tokens in the ring.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels._dot import dot, operand
from pallas_kernels._pallas_triton import Refs
from pallas_kernels._state_space import step_size
from pallas_kernels._tiles import BLOCK, iota, key_lanes
from pallas_kernels.blocks import NULL_BLOCK
from pallas_kernels.rows import Rows
from pallas_kernels.selective_state_update.deferred.entries import Inputs, Mamba2Entries

_HEADS = 16  # heads of a program, which share their B and C
_WARPS = 4


def sizes(max_query_tokens: int, length: int) -> tuple[int, int]:
    """Return the number of tokens and of a group's slots in tiles, for groups of `length` tokens.

    Up to eight tokens have the same tiles, so that decode and verify rows run the same instructions.
    """
    return max(pt.power_of_two(max_query_tokens), 8), max(pt.power_of_two(length), BLOCK)


class Factors(NamedTuple):
    """The index at which each kind of factor begins along the last axis of the array `factors`.

    Attributes:
        of_state: The factors of the state for each token, [tokens].
        fold: The factors of the inputs in a fold, [group_slots].
        decay: The factor of the state in this fold.
        size: The length of the axis, a multiple of 16 bytes.
    """

    of_state: int
    fold: int
    decay: int
    size: int

    @staticmethod
    def of(vectors: int, group_slots: int) -> "Factors":
        """The layout for `sizes` of tiles."""
        return Factors(0, vectors, vectors + group_slots, vectors + group_slots + 4)


class _Program:
    """The work of a program: one row and some heads of a group, with `vectors` tokens in a tile.

    It reads the arguments of `coefficients`, updates the ring, and writes the other results.
    """

    def __init__(self, refs: Refs, vectors: int, dt_softplus: bool, interpret: bool) -> None:
        self.refs, self.vectors, self.dt_softplus, self.interpret = refs, vectors, dt_softplus, interpret
        heads, self.ring_slots, self.head_dim = refs.ring_x.shape[2:]
        groups, _, state_dim = refs.ring_B.shape[2:]
        self.length, repeats, self.group_slots = self.ring_slots // 2, heads // groups, refs.fold_B.shape[2]
        block, self.row = pt.program_id(0), pt.program_id(1)
        # Everything that addresses depend on is loaded here, before any branch.
        self.start, end = refs.query_start_loc[self.row], refs.query_start_loc[self.row + 1]
        self.layer, self.slot = refs.layer[...], refs.slot[self.row]
        self.base, self.position = refs.base[self.row], refs.position[self.row]
        self.fold_to, self.count = refs.fold_block[self.row], end - self.start
        blocks = -(-repeats // _HEADS)
        self.group = jax.lax.div(block, jnp.int32(blocks))
        self.first_block = block == self.group * blocks
        in_group, self.exists = pt.lanes(block - self.group * blocks, _HEADS, repeats)
        self.head = self.group * repeats + in_group
        self.first_group = jax.lax.div(self.base, jnp.int32(self.length)) * self.length
        self.boundary = self.first_group + self.length
        # A product needs 16 tokens, some of which may not exist.
        self.index, self.vector = iota((self.group_slots,), 0), iota((max(vectors, BLOCK),), 0)
        self.channel, self.channel_inside = pt.lanes(0, key_lanes(self.head_dim), self.head_dim)
        self.column, self.column_inside = pt.lanes(0, key_lanes(state_dim), state_dim)
        self.of_B = heads * self.head_dim + self.group * state_dim
        self.of_C = self.of_B + groups * state_dim
        self.at_factor = Factors.of(vectors, self.group_slots)

    def run(self) -> None:
        """Run the row's groups, if it has tokens or folds."""
        takes_part = (self.count > 0) | ((self.position >= self.boundary) & (self.fold_to != NULL_BLOCK))
        pt.when(takes_part)(self.run_groups)

    def run_groups(self) -> None:
        """Store the C of the row's tokens, and run the first group, and the next one if a token is in it."""
        refs, vector, column = self.refs, self.vector, self.column
        C = refs.xBC.at[(self.start + vector)[:, None], self.of_C + column[None, :]]
        C = pt.load(C, mask=(vector < self.count)[:, None] & self.column_inside[None, :], other=0.0)
        C_at = refs.C.at[self.row, self.group, vector[:, None], column[None, :]]
        pt.store(C_at, C, mask=(vector < self.vectors)[:, None] & self.column_inside[None, :] & self.first_block)
        crosses = jnp.maximum(self.position, self.position + self.count - 1) >= self.boundary
        jax.lax.fori_loop(0, 1 + crosses.astype(jnp.int32), lambda n, _: self.run_group(n, C), None)

    def run_group(self, n: jax.Array, C: jax.Array) -> None:
        """Run the first group (n = 0), whose fold may be needed, or the next one (n = 1)."""
        first = self.first_group + n * self.length
        low, is_first = jnp.where(n == 0, self.base, first), n == 0
        B, dt, g = self.load_group(first, low, is_first)

        @pt.when(is_first)
        def _():
            fold = jnp.exp(self.sums_after(g, jnp.int32(self.group_slots))) * dt
            at = self.refs.factors.at[self.row, self.head[:, None], self.at_factor.fold + self.index[None, :]]
            pt.store(at, fold, mask=jnp.broadcast_to(self.exists[:, None], fold.shape))
            self.store_factor(self.at_factor.decay, jnp.exp(jnp.sum(g, axis=1)))

        products = dot(operand(C), operand(B), contract=(1, 1), interpret=self.interpret)
        run_token = lambda n, _: self.run_token(n, first, dt, g, products)
        # From the first token in this group to the first one after it.
        begin, stop = (jnp.clip(at - self.position, 0, self.count) for at in (first, first + self.length))
        jax.lax.fori_loop(begin, stop, run_token, None)

    def load_group(self, first: jax.Array, low: jax.Array, is_first: jax.Array) -> tuple[jax.Array, ...]:
        """Load the entries from position `low` on of the group that starts at position `first`. Store this call's.

        Returns B [group_slots, states], which is stored for a fold if `is_first` is set, and the step sizes and log decays
        [heads, group_slots]. All are 0 for slots without an entry.
        """
        refs, index, column, head, position = self.refs, self.index, self.column, self.head, self.position
        of = first + index
        inside = (index < self.length) & (of >= low)
        old, new = inside & (of < position), inside & (of >= position) & (of < position + self.count)
        at, own = jax.lax.rem(first, jnp.int32(self.ring_slots)) + index, self.start + of - position

        ring_at = refs.ring_B.at[self.layer, self.slot, self.group, at[:, None], column[None, :]]
        call_at = refs.xBC.at[own[:, None], self.of_B + column[None, :]]
        kept = pt.load(ring_at, mask=old[:, None] & self.column_inside[None, :], other=0.0)
        call = pt.load(call_at, mask=new[:, None] & self.column_inside[None, :], other=0.0)
        B = jnp.where(new[:, None], call, kept)
        pt.store(ring_at, B, mask=(new & self.first_block)[:, None] & self.column_inside[None, :])
        fold_at = refs.fold_B.at[self.row, self.group, index[:, None], column[None, :]]
        keeps = self.column_inside[None, :] & is_first & self.first_block
        pt.store(fold_at, B, mask=jnp.broadcast_to(keeps, B.shape))

        of_call = self.exists[:, None] & new[None, :]
        dt = pt.load(refs.dt.at[own[None, :], head[:, None]], mask=of_call, other=0.0).astype(jnp.float32)
        dt = step_size(dt, None if refs.dt_bias is None else self.per_head(refs.dt_bias), self.dt_softplus)
        known = []
        for ring, value in ((refs.ring_dt, dt), (refs.ring_g, self.per_head(refs.A) * dt)):
            ring_at = ring.at[self.layer, self.slot, head[:, None], at[None, :]]
            kept = pt.load(ring_at, mask=self.exists[:, None] & old[None, :], other=0.0)
            pt.store(ring_at, value, mask=of_call)
            known.append(jnp.where(of_call, value, kept))
        return B, *known

    def per_head(self, ref: Any) -> jax.Array:
        """Load a parameter of each head, [heads, 1]."""
        return pt.load(ref.at[self.head], mask=self.exists, other=0.0).astype(jnp.float32)[:, None]

    def store_factor(self, index: Any, values: jax.Array) -> None:
        """Store a factor of each head, [heads]."""
        pt.store(self.refs.factors.at[self.row, self.head, index], values, mask=self.exists)

    def sums_after(self, g: jax.Array, last: jax.Array) -> jax.Array:
        """Return the sums of log decays [heads, group_slots] from each slot, without its own, to slot `last`."""
        i, j = self.index[None, :, None], self.index[None, None, :]
        return jnp.sum(jnp.where((j > i) & (j <= last), g[:, None, :], 0.0), axis=2)

    def run_token(self, n: jax.Array, first: jax.Array, dt: jax.Array, g: jax.Array, products: jax.Array) -> None:
        """Run token n of the row, which is in the group that starts at position `first`."""
        refs, head, exists = self.refs, self.head, self.exists
        here = self.position + n - first
        of_token = jnp.sum(jnp.where((self.vector == n)[:, None], products, 0.0), axis=0)
        until = self.index <= here
        attention = jnp.exp(self.sums_after(g, here)) * dt * of_token[None, :]
        attention = jnp.where(until[None, :], attention, 0.0)
        if refs.D is not None:
            attention = attention + jnp.where((self.index == here)[None, :], self.per_head(refs.D), 0.0)
        at = refs.attention.at[self.row, head[:, None], n, self.index[None, :]]
        pt.store(at, attention, mask=jnp.broadcast_to(exists[:, None], attention.shape))
        self.store_factor(self.at_factor.of_state + n, jnp.exp(jnp.sum(jnp.where(until[None, :], g, 0.0), axis=1)))
        mask = exists[:, None] & self.channel_inside[None, :]
        x = refs.xBC.at[self.start + n, head[:, None] * self.head_dim + self.channel[None, :]]
        ring_slot = jax.lax.rem(self.position + n, jnp.int32(self.ring_slots))
        ring_at = refs.ring_x.at[self.layer, self.slot, head[:, None], ring_slot, self.channel[None, :]]
        pt.store(ring_at, pt.load(x, mask=mask, other=0.0), mask=mask)


def coefficients(
    inputs: Inputs, ring: Mamba2Entries, rows: Rows, *, vectors: int, dt_softplus: bool, interpret: bool = False
) -> dict[str, jax.Array]:
    """Compute the coefficients of inputs and states. The arguments are as in `selective_state_deferred`.

    A row has two groups: the group of its base and the next one. Results of rows that take no part, and of tokens that do
    not exist, are undefined.

    Returns:
        `attention`, the factors of the inputs in the group of each token [rows, heads, vectors, group_slots];
        `factors`, all other factors [rows, heads, Factors.size];
        `C`, the C of the row's tokens [rows, groups, vectors, state_dim], 0 for tokens that do not exist;
        `fold_B`, the B of the first group [rows, groups, group_slots, state_dim], 0 for slots without an entry;
        and the updated `ring_x`, `ring_B`, `ring_dt` and `ring_g`, with all entries of the call's tokens.
    """
    (groups, ring_slots, state_dim), num_rows, heads = ring.B.shape[2:], rows.num_rows, inputs.A.shape[0]
    group_slots = sizes(vectors, ring_slots // 2)[1]
    array, f32, dtype = jax.ShapeDtypeStruct, jnp.float32, inputs.xBC.dtype
    return pt.call(
        lambda refs: _Program(refs, vectors, dt_softplus, interpret).run(),
        name="selective_state_deferred_coefficients",
        grid=(groups * -(-(heads // groups) // _HEADS), num_rows),
        inputs=inputs._asdict() | dict(fold_block=rows.fold.block) | rows.fold_inputs,
        outputs=dict(
            attention=array((num_rows, heads, vectors, group_slots), f32),
            factors=array((num_rows, heads, Factors.of(vectors, group_slots).size), f32),
            C=array((num_rows, groups, vectors, state_dim), dtype),
            fold_B=array((num_rows, groups, group_slots, state_dim), dtype),
        ),
        updates=ring.by_name,
        num_warps=_WARPS,
        interpret=interpret,
    )
