"""The third prefill kernel on Hopper GPUs. A program has 64 value dims of one head of one row.

It computes what states.py computes. Its three warpgroups work on different chunks at the same time: one fetches what the
chunks to come need, one carries the state from chunk to chunk, and one makes the outputs. The state is transposed, [values,
keys], and everything that it is multiplied with on the way from chunk to chunk is too. The left operands of these products
are then in registers already, and none waits for shared memory.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_mosaic as pm
from pallas_kernels._dot import pieces
from pallas_kernels._mosaic_rows import SHAPE, TILE, PrefillRow
from pallas_kernels.blocks import NULL_BLOCK, StateLayout

WARPGROUPS = 3  # of a program
_QUERY_STAGES = 2  # chunks whose queries are in shared memory


def unsupported(q: jax.Array, k: jax.Array, v: jax.Array, chunk_size: int) -> str | None:
    """Returns the reason why the kernel cannot run these arguments, or None if it can."""
    key_dim, value_dim = k.shape[2], v.shape[2]
    if any(x.dtype != jnp.bfloat16 for x in (q, k, v)):
        return f"q, k and v must be bfloat16, got {q.dtype}, {k.dtype} and {v.dtype}"
    if chunk_size != TILE:
        return f"chunk_size must be {TILE}, got {chunk_size}"
    if key_dim not in (TILE, 2 * TILE) or value_dim % TILE:
        return f"key_dim must be 64 or 128 and value_dim a multiple of 64, got {key_dim} and {value_dim}"
    return None


def carry_states(
    refs, memory, place, *, layout: StateLayout, wait_for_products: Callable[[Any, Any], None] | None = None
):
    """Runs one row, head and tile of value dims, by three warpgroups.

    "full" barriers tell that a place in shared memory has been filled, "free" ones that it may be filled again.

    Args:
        refs: The inputs, the pool, the outputs and `barriers`, by name.
        memory: The views of shared memory, see `memory`.
        place: The row, the head, and the number of the tile.
        layout: The layout of the states in the pool.
        wait_for_products: wait_for_products(chunk, key_head) waits until what products_mosaic.py makes of them is there.
            None if all is there.
    """
    (token_rows, others), (token_tiles,) = memory
    refs = SimpleNamespace(**vars(refs), **others)
    out_rows, out_tile = token_rows["out"], token_tiles["out"]
    row, head, part = place
    per_channel = hasattr(refs, "k_before")
    value_heads, key_dim = refs.v.shape[1], refs.k.shape[2]
    key_head = jax.lax.div(head, jnp.int32(value_heads // refs.k.shape[1]))
    stages = refs.chunk_factors.shape[0]
    key_tiles, numbers = range(key_dim // TILE), range(refs.solve.shape[0])
    values = pm.slice_of(part * TILE, TILE)
    layer, read = refs.layer[0], refs.read_block[row]
    prefill_row = PrefillRow.of(refs, row)
    count, first = prefill_row.chunks_up_to(prefill_row.end - prefill_row.start), prefill_row.first_chunk

    def split(x):
        return pieces(x, len(numbers))

    def copy_tiles(name, here, number, at, full):
        """Copies a chunk's keys or queries. Decayed ones are stored chunk by chunk, others token by token."""
        for n in key_tiles:
            keys = pm.slice_of(n * TILE, TILE)
            if per_channel:
                pm.copy_in(getattr(refs, name).at[0, head, number, :, keys], refs.squares[name].at[at, n], full)
            else:
                pm.copy_in(getattr(refs, name).at[here, key_head, keys], token_rows[name].at[at, n], full)

    def fetch():
        """Fetches what the chunks to come need: keys, values and squares for the state, then queries for the outputs."""
        pm.set_max_registers(40, action="decrease")

        def one(chunk, _):
            token, _ = prefill_row.tokens_of(chunk)
            here, number = pm.slice_of(token, TILE), first + chunk
            at = jax.lax.rem(chunk, jnp.int32(stages))
            full = refs.full.at[at]
            pm.when(chunk >= stages)(lambda: pm.wait(refs.free.at[at]))
            for name in ("k_before", "k_after") if per_channel else ("k",):
                copy_tiles(name, here, number, at, full)
            pm.copy_in(refs.v.at[here, head, values], token_rows["v"].at[at], full)
            if wait_for_products:
                wait_for_products(number, key_head)
            for n in numbers:
                pm.copy_in(refs.solve.at[n, head, number], refs.squares["solve"].at[at, n], full)
            factors = refs.decay.at[head, number] if per_channel else refs.scales.at[head, number]
            pm.copy_in(factors, refs.chunk_factors.at[at], full)
            fetch_queries(chunk, here, number)

        def fetch_queries(chunk, here, number):
            at = jax.lax.rem(chunk, jnp.int32(_QUERY_STAGES))
            full = refs.query_full.at[at]
            pm.when(chunk >= _QUERY_STAGES)(lambda: pm.wait(refs.query_free.at[at]))
            copy_tiles("q_before" if per_channel else "q", here, number, at, full)
            pm.copy_in(refs.attention.at[0, head, number], refs.squares["attention"].at[at], full)
            if not per_channel:
                pm.copy_in(refs.scales.at[head, number, 1], refs.of_query.at[at], full)

        jax.lax.fori_loop(0, count, one, None)
        # A barrier has one phase bit, so each of its completions must be waited for.
        for length, free in ((stages, refs.free), (_QUERY_STAGES, refs.query_free)):

            @pm.loop(jnp.maximum(count - length, 0), count)
            def _(chunk, length=length, free=free):
                pm.wait(free.at[jax.lax.rem(chunk, jnp.int32(length))])

    def keys_of(name, at):
        """Returns the tiles [tokens, keys] of a chunk's decayed keys or queries, or of its keys or queries."""
        if per_channel:
            return [refs.squares[name].at[at, n] for n in key_tiles]
        return [token_tiles[name[0]].at[at, n] for n in key_tiles]

    def carry_state():
        """Runs the chunks' way from state to state, and hands the state before each and its corrections to the outputs."""
        pm.set_max_registers(232, action="increase")

        def place(block, n):
            keys = pm.slice_of(n * TILE, TILE)
            if layout == "VK":
                return refs.pool.at[layer, block, head, values, keys]
            return refs.pool.at[layer, block, head, keys, values]

        def of_tokens(kind, at):
            """Returns the factors of a chunk's tokens: of their keys before it (0), which are negative, and after it (2)."""
            if per_channel:
                return 1.0
            return pm.along_columns(pm.load_per_column(refs.chunk_factors.at[at, kind]), TILE)

        def of_state(chunk):
            """Returns the factor of the state over a chunk, if it is one number."""
            number = first + jnp.minimum(chunk, count - 1)
            return None if per_channel else refs.decay[head, number]

        def of_keys(n, at):
            """Returns the factors of the state's n-th tile over a chunk, if there is one per key."""
            keys = pm.slice_of(n * TILE, TILE)
            return pm.along_columns(pm.load_per_column(refs.chunk_factors.at[at, keys]), TILE)

        def advance(chunk, carry):
            """Runs one chunk. Its `carry` is the factor of the state over the chunk, and the state's tiles."""
            decay, state = carry
            at = jax.lax.rem(chunk, jnp.int32(stages))
            upcoming = of_state(chunk + 1)
            _, live = prefill_row.tokens_of(chunk)
            v_tile = token_tiles["v"].at[at]
            part = lambda tile, piece: lambda: split(tile)[piece]
            pm.wait(refs.full.at[at])

            @pm.when(live < TILE)
            def _():
                for tile in [v_tile] + ([] if per_channel else keys_of("k", at)):
                    pm.keep_rows(tile, live)
                pm.commit()

            def publish_state():
                pm.when(chunk > 0)(lambda: pm.wait(refs.state_free))
                pm.hand_over([split(x)[0] for x in state], [refs.states.at[n] for n in key_tiles], refs.state_full)

            before, after = keys_of("k_before", at), keys_of("k_after", at)
            of_before = [(part(state[n], p), before[n].T) for p in numbers for n in key_tiles]
            # A product with ones on the diagonal is a transposition.
            known, v = pm.multiply_all(SHAPE, [of_before, [(v_tile.T, refs.identity)]], publish_state)
            wanted = v - known if per_channel else v + of_tokens(0, at) * known
            solve = [refs.squares["solve"].at[at, n] for n in numbers]
            if per_channel:  # they are transposed if there is a decay per head
                solve = [x.T for x in solve]
            pairs = [(part(wanted, i), solve[j]) for i in numbers for j in numbers if i + j < len(numbers)]
            (added,) = pm.multiply_all(SHAPE, [pairs])
            weighted = of_tokens(2, at) * added

            def publish_added():
                pm.when(chunk > 0)(lambda: pm.wait(refs.added_free))
                pm.hand_over([added.astype(jnp.bfloat16)], [refs.added], refs.added_full)

            changes = [[(part(weighted, p), after[n]) for p in numbers] for n in key_tiles]
            change = pm.multiply_all(SHAPE, changes, publish_added)
            decays = [of_keys(n, at) if per_channel else decay for n in key_tiles]
            state = [d * s + c for d, s, c in zip(decays, state, change, strict=True)]
            pm.arrive(refs.free.at[at])
            return upcoming, state

        def advance_to(chunk, stop, state):
            return jax.lax.fori_loop(chunk, stop, advance, (of_state(chunk), state))[1]

        def store(block, state):
            for n in key_tiles:
                pm.store_directly(place(block, n), state[n].astype(refs.pool.dtype), transposed=layout == "KV")

        def initial(n):
            load = lambda: pm.load_directly(place(read, n), transposed=layout == "KV").astype(jnp.float32)
            return jax.lax.cond(read != NULL_BLOCK, load, lambda: pm.zeros(SHAPE, jnp.float32))

        diagonal = (pm.rows(SHAPE) == pm.columns(SHAPE)).astype(jnp.float32)
        refs.identity[...] = diagonal.astype(jnp.bfloat16)
        pm.commit()

        @pm.when(count > 0)
        def _():
            prefill_row.run(refs, [initial(n) for n in key_tiles], advance_to, store)
            pm.wait(refs.state_free)
            pm.wait(refs.added_free)

    def write_outputs():
        """Makes the outputs of each chunk from the state before it and from its corrections."""
        pm.set_max_registers(232, action="increase")

        def one(chunk, _):
            at = jax.lax.rem(chunk, jnp.int32(_QUERY_STAGES))
            token, live = prefill_row.tokens_of(chunk)
            pm.wait(refs.query_full.at[at])
            pm.wait(refs.state_full)
            queries, attention = keys_of("q_before", at), refs.squares["attention"].at[at]
            (out,) = pm.multiply_all(SHAPE, [[(queries[n], refs.states.at[n].T) for n in key_tiles]])
            pm.arrive(refs.state_free)
            if not per_channel:
                out = pm.along_rows(pm.load_per_row(refs.of_query.at[at]), TILE) * out
            pm.wait(refs.added_full)
            (of_added,) = pm.multiply_all(SHAPE, [[(attention, refs.added.T)]])
            pm.arrive(refs.added_free)
            pm.arrive(refs.query_free.at[at])
            pm.wait_for_copies_out(0, wait_read_only=True)
            out_tile[...] = (out + of_added).astype(jnp.bfloat16)
            pm.commit()
            store_tokens(token, live)

        jax.lax.fori_loop(0, count, one, None)
        pm.wait_for_copies_out(0, wait_read_only=True)
        prefill_row.clear(refs.v.shape[0], out_tile, store_tokens)

    def store_tokens(token, live):
        """Stores the first `live` rows of the tile of outputs."""
        target = lambda n, size: refs.out.at[pm.slice_of(token + n, size), head, values]
        pm.store_rows(out_rows, live, target)

    pm.run_by_warpgroup([fetch, carry_state, write_outputs], refs.done)


