"""Decayed Gram matrices of a chunk on Hopper GPUs: K K^T for the system, and Q K^T for the outputs, by single threads."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import hopper as hp
from pallas_kernels._pallas_triton import LOG2_E
from pallas_kernels._warpgroup import LANES, THREADS
from pallas_kernels.gated_delta_rule.prefill.cumsum_sm90 import SIZE, Factors
from pallas_kernels.gated_delta_rule.xla import L2_EPSILON

_GROUP = 8  # columns, of which a thread has two: 16 bytes of 16-bit elements
_ROWS = 8  # rows over which the swizzle repeats
_WARPS = THREADS // LANES
_OF_WARP = SIZE // _WARPS  # rows
_ROW_GROUPS = _OF_WARP // _ROWS  # groups of a warp's rows, in each of which a thread has one row
_GROUPS = _OF_WARP // _GROUP  # groups of columns with the same tokens as a warp's rows
_AT = Factors()


def find_norms(products: jax.Array | None, norms: Any, factor: float) -> None:
    """Store the factors that normalise keys or queries, by one warpgroup.

    Args:
        products: Their products with themselves, float32 [64, 64], of which only the diagonal is used. None if tokens are
            not normalised.
        norms: Receives the factors, times `factor`. float32 [64], in SMEM. Other threads see them after the warpgroup's
            next barrier.
        factor: A factor of all results.
    """

    def body(*operands: Any) -> None:
        *products, norms = operands
        lane, warp = hp.lane_and_warp(hp.thread_index_again())
        row, pair = lane >> 2, lane & 3
        factors = [hp.f32(factor)] * _ROW_GROUPS
        if products:
            for n, total in enumerate(_diagonal(products[0], row, warp)):
                norm = hp.approximate("rsqrt", total + L2_EPSILON)
                factors[n] = norm * factors[n]
        has_diagonal = pair == row >> 1
        with hp.predicated(has_diagonal):
            for index, found in zip(_rows(warp, row)[1], factors, strict=True):
                norms[index] = found

    hp.inline(body, *([] if products is None else [products]), (norms, ()))


def _rows(warp: Any, in_group: Any) -> tuple[list[Any], list[Any]]:
    """Return a thread's two 8-row groups of the tile, and its row in each, the one with index `in_group` of the group."""
    groups = [warp * _ROW_GROUPS + n for n in range(_ROW_GROUPS)]
    return groups, [group * _ROWS + in_group for group in groups]


def _diagonal(products: Any, row: Any, warp: Any) -> list[Any]:
    """Return the diagonal element in each of a thread's rows. Only a thread with `lane % 4 == lane // 8` has it.

    Of its warp's 16 rows, a thread has rows `row` and `row + 8`, and of every eight columns two.
    """
    held = [hp.unpack(x) for x in products]
    is_odd = row & 1 == 1
    found = []
    for n in range(_ROW_GROUPS):
        # Each warp has its own 16 columns of the diagonal. Which of its registers they are in depends on the warp.
        pairs = [held[_ROW_GROUPS * (_GROUPS * of_warp + n) + n] for of_warp in range(_WARPS)]
        found.append(_of_warp([hp.select(is_odd, second, first) for first, second in pairs], warp))
    return found


def _of_warp(values: Sequence[Any], warp: Any) -> Any:
    """Select the value of this thread's warp, of one for each warp."""
    is_odd, is_late = (warp & bit != 0 for bit in (1, 2))
    first, second = (hp.select(is_odd, values[n + 1], values[n]) for n in (0, 2))
    return hp.select(is_late, second, first)


