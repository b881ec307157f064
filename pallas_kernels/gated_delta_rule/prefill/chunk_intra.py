"""The first prefill kernel: the decayed Gram matrices of each chunk's keys and queries with its keys, and its decays.

It writes the triangular `system` (L in __init__.py) for the inverse, and `attention`, the products of queries with
keys. With one decay per head it also writes the factors that scale a chunk's keys and queries (`scales`). With a decay
per key channel, products cannot be scaled afterwards, and it writes the decayed keys and queries themselves.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _pallas_triton as pt
from pallas_kernels._dot import Operand, as_terms, dot
from pallas_kernels._pallas_triton import Refs
from pallas_kernels._tiles import as_operand, iota, key_lanes, store_terms
from pallas_kernels.gated_delta_rule._arguments import Options
from pallas_kernels.gated_delta_rule.xla import L2_EPSILON

# Keys in a tile of `products_per_channel`. All keys of a head would not fit into a program's registers.
_MAX_KEYS = 64
# Largest exponent, to base 2, of a decay that is taken backwards. It leaves room for the values that are scaled by it.
MAX_EXPONENT = 112.0


class HeadChunk(NamedTuple):
    """One chunk of one head.

    Attributes:
        head: The head: a key head, which stands for all of its value heads, or a value head.
        chunk: The chunk, which is not empty.
        start: Index of the chunk's first token.
        end: Index after the chunk's last token.
        size: The chunk size.
    """

    head: jax.Array
    chunk: jax.Array
    start: jax.Array
    end: jax.Array
    size: int


def sums_on_scaled_grid(x: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    """Sum log decays (at most 0) along axis 0, up to each and in total, so that differences of sums lose no digits.

    Returns the running sums and the total of two terms of `x`, the coarse term and the rest. The coarse term consists
    of multiples of a unit that no sum exceeds 2^24 times, so its sums and their differences are exact. Adding a large
    value and subtracting it again cuts `x` to such multiples without a conversion to integers, and the unit follows
    the total.

    `x` must have been loaded from memory. The compiler could fuse a product into one of its uses, where it would have
    other bits. ssd's log decays are products, so ssd cuts them on a fixed grid instead.
    """
    magic = -4.0 * jnp.sum(x, axis=0)
    coarse = (x + magic) - magic
    return [(jnp.cumsum(term, axis=0), jnp.sum(term, axis=0)) for term in (coarse, x - coarse)]


def decay_of(*differences: jax.Array) -> jax.Array:
    """Return the decay for a sum of differences of log decays. Rounding may leave that sum above 0: it is clipped."""
    return jnp.exp2(pt.LOG2_E * jnp.minimum(sum(differences[1:], differences[0]), 0.0))


def _products_of_rows(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the product of each row of `x` with the same row of `y`, [rows]."""
    return jnp.sum(x.astype(jnp.float32) * y.astype(jnp.float32), axis=1)


def _norm(squares: jax.Array, options: Options) -> jax.Array:
    """Return the factors that normalise vectors, given the sums of their squares. Without normalisation they are 1."""
    return jax.lax.rsqrt(squares + L2_EPSILON) if options.use_qk_l2norm else jnp.ones(squares.shape, jnp.float32)


def products(refs: Refs, own: HeadChunk, *, options: Options, interpret: bool) -> None:
    """Handle one chunk and key head, with one decay per value head: all value heads of that key head.

    Reads `q`, `k`, `g`, `beta`. Writes `system`, `attention`, `scales`, `decay`.
    """
    key_head, chunk, start, end, size = own
    _, key_heads, key_dim = refs.k.shape
    repeats = refs.beta.shape[1] // key_heads
    lane, later, earlier = iota((size,), 0), iota((size, size), 0), iota((size, size), 1)
    key, key_inside = pt.lanes(0, key_lanes(key_dim), key_dim)
    token = start + lane
    inside = token < end

    def tile(ref):
        mask = inside[:, None] & key_inside[None, :]
        return as_operand(pt.load(ref.at[token[:, None], key_head, key[None, :]], mask=mask, other=0.0))

    # Inputs are multiplied as they are, and the products are scaled afterwards.
    product = functools.partial(dot, contract=(1, 1), interpret=interpret)
    q, k = tile(refs.q), tile(refs.k)
    q_norm = options.scale * _norm(_products_of_rows(q, q), options)
    k_norm = _norm(_products_of_rows(k, k), options)
    keys = jnp.where(earlier < later, product(k, k) * (k_norm[:, None] * k_norm[None, :]), 0.0)
    queries = jnp.where(earlier <= later, product(q, k) * (q_norm[:, None] * k_norm[None, :]), 0.0)

    def of_value_head(n, _):
        head = key_head * repeats + n

        def take(ref):
            return pt.load(ref.at[token, head], mask=inside, other=0.0)

        (coarse, coarse_total), (fine, fine_total) = sums_on_scaled_grid(take(refs.g))
        between = decay_of(coarse[:, None] - coarse[None, :], fine[:, None] - fine[None, :])
        at = head, chunk, lane[:, None], lane[None, :]
        pt.store(refs.system.at[at], between * keys * take(refs.beta)[:, None])
        store_terms(refs.attention, between * queries, *at)
        before, after = decay_of(coarse, fine), decay_of(coarse_total - coarse, fine_total - fine)
        for kind, values in enumerate((before * k_norm, before * q_norm, after * k_norm)):
            pt.store(refs.scales.at[jnp.int32(kind), head, chunk, lane], values)
        refs.decay[head, chunk] = decay_of(coarse_total, fine_total)

    jax.lax.fori_loop(0, repeats, of_value_head, None)


