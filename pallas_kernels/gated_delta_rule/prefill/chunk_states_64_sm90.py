"""The recurrence from chunk to chunk on Hopper GPUs: a CTA has 64 value dims of one head of one row.

It computes the results of chunk_states.py. Its three warpgroups work on different chunks at the same time: one copies the
operands of later chunks from GMEM, one computes the state after each chunk, and one computes the outputs. The state is
transposed, [values, keys], and so is everything that it is multiplied with from chunk to chunk. The left operands of these
products are then in registers already, and none waits for SMEM.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import hopper as hp
from pallas_kernels.blocks import StateLayout
from pallas_kernels.gated_delta_rule.prefill.head_sm90 import Head, load_values
from pallas_kernels.hopper.prefill_rows import SHAPE, TILE, PrefillRow

WARPGROUPS = 3  # warpgroups of a CTA
_QUERY_STAGES = 2  # chunks whose queries are in SMEM


def chunk_states(
    refs,
    memory,
    indices,
    *,
    layout: StateLayout,
    wait_for_products: Callable[[Any, Any], None] | None = None,
    begin: Callable[[], None],
):
    """Run one row, head and tile of value dims, by three warpgroups.

    "full" barriers complete when a stage of SMEM has been filled, "free" ones when it may be filled again.

    Args:
        refs: The inputs, the pool, the outputs and `barriers`, by name.
        memory: The views of SMEM, see `memory`.
        indices: The indices of the row, the head, and the tile of value dims.
        layout: The layout of the states in the pool.
        wait_for_products: wait_for_products(chunk, key_head) waits until chunk_intra_sm90.py has stored their products.
            None if all products are there before the launch.
        begin: Each warpgroup calls it before it uses SMEM.
    """
    tile = _Tile(refs, memory, indices, layout, begin)
    fetch = functools.partial(tile.fetch, wait_for_products)
    hp.run_by_warpgroup([fetch, tile.carry_state, tile.write_outputs], tile.refs.done)


class _Tile:
    """One row, head and tile of value dims: see `chunk_states`."""

    def __init__(self, refs: Any, memory: Any, indices: Any, layout: StateLayout, begin: Callable[[], None]) -> None:
        row, head, value_tile = indices
        of_row = PrefillRow.of(refs, row)
        self.head = Head(refs, memory, of_row, head, refs.layer[0], refs.read_block[row], layout)
        self.refs, self.row, self.begin, self.count = self.head.refs, of_row, begin, self.head.count
        self.stages = self.refs.chunk_factors.shape[0]
        self.values = hp.ds(value_tile * TILE, TILE)

    def fetch(self, wait_for_products: Callable[[Any, Any], None] | None) -> None:
        """Copy each chunk's keys, values and 64 x 64 matrices for the state, then its queries for the outputs."""
        hp.set_max_registers(40, action="decrease")
        self.begin()
        fetch_chunk = lambda chunk, _: self.fetch_chunk(chunk, wait_for_products)
        jax.lax.fori_loop(0, self.count, fetch_chunk, None)
        hp.wait_for_last(self.count, self.stages, self.refs.free)
        hp.wait_for_last(self.count, _QUERY_STAGES, self.refs.query_free)

    def fetch_chunk(self, chunk: Any, wait_for_products: Callable[[Any, Any], None] | None) -> None:
        """Copy one chunk's operands."""
        refs, head = self.refs, self.head
        token, _ = self.row.tokens_of(chunk)
        here, index = hp.ds(token, TILE), head.first + chunk
        at = jax.lax.rem(chunk, jnp.int32(self.stages))
        full = refs.full.at[at]
        hp.when(chunk >= self.stages)(lambda: hp.barrier_wait(refs.free.at[at]))
        for name in ("k_before", "k_after") if head.per_channel else ("k",):
            head.copy_keys(name, here, index, at, full)
        hp.copy_gmem_to_smem(refs.v.at[here, head.head, self.values], head.token_rows["v"].at[at], full)
        if wait_for_products:
            wait_for_products(index, head.key_head)
        head.copy_products(index, at, full)
        self.fetch_queries(chunk, here, index)

    def fetch_queries(self, chunk: Any, here: Any, index: Any) -> None:
        """Copy one chunk's queries, and their products with its keys."""
        refs, head, at = self.refs, self.head, jax.lax.rem(chunk, jnp.int32(_QUERY_STAGES))
        full = refs.query_full.at[at]
        hp.when(chunk >= _QUERY_STAGES)(lambda: hp.barrier_wait(refs.query_free.at[at]))
        head.copy_keys("q_before" if head.per_channel else "q", here, index, at, full)
        hp.copy_gmem_to_smem(refs.attention.at[0, head.head, index], refs.squares["attention"].at[at], full)
        if not head.per_channel:
            hp.copy_gmem_to_smem(refs.scales.at[head.head, index, 1], refs.of_query.at[at], full)

    def carry_state(self) -> None:
        """Compute the state after each chunk, and store the one before it and its pseudo-values for the outputs."""
        hp.set_max_registers(232, action="increase")
        state = self.head.initial(self.values)
        self.begin()

        @hp.when(self.count > 0)
        def _():
            advance_to = lambda chunk, stop, state: jax.lax.fori_loop(chunk, stop, self.advance, state)
            store = lambda block, state: self.head.store(block, state, self.values)
            last = self.row.run(self.refs, state, advance_to, store)
            self.row.store_last(self.refs.write_block[self.row.index], last, store)
            hp.barrier_wait(self.refs.state_free)
            hp.barrier_wait(self.refs.added_free)

    def advance(self, chunk: Any, state: list[jax.Array]) -> list[jax.Array]:
        """Run one chunk. Take and return the state's tiles."""
        refs, head, at = self.refs, self.head, jax.lax.rem(chunk, jnp.int32(self.stages))
        _, live = self.row.tokens_of(chunk)
        v_tile = head.token_tiles["v"].at[at]
        hp.barrier_wait(refs.full.at[at])
        head.keep_tokens(live, v_tile, at)

        def publish_state():
            hp.when(chunk > 0)(lambda: hp.barrier_wait(refs.state_free))
            tiles = [head.term(x, 0)() for x in state]
            hp.store_and_arrive(tiles, [refs.states.at[n] for n in head.key_tiles], refs.state_full)
            return [load_values(v_tile)]

        known, v = hp.multiply_all(SHAPE, [head.of_before(state, at)], publish_state)
        (added,) = hp.multiply_all(SHAPE, [head.of_wanted(known, v.astype(jnp.float32), at)])

        def publish_added():
            hp.when(chunk > 0)(lambda: hp.barrier_wait(refs.added_free))
            hp.store_and_arrive([added.astype(jnp.bfloat16)], [refs.added], refs.added_full)

        change = hp.multiply_all(SHAPE, head.of_added(added, at), publish_added)
        state = head.changed(state, change, at)
        hp.barrier_arrive(refs.free.at[at])
        return state

    def write_outputs(self) -> None:
        """Compute the outputs of each chunk from the state before it and from its pseudo-values."""
        self.begin()
        hp.set_max_registers(232, action="increase")
        jax.lax.fori_loop(0, self.count, self.write_chunk, None)
        hp.wait_smem_to_gmem(0, wait_read_only=True)
        self.head.clear_outputs(self.row.total, self.values)

    def write_chunk(self, chunk: Any, _: None) -> None:
        """Compute the outputs of one chunk."""
        refs, head, at = self.refs, self.head, jax.lax.rem(chunk, jnp.int32(_QUERY_STAGES))
        token, live = self.row.tokens_of(chunk)
        hp.barrier_wait(refs.query_full.at[at])
        hp.barrier_wait(refs.state_full)
        queries, attention = head.keys_of("q_before", at), refs.squares["attention"].at[at]
        (out,) = hp.multiply_all(SHAPE, [[(queries[n], refs.states.at[n].T) for n in head.key_tiles]])
        hp.barrier_arrive(refs.state_free)
        if not head.per_channel:
            out = hp.along_rows(hp.load_per_row(refs.of_query.at[at]), TILE) * out
        hp.barrier_wait(refs.added_full)
        (of_added,) = hp.multiply_all(SHAPE, [[(attention, refs.added.T)]])
        hp.barrier_arrive(refs.added_free)
        hp.barrier_arrive(refs.query_free.at[at])
        hp.wait_smem_to_gmem(0, wait_read_only=True)
        head.token_tiles["out"][...] = (out + of_added).astype(jnp.bfloat16)
        hp.commit_smem()
        head.store_outputs(token, live, head.token_rows["out"], self.values)


