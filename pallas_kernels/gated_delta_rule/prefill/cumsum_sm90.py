"""Running sums of a chunk's log decays on Hopper GPUs, and factors from them: a token of one of two heads per thread.

Mosaic GPU does not lower a sum over the tokens before each token, so single threads compute it by shuffles.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import hopper as hp
from pallas_kernels._pallas_triton import LOG2_E
from pallas_kernels._warpgroup import LANES

SIZE = 64  # the tokens of a chunk
_STEPS = 1, 2, 4, 8, 16  # distances of the lanes whose sums are added, one after the other


class Factors(NamedTuple):
    """The vectors of a chunk and value head, one value per token, in the order in which `sum_log_decays` writes them.

    Attributes:
        coarse: The running sums of the log decays' hi terms. See `sums_on_scaled_grid` in chunk_intra.py.
        fine: The running sums of their lo terms, in log2.
        before: The log2 of the decay from the start of the chunk to each token.
        after: The log2 of the decay from each token to the end of the chunk.
        total: The log2 of the decay over the chunk, the same for all tokens.
        beta: The correction strengths, 0 for rows of the tile without a token.
    """

    coarse: Any = 0
    fine: Any = 1
    before: Any = 2
    after: Any = 3
    total: Any = 4
    beta: Any = 5


def load_gates(g: Any, beta: Any, start: Any, count: Any, heads: Sequence[Any]) -> tuple[jax.Array, jax.Array]:
    """Load the log decays and correction strengths of `count` tokens from `start` on for two heads, by one warpgroup.

    Both arrays are float32 [tokens, heads], in GMEM. The results are float32 [2 * 64] in the layout `spread`, 0 for rows of
    the tile without a token.
    """

    def body(g: Any, beta: Any, start: Any, count: Any, head: Any, other_head: Any) -> Any:
        thread = hp.thread_index_again()
        half, token = _half_and_token(thread)
        is_live = token < count
        column = hp.select(half == 0, head, other_head)

        def load(ref: Any) -> list[Any]:
            address = hp.long_row_address(ref, start + token, ref.shape[1], column)
            return hp.strided([hp.bitcast(hp.load_if(is_live, address, 32), jnp.float32)])

        return load(g), load(beta)

    loaded = [(2 * SIZE, jnp.float32)] * 2
    log_decays, strengths = hp.inline(body, (g, ()), (beta, ()), start, count, *heads, results=loaded)
    return log_decays, strengths


def sum_log_decays(log_decays: jax.Array, strengths: jax.Array, per_row: Any, per_column: Any, sums: Any) -> None:
    """Store the `Factors` of a chunk for two heads, by one warpgroup, whose warps no longer read the memory's old values.

    Args:
        log_decays: The first result of `load_gates`.
        strengths: The second result of `load_gates`.
        per_row: Receives the factors. float32 [2, factors, 64], in SMEM.
        per_column: Receives the first two factors once more. float32 [2, 2, 64], in SMEM.
        sums: Receives sums of warps, float32 [3, 4], in SMEM.
    """

    def body(log_decays: Any, strengths: Any, per_row: Any, per_column: Any, sums: Any) -> None:
        thread = hp.thread_index_again()
        half, token = _half_and_token(thread)
        lane, warp = hp.lane_and_warp(thread)
        (x,), (strength,) = hp.elements(log_decays), hp.elements(strengths)
        nothing = hp.f32(0.0)

        def both_warps(kind: int, value: Any, is_source: Any) -> list[Any]:
            """Return a value of the first and of the second warp of this thread's head."""
            with hp.predicated(is_source):
                sums[kind, warp] = value
            hp.warpgroup_barrier()
            warps = [half * 2 + n for n in (0, 1)]
            return [sums[kind, index] for index in warps]

        def running(kind: int, x: Any) -> tuple[Any, Any]:
            """Return the sum of the values up to this token, and the sum of all."""
            for distance in _STEPS:
                has_earlier = lane >= distance
                x = x + hp.select(has_earlier, hp.shfl_up(x, distance), nothing)
            first, second = both_warps(kind, x, lane == LANES - 1)
            in_second = warp & 1 == 1
            return x + hp.select(in_second, first, nothing), second + first

        total = hp.sum_over_lanes(x, _STEPS)
        magic = hp.add(*both_warps(0, total, lane == 0)) * -4.0
        rounded = x + magic - magic
        coarse, coarse_total = running(1, rounded)
        fine, fine_total = running(2, x - rounded)

        def log2_of(a: Any, b: Any) -> Any:
            return hp.minimum(a + b, nothing) * LOG2_E

        rest = [total - running for total, running in ((coarse_total, coarse), (fine_total, fine))]
        found = Factors(
            coarse=coarse,
            fine=fine * LOG2_E,
            before=log2_of(coarse, fine),
            after=log2_of(*rest),
            total=log2_of(coarse_total, fine_total),
            beta=strength,
        )
        for n, value in enumerate(found):
            per_row[half, n, token] = value
        for n, value in enumerate(found[:2]):
            per_column[half, n, token] = value
        hp.warpgroup_barrier()

    hp.inline(body, log_decays, strengths, *((x, ()) for x in (per_row, per_column, sums)))


def scale_tokens(per_row: Any, norms: Any, scales: Any) -> None:
    """Store the factors by which the recurrence scales keys, queries and states, for two heads, by one warpgroup.

    All arguments are in SMEM.

    Args:
        per_row: The `Factors`. float32 [2, factors, 64].
        norms: The factors of keys and of queries. float32 [2, 64].
        scales: Receives the decays up to each token times minus the key's factor, the same times the query's factor, the
            decays from each token to the end times the key's factor, and the decay over the chunk. float32 [2, 4, 64].
    """

    def body(per_row: Any, norms: Any, scales: Any) -> None:
        half, token = _half_and_token(hp.thread_index_again())
        of_key, of_query = (norms[n, token] for n in (0, 1))
        at = Factors()
        loaded = [per_row[half, n, token] for n in (at.before, at.after, at.total)]
        before, after, total = (hp.approximate("ex2", x) for x in loaded)
        found = -(before * of_key), before * of_query, after * of_key, total
        for n, value in enumerate(found):
            scales[half, n, token] = value

    hp.inline(body, *((x, ()) for x in (per_row, norms, scales)))


def _half_and_token(thread: Any) -> tuple[Any, Any]:
    """Return a thread's head, 0 or 1, and its token."""
    return thread >> 6, thread & (SIZE - 1)
