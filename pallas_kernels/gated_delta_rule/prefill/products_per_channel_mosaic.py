"""The first two prefill kernels in one, on Hopper GPUs, for a decay per key channel.

It computes what `products_per_channel` in products.py and inverse.py compute. A program has one chunk and two value heads,
one after the other, and solves both of their systems at once. Keys come in tiles of 32.
"""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

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
# Lengths of a chunk's halves, and of their halves, down to such blocks. Keys are decayed to the cut between two of them.
_LEVELS = 32, 16
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
    row, column, nothing = pm.rows(_SHAPE), pm.columns(_SHAPE), pm.zeros(_SHAPE, jnp.float32)
    # At least 32 for two tokens of different halves of a chunk, and at least 16 for those of different blocks.
    distance = row ^ column

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

    def sums(span):
        """Returns the sums of log decays over the spans with a number (see `decay_spans`), [tokens, keys] for each tile."""
        ones = pm.load_directly(refs.spans.at[span])
        (total,) = pm.multiply_all((SIZE, key_dim), [[(lambda: ones, decay_pieces.at[n]) for n in range(_PIECES)]])
        return [total[:, n * KEYS : (n + 1) * KEYS] for n in tiles]

    def products(forwards, backwards, half):
        """Returns the products of keys, and of queries, that are decayed forwards with keys that are decayed backwards.

        Args:
            forwards: The decays, [tokens, keys], for each tile of keys.
            backwards: The same, or None if they are equal.
            half: The number of the head in the pair.
        """
        pm.commit()  # no warp still multiplies what the memory had
        later = []
        for n in tiles:
            k = wide("k", n)
            later.append([(forwards[n] * x).astype(jnp.bfloat16) for x in (k, wide("q", n))])
            operands[half, n] = later[n][0] if backwards is None else (backwards[n] * k).astype(jnp.bfloat16)
        pm.commit()
        left = lambda n, which: lambda: later[n][which]
        return pm.multiply_all(_SHAPE, [[(left(n, which), operands.at[half, n].T) for n in tiles] for which in (0, 1)])

    def of_head(half, _):
        head, is_own = head_of(half)
        pm.wait(refs.full)

        @pm.when(end - start < SIZE)
        def _():
            for n in tiles:
                for tile in (token_tiles["k"].at[n], token_tiles["q"].at[n], decay_tiles.at[n]):
                    pm.keep_rows(tile, end - start)
            pm.commit()

        # Norms, the products of each token's query with its own key, and the decay over the chunk.
        squares: Any = dict.fromkeys(("kk", "qq", "qk"), 0.0)
        for n in tiles:
            values = dict(k=wide("k", n), q=wide("q", n))
            for a, b in squares:
                squares[a + b] = squares[a + b] + jnp.sum(values[a] * values[b], axis=1)
        if use_qk_l2norm:
            norms = {name: jax.lax.rsqrt(squares[2 * name] + L2_EPSILON) for name in "kq"}
        else:
            norms = {name: pm.zeros_per_row(SIZE, jnp.float32) + 1.0 for name in "kq"}
        norms["q"] = scale * norms["q"]
        refs.norms[...] = norms["k"]
        log_decays = [LOG2_E * pm.load(decay_tiles.at[n]) for n in tiles]
        for n in tiles:
            refs.total[half, keys_of(n)] = jnp.exp2(jnp.sum(log_decays[n], axis=0))
        cut_log_decays(log_decays)

        # Keys and queries decayed from the chunk's start, and keys decayed to its end.
        def put(name, of, decays, first, place):
            """Sends two tiles of decayed keys or queries, normalised, to the arrays that the next kernel reads."""
            norm = pm.along_rows(norms[of], KEYS)
            for n in (0, 1):
                operands[half, place + n] = (decays[n] * (wide(of, first + n) * norm)).astype(jnp.bfloat16)
            pm.commit()

            @pm.when(is_own)
            def _():
                for n in (0, 1):
                    target = getattr(refs, name).at[0, head, chunk, :, keys_of(first + n)]
                    pm.copy_out(operands.at[half, place + n], target)

        before = sums(len(_LEVELS) + 1)
        for first in tiles[::2]:
            decays = [jnp.exp2(x) for x in before[first : first + 2]]
            put("k_before", "k", decays, first, 0)
            put("q_before", "q", decays, first, 2)
            pm.wait_for_copies_out(0, wait_read_only=True)
        after = sums(len(_LEVELS) + 2)
        for first in tiles[::2]:
            put("k_after", "k", [jnp.exp2(x) for x in after[first : first + 2]], first, first)
        pm.wait_for_copies_out(0, wait_read_only=True)

        keys = queries = nothing
        for level, length in enumerate(_LEVELS):
            of_keys, of_queries = products([jnp.exp2(x) for x in sums(level)], None, half)
            is_found = distance >= 2 * length
            keys, queries = jnp.where(is_found, keys, of_keys), jnp.where(is_found, queries, of_queries)

        # A block is decayed from its middle, forwards and backwards, so exponents are bounded.
        def bounded(n):
            parts = [pm.load(decay_pieces.at[piece, :, keys_of(n)]).astype(jnp.float32) for piece in range(_PIECES)]
            return jnp.maximum(parts[0] + parts[1], -MAX_EXPONENT / (BLOCK // 2))

        cut_log_decays([bounded(n) for n in tiles])
        exponents = sums(len(_LEVELS))
        forwards, backwards = ([jnp.exp2(sign * x) for x in exponents] for sign in (1.0, -1.0))
        of_keys, of_queries = products(forwards, backwards, half)
        is_found = distance >= BLOCK
        keys, queries = jnp.where(is_found, keys, of_keys), jnp.where(is_found, queries, of_queries)
        of_own = jnp.where(row == column, pm.along_rows(squares["qk"], SIZE), nothing)
        keys, queries = jnp.where(column < row, keys, nothing), jnp.where(column < row, queries, of_own)

        pm.commit()
        of_columns = pm.along_columns(pm.load_per_column(refs.norms), SIZE)
        beta = pm.load_per_row(refs.betas.at[half])
        refs.attention_tile[...] = (queries * (pm.along_rows(norms["q"], SIZE) * of_columns)).astype(jnp.bfloat16)
        system[half] = keys * (pm.along_rows(beta * norms["k"], SIZE) * of_columns)
        pm.commit()
        pm.when(half == 0)(lambda: fetch(1))

        @pm.when(is_own)
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
    given |= dict(spans=decay_spans(SIZE, BLOCK))
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
            pm.shared((2, 1, *_SHAPE), jnp.bfloat16),
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
