"""One head of one row in both variants of the recurrence on Hopper GPUs: its copies, and its products per chunk."""

import dataclasses
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import hopper as hp
from pallas_kernels._dot import as_terms
from pallas_kernels.blocks import NULL_BLOCK, StateLayout
from pallas_kernels.hopper.partial_tiles import keep_rows, store_rows
from pallas_kernels.hopper.prefill_rows import SHAPE, TILE, PrefillRow

_MATRIX = 8  # the rows and columns of the matrices that a warp loads, four at a time


class Head:
    """One head of one row. A slice of 64 values of its state is transposed, [values, keys], in tiles of 64 keys."""

    def __init__(
        self, refs: Any, memory: Any, row: PrefillRow, head: Any, layer: Any, read: Any, layout: StateLayout
    ) -> None:
        """Gather the references of the value head `head`, whose state before the row is in the block `read`.

        `refs` has the inputs, the pool, the outputs and barriers, by name. Of the views of SMEM in `memory`, the first has
        tokens for copies, and a dict of everything else by name. The second has tokens for tensor cores.
        """
        (self.token_rows, others), (self.token_tiles,) = memory
        self.refs, self.head, self.layout = SimpleNamespace(**vars(refs), **others), head, layout
        self.per_channel = hasattr(refs, "k_before")
        self.key_head = jax.lax.div(head, jnp.int32(refs.v.shape[1] // refs.k.shape[1]))
        self.key_tiles, self.terms = range(refs.k.shape[2] // TILE), range(refs.solve.shape[0])
        self.row, self.layer, self.read = row, layer, read
        self.count, self.first = row.chunks_up_to(row.end - row.start), row.first_chunk
        self.has_initial = (read != NULL_BLOCK) & (self.count > 0)

    def copy_keys(self, name: str, here: Any, index: Any, at: Any, full: Any) -> None:
        """Copy a chunk's keys or queries. Decayed ones are stored chunk by chunk, others token by token."""
        source = getattr(self.refs, name)
        for n in self.key_tiles:
            keys = hp.ds(n * TILE, TILE)
            if self.per_channel:
                hp.copy_gmem_to_smem(source.at[0, self.head, index, :, keys], self.refs.squares[name].at[at, n], full)
            else:
                hp.copy_gmem_to_smem(source.at[here, self.key_head, keys], self.token_rows[name].at[at, n], full)

    def copy_products(self, index: Any, at: Any, full: Any) -> None:
        """Copy T beta of a chunk, and its factors."""
        refs = self.refs
        for n in self.terms:
            hp.copy_gmem_to_smem(refs.solve.at[n, self.head, index], refs.squares["solve"].at[at, n], full)
        factors = refs.decay.at[self.head, index] if self.per_channel else refs.scales.at[self.head, index]
        hp.copy_gmem_to_smem(factors, refs.chunk_factors.at[at], full)

    def keys_of(self, name: str, at: Any) -> list[Any]:
        """Return the tiles [tokens, keys] of a chunk's keys or queries, decayed if decays are per key channel."""
        if self.per_channel:
            return [self.refs.squares[name].at[at, n] for n in self.key_tiles]
        return [self.token_tiles[name[0]].at[at, n] for n in self.key_tiles]

    def of_tokens(self, kind: int, at: Any) -> Any:
        """Return the factors of a chunk's tokens: of keys before it (0), negative, of queries (1), of keys after it (2)."""
        if self.per_channel:
            return 1.0
        return hp.along_columns(hp.load_per_column(self.refs.chunk_factors.at[at, kind]), TILE)

    def of_state(self, n: int, at: Any) -> Any:
        """Return the factors of the state's n-th tile over a chunk: one per key, or one."""
        if not self.per_channel:
            return self.refs.chunk_factors[at, 3, 0]
        keys = hp.ds(n * TILE, TILE)
        return hp.along_columns(hp.load_per_column(self.refs.chunk_factors.at[at, keys]), TILE)

    def term(self, tile: jax.Array, n: int) -> Callable[[], jax.Array]:
        """Return a function that returns a tile's n-th bfloat16 term (0: hi), a left operand for `multiply_all`."""
        return lambda: as_terms(tile, len(self.terms))[n]

    def keep_tokens(self, live: Any, v_tile: Any, at: Any) -> None:
        """Set the tokens after a chunk's last one, which a copy brings too, to zero."""

        @hp.when(live < TILE)
        def _():
            for tile in [v_tile] + ([] if self.per_channel else self.keys_of("k", at)):
                keep_rows(tile, live)
            hp.commit_smem()

    def of_before(self, state: Sequence[jax.Array], at: Any) -> list[Any]:
        """Return the operands of S k, the values that the state before a chunk predicts for its keys."""
        before = self.keys_of("k_before", at)
        return [(self.term(state[n], t), before[n].T) for t in self.terms for n in self.key_tiles]

    def of_wanted(self, known: jax.Array, v: jax.Array, at: Any) -> list[Any]:
        """Return the operands of a chunk's pseudo-values, given its values and their prediction `known`."""
        wanted = v - known if self.per_channel else v + self.of_tokens(0, at) * known
        solve = [self.refs.squares["solve"].at[at, n] for n in self.terms]
        terms = self.terms
        return [(self.term(wanted, i), solve[j]) for i in terms for j in terms if i + j < len(terms)]

    def of_added(self, added: jax.Array, at: Any) -> list[list[Any]]:
        """Return the operands of the state's change by a chunk's pseudo-values, for each of the state's tiles."""
        decayed, after = self.of_tokens(2, at) * added, self.keys_of("k_after", at)
        return [[(self.term(decayed, t), after[n]) for t in self.terms] for n in self.key_tiles]

    def changed(self, state: Sequence[jax.Array], change: Sequence[jax.Array], at: Any) -> list[jax.Array]:
        """Return the state after a chunk."""
        decays = [self.of_state(n, at) for n in self.key_tiles]
        return [d * s + c for d, s, c in zip(decays, state, change, strict=True)]

    def initial(self, values: Any) -> list[jax.Array]:
        """Return the row's initial state for a slice of 64 values."""

        def tile(n):
            tile = self.tile_of_pool(self.read, values, n)
            load = lambda: hp.load_gmem_tile(tile, transposed=self.layout == "KV").astype(jnp.float32)
            return jax.lax.cond(self.has_initial, load, lambda: hp.zeros(SHAPE, jnp.float32))

        return [tile(n) for n in self.key_tiles]

    def store(self, block: jax.Array, state: Sequence[jax.Array], values: Any) -> None:
        """Store the state of a slice of 64 values in a block."""
        for n in self.key_tiles:
            tile = state[n].astype(self.refs.pool.dtype)
            hp.store_gmem(self.tile_of_pool(block, values, n), tile, transposed=self.layout == "KV")

    def tile_of_pool(self, block: Any, values: Any, n: int) -> Any:
        """Return the n-th tile of a slice of 64 values of a block's state. In layout "KV" it is [keys, values]."""
        keys = hp.ds(n * TILE, TILE)
        if self.layout == "VK":
            return self.refs.pool.at[self.layer, block, self.head, values, keys]
        return self.refs.pool.at[self.layer, block, self.head, keys, values]

    def store_outputs(self, token: Any, live: Any, rows: Any, values: Any) -> None:
        """Store the first `live` rows of a tile of outputs, of which `rows` is the view for copies."""
        store_rows(rows, live, self._outputs_from(token, values))

    def clear_outputs(self, total: Any, values: Any) -> None:
        """Write zeros to this row's padding tokens from `total` on."""
        row = dataclasses.replace(self.row, total=total)
        row.clear(self.refs.v.shape[0], lambda token: self._outputs_from(token, values))

    def _outputs_from(self, token: Any, values: Any) -> Any:
        return self.refs.out.at[hp.ds(token, TILE), self.head, values]


def load_values(tile: Any) -> jax.Array:
    """Load a chunk's values, transposed, from a tile [tokens, values] in SMEM. bfloat16 [64, 64]."""

    def body(tile: Any) -> Any:
        kind = tile.dtype
        words = [word for address in _addresses_of_matrices(tile) for word in hp.ldmatrix_transposed(address)]
        return ([hp.from_words([word], kind) for word in words],)

    return hp.inline(body, (tile, hp.tiling(tile.dtype)), results=[(SHAPE, tile.dtype)])[0]


def store_values(tile: Any, values: jax.Array) -> None:
    """Store a chunk's outputs, which are transposed, in a tile [tokens, values] in SMEM. bfloat16 [64, 64]."""

    def body(tile: Any, values: Any) -> None:
        words = [hp.word(pair) for pair in values]
        for n, address in enumerate(_addresses_of_matrices(tile)):
            hp.stmatrix(address, words[4 * n :][:4], transposed=True)

    hp.inline(body, (tile, hp.tiling(tile.dtype)), values)


def _addresses_of_matrices(tile: Any) -> list[Any]:
    """Return, for each four matrices of a tile [tokens, values], the address of the row that this thread gives `stmatrix`.

    Two of the four are side by side in the warp's 16 values, and two have the next eight tokens.
    """
    lane, warp = hp.lane_and_warp(hp.thread_index_again())
    row, matrix = lane & 7, lane >> 3
    group = warp * 2 + (matrix & 1)
    across = hp.swizzled(group, row, _MATRIX)

    def address(first: int) -> Any:
        token = hp.add((matrix >> 1) * _MATRIX, row, first)
        return hp.smem_address(tile, token * TILE + across)

    return [address(first) for first in range(0, TILE, 2 * _MATRIX)]
