"""The first two prefill kernels in one, on Hopper GPUs, for decays per head: products of keys, and solved systems.

A program has one chunk and key head, and all value heads of that key head, two at a time. What log decays alone decide
comes from a launch before this one (decays.py).
"""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_mosaic as pm
from pallas_kernels._pallas_triton import LOG2_E
from pallas_kernels.chunks import Chunks
from pallas_kernels.gated_delta_rule.prefill.decays import Factors, decays
from pallas_kernels.gated_delta_rule.prefill.substitution import SIZE, substitute
from pallas_kernels.gated_delta_rule.xla import L2_EPSILON

_SHAPE = SIZE, SIZE
_AT = Factors()


def kernel(names, *arrays, scale: float, use_qk_l2norm: bool):
    """Handles one chunk and key head.

    `arrays` are, by their `names`, what `products` launches: the inputs, the outputs, shared memory and barriers.
    """
    refs = SimpleNamespace(**dict(zip(names, arrays, strict=True)))
    token_rows, token_tiles, system, solution = refs.memory
    pieces = range(refs.solve.shape[0])
    key_head, chunk = pm.axis_index("key_head"), pm.axis_index("chunk")
    tiles, repeats = range(refs.k.shape[2] // SIZE), refs.factors.shape[0] // refs.k.shape[1]
    together = 2 - repeats % 2  # value heads of a pair whose vectors are copied at once
    start, end = refs.cu_chunk_seqlens[chunk], refs.cu_chunk_seqlens[chunk + 1]
    row, column, nothing = pm.rows(_SHAPE), pm.columns(_SHAPE), pm.zeros(_SHAPE, jnp.float32)

    def head_of(pair, half):
        """Returns a value head, and whether the other half of the pair does not have it too."""
        number = 2 * pair + half
        return key_head * repeats + jnp.minimum(number, repeats - 1), number < repeats

    def fetch_factors(pair):
        for half in range(0, 2, together):
            head, _ = head_of(pair, half)
            heads, here = pm.slice_of(head, together), pm.slice_of(half, together)
            pm.copy_in(refs.factors.at[heads, chunk], refs.per_row.at[here], refs.factors_full)
            sums = refs.factors.at[heads, chunk, pm.slice_of(0, 2)]
            pm.copy_in(sums, refs.per_column.at[here], refs.factors_full)

    def norm_of(tiles_of):
        """Returns the factors that normalise a chunk's keys or queries, [tokens]."""
        squares: Any = 0.0
        for n in tiles:
            x = pm.load(tiles_of.at[n]).astype(jnp.float32)
            squares = squares + jnp.sum(x * x, axis=1)
        return jax.lax.rsqrt(squares + L2_EPSILON)

    @pm.when(end > start)
    def _():
        for name in ("k", "q"):
            for n in tiles:
                source = getattr(refs, name).at[pm.slice_of(start, SIZE), key_head, pm.slice_of(n * SIZE, SIZE)]
                pm.copy_in(source, token_rows[name].at[n], refs.full)
        fetch_factors(0)
        pm.wait(refs.full)
        k, q = token_tiles["k"], token_tiles["q"]

        @pm.when(end - start < SIZE)
        def _():
            for tile in (k, q):
                for n in tiles:
                    pm.keep_rows(tile.at[n], end - start)
            pm.commit()

        k_norm: Any = 1.0
        q_norm: Any = 1.0
        if use_qk_l2norm:
            # Norms come before the products, and one after the other: tokens in float32 would not fit beside them.
            k_norm = pm.computed(norm_of(k))
            q_norm = pm.computed(norm_of(q))
            refs.norms[...] = k_norm
            pm.commit()
        keys, queries = pm.multiply_all(
            _SHAPE, [[(k.at[n], k.at[n].T) for n in tiles], [(q.at[n], k.at[n].T) for n in tiles]]
        )
        if use_qk_l2norm:
            of_columns = pm.along_columns(pm.load_per_column(refs.norms), SIZE)
            keys = keys * (pm.along_rows(k_norm, SIZE) * of_columns)
            queries = queries * (pm.along_rows(scale * q_norm, SIZE) * of_columns)
        else:
            queries = scale * queries
        # Of the products of keys, `substitute` uses those with earlier keys only.
        queries = jnp.where(column <= row, queries, nothing)

        def of_pair(pair, _):
            pm.wait(refs.factors_full)
            pm.commit()  # no warp still reads what the memory had
            for half in (0, 1):
                vector = lambda n, half=half: pm.load_per_row(refs.per_row.at[half, n])
                per_row = lambda n, vector=vector: pm.along_rows(vector(n), SIZE)
                column_of = lambda n, half=half: pm.load_per_column(refs.per_column.at[half, n])
                per_column = lambda n, column_of=column_of: pm.along_columns(column_of(n), SIZE)
                coarse, fine = (per_row(n) - per_column(n) for n in (_AT.coarse, _AT.fine))
                between = jnp.exp2(jnp.minimum(LOG2_E * coarse + fine, nothing))
                system[half] = between * keys * per_row(_AT.beta)
                refs.attention_tile[half] = (between * queries).astype(jnp.bfloat16)
                before, after = vector(_AT.before), vector(_AT.after)
                kinds = -(before * k_norm), scale * (before * q_norm), after * k_norm
                for kind, values in enumerate(kinds):
                    refs.kinds[half, kind] = values
            pm.commit()
            for half in range(0, 2, together):
                head, is_own = head_of(pair, half)

                @pm.when(is_own)
                def _(half=half, head=head):
                    target = refs.scales.at[pm.slice_of(head, together), chunk]
                    pm.copy_out(refs.kinds.at[pm.slice_of(half, together)], target)

            for half in (0, 1):
                head, is_own = head_of(pair, half)

                @pm.when(is_own)
                def _(half=half, head=head):
                    pm.copy_out(refs.attention_tile.at[half], refs.attention.at[0, head, chunk])

            substitute(system, refs.per_row.at[:, _AT.beta], solution, transposed=True)
            pm.commit()
            pm.when(2 * (pair + 1) < repeats)(lambda: fetch_factors(pair + 1))
            for half in (0, 1):
                head, is_own = head_of(pair, half)

                @pm.when(is_own)
                def _(half=half, head=head):
                    for n in pieces:
                        pm.copy_out(solution.at[half, n], refs.solve.at[n, head, chunk])

            pm.wait_for_copies_out(0, wait_read_only=True)

        jax.lax.fori_loop(0, (repeats + 1) // 2, of_pair, None)


def products(
    q: jax.Array,
    k: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    chunks: Chunks,
    *,
    scale: float,
    use_qk_l2norm: bool,
    pieces: int,
) -> dict[str, jax.Array]:
    """Launches the kernel, and the one before it. Returns what states_mosaic.py reads.

    That is `solve` and `attention` as in states.py, but the squares of `solve` are transposed, `decay`, and `scales` [value
    heads, chunks, 3, tokens], of which the first is negative.
    """
    (_, key_heads, key_dim), value_heads, number = k.shape, g.shape[1], chunks.seq_idx.shape[0]
    factors, decay = decays(g, beta, chunks)
    given = dict(cu_chunk_seqlens=chunks.cu_chunk_seqlens, q=q, k=k, factors=factors)
    array = jax.ShapeDtypeStruct
    outputs = dict(
        solve=array((pieces, value_heads, number, *_SHAPE), jnp.bfloat16),
        attention=array((1, value_heads, number, *_SHAPE), jnp.bfloat16),
        scales=array((value_heads, number, 3, SIZE), jnp.float32),
    )
    tiles = key_dim // SIZE
    tokens = dict.fromkeys(("k", "q"), (tiles, *_SHAPE))
    # The systems take the place of the tokens, and the solutions that of the systems.
    memory = *pm.views_of_tokens(tokens, k.dtype), pm.tiled(2, *_SHAPE, dtype=jnp.float32)
    repeats = value_heads // key_heads
    scratch = dict(
        memory=pm.union(*memory, pm.tiled(2, pieces, *_SHAPE, dtype=jnp.bfloat16)),
        attention_tile=pm.tiled(2, *_SHAPE, dtype=jnp.bfloat16),
        per_row=pm.shared((2, len(_AT), SIZE), jnp.float32),
        per_column=pm.shared((2, 2, SIZE), jnp.float32),
        norms=pm.shared((SIZE,), jnp.float32),
        kinds=pm.shared((2, 3, SIZE), jnp.float32),
        full=pm.Barrier(num_arrivals=2 * tiles),
        factors_full=pm.Barrier(num_arrivals=2 * (1 + repeats % 2)),
    )
    results = pm.kernel(
        functools.partial(kernel, [*given, *outputs, *scratch], scale=scale, use_qk_l2norm=use_qk_l2norm),
        out_type=tuple(outputs.values()),
        grid=(number, key_heads),
        grid_names=("chunk", "key_head"),
        scratch_types=list(scratch.values()),
        compiler_params=pm.fast_math(),
        kernel_name="gated_delta_rule_prefill_products",
    )(*given.values())
    return dict(zip(outputs, results, strict=True)) | dict(decay=decay)
