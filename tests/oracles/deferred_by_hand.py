"""The Mosaic GPU kernel of deferred states in NumPy: what follows the launch of `weights`, which runs interpreted.

No CPU can interpret that kernel. This has its steps, in float64, so what the two launches hand over is tested anywhere.
"""

import itertools
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

from pallas_kernels.gated_delta_rule.deferred.weights import Factors, sizes, weights


def wide(array):
    return np.asarray(jnp.asarray(array).astype(jnp.float32), np.float64)


def gated_delta_rule_deferred(
    qkv, a, b, A_log, dt_bias, pool, ring_k, ring_u, ring_g, layer, query_start_loc, slot, base, position, read_block,
    fold_block, *, max_query_tokens, lower_bound, allow_neg_eigval, scale, use_qk_l2norm,
):  # fmt: skip
    """Takes the arguments of the op, and returns its results."""
    vectors, places = sizes(max_query_tokens, ring_k.shape[3] // 2)
    given = weights(
        qkv, a, b, A_log, dt_bias, ring_k, ring_g, jnp.int32(layer), query_start_loc, slot, base, position, fold_block,
        vectors=vectors, gate=dict(lower_bound=lower_bound, allow_neg_eigval=allow_neg_eigval), scale=scale,
        use_qk_l2norm=use_qk_l2norm, interpret=True,
    )  # fmt: skip
    pool, ring_u = np.array(pool), np.array(ring_u)
    out = np.zeros((qkv.shape[0], *pool.shape[2:4]), qkv.dtype)
    starts, length = np.asarray(query_start_loc), ring_k.shape[3] // 2
    blocks = zip(*(map(int, each) for each in (slot, base, position, read_block, fold_block)), strict=True)
    for row, (own, before, first, read, fold_to) in enumerate(blocks):
        boundary = (before // length + 1) * length
        if starts[row] == starts[row + 1] and (first < boundary or not fold_to):
            continue
        for head in range(pool.shape[2]):
            key_head = head // (pool.shape[2] // ring_k.shape[2])
            program = SimpleNamespace(
                weight=wide(given["weight"][row, head]),
                factors=wide(given["factors"][row, head]),
                x=wide(given["x"][row, key_head]),
                fold_k=wide(given["fold_k"][row, key_head]),
                values=wide(qkv)[starts[row] : starts[row + 1], -pool.shape[2] * pool.shape[3] :],
                ring=ring_u[layer, own, head],
                out=out[starts[row] : starts[row + 1], head],
                at=Factors.of(vectors, places),
                position=first,
            )
            program.values = program.values[:, head * pool.shape[3] :][:, : pool.shape[3]]
            state = wide(pool[layer, read, head]) if read else np.zeros(pool.shape[3:])
            folded = run(program, state, before, boundary, pool.dtype)
            if first >= boundary and fold_to:
                pool[layer, fold_to, head] = folded
    return jnp.asarray(out), jnp.asarray(pool), given["ring_k"], jnp.asarray(ring_u), given["ring_g"]


def run(program, state, base, boundary, dtype):
    """Runs the tokens of one row and head, and returns the state at the end of its group if the row reaches it."""
    length = len(program.ring) // 2
    first, last = boundary - length, max(program.position, program.position + len(program.values) - 1)
    u = corrections(program, first, base)
    if program.position < boundary:
        run_tokens(program, 0, first, state, u)
    if last < boundary:
        return None
    added = (u * program.factors[program.at.fold :][: u.shape[1]]) @ program.fold_k
    folded = (program.factors[program.at.decay] * state + added).astype(dtype)
    run_tokens(program, 1, boundary, wide(folded), corrections(program, boundary, boundary))
    return folded


def corrections(program, first, low):
    """Returns a group's corrections [values, places] of the positions from `low` to the row's first one, and 0 elsewhere."""
    length, places = len(program.ring) // 2, program.weight.shape[2]
    u = np.zeros((program.ring.shape[1], places))
    for at in range(max(low, first), min(program.position, first + length)):
        u[:, at - first] = wide(program.ring[at % (2 * length)])
    return u


def run_tokens(program, group, first, state, u):
    """Runs the tokens of a group, token by token, and adds their corrections to `u`."""
    length, vectors = len(program.ring) // 2, len(program.x)
    of_state, of_key = (program.factors[at + group * vectors :][:vectors] for at in program.at[:2])
    from_state = (state @ program.x.T) * of_state

    def of_vector(index):
        return from_state[:, index] + u @ program.weight[group, index]

    for token, at in zip(range(len(program.values)), itertools.count(program.position), strict=False):
        if first <= at < first + length:
            new = (of_key[token] * (program.values[token] - of_vector(token))).astype(program.ring.dtype)
            program.ring[at % (2 * length)] = new
            u[:, at - first] = wide(new)
            program.out[token] = of_vector(vectors // 2 + token).astype(program.out.dtype)
