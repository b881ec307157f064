"""The recurrence from chunk to chunk on Hopper GPUs, for much work in many rows: a CTA has 128 value dims at a time.

It computes the bits of chunk_states_64_sm90.py with other work for each of the three warpgroups: one copies the operands of
later chunks from GMEM, and the two others have a tile of 64 value dims each, of which they compute states and outputs. While
one waits for its products, the other one keeps the tensor cores busy, and both read the same keys and 64 x 64 matrices. For
few rows that would leave most SMs idle. Outputs are transposed, [values, tokens], as states are: their left operands are
then in registers.

There are at most as many CTAs as SMs. Each takes one head after the other from a queue, and copies the next one's state and
first chunks while it still computes the one before. States come and leave as copies of whole tiles. In the tensor cores'
layout threads would load and store them in 32 bytes at a time, which takes longer than a chunk.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import hopper as hp
from pallas_kernels.blocks import StateLayout
from pallas_kernels.gated_delta_rule.prefill.head_sm90 import Head, load_values, store_values
from pallas_kernels.gated_delta_rule.prefill.work_queue_sm90 import Work, store_entry, take
from pallas_kernels.hopper.prefill_rows import SHAPE, TILE, PrefillRow

TILES = 2  # tiles of value dims per CTA
_STAGES = 2  # chunks whose operands are in SMEM


class Entry(NamedTuple):
    """An entry of the work queue, as the copying warpgroup stores it in SMEM for the others. See `PrefillRow`.

    Attributes:
        ticket: The entry's index in the queue. The queue is empty if it is `Work.total` or larger.
        start: The row's first token.
        end: The token after its last one. If the queue was empty, the row has no tokens.
        first_chunk: The number of chunks in earlier rows.
        first_length: The length of the row's first chunk.
        layer: The layer of the pool that has its states.
        read: The block of the state before the row.
        write: The block of the state at its end.
        total: The token after the last row of the batch.
    """

    ticket: Any
    start: Any
    end: Any
    first_chunk: Any
    first_length: Any
    layer: Any
    read: Any
    write: Any
    total: Any

    @classmethod
    def of(cls, refs: Any, work: Work, ticket: Any) -> "Entry":
        """Read the entry of a ticket from GMEM."""
        index = jnp.minimum(work.indices_of(ticket)[0], work.rows - 1)
        row = PrefillRow.of(refs, index)
        end = jnp.where(ticket < work.total, row.end, row.start)
        blocks = refs.layer[0], refs.read_block[index], refs.write_block[index]
        return cls(ticket, row.start, end, row.first_chunk, row.first_length, *blocks, row.total)

    @classmethod
    def stored(cls, entry: Any) -> "Entry":
        """Load the entry that the copying warpgroup has stored in SMEM."""
        return cls(*(entry[n] for n in range(len(cls._fields))))


def chunk_states(
    refs: Any,
    memory: Any,
    work: Work,
    queue: Any,
    *,
    layout: StateLayout,
    wait_for_products: Callable[[Any, Any], None] | None = None,
) -> None:
    """Run the queue's entries until it is empty, by three warpgroups.

    The copying warpgroup takes the next entry while the others still compute the one before. An entry of `work` is a pair of
    tiles of value dims of a head, and `queue` is the number of entries that CTAs have taken: one of `hp.semaphores`. The
    other arguments are the same as in chunk_states_64_sm90.py.
    """
    cta, warpgroup = _Cta(refs, memory, work, queue, layout), hp.axis_index(hp.WARPGROUP)
    hp.when(warpgroup == 0)(lambda: cta.fetch(wait_for_products))
    hp.when(warpgroup > 0)(cta.carry_tile)
    hp.finish_together(refs.done)


class _Cta:
    """A CTA that runs entries of the queue: see `chunk_states`."""

    def __init__(self, refs: Any, memory: Any, work: Work, queue: Any, layout: StateLayout) -> None:
        self.refs, self.memory, self.work, self.queue, self.layout = refs, memory, work, queue, layout
        others = memory[0][-1]
        self.entry, self.states = others["work_entry"], others["states"]

    def head_of(self, found: Entry) -> tuple[Head, Any]:
        """Return an entry's head and its pair of tiles. `PrefillRow.total` is None: this kernel does not need it."""
        index, head, pair = self.work.indices_of(found.ticket)
        row = PrefillRow(index, self.work.rows, found.start, found.end, None, found.first_chunk, found.first_length)
        return Head(self.refs, self.memory, row, head, found.layer, found.read, self.layout), pair

    def fetch(self, wait_for_products: Callable[[Any, Any], None] | None) -> None:
        """Take entries, and copy their states and the operands of their chunks."""
        hp.set_max_registers(40, action="decrease")

        def fetch_head(carry):
            found, before = carry
            head, pair = self.head_of(found)
            hp.when(head.has_initial)(lambda: self.fetch_state(head, found.read, pair))
            fetch = lambda chunk, _: self.fetch_chunk(head, pair, chunk, before + chunk, wait_for_products)
            jax.lax.fori_loop(0, head.count, fetch, None)
            hp.barrier_wait(self.refs.seen)
            following = self.take_entry()
            hp.barrier_wait(self.refs.state_free)
            return following, before + head.count

        has_entry = lambda carry: carry[0].ticket < self.work.total
        chunks = jax.lax.while_loop(has_entry, fetch_head, (self.take_entry(), jnp.int32(0)))[1]
        hp.barrier_wait(self.refs.seen)
        hp.wait_for_last(chunks, _STAGES, self.refs.free, self.refs.values_free)

    def take_entry(self) -> Entry:
        """Take the next entry, and store it for the other warpgroups."""
        take(self.queue, self.entry)
        found = Entry.of(self.refs, self.work, self.entry[0])
        # `take` has stored the ticket, and other threads may still load it.
        store_entry(found[1:], self.entry, first=1)
        hp.barrier_arrive(self.refs.taken)
        return found

    def fetch_state(self, head: Head, block: Any, pair: Any) -> None:
        """Copy a head's initial state for a pair of tiles."""
        for tile_index in range(TILES):
            for n in head.key_tiles:
                tile = head.tile_of_pool(block, _values_of(pair, tile_index), n)
                hp.copy_gmem_to_smem(tile, self.states.at[tile_index, n], self.refs.state_full)

    def fetch_chunk(self, head: Head, pair: Any, chunk: Any, index: Any, wait_for_products: Any) -> None:
        """Copy a chunk's operands for a pair of tiles. `index` is the number of chunks that the CTA has copied before."""
        refs, at = head.refs, _stage_of(index)
        token, _ = head.row.tokens_of(chunk)
        here, full = hp.ds(token, TILE), refs.full.at[at]
        hp.when(index >= _STAGES)(lambda: hp.barrier_wait(refs.free.at[at]))
        for name in ("k_before", "k_after", "q_before") if head.per_channel else ("k", "q"):
            head.copy_keys(name, here, head.first + chunk, at, full)
        if wait_for_products:
            wait_for_products(head.first + chunk, head.key_head)
        head.copy_products(head.first + chunk, at, full)
        attention = refs.attention.at[0, head.head, head.first + chunk]
        hp.copy_gmem_to_smem(attention, refs.squares["attention"].at[at], full)
        hp.when(index >= _STAGES)(lambda: hp.barrier_wait(refs.values_free.at[at]))
        for tile_index in range(TILES):
            source = refs.v.at[here, head.head, _values_of(pair, tile_index)]
            hp.copy_gmem_to_smem(source, head.token_rows["v"].at[at, tile_index], full)

    def carry_tile(self) -> None:
        """Compute the states and outputs of one tile of value dims."""
        hp.set_max_registers(232, action="increase")
        tile_index = hp.axis_index(hp.WARPGROUP) - 1
        own_states = [self.states.at[tile_index, n] for n in range(self.states.shape[1])]

        def carry_on(carry):
            found, state, before = carry
            head, pair = self.head_of(found)
            values = _values_of(pair, tile_index)
            tile = _Tile(head, values, tile_index, before, self.entry)
            state = tile.run([x.astype(jnp.float32) for x in state])
            # The next initial state is in the SMEM that this state is stored to.
            following, next_state = self.see(own_states)
            chunks = before + head.count
            hp.wait_smem_to_gmem(0, wait_read_only=True)  # the last chunk's outputs
            hp.when(head.count > 0)(lambda: hp.barrier_arrive(self.refs.values_free.at[_stage_of(chunks - 1)]))
            store = lambda block, state: self.store_state(head, block, state, values, own_states)
            head.row.store_last(found.write, state, store)
            return following, next_state, chunks

        has_entry = lambda carry: carry[0].ticket < self.work.total
        jax.lax.while_loop(has_entry, carry_on, (*self.see(own_states), jnp.int32(0)))
        hp.wait_smem_to_gmem(0, wait_read_only=True)

    def see(self, own_states: list[Any]) -> tuple[Entry, list[jax.Array]]:
        """Return the next entry and its initial state, and let the copying warpgroup take another entry."""
        hp.barrier_wait(self.refs.taken)
        found = Entry.stored(self.entry)
        hp.barrier_arrive(self.refs.seen)
        head, _ = self.head_of(found)
        hp.when(head.has_initial)(lambda: hp.barrier_wait(self.refs.state_full))
        load = hp.load_tile if self.layout == "VK" else hp.load_transposed
        nothing = lambda: hp.zeros(SHAPE, self.states.dtype)
        return found, [jax.lax.cond(head.has_initial, lambda x=x: load(x), nothing) for x in own_states]

    def store_state(self, head: Head, block: Any, state: list[jax.Array], values: Any, own_states: list[Any]) -> None:
        """Store a state in a block, by copies from the SMEM of its initial state."""
        hp.commit_smem()  # all threads have loaded the initial state from this SMEM
        tiles = [tile.astype(self.states.dtype) for tile in state]
        if self.layout == "VK":
            hp.store_tiles(tiles, own_states)
        else:
            for x, tile in zip(own_states, tiles, strict=True):
                hp.store_transposed(x, tile)
        hp.commit_smem()
        for n, x in enumerate(own_states):
            hp.copy_smem_to_gmem(x, head.tile_of_pool(block, values, n))


