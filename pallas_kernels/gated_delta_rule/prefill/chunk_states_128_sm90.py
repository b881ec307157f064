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
    other arguments are those of chunk_states_64_sm90.py.
    """
    others = memory[0][-1]
    entry, states = others["work_entry"], others["states"]
    stage_of = lambda chunk: jax.lax.rem(chunk, jnp.int32(_STAGES))
    values_of = lambda pair, tile_index: hp.ds((TILES * pair + tile_index) * TILE, TILE)

    def head_of(found: Entry) -> tuple[Head, Any]:
        """Return an entry's head and its pair of tiles. `PrefillRow.total` is None: this kernel does not need it."""
        index, head, pair = work.indices_of(found.ticket)
        row = PrefillRow(index, work.rows, found.start, found.end, None, found.first_chunk, found.first_length)
        return Head(refs, memory, row, head, found.layer, found.read, layout), pair

    def fetch():
        """Take entries, and copy their states and the operands of their chunks."""
        hp.set_max_registers(40, action="decrease")

        def take_entry():
            """Take the next entry, and store it for the other warpgroups."""
            take(queue, entry)
            found = Entry.of(refs, work, entry[0])
            # `take` has stored the ticket, and other threads may still load it.
            store_entry(found[1:], entry, first=1)
            hp.barrier_arrive(refs.taken)
            return found

        def fetch_head(carry):
            found, before = carry
            head, pair = head_of(found)
            hp.when(head.has_initial)(lambda: fetch_state(head, found.read, pair))
            jax.lax.fori_loop(0, head.count, lambda chunk, _: fetch_chunk(head, pair, chunk, before + chunk), None)
            hp.barrier_wait(refs.seen)
            following = take_entry()
            hp.barrier_wait(refs.state_free)
            return following, before + head.count

        def fetch_state(head, block, pair):
            for tile_index in range(TILES):
                for n in head.key_tiles:
                    tile = head.tile_of_pool(block, values_of(pair, tile_index), n)
                    hp.copy_gmem_to_smem(tile, states.at[tile_index, n], refs.state_full)

        def fetch_chunk(head, pair, chunk, index):
            refs, at = head.refs, stage_of(index)
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
                source = refs.v.at[here, head.head, values_of(pair, tile_index)]
                hp.copy_gmem_to_smem(source, head.token_rows["v"].at[at, tile_index], full)

        chunks = jax.lax.while_loop(
            lambda carry: carry[0].ticket < work.total, fetch_head, (take_entry(), jnp.int32(0))
        )[1]
        hp.barrier_wait(refs.seen)

        # A barrier has one phase bit, so each of its completions must be waited for.
        @hp.loop(jnp.maximum(chunks - _STAGES, 0), chunks)
        def _(index):
            hp.barrier_wait(refs.free.at[stage_of(index)])
            hp.barrier_wait(refs.values_free.at[stage_of(index)])

    def carry_tile():
        """Compute the states and outputs of one tile of value dims."""
        hp.set_max_registers(232, action="increase")
        tile_index = hp.axis_index(hp.WARPGROUP) - 1
        own_states = [states.at[tile_index, n] for n in range(states.shape[1])]

        def see():
            """Return the next entry and its initial state, and let the copying warpgroup take another entry."""
            hp.barrier_wait(refs.taken)
            found = Entry.stored(entry)
            hp.barrier_arrive(refs.seen)
            head, _ = head_of(found)
            hp.when(head.has_initial)(lambda: hp.barrier_wait(refs.state_full))
            load = hp.load_tile if layout == "VK" else hp.load_transposed
            nothing = lambda: hp.zeros(SHAPE, states.dtype)
            return found, [jax.lax.cond(head.has_initial, lambda x=x: load(x), nothing) for x in own_states]

        def carry_on(carry):
            found, state, before = carry
            head, pair = head_of(found)
            values = values_of(pair, tile_index)
            state = carry_head(head, [x.astype(jnp.float32) for x in state], values, tile_index, before)
            # The next initial state is in the SMEM that this state is stored to.
            following, next_state = see()
            chunks = before + head.count
            hp.wait_smem_to_gmem(0, wait_read_only=True)  # the last chunk's outputs
            hp.when(head.count > 0)(lambda: hp.barrier_arrive(refs.values_free.at[stage_of(chunks - 1)]))
            head.row.store_last(found.write, state, lambda block, state: store_state(head, block, state, values))
            return following, next_state, chunks

        def store_state(head, block, state, values):
            hp.commit_smem()  # all threads have loaded the initial state from this SMEM
            tiles = [tile.astype(states.dtype) for tile in state]
            if layout == "VK":
                hp.store_tiles(tiles, own_states)
            else:
                for x, tile in zip(own_states, tiles, strict=True):
                    hp.store_transposed(x, tile)
            hp.commit_smem()
            for n, x in enumerate(own_states):
                hp.copy_smem_to_gmem(x, head.tile_of_pool(block, values, n))

        jax.lax.while_loop(lambda carry: carry[0].ticket < work.total, carry_on, (*see(), jnp.int32(0)))
        hp.wait_smem_to_gmem(0, wait_read_only=True)

    def carry_head(head, state, values, tile_index, before):
        """Run one tile of a head. `before` is the number of chunks that the CTA has run. Return the state's tiles."""
        refs = head.refs

        def let_fetch(chunk):
            """Free the last chunk's outputs in SMEM, or in the first chunk the states, once they are copied."""
            hp.wait_smem_to_gmem(0, wait_read_only=True)
            hp.when(chunk > 0)(lambda: hp.barrier_arrive(refs.values_free.at[stage_of(before + chunk - 1)]))
            hp.when(chunk == 0)(lambda: hp.barrier_arrive(refs.state_free))

        def advance(chunk, state):
            """Run one chunk. Take and return the state's tiles."""
            at = stage_of(before + chunk)
            token, live = head.row.tokens_of(chunk)
            v_tile = head.token_tiles["v"].at[at, tile_index]
            hp.barrier_wait(refs.full.at[at])
            head.keep_tokens(live, v_tile, at)  # both warpgroups write the same keys

            def meanwhile():
                let_fetch(chunk)
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
            head.store_outputs(token, live, head.token_rows["v"].at[at, tile_index], values)
            return state

        advance_to = lambda chunk, stop, state: jax.lax.fori_loop(chunk, stop, advance, state)
        state = head.row.run(refs, state, advance_to, lambda block, state: head.store(block, state, values))

        @hp.when(head.count == 0)
        def _():
            hp.wait_smem_to_gmem(0, wait_read_only=True)
            hp.barrier_arrive(refs.state_free)

        # If this were read earlier, it would stay in a register over the loop, which has none to spare. The next
        # entry may have been stored since then, and has the same total.
        total = Entry.stored(entry).total
        hp.when(total < refs.v.shape[0])(lambda: head.clear_outputs(total, values))
        return state

    warpgroup = hp.axis_index(hp.WARPGROUP)
    hp.when(warpgroup == 0)(fetch)
    hp.when(warpgroup > 0)(carry_tile)
    hp.finish_together(refs.done)


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
