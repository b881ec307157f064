"""The third prefill kernel on Hopper GPUs, for much work in many rows. A program has 128 value dims of a head at a time.

It computes the bits that states_mosaic.py computes, with other work for each of the three warpgroups: one fetches what the
chunks to come need, and the two others have 64 value dims each. They carry their part of the state and make its outputs.
While one waits for its products, the other one keeps the tensor cores busy, and both read the same keys and squares. For
few rows that would leave most cores idle. Outputs are transposed, [values, tokens], as states are: their left operands are
then in registers.

There are at most as many programs as cores. Each takes one head after the other, and fetches the next one's first chunks
while it still carries the one before.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_mosaic as pm
from pallas_kernels._mosaic_rows import SHAPE, TILE
from pallas_kernels.blocks import StateLayout
from pallas_kernels.gated_delta_rule.prefill.carry_mosaic import Head, load_values
from pallas_kernels.gated_delta_rule.prefill.work_mosaic import Work, take_next

PARTS = 2  # of a program's value dims
_STAGES = 2  # chunks that are in shared memory


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
        taken: How many of them programs have taken: one of `pm.counters`.
        layout: The same as in states_mosaic.py.
        wait_for_products: The same.
    """
    number = memory[0][-1]["number"]  # of what has been taken
    stage_of = lambda chunk: jax.lax.rem(chunk, jnp.int32(_STAGES))
    values_of = lambda pair, part: pm.slice_of((PARTS * pair + part) * TILE, TILE)

    def run(take, carry_on):
        """Runs carry_on(head, pair, before) for all that is taken, and returns the number of chunks.

        `pair` is the number of the head's part, and `before` the number of chunks that were before.
        """

        def one(carry):
            found, before = carry
            row, head_index, pair = work.place_of(found)
            head = Head(refs, memory, row, head_index, layout)
            carry_on(head, pair, before)
            return take(), before + head.count

        return jax.lax.while_loop(lambda carry: carry[0] < work.total, one, (take(), jnp.int32(0)))[1]

    def fetch():
        """Takes heads, and fetches what their chunks need."""
        pm.set_max_registers(40, action="decrease")

        def take():
            """Takes the next part of a head, if there is one, and tells the others."""
            take_next(taken, number)
            pm.arrive(refs.taken)
            return number[0]

        def fetch_chunks(head, pair, before):
            refs = head.refs

            def one(chunk, _):
                token, _ = head.row.tokens_of(chunk)
                here, at = pm.slice_of(token, TILE), stage_of(before + chunk)
                full = refs.full.at[at]
                pm.when(before + chunk >= _STAGES)(lambda: pm.wait(refs.free.at[at]))
                for n in range(PARTS):
                    source = refs.v.at[here, head.head, values_of(pair, n)]
                    pm.copy_in(source, head.token_rows["v"].at[at, n], full)
                for name in ("k_before", "k_after", "q_before") if head.per_channel else ("k", "q"):
                    head.copy_keys(name, here, head.first + chunk, at, full)
                if wait_for_products:
                    wait_for_products(head.first + chunk, head.key_head)
                head.copy_products(head.first + chunk, at, full)
                attention = refs.attention.at[0, head.head, head.first + chunk]
                pm.copy_in(attention, refs.squares["attention"].at[at], full)

            jax.lax.fori_loop(0, head.count, one, None)
            pm.wait(refs.seen)

        total = run(take, fetch_chunks)
        pm.wait(refs.seen)

        # A barrier has one phase bit, so each of its completions must be waited for.
        @pm.loop(jnp.maximum(total - _STAGES, 0), total)
        def _(chunk):
            pm.wait(refs.free.at[stage_of(chunk)])

    def carry_part():
        """Runs the chunks' way from state to state for one part of the value dims, and makes its outputs."""
        pm.set_max_registers(232, action="increase")
        part = pm.axis_index(pm.WARPGROUP) - 1

        def see():
            """Returns what has been taken, and lets the next one be taken."""
            pm.wait(refs.taken)
            found = number[0]
            pm.arrive(refs.seen)
            return found

        run(see, lambda head, pair, before: carry_head(head, values_of(pair, part), part, before))

    def carry_head(head, values, part, before):
        """Runs a part of a head. Before it, the program has had so many chunks."""
        refs = head.refs
        out_rows, out_tile = head.token_rows["out"].at[part], head.token_tiles["out"].at[part]
        store_tokens = lambda token, live: head.store_outputs(token, live, out_rows, values)

        def advance(chunk, state):
            """Runs one chunk. Takes and returns the state's tiles."""
            at = stage_of(before + chunk)
            token, live = head.row.tokens_of(chunk)
            v_tile = head.token_tiles["v"].at[at, part]
            pm.wait(refs.full.at[at])
            head.keep_tokens(live, v_tile, at)  # both parts' warpgroups write the same keys
            known, v = pm.multiply_all(SHAPE, [head.of_before(state, at)], lambda: [load_values(v_tile)])
            (added,) = pm.multiply_all(SHAPE, [head.of_wanted(known, v.astype(jnp.float32), at)])
            queries, attention = head.keys_of("q_before", at), refs.squares["attention"].at[at]
            of_queries = [(head.piece(state[n], 0), queries[n].T) for n in head.key_tiles]
            of_attention = [(lambda: added.astype(jnp.bfloat16), attention.T)]
            out, of_added = pm.multiply_all(SHAPE, [of_queries, of_attention])
            out = out if head.per_channel else head.of_tokens(1, at) * out
            out = (out + of_added).astype(jnp.bfloat16)
            state = head.changed(state, pm.multiply_all(SHAPE, head.of_added(added, at)), at)
            pm.arrive(refs.free.at[at])
            pm.wait_for_copies_out(0, wait_read_only=True)
            pm.store_transposed(out_tile, out)
            pm.commit()
            store_tokens(token, live)
            return state

        @pm.when(head.count > 0)
        def _():
            advance_to = lambda chunk, stop, state: jax.lax.fori_loop(chunk, stop, advance, state)
            head.row.run(refs, head.initial(values), advance_to, lambda block, state: head.store(block, state, values))

        pm.wait_for_copies_out(0, wait_read_only=True)
        head.row.clear(refs.v.shape[0], out_tile, store_tokens)

    warpgroup = pm.axis_index(pm.WARPGROUP)
    pm.when(warpgroup == 0)(fetch)
    pm.when(warpgroup > 0)(carry_part)
    pm.finish_together(refs.done)


