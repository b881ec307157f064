"""The third prefill kernel on Hopper GPUs, for much work in many rows. A program has 128 value dims of a head at a time.

It computes the bits that states_mosaic.py computes, with other work for each of the three warpgroups: one fetches what the
chunks to come need, and the two others have 64 value dims each. They carry their part of the state and make its outputs.
While one waits for its products, the other one keeps the tensor cores busy, and both read the same keys and squares. For
few rows that would leave most cores idle. Outputs are transposed, [values, tokens], as states are: their left operands are
then in registers.

There are at most as many programs as cores. Each takes one head after the other, and fetches the next one's state and first
chunks while it still carries the one before. States come and leave as copies of whole tiles. In the layout that tensor cores
give them, threads would load and store them in pieces of 32 bytes, which takes longer than a chunk.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import hopper as hp
from pallas_kernels.blocks import StateLayout
from pallas_kernels.gated_delta_rule.prefill.carry_mosaic import Head, load_values, store_values
from pallas_kernels.gated_delta_rule.prefill.work_mosaic import Work, take_next, tell
from pallas_kernels.hopper.prefill_rows import SHAPE, TILE, PrefillRow

PARTS = 2  # of a program's value dims
_STAGES = 2  # chunks that are in shared memory


class Taken(NamedTuple):
    """What a program has taken, as the warpgroup that fetches tells it to the others. A row is as in `PrefillRow`.

    Attributes:
        number: Its number. There is no more to take if it is `Work.total`, or larger.
        start: The row's first token.
        end: The token after its last one. If there was no more to take, the row has none.
        first_chunk: The number of chunks in earlier rows.
        first_length: The length of the row's first chunk.
        layer: The layer of the pool that has its states.
        read: The block of the state before the row.
        write: The block of the state at its end.
        total: The token after the last row of all.
    """

    number: Any
    start: Any
    end: Any
    first_chunk: Any
    first_length: Any
    layer: Any
    read: Any
    write: Any
    total: Any

    @classmethod
    def of(cls, refs: Any, work: Work, number: Any) -> "Taken":
        """Reads what a number stands for."""
        index = jnp.minimum(work.place_of(number)[0], work.rows - 1)
        row = PrefillRow.of(refs, index)
        end = jnp.where(number < work.total, row.end, row.start)
        blocks = refs.layer[0], refs.read_block[index], refs.write_block[index]
        return cls(number, row.start, end, row.first_chunk, row.first_length, *blocks, row.total)

    @classmethod
    def heard(cls, told: Any) -> "Taken":
        """Reads what has been told."""
        return cls(*(told[n] for n in range(len(cls._fields))))


def carry_states(
    refs: Any,
    memory: Any,
    work: Work,
    taken: Any,
    *,
    layout: StateLayout,
    wait_for_products: Callable[[Any, Any], None] | None = None,
) -> None:
    """Runs parts of heads until none is left, by three warpgroups.

    The warpgroup that fetches takes the next one while the others still carry the one before.

    Args:
        refs: As in states_mosaic.py.
        memory: The same.
        work: All parts of all heads, of two tiles of value dims each.
        taken: How many of them programs have taken: one of `hp.semaphores`.
        layout: The same as in states_mosaic.py.
        wait_for_products: The same.
    """
    others = memory[0][-1]
    told, states = others["told"], others["states"]
    stage_of = lambda chunk: jax.lax.rem(chunk, jnp.int32(_STAGES))
    values_of = lambda pair, part: hp.ds((PARTS * pair + part) * TILE, TILE)

    def place_of(found: Taken) -> tuple[Head, Any]:
        """Returns the head of what has been taken, and the number of its part. What is not told of its row is None."""
        index, head, pair = work.place_of(found.number)
        row = PrefillRow(index, work.rows, found.start, found.end, None, found.first_chunk, found.first_length)
        return Head(refs, memory, row, head, found.layer, found.read, layout), pair

    def fetch():
        """Takes heads, and fetches their states and what their chunks need."""
        hp.set_max_registers(40, action="decrease")

        def take():
            """Takes the next part of a head, if there is one, and tells the others."""
            take_next(taken, told)
            found = Taken.of(refs, work, told[0])
            # `take_next` has stored the number, and other threads may still read it.
            tell(found[1:], told, first=1)
            hp.barrier_arrive(refs.taken)
            return found

        def fetch_head(carry):
            found, before = carry
            head, pair = place_of(found)
            hp.when(head.has_initial)(lambda: fetch_state(head, found.read, pair))
            jax.lax.fori_loop(0, head.count, lambda chunk, _: fetch_chunk(head, pair, chunk, before + chunk), None)
            hp.barrier_wait(refs.seen)
            following = take()
            hp.barrier_wait(refs.state_free)
            return following, before + head.count

        def fetch_state(head, block, pair):
            for part in range(PARTS):
                for n in head.key_tiles:
                    tile = head.tile_of_pool(block, values_of(pair, part), n)
                    hp.copy_gmem_to_smem(tile, states.at[part, n], refs.state_full)

        def fetch_chunk(head, pair, chunk, number):
            refs, at = head.refs, stage_of(number)
            token, _ = head.row.tokens_of(chunk)
            here, full = hp.ds(token, TILE), refs.full.at[at]
            hp.when(number >= _STAGES)(lambda: hp.barrier_wait(refs.free.at[at]))
            for name in ("k_before", "k_after", "q_before") if head.per_channel else ("k", "q"):
                head.copy_keys(name, here, head.first + chunk, at, full)
            if wait_for_products:
                wait_for_products(head.first + chunk, head.key_head)
            head.copy_products(head.first + chunk, at, full)
            attention = refs.attention.at[0, head.head, head.first + chunk]
            hp.copy_gmem_to_smem(attention, refs.squares["attention"].at[at], full)
            hp.when(number >= _STAGES)(lambda: hp.barrier_wait(refs.values_free.at[at]))
            for part in range(PARTS):
                source = refs.v.at[here, head.head, values_of(pair, part)]
                hp.copy_gmem_to_smem(source, head.token_rows["v"].at[at, part], full)

        chunks = jax.lax.while_loop(lambda carry: carry[0].number < work.total, fetch_head, (take(), jnp.int32(0)))[1]
        hp.barrier_wait(refs.seen)

        # A barrier has one phase bit, so each of its completions must be waited for.
        @hp.loop(jnp.maximum(chunks - _STAGES, 0), chunks)
        def _(number):
            hp.barrier_wait(refs.free.at[stage_of(number)])
            hp.barrier_wait(refs.values_free.at[stage_of(number)])

    def carry_part():
        """Runs the chunks' way from state to state for one part of the value dims, and makes its outputs."""
        hp.set_max_registers(232, action="increase")
        part = hp.axis_index(hp.WARPGROUP) - 1
        own_states = [states.at[part, n] for n in range(states.shape[1])]

        def see():
            """Returns what has been taken and the state before it, and lets the next one be taken."""
            hp.barrier_wait(refs.taken)
            found = Taken.heard(told)
            hp.barrier_arrive(refs.seen)
            head, _ = place_of(found)
            hp.when(head.has_initial)(lambda: hp.barrier_wait(refs.state_full))
            load = hp.load_tile if layout == "VK" else hp.load_transposed
            nothing = lambda: hp.zeros(SHAPE, states.dtype)
            return found, [jax.lax.cond(head.has_initial, lambda x=x: load(x), nothing) for x in own_states]

        def carry_on(carry):
            found, state, before = carry
            head, pair = place_of(found)
            values = values_of(pair, part)
            state = carry_head(head, [x.astype(jnp.float32) for x in state], values, part, before)
            # The next state is in the place that this one takes.
            following, next_state = see()
            chunks = before + head.count
            hp.wait_smem_to_gmem(0, wait_read_only=True)  # of the last chunk's outputs
            hp.when(head.count > 0)(lambda: hp.barrier_arrive(refs.values_free.at[stage_of(chunks - 1)]))
            head.row.store_last(found.write, state, lambda block, state: store_state(head, block, state, values))
            return following, next_state, chunks

        def store_state(head, block, state, values):
            hp.commit_smem()  # all threads have loaded what was there
            tiles = [tile.astype(states.dtype) for tile in state]
            if layout == "VK":
                hp.store_tiles(tiles, own_states)
            else:
                for x, tile in zip(own_states, tiles, strict=True):
                    hp.store_transposed(x, tile)
            hp.commit_smem()
            for n, x in enumerate(own_states):
                hp.copy_smem_to_gmem(x, head.tile_of_pool(block, values, n))

        jax.lax.while_loop(lambda carry: carry[0].number < work.total, carry_on, (*see(), jnp.int32(0)))
        hp.wait_smem_to_gmem(0, wait_read_only=True)

    def carry_head(head, state, values, part, before):
        """Runs a part of a head. Before it, the program has had so many chunks. Takes and returns the state's tiles."""
        refs = head.refs

        def let_fetch(chunk):
            """Frees the place of the last chunk's outputs, or in the first chunk that of states, once they have left."""
            hp.wait_smem_to_gmem(0, wait_read_only=True)
            hp.when(chunk > 0)(lambda: hp.barrier_arrive(refs.values_free.at[stage_of(before + chunk - 1)]))
            hp.when(chunk == 0)(lambda: hp.barrier_arrive(refs.state_free))

        def advance(chunk, state):
            """Runs one chunk. Takes and returns the state's tiles."""
            at = stage_of(before + chunk)
            token, live = head.row.tokens_of(chunk)
            v_tile = head.token_tiles["v"].at[at, part]
            hp.barrier_wait(refs.full.at[at])
            head.keep_tokens(live, v_tile, at)  # both parts' warpgroups write the same keys

            def meanwhile():
                let_fetch(chunk)
                return [load_values(v_tile)]

            known, v = hp.multiply_all(SHAPE, [head.of_before(state, at)], meanwhile)
            (added,) = hp.multiply_all(SHAPE, [head.of_wanted(known, v.astype(jnp.float32), at)])
            queries, attention = head.keys_of("q_before", at), refs.squares["attention"].at[at]
            of_queries = [(head.piece(state[n], 0), queries[n].T) for n in head.key_tiles]
            of_attention = [(lambda: added.astype(jnp.bfloat16), attention.T)]
            out, of_added = hp.multiply_all(SHAPE, [of_queries, of_attention])
            out = out if head.per_channel else head.of_tokens(1, at) * out
            out = (out + of_added).astype(jnp.bfloat16)
            state = head.changed(state, hp.multiply_all(SHAPE, head.of_added(added, at)), at)
            hp.barrier_arrive(refs.free.at[at])
            # Outputs take the place of the chunk's values.
            store_values(v_tile, out)
            hp.commit_smem()
            head.store_outputs(token, live, head.token_rows["v"].at[at, part], values)
            return state

        advance_to = lambda chunk, stop, state: jax.lax.fori_loop(chunk, stop, advance, state)
        state = head.row.run(refs, state, advance_to, lambda block, state: head.store(block, state, values))

        @hp.when(head.count == 0)
        def _():
            hp.wait_smem_to_gmem(0, wait_read_only=True)
            hp.barrier_arrive(refs.state_free)

        # If this were read earlier, it would stay in a register over the loop, which has none to spare. The next part of a
        # head may have been told since then, and has the same total.
        total = Taken.heard(told).total
        hp.when(total < refs.v.shape[0])(lambda: head.clear_outputs(total, values))
        return state

    warpgroup = hp.axis_index(hp.WARPGROUP)
    hp.when(warpgroup == 0)(fetch)
    hp.when(warpgroup > 0)(carry_part)
    hp.finish_together(refs.done)


