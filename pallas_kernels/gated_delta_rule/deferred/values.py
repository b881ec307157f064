"""What deferred states do with states and values, after the launch of their weights, as a Triton kernel.

A program has some value dims of one head of one row, in tiles, and all keys of them. The vectors of a row's tokens, keys
first and then queries, are the rows of one tile. One product takes them all to a tile of the state. What is left for each
token is one sum over the group's corrections.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels._dot import Operand, dot, pieces
from pallas_kernels._pallas_triton import Lanes, Refs
from pallas_kernels.blocks import NULL_BLOCK
from pallas_kernels.gated_delta_rule.deferred.config import DeferredConfig
from pallas_kernels.gated_delta_rule.deferred.weights import Factors
from pallas_kernels.gated_delta_rule.prefill.tiles import iota, key_lanes


def _operand(x: jax.Array, count: int = 3) -> Operand:
    """Returns a tile in pieces of bfloat16, float32 tiles in `count` of them and narrower ones without an error."""
    if x.dtype == jnp.bfloat16:
        return x
    return pieces(x.astype(jnp.float32), count if x.dtype == jnp.float32 else 2)


def _row(tile: jax.Array, index: jax.Array) -> jax.Array:
    """Returns row `index` of a tile."""
    return jnp.sum(jnp.where(iota(tile.shape, 0) == index, tile, 0.0), axis=0)


def _kernel(refs: Refs, *, config: DeferredConfig, interpret: bool) -> None:
    """Handles one row, value head and block of value dims.

    Args:
        refs: Reads the arguments of `values`, updates `pool` and `ring_u`, and writes `out`.
        config: The launch configuration.
        interpret: Whether the kernel runs as plain JAX.
    """
    tokens, rows, (value_heads, value_dim, key_dim) = refs.qkv.shape[0], refs.slot.shape[0], refs.pool.shape[2:]
    ring_places, (vectors, group_places) = refs.ring_u.shape[3], refs.weight.shape[3:]
    length, values_from = ring_places // 2, refs.qkv.shape[1] - value_heads * value_dim
    value_block, head, row = pt.program_id(0), pt.program_id(1), pt.program_id(2)
    vector_head = jax.lax.div(head, jnp.int32(value_heads // refs.x.shape[1]))
    # Everything that addresses depend on is loaded here, before any branch.
    start, end, total = refs.query_start_loc[row], refs.query_start_loc[row + 1], refs.query_start_loc[rows]
    layer, slot, base, position = refs.layer[...], refs.slot[row], refs.base[row], refs.position[row]
    read, fold_to = refs.read_block[row], refs.fold_block[row]

    count = end - start
    first_group = jax.lax.div(base, jnp.int32(length)) * length
    boundary = first_group + length
    index, vector, half = iota((group_places,), 0), iota((vectors,), 0), vectors // 2
    is_key, offset, place_in = vector < half, vector & (half - 1), Factors.of(vectors, group_places)
    size = min(config.tile_key, key_lanes(key_dim))
    keys = [pt.lanes(n, size, key_dim) for n in range(-(-key_dim // size))]
    tiles = config.block_value // config.tile_value
    product = functools.partial(dot, interpret=interpret)
    narrow = 2 if refs.qkv.dtype.itemsize == 2 else 3  # pieces of what only outputs depend on

    def values(tile: jax.Array) -> Lanes:
        return pt.lanes(value_block * tiles + tile, config.tile_value, value_dim)

    def states_at(block: jax.Array, value: Lanes):
        """Yields a block's state for some values, by tiles of keys, and which of its elements exist."""
        for key, inside in keys:
            mask = value[1][:, None] & inside[None, :] & (block != NULL_BLOCK)
            yield refs.pool.at[layer, block, head, value[0][:, None], key[None, :]], mask

    def factors(begin: jax.Array | int, number: jax.Array) -> jax.Array:
        return pt.load(refs.factors.at[row, head, begin + number])

    def rows_of(ref, lane: jax.Array, mask: jax.Array, tile: Lanes) -> jax.Array:
        """Loads rows of `x` or `fold_k` for a tile of keys, and 0 where `mask` is false."""
        key, inside = tile
        at = ref.at[row, vector_head, lane[:, None], key[None, :]]
        return pt.load(at, mask=mask[:, None] & inside[None, :], other=0.0)

    def corrections_at(first: jax.Array, low: jax.Array, high: jax.Array, value: Lanes):
        """Returns the corrections [places, values] of the positions low .. high - 1 of the group that starts at `first`."""
        of = first + index
        inside = ((index < length) & (of >= low) & (of < high))[:, None] & value[1][None, :]
        place = jax.lax.rem(first, jnp.int32(ring_places)) + index
        return refs.ring_u.at[layer, slot, head, place[:, None], value[0][None, :]], inside

    def fold(states: list[jax.Array], value: Lanes) -> list[jax.Array]:
        """Returns the state at the end of the first group, and keeps it if all of the group is accepted."""
        at, mask = corrections_at(first_group, base, position + count, value)
        weighted = pt.load(at, mask=mask, other=0.0).astype(jnp.float32)
        if refs.decay is None:
            weighted = factors(place_in.fold, index)[:, None] * weighted
        weighted, folded = _operand(weighted, config.pieces), []
        for tile, state, (at, mask) in zip(keys, states, states_at(fold_to, value), strict=True):
            k = rows_of(refs.fold_k, index, index < length, tile)
            if refs.decay is None:
                decay = refs.factors[row, head, place_in.decay]
            else:
                decay = pt.load(refs.decay.at[row, head, tile[0]], mask=tile[1], other=0.0)[None, :]
            added = product(weighted, _operand(k, config.pieces), contract=(0, 0))
            folded.append((decay * state.astype(jnp.float32) + added).astype(state.dtype))
            pt.store(at, folded[-1], mask=mask & (position >= boundary))
        return folded

    def multiply(inside: jax.Array, states: list[jax.Array]) -> jax.Array:
        """Multiplies the vectors that are inside with the state. Returns [vectors, values]."""
        total = None
        for tile, state in zip(keys, states, strict=True):
            x = _operand(rows_of(refs.x, vector, inside, tile), config.pieces)
            state = _operand(state, config.pieces)
            left, right = (state, x) if config.values_first else (x, state)
            part = product(left, right, contract=(1, 1))
            total = part if total is None else total + part
        assert total is not None
        return total.T if config.values_first else total

    def stage(n: jax.Array, nothing: None) -> None:
        """Runs the tokens in the first group (n = 0), or folds that group and runs the tokens in the next one (n = 1)."""
        if not interpret:
            pt.barrier()  # A fold reads the corrections that the stage before it has written.
        folds = n == 1
        first = first_group + n * length
        low = jnp.where(folds, first, base)
        inside = (offset < count) & (position + offset >= low) & (position + offset < first + length)
        token = start + offset

        def load_values(tile):
            """Loads a tile's part of the state, and its values [vectors, values] and corrections of earlier calls."""
            value = values(jnp.minimum(tile, tiles - 1))
            exists = value[1] & (tile < tiles)
            value = value[0], exists
            at, mask = corrections_at(first, low, position, value)
            u = pt.load(at, mask=mask, other=0.0)
            states = [pt.load(at, mask=mask, other=0.0) for at, mask in states_at(read, value)]
            at = refs.qkv.at[token[:, None], values_from + head * value_dim + value[0][None, :]]
            v = pt.load(at, mask=(inside & is_key)[:, None] & exists[None, :], other=0.0)
            return states, v, u

        ahead = load_values(jnp.int32(0))
        weight = pt.load(refs.weight.at[row, head, n, vector[:, None], index[None, :]])
        of_state = factors(place_in.of_state + n * vectors, vector)[:, None]
        of_key = factors(place_in.of_key + n * vectors, vector)[:, None]
        of_u, of_out = -of_key * weight, _operand(weight, narrow)

        def run_tile(tile, ahead):
            states, v, u = ahead
            value = values(tile)
            following = load_values(tile + 1) if tiles > 1 else ahead
            # Both branches multiply. If one returned a folded state, the compiler would hold it in several layouts.
            from_state = jax.lax.cond(
                folds, lambda: multiply(inside, fold(states, value)), lambda: multiply(inside, states)
            )
            from_state, u = of_state * from_state, u.astype(jnp.float32)
            own = of_key * (v.astype(jnp.float32) - from_state)

            def correct(n, u):
                """Adds the correction of token n."""
                new = _row(own, n) + jnp.sum(_row(of_u, n)[:, None] * u, axis=0)
                new = new.astype(refs.ring_u.dtype).astype(jnp.float32)
                return jnp.where((index == position + n - first)[:, None], new[None, :], u)

            # From the first token in this group to the first one after it.
            u = jax.lax.fori_loop(
                jnp.clip(first - position, 0, count), jnp.clip(first + length - position, 0, count), correct, u
            )
            at, mask = corrections_at(first, jnp.maximum(low, position), position + count, value)
            pt.store(at, u.astype(refs.ring_u.dtype), mask=mask)
            out = from_state + product(of_out, _operand(u, narrow))
            mask = (inside & ~is_key)[:, None] & value[1][None, :]
            pt.store(refs.out.at[token[:, None], head, value[0][None, :]], out.astype(refs.out.dtype), mask=mask)
            return following

        jax.lax.fori_loop(0, tiles, run_tile, ahead)

    @pt.when((count > 0) | ((position >= boundary) & (fold_to != NULL_BLOCK)))
    def _():
        last = jnp.maximum(position, position + count - 1)
        stages = (position >= boundary).astype(jnp.int32), (last >= boundary).astype(jnp.int32)
        jax.lax.fori_loop(stages[0], stages[1] + 1, stage, None)

    def clear(n: jax.Array, _: None) -> None:
        """Writes zeros to this row's n-th share of the tokens after the last row."""
        value, inside = pt.lanes(value_block, config.block_value, value_dim)
        zeros = jnp.zeros(value.shape, refs.out.dtype)
        pt.store(refs.out.at[total + row + n * rows, head, value], zeros, mask=inside)

    shares = jnp.maximum(tokens - total - row + rows - 1, 0)
    jax.lax.fori_loop(0, jax.lax.div(shares, jnp.int32(rows)), clear, None)


