"""One call of an op of deferred states of Mamba, with rows in every phase of their groups."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from kernels.common import assert_close, assert_untouched, dirty_pool, pack
from kernels.deferred_rows import (
    LAYER,
    SLOTS,
    coarsest,
    exact,
)


def check_rows_in_every_phase(rng, kind, implementation):
    """Outputs, folds and new entries, and that nothing else changes, with pools and rings of NaN."""
    grow = lambda x: x + x // 16 * (kind.length - 16)  # the same places in groups of another length
    cases = [dataclasses.replace(row, base=grow(row.base), position=grow(row.position)) for row in ROWS.values()]
    sequences = kind.sequences(rng, [row.position - row.base + row.count for row in cases])
    pool = dirty_pool(rng, kind.pool_shape, kind.state, range(1, 10))
    rings, wanted = kind.rings(), []
    for r, row in enumerate(cases):
        end = (row.base // kind.length + 1) * kind.length - row.base  # in tokens of the row
        state = exact(pool)[LAYER, row.read] if row.read else np.zeros(pool.shape[2:])
        outs, states = sequences.oracle(r, slice(0, end), state)
        if len(outs) == end:  # the rest starts from the fold, rounded as it is stored
            rounded = exact(jnp.asarray(states[-1], jnp.float32).astype(kind.state))
            outs = np.concatenate([outs, sequences.oracle(r, slice(end, None), rounded)[0]])
        wanted.append((outs, states[-1] if len(states) == end else None))
        entries = sequences.entries(r, slice(None))
        for t in range(row.position - row.base):
            at = LAYER, SLOTS - 1 - r, slice(None), (row.base + t) % (2 * kind.length)
            for ring, entry in zip(rings, entries, strict=True):
                ring[at] = entry[t]
    tokens = [(r, row.position - row.base + t) for r, row in enumerate(cases) for t in range(row.count)]
    arrays = pool, *map(jnp.asarray, rings)
    ints = lambda *values: jnp.asarray(values, jnp.int32)
    every = [*cases, PADDING, PADDING]
    slots = ints(*range(SLOTS - 1, -1, -1), 0, 0)
    where = pack([row.count for row in cases], padding_rows=2), slots
    where += tuple(ints(*(getattr(row, name) for row in every)) for name in ("base", "position", "read", "fold"))
    out, after, *kept = sequences.call([*tokens, None, None, None], arrays, where, implementation)

    width, written, places = coarsest(kind.dtype, kind.state), [], set()
    for r, row in enumerate(cases):
        outs, fold = wanted[r]
        first, known = sum(other.count for other in cases[:r]), row.position - row.base
        terms = 4 * (known + row.count + 1) * kind.pool_shape[-1]
        assert_close(out[first : first + row.count], outs[known:], width, terms, f"outputs of row {r}")
        if row.position >= (row.base // kind.length + 1) * kind.length and row.fold:
            written.append(row.fold)
            assert_close(exact(after)[LAYER, row.fold], fold, kind.state, terms, f"fold of row {r}")
        entries = sequences.entries(r, slice(known, None))
        for t in range(row.count):
            at = LAYER, SLOTS - 1 - r, slice(None), (row.position + t) % (2 * kind.length)
            places.add((SLOTS - 1 - r, at[-1]))
            for name, now, entry in zip(sequences.rings, kept, entries, strict=True):
                if name in ("step sizes", "log decays"):
                    assert_close(now[at], entry[t], jnp.float32, 16, f"{name} of row {r}")
                else:
                    np.testing.assert_array_equal(exact(now)[at], entry[t])
    assert not exact(out[len(tokens) :]).any()
    assert len(places) == len(tokens)
    assert_untouched(pool, after, written)
    assert_untouched(pool[:LAYER], after[:LAYER], written=())
    for before, now in zip(rings, kept, strict=True):
        now = np.array(now)
        for slot, place in places:
            now[LAYER, slot, :, place] = before[LAYER, slot, :, place]
        np.testing.assert_array_equal(now.view(np.uint8), before.view(np.uint8))


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a call: the arguments of its slot, and how many tokens it has."""

    base: int
    position: int
    count: int
    read: int
    fold: int


# In groups of 16 tokens. Slots are given in reverse order.
ROWS = {
    "fresh": Row(0, 0, 4, 0, 10),
    "decode": Row(16, 20, 1, 1, 10),
    "folds into the block that it reads": Row(16, 32, 4, 2, 2),
    "folds a short group, after a prefill": Row(5, 18, 3, 3, 11),
    "crosses the end of its group": Row(7, 14, 4, 4, 10),
    "has no tokens": Row(3, 10, 0, 5, 10),
    "folds only": Row(16, 33, 0, 6, 12),
    "folds nowhere": Row(16, 34, 2, 7, 0),
    "could fold and need not": Row(16, 34, 0, 8, 0),
}
PADDING = Row(0, 0, 0, 9, 10)
