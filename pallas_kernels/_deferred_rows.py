"""What ops of deferred states share: rings of entries, a kernel's row, and the loop over rows of XLA implementations."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, cast

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
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


class DeferredRow:
    """A row of a kernel of deferred states: its indices, and its groups of tokens. See `Fold`.

    Attributes:
        index: The row's index in the batch.
        start: The row's first token.
        tokens: The number of its tokens.
        layer: The layer of the pool and of the ring.
        slot: The slot whose ring it reads and writes.
        base: The position of its state.
        position: The position of its first token.
        read: The block of its state.
        fold_to: The block that receives a folded state.
        first_group: The first position of the group of its base.
        boundary: The first position of the next group.
        length: The number of tokens of a group.
    """

    @staticmethod
    def load(refs: Any, index: Any) -> Sequence[Any]:
        """Load what the constructor takes. Operands of addresses are loaded before any branch, so that loads overlap."""
        starts, layer = refs.query_start_loc, (0,) * len(refs.layer.shape)
        start, end, total, layer = starts[index], starts[index + 1], starts[refs.slot.shape[0]], refs.layer[layer]
        slot, base, position = refs.slot[index], refs.base[index], refs.position[index]
        return start, end, total, layer, slot, base, position, refs.read_block[index], refs.fold_block[index]

    def __init__(self, loaded: Sequence[Any], index: Any, rows: int, length: int) -> None:
        """Take row `index` of `rows` rows, which `load` has loaded, and whose groups have `length` tokens."""
        self.index, self._rows, self.length = index, rows, length
        self.start, end, self._total, self.layer, self.slot, self.base, self.position, self.read, self.fold_to = loaded
        self.tokens = end - self.start
        self.first_group = jax.lax.div(self.base, jnp.int32(length)) * length
        self.boundary = self.first_group + length

    def ring_slot(self, position: Any) -> Any:
        """Return the ring slot of a position."""
        return jax.lax.rem(position, jnp.int32(2 * self.length))

    def keeps_fold(self) -> Any:
        """Return whether a folded state is stored."""
        return (self.position >= self.boundary) & (self.fold_to != NULL_BLOCK)

    def takes_part(self) -> Any:
        """Return whether the row has tokens, or folds."""
        return (self.tokens > 0) | self.keeps_fold()

    def folds(self) -> Any:
        """Return whether the group of the base is folded, for the row's tokens or for a later call."""
        return jnp.maximum(self.position, self.position + self.tokens - 1) >= self.boundary

    def run_stages(self, stage: Callable[[Any], None]) -> None:
        """Run stage(0) for the tokens in the first group, and stage(1), which folds it first, for those in the next one."""

        @pt.when(self.takes_part())
        def _():
            last = jnp.maximum(self.position, self.position + self.tokens - 1)
            stages = (self.position >= self.boundary).astype(jnp.int32), (last >= self.boundary).astype(jnp.int32)
            jax.lax.fori_loop(stages[0], stages[1] + 1, lambda n, _: stage(n), None)

    def group(self, n: Any) -> tuple[Any, Any, Any]:
        """Return whether a stage folds, the first position of its group, and the first one that has an entry."""
        folds, first = n == 1, self.first_group + n * self.length
        return folds, first, jnp.where(folds, first, self.base)

    def entries(self, index: Any, first: Any, low: Any) -> tuple[Any, Any, Any, Any]:
        """Find the entries from position `low` on in the slots `index` of the group that starts at position `first`.

        Returns which slots have entries of earlier calls, and of this one, their ring slots, and their packed tokens.
        """
        of = first + index
        inside = (index < self.length) & (of >= low)
        old, new = inside & (of < self.position), inside & (of >= self.position) & (of < self.position + self.tokens)
        return old, new, self.ring_slot(first) + index, self.start + of - self.position

    def tokens_in(self, index: Any, first: Any, low: Any) -> tuple[Any, Any, Any]:
        """Find the row's tokens `index` in a group. Return which are in it, the packed tokens, and their slots."""
        position = self.position
        inside = (index < self.tokens) & (position + index >= low) & (position + index < first + self.length)
        return inside, self.start + index, position + index - first

    def num_padding(self, tokens: int) -> Any:
        """Return how many of the padding tokens, which follow the last row, this row clears: every `rows`-th one."""
        padding = jnp.maximum(tokens - self._total - self.index + self._rows - 1, 0)
        return jax.lax.div(padding, jnp.int32(self._rows))

    def padding_token(self, n: Any) -> Any:
        """Return the n-th of these padding tokens."""
        return self._total + self.index + n * self._rows


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
