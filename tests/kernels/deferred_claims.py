"""Rows of the gated delta rule in every phase of their fold groups, against the oracle."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from kernels.common import assert_close, assert_untouched, dirty_pool, pack, skip_if_unavailable
from kernels.deferred_phases import PADDING, ROWS
from kernels.deferred_rows import (
    BLOCKS,
    DIMS,
    LAYER,
    LAYERS,
    SLOTS,
    Sequences,
    coarsest,
    dirty_rings,
    exact,
)


def check_rows_in_every_phase_match_the_oracle(rng, kind, implementation):
    """Pools and rings start as NaN. Outputs, folds and entries are right, and the rest is kept."""
    skip_if_unavailable(implementation)
    # The same places in groups that are longer, and about half of them in groups of 8.
    grow = lambda x: x + x // 16 * (kind.length - 16) if kind.length >= 16 else x // 2
    cases = [dataclasses.replace(row, base=grow(row.base), position=grow(row.position)) for row in ROWS.values()]
    sequences = Sequences(rng, kind, [row.position - row.base + row.count for row in cases])
    dims = DIMS[kind.dims]
    pool = dirty_pool(rng, (LAYERS, BLOCKS, dims.value_heads, dims.value_dim, dims.key_dim), kind.state, range(1, 10))
    rings, wanted = dirty_rings(kind), []
    for r, row in enumerate(cases):
        end = (row.base // kind.length + 1) * kind.length - row.base  # in tokens of the row
        state = exact(pool)[LAYER, row.read] if row.read else np.zeros(pool.shape[2:])
        outs, states, corrections = sequences.oracle(r, slice(0, end), state)
        if len(outs) == end:  # the rest starts from the fold, rounded as it is stored
            rounded = exact(jnp.asarray(states[-1], jnp.float32).astype(kind.state))
            rest = sequences.oracle(r, slice(end, None), rounded)
            outs, corrections = np.concatenate([outs, rest[0]]), np.concatenate([corrections, rest[2]])
        wanted.append((outs, states[-1] if len(states) == end else None, corrections))
        _, k, _, g, _ = sequences.parts(r, slice(None))
        for t in range(row.position - row.base):
            at = LAYER, SLOTS - 1 - r, slice(None), (row.base + t) % (2 * kind.length)
            rings[0][at], rings[1][at], rings[2][at] = k[t], corrections[t], g[t]
    tokens = [(r, row.position - row.base + t) for r, row in enumerate(cases) for t in range(row.count)]
    arrays = pool, *map(jnp.asarray, rings)
    every = [*cases, PADDING, PADDING]
    column = lambda name: jnp.asarray([getattr(row, name) for row in every], jnp.int32)
    slots = jnp.asarray([*range(SLOTS - 1, -1, -1), 0, 0], jnp.int32)
    where = pack([row.count for row in cases], padding_rows=2), slots
    where += tuple(column(name) for name in ("base", "position", "read", "fold"))
    out, after, *kept = sequences.call([*tokens, None, None, None], arrays, where, implementation)

    width, written = coarsest(kind.dtype, kind.state, kind.ring), []
    places = set()
    for r, row in enumerate(cases):
        outs, fold, corrections = wanted[r]
        first = sum(other.count for other in cases[:r])
        known = row.position - row.base
        terms = 4 * (known + row.count + 1) * dims.key_dim
        assert_close(out[first : first + row.count], outs[known:], width, terms, f"outputs of row {r}")
        end = (row.base // kind.length + 1) * kind.length
        if row.position >= end and row.fold:
            written.append(row.fold)
            narrow = coarsest(kind.state, kind.ring)
            assert_close(exact(after)[LAYER, row.fold], fold, narrow, terms, f"fold of row {r}")
        _, k, _, g, _ = sequences.parts(r, slice(known, None))
        for t in range(row.count):
            at = LAYER, SLOTS - 1 - r, slice(None), (row.position + t) % (2 * kind.length)
            places.add((SLOTS - 1 - r, at[-1]))
            np.testing.assert_array_equal(exact(kept[0])[at], k[t])
            assert_close(exact(kept[1])[at], corrections[known + t], width, terms, f"correction of row {r}")
            assert_close(kept[2][at], g[t], jnp.float32, 16, f"decay of row {r}")
    assert not exact(out[len(tokens) :]).any()
    assert len(places) == len(tokens)
    assert_untouched(pool, after, written)
    assert_untouched(pool[:LAYER], after[:LAYER], written=())
    for before, now in zip(rings, kept, strict=True):
        now = np.array(now)
        for slot, place in places:
            now[LAYER, slot, :, place] = before[LAYER, slot, :, place]
        np.testing.assert_array_equal(now.view(np.uint8), before.view(np.uint8))