def decayed_gram(
    keys: jax.Array, queries: jax.Array, per_row: Any, per_column: Any, norms: Any, system: Any, attention: Any
) -> None:
    """Store the decayed Gram matrices of a chunk and value head, by one warpgroup.

    The two products are in registers, and everything else is in SMEM. A warp has 16 rows. The decay from a token
    before these is a product of two: the decay to the token of the warp's first row, which both rows of a thread need, and
    the decay from there to the row's own token. Neither has a positive exponent. Between the tokens of these rows, a decay
    is computed at once. A column whose token comes after the row's is 0 in `attention`, and is not used in `system`.

    Args:
        keys: Products of keys. float32 [64, 64].
        queries: Products of queries and keys. float32 [64, 64].
        per_row: The `Factors`. float32 [factors, 64].
        per_column: The first two factors once more. float32 [2, 64].
        norms: The factors that normalise keys, and queries. float32 [2, 64].
        system: Receives the system of `solve_tril`. float32 [64, 64], `tiled`.
        attention: Receives tril(Q K^T . D), the left operand of the pseudo-values. bfloat16 [64, 64], `tiled`.
    """

    def body(keys: Any, queries: Any, *refs: Any) -> None:
        thread = _Thread(keys, queries, *refs)
        for warp in range(_WARPS - 1):
            groups = range(_GROUPS * warp, _GROUPS * (warp + 1))
            with hp.predicated(thread.warp > warp):
                for n in groups:
                    thread.store_earlier(n)
            with hp.predicated(thread.warp < warp + 1):
                for n in groups:
                    thread.clear_later(n + _GROUPS)
        # The warp's index is computed again, because the compiler would spill it until here.
        _, warp = hp.lane_and_warp(hp.thread_index_again())
        for group in range(_GROUPS):
            thread.store_own(group, warp)

    vectors = [(x, ()) for x in (per_row, per_column, norms)]
    tiles = (system, hp.tiling(jnp.float32)), (attention, hp.tiling(jnp.bfloat16))
    hp.inline(body, keys, queries, *vectors, *tiles)


