"""The Mosaic GPU kernel of deferred states of Mamba-2 in NumPy: what follows `coefficients`, which runs interpreted.

No CPU can interpret that kernel. This has its steps, in float64, so what the two launches hand over is tested anywhere.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from oracles.deferred_by_hand import wide

from pallas_kernels.selective_state_update.deferred import Mamba2Entries
from pallas_kernels.selective_state_update.deferred.coefficients import Factors, coefficients, sizes
from pallas_kernels.selective_state_update.deferred.entries import Inputs


def selective_state_deferred(xBC, dt, A, pool, ring, rows, *, D=None, dt_bias=None, dt_softplus=True):
    """Takes the arguments of the op, and returns its results."""
    length, layer, groups = ring.x.shape[3] // 2, rows.layer, ring.B.shape[2]
    vectors, group_slots = sizes(rows.max_query_tokens, length)
    rows = dataclasses.replace(rows, layer=jnp.int32(layer))
    options = dict(vectors=vectors, dt_softplus=dt_softplus, interpret=True)
    given = coefficients(Inputs(xBC, dt, A, D, dt_bias), ring, rows, **options)
    at, ring_x, pool = Factors.of(vectors, group_slots), wide(given["ring_x"]), np.array(pool)
    out = np.zeros((xBC.shape[0], *pool.shape[2:4]), xBC.dtype)
    starts = np.asarray(rows.query_start_loc)
    of_row = rows.fold.slot, rows.fold.base, rows.num_computed_tokens, rows.read, rows.fold.block
    blocks = zip(*(map(int, each) for each in of_row), strict=True)
    for row, (own, before, first, read, fold_to) in enumerate(blocks):
        count, group = int(starts[row + 1] - starts[row]), before // length * length
        boundary = group + length
        if not count and (first < boundary or not fold_to):
            continue
        for head in range(pool.shape[2]):
            attention, factors = (wide(given[name][row, head]) for name in ("attention", "factors"))
            C, fold_B = (wide(given[name][row, head * groups // pool.shape[2]]) for name in ("C", "fold_B"))
            state = wide(pool[layer, read, head]) if read else np.zeros(pool.shape[3:])

            def inputs(start, low, own=own, end=first + count, head=head):
                """A group's inputs [channels, group_slots] from position `low` on, 0 for slots without an entry."""
                x = np.zeros((pool.shape[3], group_slots))
                for n in range(max(start, low), min(end, start + length)):
                    x[:, n - start] = ring_x[layer, own, head, n % (2 * length)]
                return x

            x = inputs(group, before)
            for n in range(count):
                if first + n == boundary or (n == 0 and first > boundary):
                    state = folded(state, x, factors, fold_B, at, group_slots, pool.dtype)
                    x = inputs(boundary, boundary)
                answer = factors[at.of_state + n] * (state @ C[n]) + x @ attention[n]
                out[starts[row] + n, head] = answer.astype(out.dtype)
            if first >= boundary and fold_to:
                start = wide(pool[layer, read, head]) if read else np.zeros(pool.shape[3:])
                x = inputs(group, before)
                pool[layer, fold_to, head] = folded(start, x, factors, fold_B, at, group_slots, pool.dtype)
    return jnp.asarray(out), jnp.asarray(pool), Mamba2Entries.of(given)


def folded(state, x, factors, fold_B, at, group_slots, dtype):
    """Returns the state at the end of the group that has the inputs x, rounded as it is stored."""
    added = (x * factors[at.fold :][:group_slots]) @ fold_B
    return wide((factors[at.decay] * state + added).astype(dtype))