def memory(key_dim: int, pieces: int, dtype: Any, pool_dtype: Any, *, per_channel: bool) -> list[tuple[Any, ...]]:
    """Describes a program's shared memory, as views of the same place."""
    tiles = key_dim // TILE
    tokens, squares = dict(v=(_STAGES, PARTS, *SHAPE)), dict(solve=(_STAGES, pieces))
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
    others = dict(squares=squares, chunk_factors=factors, told=hp.SMEM((len(Taken._fields),), jnp.int32))
    others |= dict(states=hp.tiled(PARTS, tiles, *SHAPE, dtype=pool_dtype))
    return [(rows, others), (tiles_of_tokens,)]


def barriers(key_dim: int, pieces: int, *, per_channel: bool) -> dict[str, Any]:
    """Describes a program's barriers."""
    tiles = key_dim // TILE
    copies = (2 + per_channel) * tiles + PARTS + pieces + 2
    return dict(
        full=hp.Barrier(num_arrivals=copies, num_barriers=_STAGES),
        free=hp.Barrier(num_arrivals=PARTS, num_barriers=_STAGES),
        values_free=hp.Barrier(num_arrivals=PARTS, num_barriers=_STAGES),
        state_full=hp.Barrier(num_arrivals=PARTS * tiles),
        state_free=hp.Barrier(num_arrivals=PARTS),
        taken=hp.Barrier(),
        seen=hp.Barrier(num_arrivals=PARTS),
        done=hp.Barrier(num_arrivals=1 + PARTS),
    )
