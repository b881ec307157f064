"""How the XLA implementations of deferred states run rows: one after the other, and each token by token."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import NULL_BLOCK, read_blocks, write_blocks
from pallas_kernels.rows import Rows

Rings = tuple[jax.Array, ...]


def run_rows(
    fold: Callable[..., jax.Array],
    advance: Callable[..., tuple[jax.Array, Rings]],
    rows: Rows,
    length: int,
    out: jax.Array,
    pool: jax.Array,
    rings: Rings,
) -> tuple[jax.Array, jax.Array, Rings]:
    """Runs all rows of an op of deferred states.

    Args:
        fold: Returns the state at the end of base's group, rounded to the pool's dtype, in float32:
            fold(state, rings, slot, base).
        advance: Runs one token at `position`, which is in base's group, and stores its entry:
            advance(token, slot, base, position, state, out, rings) returns the outputs and the rings.
        rows: The rows.
        length: The number of tokens of a group.
        out: The outputs, zeros.
        pool: The pool.
        rings: The arrays of the ring.

    Returns:
        The outputs, the pool and the rings.
    """
    query_start_loc, layer, position, read_block = rows.query_start_loc, rows.layer, rows.num_computed_tokens, rows.read
    slot, base, fold_block = rows.fold.slot, rows.fold.base, rows.fold.block

    def run_row(row, carry):
        out, pool, rings = carry
        start, count = query_start_loc[row], query_start_loc[row + 1] - query_start_loc[row]

        def turn(n: Any, carry):
            state, base, out, pool, rings = carry
            boundary = (base // length + 1) * length
            crosses = position[row] + n >= boundary
            state = jax.lax.cond(crosses, lambda: fold(state, rings, slot[row], base), lambda: state)
            # The first token's fold has no drafts, and it is the only one that is kept.
            target = jnp.where(crosses & (n == 0), fold_block[row], NULL_BLOCK)
            pool = write_blocks(pool, layer, target, state)
            base = jnp.where(crosses, boundary, base)
            out, rings = jax.lax.cond(
                n < count,
                lambda: advance(start + n, slot[row], base, position[row] + n, state, out, rings),
                lambda: (out, rings),
            )
            return state, base, out, pool, rings

        # A row that only folds has a turn without a token. Folds and tokens have one place in the program each, because
        # a copy of either might be compiled to other bits.
        state = read_blocks(pool, layer, read_block[row])
        carry = state, base[row], out, pool, rings
        _, _, *carry = jax.lax.fori_loop(0, turns[row], turn, carry)
        return tuple(carry)

    folds = (position >= (base // length + 1) * length) & (fold_block != NULL_BLOCK)
    turns = jnp.maximum(jnp.diff(query_start_loc), folds.astype(jnp.int32))
    # The last row with a turn. If the number of turns were known to the compiler, it could compile some to other bits.
    last = jnp.max(jnp.where(turns > 0, jnp.arange(1, turns.shape[0] + 1, dtype=jnp.int32), 0))
    return jax.lax.fori_loop(0, last, run_row, (out, pool, rings))
