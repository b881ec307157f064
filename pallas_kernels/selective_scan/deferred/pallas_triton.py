"""Deferred states of Mamba-1 as a Pallas kernel, with one program per block of a head's channels, head, and row.

A program reads its part of the state at the row's base, and runs all tokens from there on in one loop: those whose entries
are in the ring, and then those of the call. A token is advanced by the same instructions in both, so the states have the
same bits under every schedule of steps. The programs of one row own disjoint channels, so each of them may overwrite the
block that it has read.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels._math import silu, softplus
from pallas_kernels._pallas_triton import Refs
from pallas_kernels.blocks import NULL_BLOCK
from pallas_kernels.selective_scan.deferred.config import DeferredConfig, default_config


def _kernel(refs: Refs, *, config: DeferredConfig, dt_softplus: bool) -> None:
    """Handles one row, head and block of channels.

    Args:
        refs: Reads the arguments of `selective_scan_deferred`, updates `pool`, `ring_x`, `ring_B` and `ring_dt`, and
            writes `out`.
        config: The launch configuration.
        dt_softplus: Whether a softplus is applied to `dt`.
    """
    (tokens, _, head_dim), rows = refs.x.shape, refs.slot.shape[0]
    (_, _, heads, _, state_dim), (groups, places) = refs.pool.shape, refs.ring_B.shape[2:4]
    block, head, row = pt.program_id(0), pt.program_id(1), pt.program_id(2)
    # Everything that addresses depend on is loaded here, before any branch, so that the loads share one trip to memory.
    start, end, total = refs.query_start_loc[row], refs.query_start_loc[row + 1], refs.query_start_loc[rows]
    layer, slot, base, position = refs.layer[...], refs.slot[row], refs.base[row], refs.position[row]
    read, fold_to = refs.read_block[row], refs.fold_block[row]

    count = end - start
    length = jnp.int32(places // 2)
    boundary = (jax.lax.div(base, length) + 1) * length
    folds = (position >= boundary) & (fold_to != NULL_BLOCK)
    # A row that only folds stops after the turn that begins at the boundary.
    stop = jnp.where(count > 0, position + count, boundary + 1)
    repeats = heads // groups
    group, is_first = jax.lax.div(head, jnp.int32(repeats)), jax.lax.rem(head, jnp.int32(repeats)) == 0
    channel, inside = pt.lanes(block, config.block_dim, head_dim)
    column, column_inside = pt.segments(state_dim, min(config.segment, pt.power_of_two(state_dim)))
    state_inside = column_inside[:, None, :] & inside[None, :, None]

    def parameter(ref):
        """Loads a parameter of each channel, or returns None if there is no such array."""
        return None if ref is None else pt.load(ref.at[head, channel], mask=inside, other=0.0).astype(jnp.float32)

    def states(ref, *at):
        return ref.at[(*at, head, channel[None, :, None], column[:, None, :])]

    # The arrays of an entry: the call's and the ring's, their head or group, and the elements, of which some exist.
    of_entry = (
        (refs.x, refs.ring_x, head, channel, inside),
        (refs.dt, refs.ring_dt, head, channel, inside),
        (refs.B, refs.ring_B, group, column, column_inside),
    )

    def in_ring(ring, owner, at, lane):
        return ring.at[layer, slot, owner, jax.lax.rem(at, jnp.int32(places)), lane]

    def is_new(at):
        return (at >= position) & (at < position + count)

    def take(at):
        """Loads the entry of the token at a position from the call and from the ring, of which one has it, and C and z."""
        token, new, old = start + at - position, is_new(at), at < position
        load = lambda ref, owner, lane, mask: pt.load(ref.at[token, owner, lane], mask=mask & new, other=0.0)
        call = [load(given, owner, lane, mask) for given, _, owner, lane, mask in of_entry]
        kept = [
            pt.load(in_ring(ring, owner, at, lane), mask=mask & old, other=0.0)
            for _, ring, owner, lane, mask in of_entry
        ]
        z = None if refs.z is None else load(refs.z, head, channel, inside)
        return call, kept, load(refs.C, group, column, column_inside), z

    @pt.when((count > 0) | folds)
    def _():
        mask = state_inside & (read != NULL_BLOCK)
        initial = pt.load(states(refs.pool, layer, read), mask=mask, other=0.0).astype(jnp.float32)
        # Rates are in units of log 2, because exp2 is the fastest exponential.
        rate = pt.load(states(refs.A), mask=state_inside, other=0.0).astype(jnp.float32) * pt.LOG2_E
        D, dt_bias = parameter(refs.D), parameter(refs.dt_bias)

        def advance(at, carry):
            """Runs the token at a position."""
            state, (call, kept, C, z) = carry
            # The next token's inputs are loaded while this one's are used.
            upcoming, new = take(at + 1), is_new(at)
            # A fold is rounded as it is stored, whether it is kept or not.
            is_fold, rounded = at == boundary, state.astype(refs.pool.dtype)
            pt.store(states(refs.pool, layer, fold_to), rounded, mask=state_inside & is_fold & folds)
            state = jnp.where(is_fold, rounded.astype(jnp.float32), state)

            entry = [jnp.where(new, mine, old) for mine, old in zip(call, kept, strict=True)]
            x, dt, B = (value.astype(jnp.float32) for value in entry)
            dt = dt if dt_bias is None else dt + dt_bias
            dt = softplus(dt) if dt_softplus else dt
            state = state * jnp.exp2(rate * dt[None, :, None]) + (dt * x)[None, :, None] * B[:, None, :]

            @pt.when(new)
            def _():
                # What programs share is stored by one of them.
                stores = inside, inside, column_inside & (block == 0) & is_first
                for (_, ring, owner, lane, _), value, mask in zip(of_entry, entry, stores, strict=True):
                    pt.store(in_ring(ring, owner, at, lane), value, mask=mask)
                y = pt.row_sum(state * C.astype(jnp.float32)[:, None, :])
                y = y if D is None else y + D * x
                y = y if z is None else y * silu(z.astype(jnp.float32))
                out = refs.out.at[start + at - position, head, channel]
                pt.store(out, y.astype(refs.out.dtype), mask=inside)

            return state, upcoming

        jax.lax.fori_loop(base, stop, advance, (initial, take(base)))

    def clear(n: jax.Array, _: None) -> None:
        """Writes zeros to the n-th part of the tokens after the last row that this row clears."""
        zeros = jnp.zeros(channel.shape, refs.out.dtype)
        pt.store(refs.out.at[total + row + n * rows, head, channel], zeros, mask=inside)

    shares = jnp.maximum(tokens - total - row + rows - 1, 0)
    jax.lax.fori_loop(0, jax.lax.div(shares, jnp.int32(rows)), clear, None)


def selective_scan_deferred(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    pool: jax.Array,
    ring_x: jax.Array,
    ring_B: jax.Array,
    ring_dt: jax.Array,
    layer: jax.Array,
    query_start_loc: jax.Array,
    slot: jax.Array,
    base: jax.Array,
    position: jax.Array,
    read_block: jax.Array,
    fold_block: jax.Array,
    D: jax.Array | None,
    z: jax.Array | None,
    dt_bias: jax.Array | None,
    *,
    dt_softplus: bool,
    config: DeferredConfig | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Launches the kernel. See api.py."""
    _, heads, head_dim = x.shape
    config = config or default_config(pool.shape[-1], pool.dtype.itemsize)
    rows = dict(layer=layer, query_start_loc=query_start_loc, slot=slot, base=base, position=position)
    rows |= dict(read_block=read_block, fold_block=fold_block)
    updates = dict(pool=pool, ring_x=ring_x, ring_B=ring_B, ring_dt=ring_dt)
    results = pt.call(
        functools.partial(_kernel, config=config, dt_softplus=dt_softplus),
        name="selective_scan_deferred",
        grid=(-(-head_dim // config.block_dim), heads, slot.shape[0]),
        inputs=dict(x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias) | rows,
        outputs=dict(out=jax.ShapeDtypeStruct(x.shape, x.dtype)),
        updates=updates,
        num_warps=config.num_warps,
        interpret=interpret,
    )
    return tuple(results[name] for name in ("out", *updates))
