"""The first two prefill kernels in one, on Hopper GPUs, for a decay per key channel.

It computes what `products_per_channel` in products.py and inverse.py compute. A program has one chunk and two value heads,
one after the other, and solves both of their systems at once. Keys come in tiles of 32.
"""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _pallas_mosaic as pm
from pallas_kernels._dot import pieces
from pallas_kernels._pallas_triton import LOG2_E
from pallas_kernels.chunks import Chunks
from pallas_kernels.gated_delta_rule.prefill.products import MAX_EXPONENT, decay_spans
from pallas_kernels.gated_delta_rule.prefill.substitution import SIZE, substitute
from pallas_kernels.gated_delta_rule.xla import L2_EPSILON

_SHAPE = SIZE, SIZE
KEYS = 32  # the keys of a tile, whose rows of float32 log decays have as many bytes as tensor cores can swizzle
_TILE = SIZE, KEYS
BLOCK = 16  # tokens of a block that is decayed from its middle
_LEVELS = 2  # a chunk's halves, and their halves: keys are decayed to the cut between two of them
TEAMS, TEAM = 2, 2  # teams of a program, and warpgroups of a team: so many that no thread has more than 128 registers
_KEYS, _QUERIES = 0, 1  # the warpgroup that multiplies them, and their place in shared memory
_PIECES = 2  # bfloat16 numbers that stand for a float32 log decay in sums


