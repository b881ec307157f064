"""The Mosaic GPU kernel of deferred states in NumPy: the code of its threads, and what follows it in float64.

No CPU can interpret that kernel. What `gram_sm90.py` writes for single threads runs here as it is, on arrays of all threads.
What the kernel does with values is written down again.
"""

import itertools
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from kernels import threads_in_numpy
from kernels.threads_in_numpy import Ref

from pallas_kernels.gated_delta_rule import _gate_code
from pallas_kernels.gated_delta_rule._arguments import Options
from pallas_kernels.gated_delta_rule.deferred import gram_sm90
from pallas_kernels.gated_delta_rule.deferred._factors import Factors, sizes
from pallas_kernels.gated_delta_rule.deferred.gram_sm90 import Group, Inputs, Results
from pallas_kernels.gated_delta_rule.gates import Gates


def wide(array):
    return np.asarray(jnp.asarray(array).astype(jnp.float32), np.float64)


def gated_delta_rule_deferred(
    qkv, a, b, A_log, dt_bias, pool, ring_k, ring_u, ring_g, layer, query_start_loc, slot, base, position, read_block,
    fold_block, *, max_query_tokens, lower_bound, allow_neg_eigval, scale, use_qk_l2norm,
):  # fmt: skip
    """Takes the arguments of the op, and returns its results."""
    gates = Gates(lower_bound=lower_bound, allow_neg_eigval=allow_neg_eigval)
    options = Options(scale, use_qk_l2norm, gates=gates)
    qkv, a, b, A_log, dt_bias = map(np.asarray, (qkv, a, b, A_log, dt_bias))
    pool, ring_k, ring_u, ring_g = (np.array(x) for x in (pool, ring_k, ring_u, ring_g))
    out = np.zeros((qkv.shape[0], *pool.shape[2:4]), qkv.dtype)
    starts, length = np.asarray(query_start_loc), ring_k.shape[3] // 2
    heads, (key_heads, key_dim) = pool.shape[2], (ring_k.shape[2], ring_k.shape[4])
    vectors, group_slots = sizes(max_query_tokens, length)
    row_bytes = 256 // pool.dtype.itemsize
    blocks = zip(*(map(int, each) for each in (slot, base, position, read_block, fold_block)), strict=True)
    for row, (own, before, first, read, fold_to) in enumerate(blocks):
        boundary, count = (before // length + 1) * length, starts[row + 1] - starts[row]
        if not count and (first < boundary or not fold_to):
            continue
        folds = max(first, first + count - 1) >= boundary
        for head in range(heads):
            key_head = head // (heads // key_heads)
            channels = lambda n: slice(n * key_dim, (n + 1) * key_dim)
            inputs = Inputs(
                *(Ref(qkv[:, channels(n)]) for n in (key_head, key_heads + key_head)),
                *(Ref(x[:, head]) for x in (a, b)),
                *(Ref(x[head : head + 1]) for x in (A_log, dt_bias)),
                Ref(ring_k[layer, own, key_head]),
                Ref(ring_g[layer, own, head]),
            )  # fmt: skip
            results = Results(
                Ref(dirty_tiles(vectors, key_dim, row_bytes, qkv.dtype)),
                Ref(np.full((2, vectors, group_slots), np.nan, np.float32)),
                Ref(np.full(Factors.of(vectors, group_slots).size, np.nan, np.float32)),
                Ref(dirty_tiles(group_slots, key_dim, 2 * group_slots, qkv.dtype)),
                row_bytes,
            )
            groups = [(boundary - length, before)] + [(boundary, boundary)] * bool(first + count > boundary)
            for index, (start, low) in enumerate(groups):
                group = Group(start, low, start % (2 * length), starts[row], count, first)
                keeps_keys = np.bool_(head % (heads // key_heads) == 0)
                compute(index, inputs, group, options, results, np.bool_(folds), keeps_keys, np.bool_(True))
            program = SimpleNamespace(
                coefficients=wide(results.coefficients.array),
                factors=wide(results.factors.array),
                x=wide(plain(results.x.array)),
                fold_k=wide(plain(results.fold.array)),
                values=wide(qkv)[starts[row] : starts[row + 1], -heads * pool.shape[3] :],
                ring=ring_u[layer, own, head],
                out=out[starts[row] : starts[row + 1], head],
                at=Factors.of(vectors, group_slots),
                position=first,
            )
            program.values = program.values[:, head * pool.shape[3] :][:, : pool.shape[3]]
            state = wide(pool[layer, read, head]) if read else np.zeros(pool.shape[3:])
            folded = run(program, state, before, boundary, pool.dtype)
            if first >= boundary and fold_to:
                pool[layer, fold_to, head] = folded
    return tuple(map(jnp.asarray, (out, pool, ring_k, ring_u, ring_g)))


def compute(*arguments):
    """Runs `store_gram` in NumPy."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        threads = threads_in_numpy.Threads()
        threads_in_numpy.install(monkeypatch, threads, threads_in_numpy.fake(threads), (gram_sm90, _gate_code))
        gram_sm90.store_gram(*arguments)


def dirty_tiles(rows, columns, row_bytes, dtype):
    """Returns NaN in tiles of eight rows of `row_bytes` bytes."""
    width = row_bytes // np.dtype(dtype).itemsize
    return np.full((rows // 8, columns // width, 8, width), np.nan, dtype)


def plain(tiles):
    """Returns a tiled array as rows. In row r of a tile, 16-byte group p is stored as p ^ (r * bytes of a row // 128)."""
    rows, columns, _, width = tiles.shape
    parts = width // 8
    cut = tiles.reshape(rows, columns, 8, parts, 8)
    swap = np.arange(8) * 2 * width // 128 % parts
    back = np.stack([cut[:, :, r, np.arange(parts) ^ swap[r]] for r in range(8)], axis=2)
    return back.transpose(0, 2, 1, 3, 4).reshape(8 * rows, columns * width)


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
    """Returns a group's corrections [values, group_slots] from position `low` to the row's first one, and 0 elsewhere."""
    length, group_slots = len(program.ring) // 2, program.coefficients.shape[2]
    u = np.zeros((program.ring.shape[1], group_slots))
    for at in range(max(low, first), min(program.position, first + length)):
        u[:, at - first] = wide(program.ring[at % (2 * length)])
    return u


def run_tokens(program, group, first, state, u):
    """Runs the tokens of a group, token by token, and adds their corrections to `u`."""
    length, vectors = len(program.ring) // 2, len(program.x)
    of_state, of_key = (program.factors[at + group * vectors :][:vectors] for at in program.at[:2])
    from_state = (state @ program.x.T) * of_state

    def of_vector(index):
        return from_state[:, index] + u @ program.coefficients[group, index]

    for token, at in zip(range(len(program.values)), itertools.count(program.position), strict=False):
        if first <= at < first + length:
            new = (of_key[token] * (program.values[token] - of_vector(token))).astype(program.ring.dtype)
            program.ring[at % (2 * length)] = new
            u[:, at - first] = wide(new)
            program.out[token] = of_vector(vectors // 2 + token).astype(program.out.dtype)