def memory(key_dim: int, pieces: int, dtype: Any, *, per_channel: bool) -> list[tuple[Any, ...]]:
    """Describes a program's shared memory, as views of the same place."""
    tiles = key_dim // TILE
    tokens, squares = dict(out=(PARTS, *SHAPE), v=(_STAGES, PARTS, *SHAPE)), dict(solve=(_STAGES, pieces))
    squares |= dict(attention=(_STAGES,))
    if per_channel:
        squares |= dict.fromkeys(("k_before", "k_after", "q_before"), (_STAGES, tiles))
        factors = pm.shared((_STAGES, key_dim), jnp.float32)
    else:
        tokens |= dict.fromkeys(("k", "q"), (_STAGES, tiles, *SHAPE))
        factors = pm.shared((_STAGES, 4, TILE), jnp.float32)
    tile = lambda *shape: pm.tiled(*shape, *SHAPE, dtype=jnp.bfloat16)
    squares = {name: tile(*shape) for name, shape in squares.items()}
    rows, tiles_of_tokens = pm.views_of_tokens(tokens, dtype)
    others = dict(squares=squares, chunk_factors=factors, number=pm.shared((1,), jnp.int32))
    return [(rows, others), (tiles_of_tokens,)]


def barriers(key_dim: int, pieces: int, *, per_channel: bool) -> dict[str, Any]:
    """Describes a program's barriers."""
    copies = (2 + per_channel) * (key_dim // TILE) + PARTS + pieces + 2
    return dict(
        full=pm.Barrier(num_arrivals=copies, num_barriers=_STAGES),
        free=pm.Barrier(num_arrivals=PARTS, num_barriers=_STAGES),
        taken=pm.Barrier(),
        seen=pm.Barrier(num_arrivals=PARTS),
        done=pm.Barrier(num_arrivals=1 + PARTS),
    )