class _Thread:
    """A thread of `decayed_gram`. It has two rows, and two columns of every group of eight.

    Attributes:
        warp: The index of its warp.
    """

    def __init__(
        self, keys: Any, queries: Any, per_row: Any, per_column: Any, norms: Any, system: Any, attention: Any
    ) -> None:
        """Load the decays and factors of the thread's rows."""
        self._per_column, self._norms, self._system, self._attention = per_column, norms, system, attention
        lane, self.warp = hp.lane_and_warp(hp.thread_index_again())
        self._in_row_group, pair = lane >> 2, lane & 3
        self._row_groups, rows = _rows(self.warp, self._in_row_group)
        of_row = lambda ref, n: [ref[n, row] for row in rows]
        coarse, fine, beta = (of_row(per_row, n) for n in (_AT.coarse, _AT.fine, _AT.beta))
        of_keys, of_queries = (of_row(norms, n) for n in (0, 1))
        of_keys = [-(x * y) for x, y in zip(of_keys, beta, strict=True)]
        # For each row, the sums of log decays, and the factors of keys and of queries. These factors are decayed for
        # earlier columns, from the token of the warp's first row on.
        self._sums, self._factors = [*zip(coarse, fine, strict=True)], [*zip(of_keys, of_queries, strict=True)]
        first = self.warp * _OF_WARP
        self._start = [per_row[n, first] for n in (_AT.coarse, _AT.fine)]
        decays = [_decay(self._start, to) for to in self._sums]
        self._decayed = [[x * y for x in each] for each, y in zip(self._factors, decays, strict=True)]
        self._products = [[*x] for x in (keys, queries)]
        # The offsets of this thread's first column in a group of eight, and in the rows of both tiles for the first group.
        # The swizzle moves a group by changing bits of its offset.
        self._in_group = pair * 2
        half, in_half = pair >> 1, (pair & 1) * 2
        self._in_system = hp.swizzled(half, self._in_row_group, _GROUP // 2) + in_half
        self._in_attention = self._in_row_group * _GROUP + self._in_group

    def store_earlier(self, n: int) -> None:
        """Store the n-th group of columns, whose tokens come before the tokens of the warp's rows."""
        decays = [_decay(to, self._start) * norm for to, norm in self._columns(hp.i32(n))]
        for row_group in range(_ROW_GROUPS):
            products = [x[_ROW_GROUPS * n + row_group] for x in self._products]
            self._store(hp.i32(n), row_group, *_decayed(products, decays, self._decayed[row_group]))

    def store_own(self, group: int, warp: Any) -> None:
        """Store one of the groups of columns with the same tokens as the warp's rows."""
        n = warp * _GROUPS + group
        columns = self._columns(n)
        for row_group in range(_ROW_GROUPS):
            if row_group < group:
                self._clear(n, row_group)
                continue
            at = [_ROW_GROUPS * (_GROUPS * m + group) + row_group for m in range(_WARPS)]
            of_warps = [[x[m] for m in at] for x in self._products]
            products = [_of_warp(each, warp) for each in of_warps]
            decays = [_decay(to, self._sums[row_group]) * norm for to, norm in columns]
            of_system, of_attention = _decayed(products, decays, self._factors[row_group])
            if row_group == group:
                indices = [self._in_group + m for m in range(2)]
                is_later = [x > self._in_row_group for x in indices]
                nothing = hp.f32(0.0)
                of_attention = [hp.select(x, nothing, y) for x, y in zip(is_later, of_attention, strict=True)]
            self._store(n, row_group, of_system, of_attention)

    def clear_later(self, n: int) -> None:
        """Store zeros for the n-th group of columns, whose tokens come after the tokens of the warp's rows."""
        for row_group in range(_ROW_GROUPS):
            self._clear(hp.i32(n), row_group)

    def _columns(self, n: Any) -> list[tuple[tuple[Any, Any], Any]]:
        """Return, for both columns of the n-th group, the sums of log decays and the factor of the key."""
        first = self._in_group + n * _GROUP
        load = lambda ref, at: hp.load_vector(ref, at, first, count=2)
        arrays = (self._per_column, 0), (self._per_column, 1), (self._norms, 0)
        coarse, fine, norm = (hp.unpack(load(*x)) for x in arrays)
        return [*zip(zip(coarse, fine, strict=True), norm, strict=True)]

    def _clear(self, n: Any, row_group: int) -> None:
        """Store zeros in a row's n-th group of `attention`. Nothing reads `system` there."""
        self._store_attention(n, row_group, [hp.f32(0.0)] * 2)

    def _store(self, n: Any, row_group: int, of_system: Sequence[Any], of_attention: Sequence[Any]) -> None:
        """Store a row's n-th group of both matrices."""
        in_tile = self._in_system ^ ((n & 3) * _GROUP)
        at = [hp.index(x) for x in (self._row_groups[row_group], n >> 2, self._in_row_group, in_tile)]
        hp.store_vector(hp.pack(of_system), self._system, *at)
        self._store_attention(n, row_group, of_attention)

    def _store_attention(self, n: Any, row_group: int, values: Sequence[Any]) -> None:
        """Store a row's n-th group of `attention`."""
        in_tile = self._in_attention ^ (n * _GROUP)
        at = [hp.index(x) for x in (self._row_groups[row_group], hp.i32(0), self._in_row_group, in_tile)]
        hp.store_vector(hp.rounded_pair(values, jnp.bfloat16), self._attention, *at)


def _decayed(products: Sequence[Any], decays: Sequence[Any], factors: Sequence[Any]) -> list[list[Any]]:
    """Return two elements of each Gram matrix, times the columns' decays and the row's factors."""
    return [
        [decay * x * factor for decay, x in zip(decays, hp.unpack(each), strict=True)]
        for each, factor in zip(products, factors, strict=True)
    ]


def _decay(since: Sequence[Any], until: Sequence[Any]) -> Any:
    """Return the decay from one token to another one, given the first two `Factors` of both."""
    coarse, fine = (x - y for x, y in zip(until, since, strict=True))
    return hp.approximate("ex2", hp.fma(coarse, hp.f32(LOG2_E), fine))
