"""The Triton kernel before the Mosaic GPU kernel: the decay-weighted attention of C with B, and the other decays.

They need only B, C and step sizes. It has one program per row and up to 16 heads. It also stores the entries of the
call's tokens in the ring.
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


def _kernel(refs: Refs, *, vectors: int, dt_softplus: bool, interpret: bool) -> None:
    """Handle one row and some heads of a group, with `vectors` tokens in a tile.

    Reads the arguments of `coefficients`, updates the ring, and writes the other results.
    """
    heads, ring_slots, head_dim = refs.ring_x.shape[2:]
    groups, _, state_dim = refs.ring_B.shape[2:]
    length, repeats, group_slots = ring_slots // 2, heads // groups, refs.fold_B.shape[2]
    block, row = pt.program_id(0), pt.program_id(1)
    # Everything that addresses depend on is loaded here, before any branch.
    start, end = refs.query_start_loc[row], refs.query_start_loc[row + 1]
    layer, slot, base, position = refs.layer[...], refs.slot[row], refs.base[row], refs.position[row]
    fold_to, count = refs.fold_block[row], end - start
    blocks = -(-repeats // _HEADS)
    group = jax.lax.div(block, jnp.int32(blocks))
    first_block = block == group * blocks
    in_group, exists = pt.lanes(block - group * blocks, _HEADS, repeats)
    head = group * repeats + in_group
    first_group = jax.lax.div(base, jnp.int32(length)) * length
    boundary = first_group + length
    # A product needs 16 tokens, some of which may not exist.
    index, vector = iota((group_slots,), 0), iota((max(vectors, BLOCK),), 0)
    channel, channel_inside = pt.lanes(0, key_lanes(head_dim), head_dim)
    column, column_inside = pt.lanes(0, key_lanes(state_dim), state_dim)
    of_B = heads * head_dim + group * state_dim
    of_C = of_B + groups * state_dim
    at_factor = Factors.of(vectors, group_slots)

    def per_head(ref) -> jax.Array:
        """Load a parameter of each head, [heads, 1]."""
        return pt.load(ref.at[head], mask=exists, other=0.0).astype(jnp.float32)[:, None]

    def store_factor(index, values):
        pt.store(refs.factors.at[row, head, index], values, mask=exists)

    def sums_after(g: jax.Array, last: jax.Array) -> jax.Array:
        """Return the sums of log decays [heads, group_slots] from each slot, without its own, to slot `last`."""
        i, j = index[None, :, None], index[None, None, :]
        return jnp.sum(jnp.where((j > i) & (j <= last), g[:, None, :], 0.0), axis=2)

    def of_group(n: jax.Array, C: jax.Array) -> None:
        """Handle the first group (n = 0), whose fold may be needed, or the next one (n = 1)."""
        first = first_group + n * length
        low, is_first = jnp.where(n == 0, base, first), n == 0
        of = first + index
        inside = (index < length) & (of >= low)
        old, new = inside & (of < position), inside & (of >= position) & (of < position + count)
        at, own = jax.lax.rem(first, jnp.int32(ring_slots)) + index, start + of - position

        ring_at = refs.ring_B.at[layer, slot, group, at[:, None], column[None, :]]
        call_at = refs.xBC.at[own[:, None], of_B + column[None, :]]
        kept = pt.load(ring_at, mask=old[:, None] & column_inside[None, :], other=0.0)
        call = pt.load(call_at, mask=new[:, None] & column_inside[None, :], other=0.0)
        B = jnp.where(new[:, None], call, kept)
        pt.store(ring_at, B, mask=(new & first_block)[:, None] & column_inside[None, :])
        fold_at = refs.fold_B.at[row, group, index[:, None], column[None, :]]
        pt.store(fold_at, B, mask=jnp.broadcast_to(column_inside[None, :] & is_first & first_block, B.shape))

        of_call = exists[:, None] & new[None, :]
        dt = pt.load(refs.dt.at[own[None, :], head[:, None]], mask=of_call, other=0.0).astype(jnp.float32)
        dt = step_size(dt, None if refs.dt_bias is None else per_head(refs.dt_bias), dt_softplus)
        known = []
        for ring, value in ((refs.ring_dt, dt), (refs.ring_g, per_head(refs.A) * dt)):
            ring_at = ring.at[layer, slot, head[:, None], at[None, :]]
            kept = pt.load(ring_at, mask=exists[:, None] & old[None, :], other=0.0)
            pt.store(ring_at, value, mask=of_call)
            known.append(jnp.where(of_call, value, kept))
        dt, g = known

        @pt.when(is_first)
        def _():
            fold = jnp.exp(sums_after(g, jnp.int32(group_slots))) * dt
            at = refs.factors.at[row, head[:, None], at_factor.fold + index[None, :]]
            pt.store(at, fold, mask=jnp.broadcast_to(exists[:, None], fold.shape))
            store_factor(at_factor.decay, jnp.exp(jnp.sum(g, axis=1)))

        products = dot(operand(C), operand(B), contract=(1, 1), interpret=interpret)

        def run_token(n: jax.Array, _: None) -> None:
            """Handle token n of the row."""
            here = position + n - first
            of_token = jnp.sum(jnp.where((vector == n)[:, None], products, 0.0), axis=0)
            until = index <= here
            attention = jnp.exp(sums_after(g, here)) * dt * of_token[None, :]
            attention = jnp.where(until[None, :], attention, 0.0)
            if refs.D is not None:
                attention = attention + jnp.where((index == here)[None, :], per_head(refs.D), 0.0)
            at = refs.attention.at[row, head[:, None], n, index[None, :]]
            pt.store(at, attention, mask=jnp.broadcast_to(exists[:, None], attention.shape))
            store_factor(at_factor.of_state + n, jnp.exp(jnp.sum(jnp.where(until[None, :], g, 0.0), axis=1)))
            mask = exists[:, None] & channel_inside[None, :]
            x = refs.xBC.at[start + n, head[:, None] * head_dim + channel[None, :]]
            ring_slot = jax.lax.rem(position + n, jnp.int32(ring_slots))
            ring_at = refs.ring_x.at[layer, slot, head[:, None], ring_slot, channel[None, :]]
            pt.store(ring_at, pt.load(x, mask=mask, other=0.0), mask=mask)

        # From the first token in this group to the first one after it.
        begin, stop = (jnp.clip(at - position, 0, count) for at in (first, first + length))
        jax.lax.fori_loop(begin, stop, run_token, None)

    @pt.when((count > 0) | ((position >= boundary) & (fold_to != NULL_BLOCK)))
    def _():
        C = refs.xBC.at[(start + vector)[:, None], of_C + column[None, :]]
        C = pt.load(C, mask=(vector < count)[:, None] & column_inside[None, :], other=0.0)
        C_at = refs.C.at[row, group, vector[:, None], column[None, :]]
        pt.store(C_at, C, mask=(vector < vectors)[:, None] & column_inside[None, :] & first_block)
        crosses = jnp.maximum(position, position + count - 1) >= boundary
        jax.lax.fori_loop(0, 1 + crosses.astype(jnp.int32), lambda n, _: of_group(n, C), None)


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
        functools.partial(_kernel, vectors=vectors, dt_softplus=dt_softplus, interpret=interpret),
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