def kernel(names, *arrays, scale: float, use_qk_l2norm: bool):
    """Handles one chunk and four value heads, two by each of two teams.

    A team's two warpgroups divide the work of a head: one has the products of keys with keys, the other those of queries
    with keys. Whatever both need is computed for half of the keys by each of them, and goes through shared memory. The teams
    have nothing in common but the core. `arrays` are, by their `names`, what `products_per_channel` launches: inputs,
    outputs, shared memory and barriers.
    """
    refs = SimpleNamespace(**dict(zip(names, arrays, strict=True)))
    four, chunk, warpgroup = (pm.axis_index(axis) for axis in ("four", "chunk", pm.WARPGROUP))
    team, own = jax.lax.div(warpgroup, jnp.int32(TEAM)), jax.lax.rem(warpgroup, jnp.int32(TEAM))
    of_team = lambda memory: [view.at[team] for view in memory]
    token_rows, token_tiles = of_team(refs.tokens)
    decay_rows, decay_tiles, decay_pieces, attention = of_team(refs.log_decays)
    operands, system, solution = of_team(refs.systems)
    decayed_queries, betas, all_norms, totals, full = of_team(
        (refs.queries, refs.betas, refs.norms, refs.total, refs.full)
    )
    together = functools.partial(pm.commit_of_team, team, TEAM)
    heads = refs.g.shape[1]
    key_dim, repeats = refs.k.shape[2], heads // refs.k.shape[1]
    tiles = range(key_dim // KEYS)
    each = len(tiles) // TEAM
    start, end = refs.cu_chunk_seqlens[chunk], refs.cu_chunk_seqlens[chunk + 1]
    nothing = pm.zeros(_SHAPE, jnp.float32)
    has_keys = own == _KEYS
    own_tiles = [TEAM * n + own for n in range(each)]

    def head_of(half):
        """Returns a value head, and whether no other team or half has it too."""
        number = 4 * four + 2 * team + half
        return jnp.minimum(number, heads - 1), number < heads

    def keys_of(n, count=1):
        return pm.slice_of(n * KEYS, count * KEYS)

    def fetch_tokens(half):
        head, _ = head_of(half)
        key_head, here = jax.lax.div(head, jnp.int32(repeats)), pm.slice_of(start, SIZE)
        for n in tiles:
            for which, ref in ((_KEYS, refs.k), (_QUERIES, refs.q)):
                pm.copy_in(ref.at[here, key_head, keys_of(n)], token_rows.at[which, n], full)
        pm.copy_in(refs.beta.at[head, chunk], betas.at[half], full)

    def fetch_decays(half):
        head, _ = head_of(half)
        for n in tiles:
            pm.copy_in(refs.g.at[pm.slice_of(start, SIZE), head, keys_of(n)], decay_rows.at[n], full)

    def wide(which, n):
        return pm.load(token_tiles.at[which, n]).astype(jnp.float32)

    def cut_log_decays(values):
        """Puts this warpgroup's log decays [tokens, keys] into the place of what is there, in pieces."""
        together()  # no warp still reads what the memory had
        for n, value in zip(own_tiles, values, strict=True):
            for piece, part in enumerate(pieces(value, _PIECES)):
                decay_pieces[n, piece] = part
        together()

    def sums(span, n):
        """Returns the sums of a tile's log decays over some spans of tokens, [tokens, keys]."""
        ones = pm.load_directly(refs.spans.at[span])
        pairs = [(lambda: ones, decay_pieces.at[n, piece]) for piece in range(_PIECES)]
        return pm.multiply_all(_TILE, [pairs])[0]

    def products(level, half):
        """Returns the products of this warpgroup's keys or queries with earlier keys, which are decayed at a level."""
        # The last level's earlier keys are decayed backwards, the others' by the same exponents.
        sign, total = jnp.where(level < _LEVELS, 1.0, -1.0), nothing
        for n in own_tiles:
            exponent, k = sums(level, n), wide(_KEYS, n)
            decay = jnp.exp2(exponent)
            earlier, later = jnp.exp2(sign * exponent) * k, (decay * k, decay * wide(_QUERIES, n))
            together()  # no warp still multiplies what the memory had
            operands[half, own] = earlier.astype(jnp.bfloat16)
            operands[half, TEAM + own] = later[_KEYS].astype(jnp.bfloat16)
            decayed_queries[own] = later[_QUERIES].astype(jnp.bfloat16)
            together()
            earlier = [operands.at[half, t].T for t in range(TEAM)]
            of_keys = [operands.at[half, TEAM + t] for t in range(TEAM)], earlier
            of_queries = [decayed_queries.at[t] for t in range(TEAM)], earlier
            multiply = lambda left, right: pm.multiply_all(_SHAPE, [[*zip(left, right, strict=True)]])[0]
            total += jax.lax.cond(
                has_keys, functools.partial(multiply, *of_keys), functools.partial(multiply, *of_queries)
            )
        return total

    def of_head(half, _):
        head, is_stored = head_of(half)
        pm.wait(full)

        @pm.when(end - start < SIZE)
        def _():
            for n in own_tiles:
                for tile in (token_tiles.at[_KEYS, n], token_tiles.at[_QUERIES, n], decay_tiles.at[n]):
                    pm.keep_rows(tile, end - start)

        together()

        # Norms come first, with the products of each token's query and its own key, and then the decay over the chunk.
        def of_tile(n, found):
            x = wide(own, n)
            return [total + jnp.sum(y, axis=1) for total, y in zip(found, (x * x, wide(_KEYS, n) * x), strict=True)]

        squares, with_key = jax.lax.fori_loop(0, len(tiles), of_tile, [pm.zeros_per_row(SIZE, jnp.float32)] * 2)
        factor = jnp.where(has_keys, 1.0, scale)
        all_norms[own] = factor * jax.lax.rsqrt(squares + L2_EPSILON) if use_qk_l2norm else factor + 0.0 * squares
        log_decays = [LOG2_E * pm.load(decay_tiles.at[n]) for n in own_tiles]
        cut_log_decays(log_decays)

        # The next kernel reads keys and queries that are decayed from the chunk's start, and keys decayed to its end.
        norms = [pm.load_per_row(all_norms.at[which]) for which in (_KEYS, _QUERIES)]

        def put(*what):
            """Sends tiles of decayed keys or queries, normalised, to the arrays that the next kernel reads.

            Each of `what` is the name of an array, what of, the number of the tile, its decays, and a place for it.
            """
            for _, which, n, decays, place in what:
                normed = wide(which, n) * pm.along_rows(norms[which], KEYS)
                operands[half, place] = (decays * normed).astype(jnp.bfloat16)
            pm.commit()

            @pm.when(is_stored)
            def _():
                for name, _, n, _, place in what:
                    pm.copy_out(operands.at[half, place], getattr(refs, name).at[0, head, chunk, :, keys_of(n)])

            pm.wait_for_copies_out(0, wait_read_only=True)

        for n in own_tiles:
            before = jnp.exp2(sums(_LEVELS + 1, n))
            # A sum over rows would need memory that the lowering gives to one warpgroup at a time only.
            pm.store_row(before, SIZE - 1, totals.at[half, keys_of(n)])
            put(("k_before", _KEYS, n, before, own), ("q_before", _QUERIES, n, before, TEAM + own))
        put(*(("k_after", _KEYS, n, jnp.exp2(sums(_LEVELS + 2, n)), TEAM * i + own) for i, n in enumerate(own_tiles)))

        # Blocks, the last level, are decayed from their middles, forwards and backwards, where exponents are bounded.
        def bounded(n):
            parts = [pm.load(decay_pieces.at[n, piece]).astype(jnp.float32) for piece in range(_PIECES)]
            return jnp.maximum(parts[0] + parts[1], -MAX_EXPONENT / (BLOCK // 2))

        def of_level(level, found):
            new = products(level, half)
            return jnp.where(pm.load_directly(refs.levels) == level.astype(jnp.float32), new, found)

        cut_log_decays([bounded(n) for n in own_tiles])
        found = jax.lax.fori_loop(0, _LEVELS + 1, of_level, nothing)
        together()
        pm.when(has_keys & (half == 0))(lambda: fetch_tokens(1))
        of_columns = pm.along_columns(pm.load_per_column(all_norms.at[_KEYS]), SIZE)

        @pm.when(has_keys)
        def _():
            beta = pm.load_per_row(betas.at[half])
            system[half] = found * (pm.along_rows(beta * norms[_KEYS], SIZE) * of_columns)

        @pm.when(jnp.logical_not(has_keys))
        def _():
            is_own = pm.load_directly(refs.levels) == float(_LEVELS + 1)
            queries = jnp.where(is_own, pm.along_rows(with_key, SIZE), found)
            attention[0] = (queries * (pm.along_rows(norms[_QUERIES], SIZE) * of_columns)).astype(jnp.bfloat16)
            pm.commit()

            @pm.when(is_stored)
            def _():
                pm.copy_out(attention.at[0], refs.attention.at[0, head, chunk])
                pm.copy_out(totals.at[half], refs.decay.at[head, chunk])

            pm.wait_for_copies_out(0, wait_read_only=True)
            pm.when(half == 0)(lambda: fetch_decays(1))

        together()

    @pm.when(end > start)
    def _():

        @pm.when(has_keys)
        def _():
            fetch_tokens(0)
            fetch_decays(0)

        jax.lax.fori_loop(0, 2, of_head, None)

        @pm.when(has_keys)
        def _():
            substitute(system, betas, solution.at[pm.slice_of(0, 2)])
            pm.commit()
            for half in (0, 1):
                head, is_own = head_of(half)

                @pm.when(is_own)
                def _(half=half, head=head):
                    for n in range(refs.solve.shape[0]):
                        pm.copy_out(solution.at[half, n], refs.solve.at[n, head, chunk])

            pm.wait_for_copies_out(0, wait_read_only=True)

    pm.finish_together(refs.done)


def levels() -> jax.Array:
    """Returns which of a chunk's levels multiplies two tokens, float32 [tokens, tokens].

    Where the row is the later token, tokens of different halves have 0, those of different halves of a half 1, and those of
    one block 2. A token and itself have 3, and what no level multiplies has -1.
    """
    row, column = np.arange(SIZE)[:, None], np.arange(SIZE)[None, :]
    apart = np.where((row ^ column) >= SIZE // 2, 0, np.where((row ^ column) >= BLOCK, 1, _LEVELS))
    return jnp.asarray(np.where(column < row, apart, np.where(column == row, _LEVELS + 1, -1)), jnp.float32)


def of_chunks(beta: jax.Array, chunks: Chunks) -> jax.Array:
    """Returns betas as [heads, chunks, tokens], 0 for places without a token."""
    first, last = chunks.cu_chunk_seqlens[:-1, None], chunks.cu_chunk_seqlens[1:, None]
    token = first + jnp.arange(SIZE)
    exists = (token < last)[:, :, None]
    return jnp.where(exists, beta[jnp.minimum(token, beta.shape[0] - 1)], 0.0).transpose(2, 0, 1)


def products_per_channel(
    q: jax.Array,
    k: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    chunks: Chunks,
    *,
    scale: float,
    use_qk_l2norm: bool,
) -> dict[str, jax.Array]:
    """Launches the kernel. Returns `solve`, `attention`, `q_before`, `k_before`, `k_after` and `decay` for states.py."""
    (_, _, key_dim), heads, number = k.shape, g.shape[1], chunks.seq_idx.shape[0]
    given = dict(cu_chunk_seqlens=chunks.cu_chunk_seqlens, q=q, k=k, g=g, beta=of_chunks(beta, chunks))
    given |= dict(spans=decay_spans(SIZE, BLOCK), levels=levels())
    array, of_chunk = jax.ShapeDtypeStruct, (heads, number)
    square, keys = array((1, *of_chunk, *_SHAPE), jnp.bfloat16), array((1, *of_chunk, SIZE, key_dim), jnp.bfloat16)
    outputs = dict(solve=square, attention=square, q_before=keys, k_before=keys, k_after=keys)
    outputs |= dict(decay=array((*of_chunk, key_dim), jnp.float32))
    tiles, bytes_of_row = key_dim // KEYS, 2 * KEYS
    pieces_of_decays = pm.tiled(TEAMS, tiles, _PIECES, *_TILE, dtype=jnp.bfloat16, swizzle=bytes_of_row)
    attention_tile = pm.tiled(TEAMS, tiles, *_SHAPE, dtype=jnp.bfloat16)
    scratch: dict[str, Any] = dict(
        tokens=pm.union(*pm.views_of_tokens((TEAMS, 2, tiles, *_TILE), k.dtype, swizzle=bytes_of_row)),
        # Log decays are replaced by their pieces, and these by products of queries.
        log_decays=pm.union(*pm.views_of_tokens((TEAMS, tiles, *_TILE), jnp.float32), pieces_of_decays, attention_tile),
        # What is multiplied and stored on the way to a system takes its place, and solutions do afterwards.
        systems=pm.union(
            pm.tiled(TEAMS, 2, 4, *_TILE, dtype=jnp.bfloat16, swizzle=bytes_of_row),
            pm.tiled(TEAMS, 2, *_SHAPE, dtype=jnp.float32),
            # As large as a team's system, so that a team's solutions take the place of its own system only.
            pm.shared((TEAMS, 4, 1, *_SHAPE), jnp.bfloat16),
        ),
        queries=pm.tiled(TEAMS, TEAM, *_TILE, dtype=jnp.bfloat16, swizzle=bytes_of_row),
        betas=pm.shared((TEAMS, 2, SIZE), jnp.float32),
        norms=pm.shared((TEAMS, 2, SIZE), jnp.float32),
        total=pm.shared((TEAMS, 2, key_dim), jnp.float32),
        full=pm.Barrier(num_arrivals=3 * tiles + 1, num_barriers=TEAMS),
        done=pm.Barrier(num_arrivals=TEAMS * TEAM),
    )
    results = pm.kernel(
        functools.partial(kernel, [*given, *outputs, *scratch], scale=scale, use_qk_l2norm=use_qk_l2norm),
        out_type=tuple(outputs.values()),
        grid=(number, -(-heads // 4)),
        grid_names=("chunk", "four"),
        num_threads=TEAMS * TEAM,
        thread_name=pm.WARPGROUP,
        scratch_types=list(scratch.values()),
        compiler_params=pm.fast_math(),
        kernel_name="gated_delta_rule_prefill_products",
    )(*given.values())
    return dict(zip(outputs, results, strict=True))
