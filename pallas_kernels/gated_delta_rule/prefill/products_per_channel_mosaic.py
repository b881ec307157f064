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
_PIECES = 2  # bfloat16 numbers that stand for a float32 log decay in sums


def kernel(names, *arrays, scale: float, use_qk_l2norm: bool):
    """Handles one chunk and two value heads.

    `arrays` are, by their `names`, what `products_per_channel` launches: inputs, outputs, shared memory and barriers.
    """
    refs = SimpleNamespace(**dict(zip(names, arrays, strict=True)))
    token_rows, token_tiles = refs.tokens
    decay_rows, decay_tiles, decay_pieces = refs.log_decays
    operands, system, solution = refs.systems
    pair, chunk = pm.axis_index("pair"), pm.axis_index("chunk")
    heads = refs.g.shape[1]
    key_dim, repeats = refs.k.shape[2], heads // refs.k.shape[1]
    tiles = range(key_dim // KEYS)
    start, end = refs.cu_chunk_seqlens[chunk], refs.cu_chunk_seqlens[chunk + 1]
    nothing = pm.zeros(_SHAPE, jnp.float32)

    def head_of(half):
        """Returns a value head, and whether the pair's other half does not have it too."""
        number = 2 * pair + half
        return jnp.minimum(number, heads - 1), number < heads

    def keys_of(n):
        return pm.slice_of(n * KEYS, KEYS)

    def fetch(half):
        head, _ = head_of(half)
        key_head, here = jax.lax.div(head, jnp.int32(repeats)), pm.slice_of(start, SIZE)
        for n in tiles:
            for name in ("k", "q"):
                pm.copy_in(getattr(refs, name).at[here, key_head, keys_of(n)], token_rows[name].at[n], refs.full)
            pm.copy_in(refs.g.at[here, head, keys_of(n)], decay_rows.at[n], refs.full)
        pm.copy_in(refs.beta.at[head, chunk], refs.betas.at[half], refs.full)

    def wide(name, n):
        return pm.load(token_tiles[name].at[n]).astype(jnp.float32)

    def cut_log_decays(values):
        """Puts log decays [tokens, keys], one tile after the other, into the place of what is there, in pieces."""
        values = [pieces(value, _PIECES) for value in values]
        pm.commit()  # no warp still reads what the memory had
        for n in tiles:
            for piece in range(_PIECES):
                decay_pieces[piece, :, keys_of(n)] = values[n][piece]
        pm.commit()

    def sums(span, first, count):
        """Returns the sums of log decays over some spans of tokens, [tokens, keys] for each of `count` tiles of keys."""
        ones = pm.load_directly(refs.spans.at[span])
        here = pm.slice_of(first * KEYS, count * KEYS)
        pairs = [(lambda: ones, decay_pieces.at[piece, :, here]) for piece in range(_PIECES)]
        (total,) = pm.multiply_all((SIZE, count * KEYS), [pairs])
        return [total[:, n * KEYS : (n + 1) * KEYS] for n in range(count)]

    def products(exponents, first, sign, half):
        """Returns the products of keys, and of queries, with earlier keys, over some tiles of keys.

        Args:
            exponents: The exponents of the decays, [tokens, keys], for each of these tiles.
            first: The number of the first tile.
            sign: 1.0 if the earlier keys are decayed by the same exponents, and -1.0 if they are decayed backwards.
            half: The number of the head in the pair.
        """
        pm.commit()  # no warp still multiplies what the memory had
        later = []
        for n, exponent in enumerate(exponents):
            k, decay = wide("k", first + n), jnp.exp2(exponent)
            later.append([(decay * x).astype(jnp.bfloat16) for x in (k, wide("q", first + n))])
            operands[half, first + n] = (jnp.exp2(sign * exponent) * k).astype(jnp.bfloat16)
        pm.commit()
        of = lambda which: [(lambda x=x: x[which], operands.at[half, first + n].T) for n, x in enumerate(later)]
        return pm.multiply_all(_SHAPE, [of(0), of(1)])

    def of_head(half, _):
        head, is_stored = head_of(half)
        pm.wait(refs.full)

        @pm.when(end - start < SIZE)
        def _():
            @pm.loop(0, len(tiles))
            def _(n):
                for tile in (token_tiles["k"].at[n], token_tiles["q"].at[n], decay_tiles.at[n]):
                    pm.keep_rows(tile, end - start)

            pm.commit()

        # Norms come first, with the products of each token's query and its own key, and then the decay over the chunk.
        def of_tile(n, sums):
            k, q = wide("k", n), wide("q", n)
            return [x + jnp.sum(y, axis=1) for x, y in zip(sums, (k * k, q * q, q * k), strict=True)]

        kk, qq, qk = jax.lax.fori_loop(0, len(tiles), of_tile, [pm.zeros_per_row(SIZE, jnp.float32)] * 3)
        if use_qk_l2norm:
            norms = dict(k=jax.lax.rsqrt(kk + L2_EPSILON), q=jax.lax.rsqrt(qq + L2_EPSILON))
        else:
            norms = dict.fromkeys("kq", pm.zeros_per_row(SIZE, jnp.float32) + 1.0)
        norms["q"] = scale * norms["q"]
        refs.norms[...] = norms["k"]
        log_decays = [LOG2_E * pm.load(decay_tiles.at[n]) for n in tiles]
        for n in tiles:
            refs.total[half, keys_of(n)] = jnp.exp2(jnp.sum(log_decays[n], axis=0))
        cut_log_decays(log_decays)

        # The next kernel reads keys and queries that are decayed from the chunk's start, and keys decayed to its end.
        def put(name, of, decays, first, place):
            """Sends two tiles of decayed keys or queries, normalised, to the arrays that the next kernel reads."""
            norm = pm.along_rows(norms[of], KEYS)
            for n in (0, 1):
                operands[half, place + n] = (decays[n] * (wide(of, first + n) * norm)).astype(jnp.bfloat16)
            pm.commit()

            @pm.when(is_stored)
            def _():
                for n in (0, 1):
                    target = getattr(refs, name).at[0, head, chunk, :, keys_of(first + n)]
                    pm.copy_out(operands.at[half, place + n], target)

        before = sums(_LEVELS + 1, 0, len(tiles))
        for first in tiles[::2]:
            decays = [jnp.exp2(x) for x in before[first : first + 2]]
            put("k_before", "k", decays, first, 0)
            put("q_before", "q", decays, first, 2)
            pm.wait_for_copies_out(0, wait_read_only=True)
        after = sums(_LEVELS + 2, 0, len(tiles))
        for first in tiles[::2]:
            put("k_after", "k", [jnp.exp2(x) for x in after[first : first + 2]], first, first)
        pm.wait_for_copies_out(0, wait_read_only=True)

        # Blocks, the last level, are decayed from their middles, forwards and backwards, where exponents are bounded.
        def bounded(n):
            parts = [pm.load(decay_pieces.at[piece, :, keys_of(n)]).astype(jnp.float32) for piece in range(_PIECES)]
            return jnp.maximum(parts[0] + parts[1], -MAX_EXPONENT / (BLOCK // 2))

        def of_level(level, found):
            sign = jnp.where(level < _LEVELS, 1.0, -1.0)

            def of_tiles(part, total):
                # Two tiles at a time: the exponents of all of them would not fit into the registers.
                first = 2 * part
                new = products(sums(level, first, 2), first, sign, half)
                return [x + y for x, y in zip(total, new, strict=True)]

            both = jax.lax.fori_loop(0, len(tiles) // 2, of_tiles, [nothing, nothing])
            is_here = pm.load_directly(refs.levels) == level.astype(jnp.float32)
            return [jnp.where(is_here, new, old) for new, old in zip(both, found, strict=True)]

        cut_log_decays([bounded(n) for n in tiles])
        keys, queries = jax.lax.fori_loop(0, _LEVELS + 1, of_level, [nothing, nothing])
        is_own = pm.load_directly(refs.levels) == float(_LEVELS + 1)
        queries = jnp.where(is_own, pm.along_rows(qk, SIZE), queries)

        pm.commit()
        of_columns = pm.along_columns(pm.load_per_column(refs.norms), SIZE)
        beta = pm.load_per_row(refs.betas.at[half])
        refs.attention_tile[...] = (queries * (pm.along_rows(norms["q"], SIZE) * of_columns)).astype(jnp.bfloat16)
        system[half] = -(keys * (pm.along_rows(beta * norms["k"], SIZE) * of_columns))
        pm.commit()
        pm.when(half == 0)(lambda: fetch(1))

        @pm.when(is_stored)
        def _():
            pm.copy_out(refs.attention_tile, refs.attention.at[0, head, chunk])
            pm.copy_out(refs.total.at[half], refs.decay.at[head, chunk])

        pm.wait_for_copies_out(0, wait_read_only=True)

    @pm.when(end > start)
    def _():
        fetch(0)
        jax.lax.fori_loop(0, 2, of_head, None)
        pm.commit()
        substitute(system, refs.betas, solution)
        pm.commit()
        for half in (0, 1):
            head, is_own = head_of(half)

            @pm.when(is_own)
            def _(half=half, head=head):
                for n in range(refs.solve.shape[0]):
                    pm.copy_out(solution.at[half, n], refs.solve.at[n, head, chunk])

        pm.wait_for_copies_out(0, wait_read_only=True)


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
    pieces_of_decays = pm.tiled(_PIECES, SIZE, key_dim, dtype=jnp.bfloat16, swizzle=bytes_of_row)
    scratch: dict[str, Any] = dict(
        tokens=pm.union(*pm.views_of_tokens(dict.fromkeys("kq", (tiles, *_TILE)), k.dtype, swizzle=bytes_of_row)),
        # Log decays are replaced by their pieces.
        log_decays=pm.union(*pm.views_of_tokens((tiles, *_TILE), jnp.float32), pieces_of_decays),
        # What is multiplied and stored on the way to a system takes its place, and solutions do afterwards.
        systems=pm.union(
            pm.tiled(2, 4, *_TILE, dtype=jnp.bfloat16, swizzle=bytes_of_row),
            pm.tiled(2, *_SHAPE, dtype=jnp.float32),
            pm.tiled(2, 1, *_SHAPE, dtype=jnp.bfloat16),
        ),
        attention_tile=pm.tiled(*_SHAPE, dtype=jnp.bfloat16),
        betas=pm.shared((2, SIZE), jnp.float32),
        norms=pm.shared((SIZE,), jnp.float32),
        total=pm.shared((2, key_dim), jnp.float32),
        full=pm.Barrier(num_arrivals=3 * tiles + 1),
    )
    results = pm.kernel(
        functools.partial(kernel, [*given, *outputs, *scratch], scale=scale, use_qk_l2norm=use_qk_l2norm),
        out_type=tuple(outputs.values()),
        grid=(number, -(-heads // 2)),
        grid_names=("chunk", "pair"),
        scratch_types=list(scratch.values()),
        compiler_params=pm.fast_math(),
        kernel_name="gated_delta_rule_prefill_products",
    )(*given.values())
    return dict(zip(outputs, results, strict=True))