def memory(key_dim: int, pieces: int, dtype: Any, *, per_channel: bool) -> list[tuple[Any, ...]]:
    """Describes a program's shared memory, as views of the same place."""
    tiles, stages = key_dim // TILE, _stages(per_channel)
    tokens, squares = dict(out=SHAPE, v=(stages, *SHAPE)), dict(solve=(stages, pieces), attention=(_QUERY_STAGES,))
    if per_channel:
        squares |= dict(k_before=(stages, tiles), k_after=(stages, tiles), q_before=(_QUERY_STAGES, tiles))
        factors = pm.shared((stages, key_dim), jnp.float32)
    else:
        tokens |= dict(k=(stages, tiles, *SHAPE), q=(_QUERY_STAGES, tiles, *SHAPE))
        factors = pm.shared((stages, 3, TILE), jnp.float32)
    tile = lambda *shape: pm.tiled(*shape, *SHAPE, dtype=jnp.bfloat16)
    others = dict(
        squares={name: tile(*shape) for name, shape in squares.items()},
        chunk_factors=factors,
        of_query=pm.shared((_QUERY_STAGES, TILE), jnp.float32),
        states=tile(tiles),
        added=tile(),
        identity=tile(),
    )
    rows, tiles_of_tokens = pm.views_of_tokens(tokens, dtype)
    return [(rows, others), (tiles_of_tokens,)]