def _halves(size: int, last: int) -> list[int]:
    """Return the lengths of the halves of a chunk, of the halves of its halves, and so on, down to `last` tokens."""
    return [1 << n for n in reversed(range(last.bit_length() - 1, size.bit_length() - 1))]


def decay_spans(size: int, last: int) -> jax.Array:
    """Return the matrices that sum log decays over spans of tokens, bfloat16 [spans, size, size].

    Row i of a matrix has 1 (or -1) for the tokens whose log decays are added to (or subtracted from) the exponent of
    token i. There is one matrix per length of `_halves`, then the matrix for blocks of `last` tokens that are decayed
    from their middles, the matrix for all tokens up to i, and the matrix for all tokens after i.
    """
    row, column = np.arange(size)[:, None], np.arange(size)[None, :]
    halves = [(row // h == column // h) & ((row // h % 2 == 1) == (column <= row)) for h in _halves(size, last)]
    middle = row // last * last + last // 2
    in_block = 1 * ((middle <= column) & (column <= row)) - 1 * ((row < column) & (column < middle))
    return jnp.asarray(np.stack([*halves, in_block, column <= row, column > row]), jnp.bfloat16)


def last_block(decayed_keys: jax.ShapeDtypeStruct) -> int:
    """Return the number of tokens in a block that is decayed from its middle.

    Within such a block a single token's decay counts as no less than 2^-14 if decayed keys are one bfloat16, and as no
    less than 2^-28 otherwise. `decayed_keys` is the array of decayed keys, [terms, ...].
    """
    return 16 if decayed_keys.dtype == jnp.bfloat16 and decayed_keys.shape[0] == 1 else 8


class _Channels:
    """The work of `products_per_channel`, which takes the keys in tiles."""

    def __init__(self, refs: Refs, own: HeadChunk, options: Options, interpret: bool) -> None:
        self.refs, self.options, (self.head, self.chunk, start, end, self.size) = refs, options, own
        _, key_heads, self.key_dim = refs.k.shape
        self.key_head = self.head // (refs.beta.shape[1] // key_heads)
        shape = self.size, self.size
        self.lane, self.row, self.column = iota((self.size,), 0), iota(shape, 0), iota(shape, 1)
        self.token = start + self.lane
        self.live = self.token < end
        self.product = functools.partial(dot, interpret=interpret)
        self.exact, self.count = refs.k.dtype == jnp.bfloat16, refs.k_before.shape[0]
        self.last = last_block(refs.k_before)
        self.levels = len(_halves(self.size, self.last))
        self.tile = min(key_lanes(self.key_dim), _MAX_KEYS)
        self.tiles = key_lanes(self.key_dim) // self.tile

    def run(self) -> None:
        """Compute and store all results."""
        refs, tiles, lane = self.refs, self.tiles, self.lane
        # The squares have a loop of their own, because the other one has no registers to spare.
        vector, square = jnp.zeros((self.size,), jnp.float32), jnp.zeros((self.size, self.size), jnp.float32)
        qq, kk, qk = jax.lax.fori_loop(0, tiles, self.add_squares, [vector] * 3)
        q_norm, k_norm = self.options.scale * _norm(qq, self.options), _norm(kk, self.options)
        keys, queries = jax.lax.fori_loop(0, tiles, self.add_products, [square] * 2)
        queries = jnp.where(self.row == self.column, qk[:, None], queries)
        beta = pt.load(refs.beta.at[self.token, self.head], mask=self.live, other=0.0)
        at = self.head, self.chunk, lane[:, None], lane[None, :]
        pt.store(refs.system.at[at], keys * (beta * k_norm)[:, None] * k_norm[None, :])
        store_terms(refs.attention, queries * q_norm[:, None] * k_norm[None, :], *at)
        jax.lax.fori_loop(0, tiles, lambda n, _: self.store_decayed(n, q_norm, k_norm), None)

    def take(self, n: jax.Array) -> tuple[jax.Array, ...]:
        """Load q, k and log2 decays of tile n. Return them, the tile's key indices, and which of these exist."""
        key, inside = pt.lanes(n, self.tile, self.key_dim)
        mask = self.live[:, None] & inside[None, :]

        def load(ref, head):
            return pt.load(ref.at[self.token[:, None], head, key[None, :]], mask=mask, other=0.0)

        q, k = as_operand(load(self.refs.q, self.key_head)), as_operand(load(self.refs.k, self.key_head))
        return q, k, pt.LOG2_E * load(self.refs.g, self.head), key, inside

    def over_spans(self, g: jax.Array) -> Callable[[jax.Array | int], jax.Array]:
        """Return a function that sums the log decays over the span with a given index, each sum on its own."""
        terms, lane = as_terms(g, 2 if self.exact else 3), self.lane
        load = lambda span: pt.load(self.refs.spans.at[jnp.int32(span), lane[:, None], lane[None, :]])
        return lambda span: self.product(load(span), terms)

    def split(self, x: jax.Array, count: int) -> Operand:
        """Return the operand in `count` terms."""
        return as_terms(x, count) if self.exact else x

    def multiply(self, keys: jax.Array, queries: jax.Array, earlier: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the products of decayed keys with decayed earlier keys, and of decayed queries with them."""
        terms = self.split(earlier, self.count)
        of_keys = self.product(self.split(keys, self.count), terms, contract=(1, 1))
        return of_keys, self.product(self.split(queries, 1), terms[:1] if self.exact else terms, contract=(1, 1))

    def add_squares(self, n: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        """Add the squares of queries and of keys, and the products of each token's query and key, over a tile."""
        q, k, _, _, _ = self.take(n)
        return [x + _products_of_rows(y, z) for x, (y, z) in zip(sums, ((q, q), (k, k), (q, k)), strict=True)]

    def add_products(self, n: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
        """Add the decayed products of keys, and of queries, with earlier keys over a tile."""
        q, k, g, _, _ = self.take(n)
        sums = self.over_spans(jnp.maximum(g, -MAX_EXPONENT / (self.last // 2)))

        def add_level(level, totals):
            decay = jnp.exp2(sums(level))
            decayed = _wide(k) * decay
            # The products of an earlier half's keys with the tokens of the half after it.
            half = self.lane >> (self.size.bit_length() - 2 - level)
            across = jnp.where(half % 2 == 1, half - 1, -1)[:, None] == half[None, :]
            both = self.multiply(decayed, _wide(q) * decay, decayed)
            return [total + jnp.where(across, x, 0.0) for total, x in zip(totals, both, strict=True)]

        exponents = sums(self.levels)
        forwards, backwards = jnp.exp2(exponents), jnp.exp2(-exponents)
        in_block = (self.row // self.last == self.column // self.last) & (self.column < self.row)
        both = self.multiply(_wide(k) * forwards, _wide(q) * forwards, _wide(k) * backwards)
        totals = [total + jnp.where(in_block, x, 0.0) for total, x in zip(totals, both, strict=True)]
        return jax.lax.fori_loop(0, self.levels, add_level, totals)

    def store_decayed(self, n: jax.Array, q_norm: jax.Array, k_norm: jax.Array) -> None:
        """Store a tile of decayed queries and keys, and its decays over the chunk."""
        refs, (q, k, g, key, inside) = self.refs, self.take(n)
        q, k, sums = _wide(q) * q_norm[:, None], _wide(k) * k_norm[:, None], self.over_spans(g)
        before, after = jnp.exp2(sums(self.levels + 1)), jnp.exp2(sums(self.levels + 2))
        at = self.head, self.chunk, self.lane[:, None], key[None, :]
        mask = jnp.broadcast_to(inside[None, :], (self.size, self.tile))
        for ref, values in ((refs.k_before, before * k), (refs.q_before, before * q), (refs.k_after, after * k)):
            store_terms(ref, values, *at, mask=mask)
        pt.store(refs.decay.at[self.head, self.chunk, key], jnp.exp2(jnp.sum(g, axis=0)), mask=inside)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def products_per_channel(refs: Refs, own: HeadChunk, *, options: Options, interpret: bool) -> None:
    """Handle one chunk and value head, with a decay per key channel.

    Such a decay cannot scale a product of keys afterwards: queries and keys are decayed first. The chunk is cut into
    halves, the halves into halves, and so on. To multiply tokens of the later half with tokens of the earlier half, the
    later tokens are decayed from the cut on and the earlier ones up to the cut. No exponent is then positive. The last
    blocks are decayed from their middles, forwards and backwards, where exponents are bounded.

    Reads `q`, `k`, `g`, `beta` and `spans` (see `decay_spans`). Writes `system`, `attention`, `q_before`, `k_before`,
    `k_after` and `decay`.
    """
    _Channels(refs, own, options, interpret).run()
