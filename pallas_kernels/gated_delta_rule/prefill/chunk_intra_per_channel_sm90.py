"""The stages within a chunk on Hopper GPUs, for a decay per key channel: decayed Gram matrices, and the inverse for WY.

It computes the results of `products_per_channel` in chunk_intra.py and of solve_tril.py. A CTA has one chunk and two value
heads, one after the other, and solves both of their systems at once. Keys come in tiles of 64, and log decays in tiles of
32.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import hopper as hp
from pallas_kernels._dot import as_terms
from pallas_kernels._pallas_triton import LOG2_E
from pallas_kernels.chunks import Chunks
from pallas_kernels.gated_delta_rule._arguments import Options, Tokens
from pallas_kernels.gated_delta_rule.prefill.chunk_intra import MAX_EXPONENT, decay_spans
from pallas_kernels.gated_delta_rule.prefill.solve_tril_sm90 import SIZE, solve_tril
from pallas_kernels.gated_delta_rule.xla import L2_EPSILON
from pallas_kernels.hopper.partial_tiles import keep_rows

_SHAPE = SIZE, SIZE
KEYS = 64  # the keys of a tile, whose rows have as many bytes as tensor cores can swizzle
DECAYS = 32  # the keys of a tile of log decays, which are float32
BLOCK = 16  # tokens of a block that is decayed from its middle
_LEVELS = 2  # a chunk's halves, and their halves: keys are decayed to the cut between two of them
_BEFORE, _AFTER = _LEVELS + 1, _LEVELS + 2  # the spans from the chunk's start to each token, and from it to the end
_TERMS = 2  # bfloat16 terms of a float32 log decay in sums


class _Cta:
    """The work of a CTA: one chunk and two value heads, one after the other."""

    def __init__(self, refs: Any, options: Options) -> None:
        self.refs, self.options = refs, options
        self.token_rows, self.token_tiles = refs.tokens
        self.decay_rows, self.decay_tiles, self.decay_terms = refs.log_decays
        self.operands, self.system, self.solution = refs.systems
        self.pair, self.chunk = hp.axis_index("pair"), hp.axis_index("chunk")
        self.heads, self.key_dim = refs.g.shape[1], refs.k.shape[2]
        self.tiles, self.tiles_of_decays = range(self.key_dim // KEYS), range(self.key_dim // DECAYS)
        self.start, self.end = refs.cu_chunk_seqlens[self.chunk], refs.cu_chunk_seqlens[self.chunk + 1]
        self.row, self.nothing = hp.rows(_SHAPE).astype(jnp.float32), hp.zeros(_SHAPE, jnp.float32)
        # Less than `BLOCK` for tokens of one block.
        self.apart = (hp.rows(_SHAPE) & -BLOCK) ^ (hp.columns(_SHAPE) & -BLOCK)

    def run(self) -> None:
        """Compute the products of both heads, and then solve both of their systems."""
        refs = self.refs
        self.fetch(0)
        self.fetch_span(_BEFORE)
        refs.token[...] = jnp.max(self.row, axis=1)
        jax.lax.fori_loop(0, 2, lambda half, _: _Head(self, half).run(), None)
        hp.commit_smem()
        solve_tril(self.system, refs.betas, self.solution)
        hp.commit_smem()
        for half in (0, 1):
            head, is_own = self.head_of(half)

            @hp.when(is_own)
            def _(half=half, head=head):
                for n in range(refs.solve.shape[0]):
                    hp.copy_smem_to_gmem(self.solution.at[half, n], refs.solve.at[n, head, self.chunk])

        hp.wait_smem_to_gmem(0, wait_read_only=True)

    def head_of(self, half: Any) -> tuple[Any, Any]:
        """Return a value head, and whether this half of the pair is the first to have it."""
        index = 2 * self.pair + half
        return jnp.minimum(index, self.heads - 1), index < self.heads

    def fetch(self, half: int) -> None:
        """Start the copies of a head's inputs to SMEM."""
        refs, (head, _) = self.refs, self.head_of(half)
        key_head = jax.lax.div(head, jnp.int32(self.heads // refs.k.shape[1]))
        here = hp.ds(self.start, SIZE)
        for n in self.tiles:
            for name in ("k", "q"):
                source = getattr(refs, name).at[here, key_head, _keys(n)]
                hp.copy_gmem_to_smem(source, self.token_rows[name].at[n], refs.full)
        for n in self.tiles_of_decays:
            source = refs.g.at[here, head, hp.ds(n * DECAYS, DECAYS)]
            hp.copy_gmem_to_smem(source, self.decay_rows.at[n], refs.full)
        hp.copy_gmem_to_smem(refs.beta.at[head, self.chunk], refs.betas.at[half], refs.full)

    def fetch_span(self, span: Any) -> None:
        """Copy the matrix whose ones are the tokens to sum over to SMEM, over the last span's matrix."""
        hp.copy_gmem_to_smem(self.refs.spans.at[span], self.refs.square, self.refs.span_full)

    def wide(self, name: str, n: Any) -> jax.Array:
        """Return tile n of the keys or queries, in float32."""
        return hp.load_tile(self.token_tiles[name].at[n]).astype(jnp.float32)

    def cut_log_decays(self, values: jax.Array) -> None:
        """Store log decays [tokens, keys] as bfloat16 terms over the float32 ones."""
        terms = as_terms(values, _TERMS)
        hp.commit_smem()  # no warp still reads the float32 log decays
        for n, term in enumerate(terms):
            self.decay_terms[n] = term
        hp.commit_smem()

    def sums(self, keys: Any, count: int) -> jax.Array:
        """Return the sums of log decays over spans of tokens, float32 [tokens, count], for a slice of `count` keys."""
        pairs = [(self.refs.square, self.decay_terms.at[n, :, keys]) for n in range(_TERMS)]
        return hp.multiply_all((SIZE, count), [pairs])[0]

    def decays_over_span(self, *, then_fetch: int) -> list[jax.Array]:
        """Wait for the span that is on its way, and return the decays over it, for each tile. Fetch the next span."""
        hp.barrier_wait(self.refs.span_full)
        exponents = self.sums(hp.ds(0, self.key_dim), self.key_dim)
        hp.commit_smem()  # no warp still multiplies by the last span
        self.fetch_span(then_fetch)
        return [jnp.exp2(exponents[:, n * KEYS : (n + 1) * KEYS]) for n in self.tiles]


class _Head:
    """The work of a CTA for one of its value heads, the first or the second half of the pair."""

    def __init__(self, cta: _Cta, half: Any) -> None:
        self.cta, self.refs, self.half, self.operands = cta, cta.refs, half, cta.operands
        self.head, self.is_stored = cta.head_of(half)

    def run(self) -> None:
        """Store the head's decayed keys and queries, and its decayed Gram matrices."""
        cta, refs = self.cta, self.refs
        hp.barrier_wait(refs.full)

        @hp.when(cta.end - cta.start < SIZE)
        def _():
            for ref in (cta.token_tiles["k"], cta.token_tiles["q"], cta.decay_tiles):
                hp.loop(0, ref.shape[0])(lambda n, ref=ref: keep_rows(ref.at[n], cta.end - cta.start))

            hp.commit_smem()

        # Norms come first, with the products of each token's query and its own key, and then the decay over the chunk.
        norms, qk = self.find_norms()
        refs.norms[...] = norms["k"]
        log_decays = [hp.load_tile(cta.decay_tiles.at[n]) for n in cta.tiles_of_decays]
        log_decays = LOG2_E * jnp.concatenate(log_decays, axis=1)
        refs.total[self.half] = jnp.exp2(jnp.sum(log_decays, axis=0))
        cta.cut_log_decays(log_decays)
        self.store_decayed(norms)
        self.store_products(norms, qk, *self.decayed_products())
        hp.when(self.half == 0)(lambda: cta.fetch_span(_BEFORE))

    def find_norms(self) -> tuple[dict[str, jax.Array], jax.Array]:
        """Return the factors that normalise keys and queries, by name, and the product of each query with its own key."""
        cta, options = self.cta, self.cta.options

        def of_tile(n, sums):
            k, q = cta.wide("k", n), cta.wide("q", n)
            return [x + jnp.sum(y, axis=1) for x, y in zip(sums, (k * k, q * q, q * k), strict=True)]

        kk, qq, qk = jax.lax.fori_loop(0, len(cta.tiles), of_tile, [hp.zeros_per_row(SIZE, jnp.float32)] * 3)
        if options.use_qk_l2norm:
            k, q = jax.lax.rsqrt(kk + L2_EPSILON), jax.lax.rsqrt(qq + L2_EPSILON)
        else:
            k = q = hp.zeros_per_row(SIZE, jnp.float32) + 1.0
        return dict(k=k, q=options.scale * q), qk

    def store_decayed(self, norms: dict[str, jax.Array]) -> None:
        """Store keys and queries decayed from the chunk's start, and keys decayed to its end, for the next kernel."""
        cta = self.cta

        def put(name, of, decay, n, operand):
            """Send a tile of decayed keys or queries, normalised, to the array that the next kernel reads."""
            tile = self.operands.at[self.half, operand]
            hp.wait_smem_to_gmem(1, wait_read_only=True)  # the copy before the last one has left its SMEM
            tile[...] = (decay * (cta.wide(of, n) * hp.along_rows(norms[of], KEYS))).astype(jnp.bfloat16)
            hp.commit_smem()
            target = getattr(self.refs, name).at[0, self.head, cta.chunk, :, _keys(n)]
            hp.when(self.is_stored)(lambda: hp.copy_smem_to_gmem(tile, target))

        for n, decay in enumerate(cta.decays_over_span(then_fetch=_AFTER)):
            put("k_before", "k", decay, n, 0)
            put("q_before", "q", decay, n, 1)
        for n, decay in enumerate(cta.decays_over_span(then_fetch=0)):
            put("k_after", "k", decay, n, n)
        hp.wait_smem_to_gmem(0, wait_read_only=True)

    def decayed_products(self) -> list[jax.Array]:
        """Return the decayed products of keys, and of queries, with earlier keys, without their norms."""
        cta = self.cta
        # Blocks, the last level, are decayed from their middles, forwards and backwards, where exponents are bounded.
        terms = [hp.load_tile(cta.decay_terms.at[n]).astype(jnp.float32) for n in range(_TERMS)]
        cta.cut_log_decays(jnp.maximum(sum(terms[1:], terms[0]), -MAX_EXPONENT / (BLOCK // 2)))
        found = jax.lax.fori_loop(0, _LEVELS, self.add_level, [cta.nothing, cta.nothing])
        return self.add_level(_LEVELS, found, is_last=True)

    def add_level(self, level: Any, found: list[jax.Array], is_last: bool = False) -> list[jax.Array]:
        """Multiply the tokens of one level, and return `found` with their products."""
        cta, tiles = self.cta, len(self.cta.tiles)

        def of_tile(n, total):
            # One tile at a time: the exponents of all of them would not fit into the registers.
            hp.when(n == 0)(lambda: hp.barrier_wait(self.refs.span_full))
            fetch_next = lambda: hp.when((n == tiles - 1) & (not is_last))(lambda: cta.fetch_span(level + 1))
            return [x + y for x, y in zip(total, self.products(n, is_last, fetch_next), strict=True)]

        both = jax.lax.fori_loop(0, tiles, of_tile, [cta.nothing, cta.nothing])
        low, high = (jax.lax.shift_right_logical(jnp.int32(n * BLOCK), jnp.int32(level)) & -BLOCK for n in (2, 4))
        is_here = (cta.apart >= low) & (cta.apart < high)
        return [jnp.where(is_here, new, old) for new, old in zip(both, found, strict=True)]

    def products(self, n: Any, backwards: bool, fetch_next: Callable[[], None]) -> list[jax.Array]:
        """Return the products of keys, and of queries, with earlier keys, over tile n of the keys, decayed over a span.

        Earlier keys are decayed like the later ones, or backwards. `fetch_next` fetches the next level's span.
        """
        cta = self.cta
        exponent = cta.sums(_keys(n), KEYS)
        hp.commit_smem()  # no warp still multiplies by the last span or operands
        fetch_next()
        k, decay = cta.wide("k", n), jnp.exp2(exponent)
        later = [(decay * x).astype(jnp.bfloat16) for x in (k, cta.wide("q", n))]
        operand = self.operands.at[self.half, n]
        operand[...] = (jnp.exp2(-exponent) * k).astype(jnp.bfloat16) if backwards else later[0]
        hp.commit_smem()
        return hp.multiply_all(_SHAPE, [[(lambda x=x: x, operand.T)] for x in later])

    def store_products(self, norms: dict[str, jax.Array], qk: jax.Array, keys: jax.Array, queries: jax.Array) -> None:
        """Store the products with their norms: queries' products for the next kernel, and keys' products as the system."""
        cta, refs, half = self.cta, self.refs, self.half
        hp.commit_smem()
        # The compiler would keep the columns' indices in registers for the whole kernel, so SMEM has them.
        later = cta.row - hp.along_columns(hp.load_per_column(refs.token), SIZE)
        queries = jnp.where(later > 0, queries, jnp.where(later == 0, hp.along_rows(qk, SIZE), cta.nothing))
        of_columns = hp.along_columns(hp.load_per_column(refs.norms), SIZE)
        beta = hp.load_per_row(refs.betas.at[half])
        refs.square[...] = (queries * (hp.along_rows(norms["q"], SIZE) * of_columns)).astype(jnp.bfloat16)
        cta.system[half] = -(keys * (hp.along_rows(beta * norms["k"], SIZE) * of_columns))
        hp.commit_smem()
        hp.when(half == 0)(lambda: cta.fetch(1))

        @hp.when(self.is_stored)
        def _():
            hp.copy_smem_to_gmem(refs.square, refs.attention.at[0, self.head, cta.chunk])
            hp.copy_smem_to_gmem(refs.total.at[half], refs.decay.at[self.head, cta.chunk])

        hp.wait_smem_to_gmem(0, wait_read_only=True)


def _keys(n: Any) -> Any:
    """Return the slice of the n-th tile of keys."""
    return hp.ds(n * KEYS, KEYS)


def kernel(refs: Any, *, options: Options) -> None:
    """Handle one chunk, if it has tokens, and two value heads."""
    cta = _Cta(refs, options)
    hp.when(cta.end > cta.start)(cta.run)


def of_chunks(beta: jax.Array, chunks: Chunks) -> jax.Array:
    """Return betas as [heads, chunks, tokens], 0 for rows of the tile without a token."""
    first, last = chunks.cu_chunk_seqlens[:-1, None], chunks.cu_chunk_seqlens[1:, None]
    token = first + jnp.arange(SIZE, dtype=jnp.int32)[None]
    exists = (token < last)[:, :, None]
    return jnp.where(exists, beta[jnp.minimum(token, beta.shape[0] - 1)], 0.0).transpose(2, 0, 1)


def products_per_channel(tokens: Tokens, chunks: Chunks, *, options: Options) -> dict[str, jax.Array]:
    """Launch the kernel. Return inputs of chunk_states.py: solve, attention, q_before, k_before, k_after and decay."""
    q, k, _, g, beta = tokens
    (_, _, key_dim), heads, num_chunks = k.shape, g.shape[1], chunks.seq_idx.shape[0]
    given = dict(cu_chunk_seqlens=chunks.cu_chunk_seqlens, q=q, k=k, g=g, beta=of_chunks(beta, chunks))
    given |= dict(spans=decay_spans(SIZE, BLOCK))
    array, of_chunk = jax.ShapeDtypeStruct, (heads, num_chunks)
    square, keys = array((1, *of_chunk, *_SHAPE), jnp.bfloat16), array((1, *of_chunk, SIZE, key_dim), jnp.bfloat16)
    outputs = dict(solve=square, attention=square, q_before=keys, k_before=keys, k_after=keys)
    outputs |= dict(decay=array((*of_chunk, key_dim), jnp.float32))
    tiles, decay_tiles, decay_bytes = key_dim // KEYS, key_dim // DECAYS, 2 * DECAYS
    terms_of_decays = hp.tiled(_TERMS, SIZE, key_dim, dtype=jnp.bfloat16, swizzle=decay_bytes)
    scratch: dict[str, Any] = dict(
        tokens=hp.RefUnion(*hp.views_of_tokens(dict.fromkeys("kq", (tiles, SIZE, KEYS)), k.dtype)),
        # Log decays are replaced by their terms.
        log_decays=hp.RefUnion(*hp.views_of_tokens((decay_tiles, SIZE, DECAYS), jnp.float32), terms_of_decays),
        # Operands, systems and solutions share the same bytes, one after the other.
        systems=hp.RefUnion(
            hp.tiled(2, 2, SIZE, KEYS, dtype=jnp.bfloat16),
            hp.tiled(2, *_SHAPE, dtype=jnp.float32),
            hp.tiled(2, 1, *_SHAPE, dtype=jnp.bfloat16),
        ),
        # First spans of tokens, in tiles as wide as the tiles of the log decays' terms, and then the products of queries.
        square=hp.tiled(*_SHAPE, dtype=jnp.bfloat16, swizzle=decay_bytes),
        betas=hp.SMEM((2, SIZE), jnp.float32),
        norms=hp.SMEM((SIZE,), jnp.float32),
        token=hp.SMEM((SIZE,), jnp.float32),
        total=hp.SMEM((2, key_dim), jnp.float32),
        full=hp.Barrier(num_arrivals=2 * tiles + decay_tiles + 1),
        span_full=hp.Barrier(num_arrivals=1),
    )
    return hp.launch(
        functools.partial(kernel, options=options),
        name="gated_delta_rule_prefill_products",
        grid=dict(chunk=num_chunks, pair=-(-heads // 2)),
        inputs=given,
        outputs=outputs,
        scratch=scratch,
        is_fast=True,
    )
