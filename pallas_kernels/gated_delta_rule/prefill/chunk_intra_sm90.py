"""The stages within a chunk on Hopper GPUs, for decays per head: decayed Gram matrices, and the inverse for WY.

A warpgroup handles one chunk and key head, and all value heads of that key head, two at a time.
"""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import hopper as hp
from pallas_kernels.gated_delta_rule._arguments import Options
from pallas_kernels.gated_delta_rule.prefill.cumsum_sm90 import Factors, load_gates, scale_tokens, sum_log_decays
from pallas_kernels.gated_delta_rule.prefill.gram_sm90 import decayed_gram, find_norms
from pallas_kernels.gated_delta_rule.prefill.solve_tril_sm90 import SIZE, solve_tril
from pallas_kernels.hopper.partial_tiles import keep_rows

_SHAPE = SIZE, SIZE
_AT = Factors()


def load_pair(refs, key_head, pair, bounds):
    """Load the gates of a pair of value heads of a key head, see `load_gates`. If there is one, it is loaded twice."""
    start, end = bounds
    heads = [_head_of(refs, key_head, pair, half)[0] for half in (0, 1)]
    return load_gates(refs.g, refs.beta, start, end - start, heads)


def _head_of(refs, key_head, pair, half):
    """Return a value head of a pair, and whether this half of the pair is the first to have it."""
    repeats = refs.g.shape[1] // refs.k.shape[1]
    index = 2 * pair + half
    return key_head * repeats + jnp.minimum(index, repeats - 1), index < repeats


