"""A row of a kernel of deferred states on Hopper GPUs: its indices, its groups of tokens, and zeros for padding tokens."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import hopper as hp
from pallas_kernels._dot import as_terms
from pallas_kernels.blocks import NULL_BLOCK
from pallas_kernels.rows import Rows


def deferred_inputs(rows: Rows) -> dict[str, jax.Array]:
    """Return the inputs of a kernel of `DeferredRow`s, by name."""
    inputs = dict(layer=jnp.reshape(rows.layer, 1), query_start_loc=rows.query_start_loc, slot=rows.fold.slot)
    inputs |= dict(base=rows.fold.base, position=rows.num_computed_tokens)
    return inputs | dict(read_block=rows.read, fold_block=rows.fold.block)


class DeferredRow:
    """The indices of a row with deferred states: see `Fold`.

    Attributes:
        index: The row's index in the batch.
        start: The row's first token.
        tokens: The number of its tokens.
        first_group: The first position of the group of its base.
        boundary: The first position of the next group.
        read: The block of its state.
        fold_to: The block that receives a folded state.
    """

    def __init__(self, refs: Any, index: jax.Array, length: int, *, at_once: bool = False) -> None:
        """Load the indices of row `index`, whose groups have `length` tokens.

        If `at_once` is set, all of them are loaded before any is used. The compiler would load some of them only when it
        knows others.
        """
        self.index, self._rows, self._length = index, refs.slot.shape[0], length
        start, end, total = (
            refs.query_start_loc[index],
            refs.query_start_loc[index + 1],
            refs.query_start_loc[self._rows],
        )
        layer, slot, base, position = refs.layer[0], refs.slot[index], refs.base[index], refs.position[index]
        found = start, end, total, layer, slot, base, position, refs.read_block[index], refs.fold_block[index]
        found = hp.optimization_barrier(found) if at_once else found
        self.start, end, self._total, self.layer, self.slot, self.base, self.position, self.read, self.fold_to = found
        self.tokens = end - self.start
        self.first_group = jax.lax.div(self.base, jnp.int32(length)) * length
        self.boundary = self.first_group + length

    def ring_slot(self, position: Any) -> Any:
        """Return the ring slot of a position."""
        return jax.lax.rem(position, jnp.int32(2 * self._length))

    def keeps_fold(self) -> Any:
        """Return whether a folded state is stored."""
        return (self.position >= self.boundary) & (self.fold_to != NULL_BLOCK)

    def takes_part(self) -> Any:
        """Return whether the row has tokens, or folds."""
        return (self.tokens > 0) | self.keeps_fold()

    def folds(self) -> Any:
        """Return whether the group of the base is folded, for the row's tokens or for a later call."""
        return jnp.maximum(self.position, self.position + self.tokens - 1) >= self.boundary

    def clear(self, tokens: int, zeros: Any, output_of: Callable[[Any], Any]) -> None:
        """Store zeros in the outputs of every `rows`-th padding token. `tokens` is the number of tokens, padding included.

        `zeros` is SMEM for the outputs of a token, which are in GMEM where `output_of(token)` says.
        """
        padding = jnp.maximum(tokens - self._total - self.index + self._rows - 1, 0)
        padding = jax.lax.div(padding, jnp.int32(self._rows))

        @hp.when(padding > 0)
        def _():
            zeros[...] = hp.zeros_per_row(zeros.shape[0], zeros.dtype)
            hp.commit_smem()

            def clear(n, _):
                hp.copy_smem_to_gmem(zeros, output_of(self._total + self.index + n * self._rows))

            jax.lax.fori_loop(0, padding, clear, None)
            hp.wait_smem_to_gmem(0, wait_read_only=True)


def terms_of(state: jax.Array, count: int) -> list[jax.Array]:
    """Return a state's `count` bfloat16 terms, lo first, so that larger products do not round them away."""
    return [state] if state.dtype == jnp.bfloat16 else [*as_terms(state.astype(jnp.float32), count)[::-1]]
