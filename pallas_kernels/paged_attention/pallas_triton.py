"""paged_attention as Pallas kernels: one attends tiles of queries to shards of their rows' keys, one merges the shards."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels import device
from pallas_kernels._dot import dot
from pallas_kernels.dispatch import Run
from pallas_kernels.paged_attention._arguments import Attention
from pallas_kernels.paged_attention._dims import dims_of, gated, mask_of
from pallas_kernels.paged_attention._merge import LOW, Sums, joined, merge
from pallas_kernels.paged_attention._shards import Shards, best_unit, ceil
from pallas_kernels.paged_attention._tiles import tiles
from pallas_kernels.paged_attention.config import (
    Config,
    default_config,
    default_programs,
    default_stages,
    possible_units,
)
from pallas_kernels.rows import Rows


class _Tile(NamedTuple):
    """A tile's shape: `heads` of the `group` query heads of a key head, and up to `tokens` tokens, in `queries` rows."""

    group: int
    heads: int
    tokens: int
    queries: int

    @property
    def per_group(self) -> int:
        """The number of tiles into which the heads of a group are cut."""
        return -(-self.group // self.heads)


def _tile(group: int, config: Config, max_query_tokens: int | None) -> _Tile:
    heads = min(group, config.queries)
    tokens = config.queries // heads
    tokens = tokens if max_query_tokens is None else min(tokens, max_query_tokens)
    return _Tile(group, heads, tokens, max(16, pt.power_of_two(tokens * heads)))


def _dims(inputs: Attention, value_dim: int) -> int:
    """Return the dims of a key and a value together, or of a key alone in latent attention."""
    return inputs.q.shape[2] + (0 if inputs.values is None else value_dim)


def _default_config(inputs: Attention, rows: Rows, value_dim: int) -> Config:
    options = dict(is_prompt=rows.max_query_tokens is None, is_latent=inputs.values is None)
    return default_config(_dims(inputs, value_dim), inputs.q.dtype.itemsize, **options)


def unsupported(inputs: Attention, rows: Rows, value_dim: int, config: Config | None) -> str | None:
    """Return why the kernels cannot run these arguments, or None if they can."""
    q, keys = inputs.q, inputs.keys
    if q.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"q must be float32, bfloat16 or float16, got {q.dtype}"
    config = config or _default_config(inputs, rows, value_dim)
    tile, dims = _tile(q.shape[1] // keys.shape[3], config, rows.max_query_tokens), _dims(inputs, value_dim)
    needed, available = _needed_bytes(config, tile.queries, q.shape[2], dims, q.dtype.itemsize), device.shared_bytes()
    if needed > available:
        return f"keys of {q.shape[2]} and values of {value_dim} dims take {needed} bytes of {available}"
    return None


def _needed_bytes(config: Config, queries: int, key_dim: int, dims: int, itemsize: int) -> int:
    """Return an upper bound of the shared memory of a program in bytes, as measured in compiled kernels.

    `dims` are the dims of a key and a value together, or of a key alone in latent attention.
    """
    blocks, probabilities, again = config.num_stages, queries * config.block, 0
    if itemsize == 4:
        # The compiler keeps probabilities, and queries beyond a square tile, twice.
        probabilities, again = 2 * probabilities, max(0, queries - config.block) * key_dim
    elif device.shared_bytes() < device.HOPPER_SHARED_BYTES:
        # Only Hopper's tensor cores read a block from shared memory. On other GPUs it is copied to registers.
        blocks -= 1
    return (blocks * config.block * dims + queries * key_dim + probabilities + again) * itemsize


def _load(at, mask):
    return pt.load(at) if mask is None else pt.load(at, mask=mask, other=0.0)


def _attend_kernel(
    refs,
    *,
    tile: _Tile,
    block: int,
    shards: Shards,
    joins: tuple[int, ...],
    least: int,
    programs: int,
    scale: float,
    value_dim: int,
    is_prompt: bool,
    interpret: bool,
):
    key_dim, dtype, is_latent = refs.q.shape[2], refs.q.dtype, refs.values is None
    page_size = refs.keys.shape[2]
    head_tile, tile_index, program = pt.program_id(0), pt.program_id(1), pt.program_id(2)
    # The last tiles of a prompt see the most keys. They go first.
    tile_index = pt.num_programs(1) - 1 - tile_index if is_prompt else tile_index
    table, start, length, first = (ref[tile_index] for ref in (refs.table, refs.start, refs.length, refs.position))
    layer = refs.layer[...]
    end = first + length
    # Shards are attended one by one, or in units, which are joined and stored as their first shard.
    unit = refs.unit[...] if joins else 1
    num_units = ceil(shards.used(end), unit) if joins else shards.used(end)

    kv_head = jax.lax.div(head_tile, jnp.int32(tile.per_group))
    query, _ = pt.lanes(0, tile.queries, tile.queries)
    token = jax.lax.div(query, jnp.int32(tile.heads))
    of_group = jax.lax.rem(head_tile, jnp.int32(tile.per_group)) * tile.heads + query - token * tile.heads
    inside = (token < length) & (of_group < tile.group)
    packed, head, position_of = start + token, kv_head * tile.group + of_group, first + token

    value_dims = list(dims_of(0, value_dim))
    key_dims = [*value_dims, *dims_of(value_dim, key_dim)] if is_latent else list(dims_of(0, key_dim))
    lane, _ = pt.lanes(0, block, block)
    one_page = page_size % block == 0  # a block's keys lie in one page

    def page_of(begin):
        """Return the page of the block at position `begin`, or of each of its keys. It reads the row's own pages only."""
        position = jnp.minimum(begin if one_page else begin + lane, end - 1)
        at = refs.page_table.at[table, jax.lax.div(position, jnp.int32(page_size))]
        return pt.load(at)

    def attend(queries, shard):
        count_of = lambda shard: shards.blocks_below(shard, ceil(end, block), block)
        count = count_of(shard)
        if joins:
            count = jax.lax.fori_loop(jnp.int32(1), unit, lambda n, so_far: so_far + count_of(shard + n), count)

        def with_next_shard(own, sums, level=0):
            """Add the last shard to its group. When a group is complete, it is added to the group of the next larger size.

            The loop calls it before shard `own` begins. `sums` has the `Sums` of the last shard, and then of one group of
            each size, from the smallest on.
            """
            last, group, *larger = sums
            last, group = nothing, joined(group, last, interpret)
            if larger:
                group, *larger = jax.lax.cond(
                    jax.lax.rem(own, jnp.int32(joins[level])) == 0,
                    lambda sums: with_next_shard(own, sums, level + 1),
                    lambda sums: sums,
                    [group, *larger],
                )
            return [last, group, *larger]

        def advance(is_masked, n, carry):
            own, n_own, page, sums = carry
            begin = shards.begin_of(own, n_own, block)
            upcoming = own, n_own + 1
            if joins:
                sums = jax.lax.cond(n_own == 0, lambda sums: with_next_shard(own, sums), lambda sums: sums, sums)
                is_last = (n_own + 1 == count_of(own)).astype(jnp.int32)
                upcoming = own + is_last, (n_own + 1) * (1 - is_last)
            so_far, *groups = sums
            position = begin + lane
            exists = position < end
            upcoming = *upcoming, page_of(shards.begin_of(*upcoming, block))
            if one_page:
                offset = jax.lax.rem(begin, jnp.int32(page_size)) + lane
            else:
                offset, page = jax.lax.rem(jnp.minimum(position, end - 1), jnp.int32(page_size)), page[:, None]

            def take(ref, dims, is_masked):
                at = ref.at[layer, page, offset[:, None], kv_head, dims.index[None, :]]
                is_masked = is_masked or dims.exists is not None
                return _load(at, mask_of(exists, dims) if is_masked else None).astype(dtype)

            # Scores of keys that do not exist are replaced below. A probability of 0 does not hide a value that is NaN.
            keys = [take(refs.keys, d, is_masked and is_latent and i < len(value_dims)) for i, d in enumerate(key_dims)]
            scores = dot(queries[0], keys[0], contract=(1, 1), interpret=interpret)
            for q, k in zip(queries[1:], keys[1:], strict=True):
                scores = scores + dot(q, k, contract=(1, 1), interpret=interpret)
            if is_masked:
                seen = exists[None, :] & (position[None, :] <= position_of[:, None])
                scores = jnp.where(seen, scores, -jnp.inf)
            top = jnp.maximum(so_far.top, jnp.max(scores, axis=1) * (scale * pt.LOG2_E))
            probabilities = pt.exp2_of_sum(scores, scale * pt.LOG2_E, -top[:, None], interpret)
            decay = pt.exp2(so_far.top - top, interpret)
            values = keys[: len(value_dims)] if is_latent else [take(refs.values, d, is_masked) for d in value_dims]
            narrow = probabilities.astype(dtype)
            sums_of_values = [
                x * decay[:, None] + dot(narrow, v, interpret=interpret)
                for x, v in zip(so_far.values, values, strict=True)
            ]
            total = pt.product(so_far.total, decay, interpret) + jnp.sum(probabilities, axis=1)
            return *upcoming, [Sums(top, total, sums_of_values), *groups]

        zeros = lambda *shape: jnp.zeros(shape, jnp.float32)
        sums = [zeros(tile.queries, d.index.shape[0]) for d in value_dims]
        nothing = Sums(jnp.full((tile.queries,), LOW, jnp.float32), zeros(tile.queries), sums)
        page = page_of(shards.begin_of(shard, jnp.int32(0), block))
        carry, plain = (shard, jnp.int32(0), page, [nothing for _ in (1, *joins)]), jnp.int32(0)
        if is_prompt:
            # Every token of the tile sees all keys of the first blocks.
            plain = jnp.minimum(shards.blocks_below(shard, jax.lax.div(first + 1, jnp.int32(block)), block), count)
            carry = jax.lax.fori_loop(jnp.int32(0), plain, functools.partial(advance, False), carry)
        *_, sums = jax.lax.fori_loop(plain, count, functools.partial(advance, True), carry)
        top, total, values = functools.reduce(lambda smaller, larger: joined(larger, smaller, interpret), sums)

        # A token whose keys are one split gets its result here. The shards of other tokens are merged later.
        is_whole = position_of < shards.split
        slot = shard // least
        for dims, x in zip(value_dims, values, strict=True):
            at = packed[:, None], head[:, None], dims.index[None, :]
            mask = mask_of(inside & is_whole & (shard == 0), dims)
            result = gated(
                refs.gates, x / jnp.where(total > 0, total, 1.0)[:, None], packed, head, dims, mask, value_dim
            )
            pt.store(refs.out.at[at], result.astype(dtype), mask=mask)
            pt.store(refs.sums.at[(slot, *at)], x, mask=mask_of(inside & ~is_whole, dims))
        pt.store(refs.tops.at[slot, head, packed], top, mask=inside & ~is_whole)
        pt.store(refs.totals.at[slot, head, packed], total, mask=inside & ~is_whole)

    @pt.when((length > 0) & (program < num_units))
    def _():
        queries = [
            _load(refs.q.at[packed[:, None], head[:, None], d.index[None, :]], mask_of(inside, d)) for d in key_dims
        ]
        if programs == shards.count and not joins:
            attend(queries, program)
        else:
            own_units = ceil(num_units - program, programs)
            each = lambda n, _: attend(queries, (program + n * programs) * unit)
            jax.lax.fori_loop(jnp.int32(0), own_units, each, None)


def paged_attention(inputs: Attention, rows: Rows, *, value_dim: int, scale: float, run: Run) -> jax.Array:
    """See api.py."""
    q, keys, values, page_table, slots, gates = inputs
    num_tokens, heads, _ = q.shape
    kv_heads, is_prompt, interpret = keys.shape[3], rows.max_query_tokens is None, run.interpret
    used = run.config or _default_config(inputs, rows, value_dim)
    tile = _tile(heads // kv_heads, used, rows.max_query_tokens)
    cut = tiles(rows, num_tokens, tile.tokens, slots)
    grid = kv_heads * tile.per_group, cut.table.shape[0]
    num_tiles = grid[0] * grid[1]
    shards, units = Shards(used.split, used.shares), (1,)
    if used.unit is not None and not is_prompt:
        units = (used.unit,)
    elif not (is_prompt or values is None or interpret):
        sums_per_thread = max(1, tile.queries * value_dim // (32 * used.num_warps))
        units = possible_units(used.groups, sums_per_thread, num_tiles)
    num_slots = used.shares // units[0]
    programs = used.programs or default_programs(num_slots, num_tiles, is_prompt=is_prompt)
    num_keys = jnp.where(cut.length > 0, cut.position + cut.length, 0)
    unit = None if units == (1,) else best_unit(num_keys, grid[0], programs, shards, units)
    num_stages = used.num_stages if run.config else default_stages(used, num_tiles)

    array = lambda shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
    attended = pt.call(
        functools.partial(
            _attend_kernel,
            tile=tile,
            block=used.block,
            shards=shards,
            joins=tuple(n for n in used.groups if n <= units[-1]),
            least=units[0],
            programs=programs,
            scale=scale,
            value_dim=value_dim,
            is_prompt=is_prompt,
            interpret=interpret,
        ),
        name="paged_attention",
        # The heads of one tile are neighbours, because the keys of all heads are.
        grid=(*grid, programs),
        inputs=dict(
            q=q,
            keys=keys,
            values=values,
            layer=rows.layer,
            page_table=page_table,
            gates=gates,
            table=cut.table,
            start=cut.start,
            length=cut.length,
            position=cut.position,
            unit=unit,
        ),
        outputs=dict(
            out=array((num_tokens, heads, value_dim), q.dtype),
            sums=array((num_slots, num_tokens, heads, value_dim)),
            tops=array((num_slots, heads, num_tokens)),
            totals=array((num_slots, heads, num_tokens)),
        ),
        num_warps=used.num_warps,
        num_stages=num_stages,
        interpret=interpret,
    )
    options = dict(
        split=used.split, shards=used.shares, groups=used.groups, unit=unit, units=units, interpret=interpret
    )
    return merge(attended, rows, gates, **options)
