"""What ops of deferred states share: the rings of entries, and the loop over rows and tokens of XLA implementations."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self, cast

import jax
import jax.numpy as jnp

from pallas_kernels._check import Arguments
from pallas_kernels.blocks import NULL_BLOCK, read_blocks, write_blocks
from pallas_kernels.rows import Rows

Rings = tuple[jax.Array, ...]


class RingEntries(Arguments):
    """The base of dataclasses whose fields are the arrays of a ring. Kernels name the array `x` of a ring `ring_x`."""

    @property
    def by_name(self) -> dict[str, jax.Array]:
        """The arrays by their names in kernels."""
        return {f"ring_{field.name}": getattr(self, field.name) for field in dataclasses.fields(cast(Any, self))}

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """The arrays in the order of the fields."""
        return tuple(self.by_name.values())

    @classmethod
    def of(cls, results: Mapping[str, jax.Array]) -> Self:
        """Take the arrays from a kernel's results by these names."""
        return cls(**{field.name: results[f"ring_{field.name}"] for field in dataclasses.fields(cast(Any, cls))})


def run_rows(
    fold: Callable[..., jax.Array],
    advance: Callable[..., tuple[jax.Array, Rings]],
    rows: Rows,
    length: int,
    out: jax.Array,
    pool: jax.Array,
    rings: Rings,
) -> tuple[jax.Array, jax.Array, Rings]:
    """Run all rows of an op of deferred states, one after the other, each token by token.

    Args:
        fold: fold(state, rings, slot, base) returns the state at the end of base's group, rounded to the pool's dtype, in
            float32.
        advance: advance(token, slot, base, position, state, out, rings) runs one token at `position`, which is in base's
            group, stores its entry, and returns the outputs and the rings.
        rows: The rows.
        length: The number of tokens of a group.
        out: The outputs, zeros. They are returned with the pool and the rings.
        pool: The pool.
        rings: The arrays of the ring.
    """
    query_start_loc, layer, position, read_block = rows.query_start_loc, rows.layer, rows.num_computed_tokens, rows.read
    slot, base, fold_block = rows.fold.slot, rows.fold.base, rows.fold.block

    def run_row(row, carry):
        out, pool, rings = carry
        start, count = query_start_loc[row], query_start_loc[row + 1] - query_start_loc[row]

        def step(n: Any, carry):
            state, base, out, pool, rings = carry
            boundary = (base // length + 1) * length
            crosses = position[row] + n >= boundary
            state = jax.lax.cond(crosses, lambda: fold(state, rings, slot[row], base), lambda: state)
            # Only the first token's fold has no drafts, so only its state is written.
            target = jnp.where(crosses & (n == 0), fold_block[row], NULL_BLOCK)
            pool = write_blocks(pool, layer, target, state)
            base = jnp.where(crosses, boundary, base)
            out, rings = jax.lax.cond(
                n < count,
                lambda: advance(start + n, slot[row], base, position[row] + n, state, out, rings),
                lambda: (out, rings),
            )
            return state, base, out, pool, rings

        # A row that only folds has an iteration without a token. `fold` and `advance` are each traced once, because a
        # second copy of either might be compiled to other bits.
        state = read_blocks(pool, layer, read_block[row])
        carry = state, base[row], out, pool, rings
        _, _, *carry = jax.lax.fori_loop(0, iterations[row], step, carry)
        return tuple(carry)

    folds = (position >= (base // length + 1) * length) & (fold_block != NULL_BLOCK)
    iterations = jnp.maximum(jnp.diff(query_start_loc), folds.astype(jnp.int32))
    # The last row with an iteration. If their number were a constant, the compiler could compile some to other bits.
    last = jnp.max(jnp.where(iterations > 0, jnp.arange(1, iterations.shape[0] + 1, dtype=jnp.int32), 0))
    return jax.lax.fori_loop(0, last, run_row, (out, pool, rings))