class _Tile(NamedTuple):
    """One tile of 64 value dims of a head, by one warpgroup.

    Attributes:
        head: The head.
        values: The slice of its value dims.
        tile_index: The tile's index in the pair.
        before: The number of chunks that the CTA has run.
        entry: The entry in SMEM.
    """

    head: Head
    values: Any
    tile_index: Any
    before: Any
    entry: Any

    def run(self, state: list[jax.Array]) -> list[jax.Array]:
        """Run the head's chunks, and store zeros in outputs of padding tokens. Take and return the state's tiles."""
        head, refs = self.head, self.head.refs
        advance_to = lambda chunk, stop, state: jax.lax.fori_loop(chunk, stop, self.advance, state)
        state = head.row.run(refs, state, advance_to, lambda block, state: head.store(block, state, self.values))

        @hp.when(head.count == 0)
        def _():
            hp.wait_smem_to_gmem(0, wait_read_only=True)
            hp.barrier_arrive(refs.state_free)

        # If this were read earlier, it would stay in a register over the loop, which has none to spare. The next
        # entry may have been stored since then, and has the same total.
        total = Entry.stored(self.entry).total
        hp.when(total < refs.v.shape[0])(lambda: head.clear_outputs(total, self.values))
        return state

    def let_fetch(self, chunk: Any) -> None:
        """Free the last chunk's outputs in SMEM, or in the first chunk the states, once they are copied."""
        refs = self.head.refs
        hp.wait_smem_to_gmem(0, wait_read_only=True)
        hp.when(chunk > 0)(lambda: hp.barrier_arrive(refs.values_free.at[_stage_of(self.before + chunk - 1)]))
        hp.when(chunk == 0)(lambda: hp.barrier_arrive(refs.state_free))

    def advance(self, chunk: Any, state: list[jax.Array]) -> list[jax.Array]:
        """Run one chunk. Take and return the state's tiles."""
        head, refs, at = self.head, self.head.refs, _stage_of(self.before + chunk)
        token, live = head.row.tokens_of(chunk)
        v_tile = head.token_tiles["v"].at[at, self.tile_index]
        hp.barrier_wait(refs.full.at[at])
        head.keep_tokens(live, v_tile, at)  # both warpgroups write the same keys

        def meanwhile():
            self.let_fetch(chunk)
            return [load_values(v_tile)]

        known, v = hp.multiply_all(SHAPE, [head.of_before(state, at)], meanwhile)
        (added,) = hp.multiply_all(SHAPE, [head.of_wanted(known, v.astype(jnp.float32), at)])
        queries, attention = head.keys_of("q_before", at), refs.squares["attention"].at[at]
        of_queries = [(head.term(state[n], 0), queries[n].T) for n in head.key_tiles]
        of_attention = [(lambda: added.astype(jnp.bfloat16), attention.T)]
        out, of_added = hp.multiply_all(SHAPE, [of_queries, of_attention])
        out = out if head.per_channel else head.of_tokens(1, at) * out
        out = (out + of_added).astype(jnp.bfloat16)
        state = head.changed(state, hp.multiply_all(SHAPE, head.of_added(added, at)), at)
        hp.barrier_arrive(refs.free.at[at])
        # Outputs are stored over the chunk's values.
        store_values(v_tile, out)
        hp.commit_smem()
        head.store_outputs(token, live, head.token_rows["v"].at[at, self.tile_index], self.values)
        return state