def make_products(refs, own, chunk, key_head, bounds, gates, options: Options):
    """Handle one chunk and key head, by one warpgroup.

    Args:
        refs: The inputs and outputs by name, see `outputs`.
        own: The warpgroup's SMEM and barriers by name, see `of_warpgroup`.
        chunk: The chunk.
        key_head: The key head.
        bounds: The chunk's first token, and the token after its last one. It has tokens.
        gates: The result of `load_pair` for the first two value heads.
        options: The op's options.
    """
    (k_rows, q_rows), (k, q), system, solution = own.token_rows, own.token_tiles, own.system, own.solution
    terms = range(refs.solve.shape[0])
    tiles, repeats = range(refs.k.shape[2] // SIZE), refs.g.shape[1] // refs.k.shape[1]
    together = 2 - repeats % 2  # value heads of a pair whose vectors are copied at once
    start, end = bounds

    head_of = functools.partial(_head_of, refs, key_head)

    def sum_decays(gates):
        log_decays, strengths = gates
        sum_log_decays(log_decays, strengths, own.per_row, own.per_column, own.sums)

    for tokens, rows in ((refs.k, k_rows), (refs.q, q_rows)):
        for n in tiles:
            source = tokens.at[hp.ds(start, SIZE), key_head, hp.ds(n * SIZE, SIZE)]
            hp.copy_gmem_to_smem(source, rows.at[n], own.full)
    sum_decays(gates)
    hp.barrier_wait(own.full)

    @hp.when(end - start < SIZE)
    def _():
        for tile in (k, q):
            for n in tiles:
                keep_rows(tile.at[n], end - start)
        hp.commit_smem()

    def product(x, y):
        return hp.multiply_all(_SHAPE, [[(x.at[n], y.at[n].T) for n in tiles]])[0]

    keys, queries = product(k, k), product(q, k)
    with_themselves = (keys, product(q, q)) if options.use_qk_l2norm else (None, None)
    for n, factor in enumerate((1.0, options.scale)):
        find_norms(with_themselves[n], own.norms.at[n], factor)
    hp.commit_smem()  # all threads have finished with the tokens, whose bytes the systems share

    def of_pair(pair, _):
        @hp.loop(0, 2)
        def _(half):
            vectors = own.per_row.at[half], own.per_column.at[half], own.norms
            decayed_gram(keys, queries, *vectors, system.at[half], own.attention_tile.at[half])

        scale_tokens(own.per_row, own.norms, own.kinds)
        hp.commit_smem()
        for half in range(0, 2, together):
            head, is_own = head_of(pair, half)

            @hp.when(is_own)
            def _(half=half, head=head):
                target = refs.scales.at[hp.ds(head, together), chunk]
                hp.copy_smem_to_gmem(own.kinds.at[hp.ds(half, together)], target)

        for half in (0, 1):
            head, is_own = head_of(pair, half)

            @hp.when(is_own)
            def _(half=half, head=head):
                hp.copy_smem_to_gmem(own.attention_tile.at[half], refs.attention.at[0, head, chunk])

        solve_tril(system, own.per_row.at[:, _AT.beta], solution)
        hp.commit_smem()
        hp.when(2 * (pair + 1) < repeats)(lambda: sum_decays(load_pair(refs, key_head, pair + 1, bounds)))
        for half in (0, 1):
            head, is_own = head_of(pair, half)

            @hp.when(is_own)
            def _(half=half, head=head):
                for n in terms:
                    hp.copy_smem_to_gmem(solution.at[half, n], refs.solve.at[n, head, chunk])

        hp.wait_smem_to_gmem(0, wait_read_only=True)

    jax.lax.fori_loop(0, (repeats + 1) // 2, of_pair, None)


def outputs(value_heads: int, chunks: int, terms: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Describe the arrays that all calls of `make_products` store together, by name.

    They are `solve` and `attention` as in chunk_states.py, but the matrices of `solve` are transposed, and `scales` [value
    heads, chunks, 4, tokens], of which the first is negative and the last is the decay over the chunk, for each token.
    """
    array = jax.ShapeDtypeStruct
    return dict(
        solve=array((terms, value_heads, chunks, *_SHAPE), jnp.bfloat16),
        attention=array((1, value_heads, chunks, *_SHAPE), jnp.bfloat16),
        scales=array((value_heads, chunks, 4, SIZE), jnp.float32),
    )


def memory(warpgroups: int, dtype: Any) -> list[tuple[Any, ...]]:
    """Describe the SMEM of some warpgroups, as views of the same bytes: see `of_warpgroup`.

    Solutions have two bfloat16 terms.
    """
    rows, tiles = hp.views_of_tokens((warpgroups, 2, 2, *_SHAPE), dtype)
    others = dict(
        attention_tile=hp.tiled(warpgroups, 2, *_SHAPE, dtype=jnp.bfloat16),
        per_row=hp.SMEM((warpgroups, 2, len(_AT), SIZE), jnp.float32),
        per_column=hp.SMEM((warpgroups, 2, 2, SIZE), jnp.float32),
        norms=hp.SMEM((warpgroups, 2, SIZE), jnp.float32),
        sums=hp.SMEM((warpgroups, 3, 4), jnp.float32),
        kinds=hp.SMEM((warpgroups, 2, 4, SIZE), jnp.float32),
    )
    system = hp.tiled(warpgroups, 2, *_SHAPE, dtype=jnp.float32)
    solution = hp.tiled(warpgroups, 2, 2, *_SHAPE, dtype=jnp.bfloat16)
    # Tokens, systems and solutions share the same 32 KiB of each warpgroup, one after the other.
    return [(rows, others), (tiles,), (system,), (solution,)]


def barriers(warpgroups: int, key_dim: int) -> dict[str, Any]:
    """Describe the barriers of some warpgroups."""
    return dict(full=hp.Barrier(num_arrivals=2 * (key_dim // SIZE), num_barriers=warpgroups))


def of_warpgroup(warpgroup: Any, memory: Any, barriers: dict[str, Any]) -> SimpleNamespace:
    """Return a warpgroup's own views of `memory` and `barriers`."""
    (rows, others), (tiles,), (system,), (solution,) = memory
    tokens = lambda view: (view.at[warpgroup, 0], view.at[warpgroup, 1])
    named = {name: ref.at[warpgroup] for name, ref in (others | barriers).items()}
    named |= dict(system=system.at[warpgroup], solution=solution.at[warpgroup])
    return SimpleNamespace(token_rows=tokens(rows), token_tiles=tokens(tiles), **named)