def barriers(key_dim: int, pieces: int, *, per_channel: bool) -> dict[str, Any]:
    """Describes a program's barriers."""
    tiles, stages = key_dim // TILE, _stages(per_channel)
    return dict(
        full=pm.Barrier(num_arrivals=(1 + per_channel) * tiles + 1 + pieces + 1, num_barriers=stages),
        free=pm.Barrier(num_barriers=stages),
        query_full=pm.Barrier(num_arrivals=tiles + 1 + (not per_channel), num_barriers=_QUERY_STAGES),
        query_free=pm.Barrier(num_barriers=_QUERY_STAGES),
        state_full=pm.Barrier(),
        state_free=pm.Barrier(),
        added_full=pm.Barrier(),
        added_free=pm.Barrier(),
        done=pm.Barrier(num_arrivals=WARPGROUPS),
    )


def _stages(per_channel: bool) -> int:
    """Returns for how many chunks keys and values are in shared memory: as many as fit."""
    return 2 if per_channel else 3


def states(inputs: dict[str, jax.Array], pool: jax.Array, *, layout: StateLayout) -> tuple[jax.Array, jax.Array]:
    """Launches the kernel for a decay per key channel.

    Args:
        inputs: What `states.states` reads, by name.
        pool: The states.
        layout: The layout of the states in the pool.
    """
    v, key_dim, pieces = inputs["v"], inputs["k"].shape[2], inputs["solve"].shape[0]
    rows, (_, value_heads, value_dim) = inputs["read_block"].shape[0], v.shape
    names = [*inputs, "pool", "out"]

    def body(*arrays):
        *arrays, memory, barriers = arrays
        refs = SimpleNamespace(**dict(zip(names, arrays, strict=True)), **barriers)
        carry_states(refs, memory, [pm.axis_index(axis) for axis in ("row", "head", "part")], layout=layout)

    updated = jax.new_ref(pool)
    out = pm.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(v.shape, v.dtype),
        grid=(rows, value_heads, value_dim // TILE),
        grid_names=("row", "head", "part"),
        num_threads=WARPGROUPS,
        thread_name=pm.WARPGROUP,
        scratch_types=[
            pm.union(*memory(key_dim, pieces, v.dtype, per_channel=True)),
            barriers(key_dim, pieces, per_channel=True),
        ],
        kernel_name="gated_delta_rule_prefill_states",
    )(*inputs.values(), updated)
    return out, jax.freeze(updated)