def memory(key_dim: int, terms: int, dtype: Any, _pool: Any, *, per_channel: bool) -> list[tuple[Any, ...]]:
    """Describe a CTA's SMEM, as views of the same bytes. The pool's states are never in it."""
    tiles, stages = key_dim // TILE, _stages(per_channel)
    tokens, squares = dict(out=SHAPE, v=(stages, *SHAPE)), dict(solve=(stages, terms), attention=(_QUERY_STAGES,))
    if per_channel:
        squares |= dict(k_before=(stages, tiles), k_after=(stages, tiles), q_before=(_QUERY_STAGES, tiles))
        factors = hp.SMEM((stages, key_dim), jnp.float32)
    else:
        tokens |= dict(k=(stages, tiles, *SHAPE), q=(_QUERY_STAGES, tiles, *SHAPE))
        factors = hp.SMEM((stages, 4, TILE), jnp.float32)
    tile = lambda *shape: hp.tiled(*shape, *SHAPE, dtype=jnp.bfloat16)
    others = dict(
        squares={name: tile(*shape) for name, shape in squares.items()},
        chunk_factors=factors,
        of_query=hp.SMEM((_QUERY_STAGES, TILE), jnp.float32),
        states=tile(tiles),
        added=tile(),
    )
    rows, tiles_of_tokens = hp.views_of_tokens(tokens, dtype)
    return [(rows, others), (tiles_of_tokens,)]


def barriers(key_dim: int, terms: int, *, per_channel: bool) -> dict[str, Any]:
    """Describe a CTA's barriers."""
    tiles, stages = key_dim // TILE, _stages(per_channel)
    return dict(
        full=hp.Barrier(num_arrivals=(1 + per_channel) * tiles + 1 + terms + 1, num_barriers=stages),
        free=hp.Barrier(num_barriers=stages),
        query_full=hp.Barrier(num_arrivals=tiles + 1 + (not per_channel), num_barriers=_QUERY_STAGES),
        query_free=hp.Barrier(num_barriers=_QUERY_STAGES),
        state_full=hp.Barrier(),
        state_free=hp.Barrier(),
        added_full=hp.Barrier(),
        added_free=hp.Barrier(),
        done=hp.Barrier(num_arrivals=WARPGROUPS),
    )


def _stages(per_channel: bool) -> int:
    """Return the number of chunks whose keys and values fit into SMEM."""
    return 2 if per_channel else 3