def _stage_of(chunk: Any) -> Any:
    """Return the stage of SMEM that the operands of a CTA's n-th chunk are in."""
    return jax.lax.rem(chunk, jnp.int32(_STAGES))


def _values_of(pair: Any, tile_index: Any) -> Any:
    """Return the value dims of a tile of a pair."""
    return hp.ds((TILES * pair + tile_index) * TILE, TILE)


def memory(key_dim: int, terms: int, dtype: Any, pool_dtype: Any, *, per_channel: bool) -> list[tuple[Any, ...]]:
    """Describe a CTA's SMEM, as views of the same bytes."""
    tiles = key_dim // TILE
    tokens, squares = dict(v=(_STAGES, TILES, *SHAPE)), dict(solve=(_STAGES, terms))
    squares |= dict(attention=(_STAGES,))
    if per_channel:
        squares |= dict.fromkeys(("k_before", "k_after", "q_before"), (_STAGES, tiles))
        factors = hp.SMEM((_STAGES, key_dim), jnp.float32)
    else:
        tokens |= dict.fromkeys(("k", "q"), (_STAGES, tiles, *SHAPE))
        factors = hp.SMEM((_STAGES, 4, TILE), jnp.float32)
    tile = lambda *shape: hp.tiled(*shape, *SHAPE, dtype=jnp.bfloat16)
    squares = {name: tile(*shape) for name, shape in squares.items()}
    rows, tiles_of_tokens = hp.views_of_tokens(tokens, dtype)
    others = dict(squares=squares, chunk_factors=factors, work_entry=hp.SMEM((len(Entry._fields),), jnp.int32))
    others |= dict(states=hp.tiled(TILES, tiles, *SHAPE, dtype=pool_dtype))
    return [(rows, others), (tiles_of_tokens,)]


def barriers(key_dim: int, terms: int, *, per_channel: bool) -> dict[str, Any]:
    """Describe a CTA's barriers."""
    tiles = key_dim // TILE
    copies = (2 + per_channel) * tiles + TILES + terms + 2
    return dict(
        full=hp.Barrier(num_arrivals=copies, num_barriers=_STAGES),
        free=hp.Barrier(num_arrivals=TILES, num_barriers=_STAGES),
        values_free=hp.Barrier(num_arrivals=TILES, num_barriers=_STAGES),
        state_full=hp.Barrier(num_arrivals=TILES * tiles),
        state_free=hp.Barrier(num_arrivals=TILES),
        taken=hp.Barrier(),
        seen=hp.Barrier(num_arrivals=TILES),
        done=hp.Barrier(num_arrivals=1 + TILES),
    )