def values(
    given: dict[str, jax.Array],
    qkv: jax.Array,
    pool: jax.Array,
    ring_u: jax.Array,
    layer: jax.Array,
    query_start_loc: jax.Array,
    slot: jax.Array,
    base: jax.Array,
    position: jax.Array,
    read_block: jax.Array,
    fold_block: jax.Array,
    *,
    config: DeferredConfig,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes outputs, folds and corrections.

    Args:
        given: The results of `weights` or of `channel_weights`.
        qkv: This and the other arrays are arguments of `gated_delta_rule_deferred`.
        pool: As above.
        ring_u: As above.
        layer: As above.
        query_start_loc: As above.
        slot: As above.
        base: As above.
        position: As above.
        read_block: As above.
        fold_block: As above.
        config: The launch configuration.
        interpret: Whether to run the kernel's body as plain JAX.

    Returns:
        The outputs, and the updated `pool` and `ring_u`.
    """
    value_heads, value_dim = pool.shape[2:4]
    rows = dict(layer=layer, query_start_loc=query_start_loc, slot=slot, base=base, position=position)
    taken = {name: given.get(name) for name in ("x", "weight", "factors", "fold_k", "decay")}
    results = pt.call(
        functools.partial(_kernel, config=config, interpret=interpret),
        name="gated_delta_rule_deferred",
        grid=(-(-value_dim // config.block_value), value_heads, slot.shape[0]),
        inputs=dict(qkv=qkv, read_block=read_block, fold_block=fold_block) | rows | taken,
        outputs={"out": jax.ShapeDtypeStruct((qkv.shape[0], value_heads, value_dim), qkv.dtype)},
        updates=dict(pool=pool, ring_u=ring_u),
        num_warps=config.num_warps,
        interpret=interpret,
    )
    return results["out"], results["pool"], results["ring_u"]
