"""paged_attention as Pallas kernels: one attends tiles of queries to shards of their rows' keys, one merges the shards."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels import device
from pallas_kernels._dot import dot
from pallas_kernels._pallas_triton import Refs
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


class _Sizes(NamedTuple):
    """How a launch cuts queries and keys.

    Attributes:
        tile: The tile of queries of a program.
        block: The number of keys of a block.
        shards: The shards of a row's keys.
        joins: The sizes of groups in which the shards of a unit are joined. Without any, a unit is one shard.
        least: The smallest number of shards that a unit may have.
        programs: The number of programs of a tile of queries.
    """

    tile: _Tile
    block: int
    shards: Shards
    joins: tuple[int, ...]
    least: int
    programs: int


class _Program:
    """The work of a program: it attends a tile of queries to every `programs`-th unit of their row's shards."""

    def __init__(
        self, refs: Refs, sizes: _Sizes, scale: float, value_dim: int, *, is_prompt: bool, interpret: bool
    ) -> None:
        self.refs, self.sizes, self.is_prompt, self.interpret = refs, sizes, is_prompt, interpret
        self.factor, self.value_dim, self.is_latent = scale * pt.LOG2_E, value_dim, refs.values is None
        self.page_size, self.dtype = refs.keys.shape[2], refs.q.dtype
        tile, head_tile, tile_index, self.index = sizes.tile, *(pt.program_id(axis) for axis in range(3))
        # The last tiles of a prompt see the most keys. They go first.
        tile_index = pt.num_programs(1) - 1 - tile_index if is_prompt else tile_index
        of_tile = refs.table, refs.start, refs.length, refs.position
        self.table, start, self.length, self.first = (ref[tile_index] for ref in of_tile)
        self.layer, self.end = refs.layer[...], self.first + self.length
        # Shards are attended one by one, or in units, which are joined and stored as their first shard.
        self.unit = refs.unit[...] if sizes.joins else 1
        used = sizes.shards.used(self.end)
        self.num_units = ceil(used, self.unit) if sizes.joins else used

        self.kv_head = jax.lax.div(head_tile, jnp.int32(tile.per_group))
        query, _ = pt.lanes(0, tile.queries, tile.queries)
        token = jax.lax.div(query, jnp.int32(tile.heads))
        of_group = jax.lax.rem(head_tile, jnp.int32(tile.per_group)) * tile.heads + query - token * tile.heads
        # Each query's packed token, head and position, and whether there is such a query.
        self.inside = (token < self.length) & (of_group < tile.group)
        self.packed, self.head = start + token, self.kv_head * tile.group + of_group
        self.position_of = self.first + token

        self.value_dims, key_dim = list(dims_of(0, value_dim)), refs.q.shape[2]
        rest = dims_of(value_dim, key_dim)
        self.key_dims = [*self.value_dims, *rest] if self.is_latent else list(dims_of(0, key_dim))
        self.lane, _ = pt.lanes(0, sizes.block, sizes.block)
        self.one_page = self.page_size % sizes.block == 0  # a block's keys lie in one page

    def run(self) -> None:
        """Attend the program's units, if the tile has tokens."""
        sizes = self.sizes

        @pt.when((self.length > 0) & (self.index < self.num_units))
        def _():
            at = lambda dims: self.refs.q.at[self.packed[:, None], self.head[:, None], dims.index[None, :]]
            queries = [_load(at(dims), mask_of(self.inside, dims)) for dims in self.key_dims]
            if sizes.programs == sizes.shards.count and not sizes.joins:
                _Unit(self, queries, self.index).attend()
            else:
                own_units = ceil(self.num_units - self.index, sizes.programs)
                first = lambda n: (self.index + n * sizes.programs) * self.unit
                each = lambda n, _: _Unit(self, queries, first(n)).attend()
                jax.lax.fori_loop(jnp.int32(0), own_units, each, None)

    def page_of(self, begin: jax.Array) -> jax.Array:
        """Return the page of the block at position `begin`, or of each of its keys. It reads the row's own pages only."""
        position = jnp.minimum(begin if self.one_page else begin + self.lane, self.end - 1)
        return pt.load(self.refs.page_table.at[self.table, jax.lax.div(position, jnp.int32(self.page_size))])


class _Unit:
    """The attention of a program's queries to the unit of shards that begins with `shard`."""

    def __init__(self, program: _Program, queries: list[jax.Array], shard: jax.Array) -> None:
        self.program, self.queries, self.shard, tile = program, queries, shard, program.sizes.tile
        self.count = self.count_of(shard)
        if program.sizes.joins:
            add = lambda n, so_far: so_far + self.count_of(shard + n)
            self.count = jax.lax.fori_loop(jnp.int32(1), program.unit, add, self.count)
        zeros = lambda *shape: jnp.zeros(shape, jnp.float32)
        sums = [zeros(tile.queries, dims.index.shape[0]) for dims in program.value_dims]
        self.nothing = Sums(jnp.full((tile.queries,), LOW, jnp.float32), zeros(tile.queries), sums)

    def count_of(self, shard: jax.Array) -> jax.Array:
        """Return the number of a shard's blocks that the tile's last token sees."""
        block = self.program.sizes.block
        return self.program.sizes.shards.blocks_below(shard, ceil(self.program.end, block), block)

    def attend(self) -> None:
        """Attend the unit's blocks, and store the results."""
        program, sizes = self.program, self.program.sizes
        page = program.page_of(sizes.shards.begin_of(self.shard, jnp.int32(0), sizes.block))
        plain, nothing = jnp.int32(0), [self.nothing for _ in (1, *sizes.joins)]
        carry = self.shard, plain, page, nothing
        if program.is_prompt:
            # Every token of the tile sees all keys of the first blocks.
            blocks = jax.lax.div(program.first + 1, jnp.int32(sizes.block))
            plain = jnp.minimum(sizes.shards.blocks_below(self.shard, blocks, sizes.block), self.count)
            carry = jax.lax.fori_loop(jnp.int32(0), plain, functools.partial(self.advance, False), carry)
        *_, sums = jax.lax.fori_loop(plain, self.count, functools.partial(self.advance, True), carry)
        self.store(functools.reduce(lambda smaller, larger: joined(larger, smaller, program.interpret), sums))

    def with_next_shard(self, own: jax.Array, sums: list[Sums], level: int = 0) -> list[Sums]:
        """Add the last shard to its group. When a group is complete, it is added to the group of the next larger size.

        The loop calls it before shard `own` begins. `sums` has the `Sums` of the last shard, and then of one group of each
        size, from the smallest on.
        """
        last, group, *larger = sums
        last, group = self.nothing, joined(group, last, self.program.interpret)
        if larger:
            is_complete = jax.lax.rem(own, jnp.int32(self.program.sizes.joins[level])) == 0
            add = lambda sums: self.with_next_shard(own, sums, level + 1)
            group, *larger = jax.lax.cond(is_complete, add, lambda sums: sums, [group, *larger])
        return [last, group, *larger]

    def advance(self, is_masked: bool, n: jax.Array, carry: Any) -> Any:
        """Attend a block. `is_masked` says that not all queries see all of its keys."""
        program, sizes, interpret = self.program, self.program.sizes, self.program.interpret
        own, n_own, page, sums = carry
        begin = sizes.shards.begin_of(own, n_own, sizes.block)
        upcoming = own, n_own + 1
        if sizes.joins:
            sums = jax.lax.cond(n_own == 0, lambda sums: self.with_next_shard(own, sums), lambda sums: sums, sums)
            is_last = (n_own + 1 == self.count_of(own)).astype(jnp.int32)
            upcoming = own + is_last, (n_own + 1) * (1 - is_last)
        so_far, *groups = sums
        position = begin + program.lane
        exists = position < program.end
        upcoming = *upcoming, program.page_of(sizes.shards.begin_of(*upcoming, sizes.block))
        if program.one_page:
            offset = jax.lax.rem(begin, jnp.int32(program.page_size)) + program.lane
        else:
            position_of_key = jnp.minimum(position, program.end - 1)
            offset, page = jax.lax.rem(position_of_key, jnp.int32(program.page_size)), page[:, None]

        def take(ref, dims, is_masked):
            at = ref.at[program.layer, page, offset[:, None], program.kv_head, dims.index[None, :]]
            is_masked = is_masked or dims.exists is not None
            return _load(at, mask_of(exists, dims) if is_masked else None).astype(program.dtype)

        # Scores of keys that do not exist are replaced below. A probability of 0 does not hide a value that is NaN.
        hides = lambda i: is_masked and program.is_latent and i < len(program.value_dims)
        keys = [take(program.refs.keys, dims, hides(i)) for i, dims in enumerate(program.key_dims)]
        scores = dot(self.queries[0], keys[0], contract=(1, 1), interpret=interpret)
        for q, k in zip(self.queries[1:], keys[1:], strict=True):
            scores = scores + dot(q, k, contract=(1, 1), interpret=interpret)
        if is_masked:
            seen = exists[None, :] & (position[None, :] <= program.position_of[:, None])
            scores = jnp.where(seen, scores, -jnp.inf)
        top = jnp.maximum(so_far.top, jnp.max(scores, axis=1) * program.factor)
        probabilities = pt.exp2_of_sum(scores, program.factor, -top[:, None], interpret)
        decay = pt.exp2(so_far.top - top, interpret)
        if program.is_latent:
            values = keys[: len(program.value_dims)]
        else:
            values = [take(program.refs.values, dims, is_masked) for dims in program.value_dims]
        narrow = probabilities.astype(program.dtype)
        add = lambda x, v: x * decay[:, None] + dot(narrow, v, interpret=interpret)
        sums_of_values = [add(x, v) for x, v in zip(so_far.values, values, strict=True)]
        total = pt.product(so_far.total, decay, interpret) + jnp.sum(probabilities, axis=1)
        return *upcoming, [Sums(top, total, sums_of_values), *groups]

    def store(self, sums: Sums) -> None:
        """Store the results of tokens whose keys are one split, and the sums of others, which are merged later."""
        program, refs = self.program, self.program.refs
        packed, head, inside = program.packed, program.head, program.inside
        is_whole = program.position_of < program.sizes.shards.split
        slot = self.shard // program.sizes.least
        for dims, x in zip(program.value_dims, sums.values, strict=True):
            at = packed[:, None], head[:, None], dims.index[None, :]
            mask = mask_of(inside & is_whole & (self.shard == 0), dims)
            result = x / jnp.where(sums.total > 0, sums.total, 1.0)[:, None]
            result = gated(refs.gates, result, packed, head, dims, mask, program.value_dim)
            pt.store(refs.out.at[at], result.astype(program.dtype), mask=mask)
            pt.store(refs.sums.at[(slot, *at)], x, mask=mask_of(inside & ~is_whole, dims))
        pt.store(refs.tops.at[slot, head, packed], sums.top, mask=inside & ~is_whole)
        pt.store(refs.totals.at[slot, head, packed], sums.total, mask=inside & ~is_whole)


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
    joins = tuple(n for n in used.groups if n <= units[-1])
    sizes = _Sizes(tile, used.block, shards, joins, least=units[0], programs=programs)
    how = dict(is_prompt=is_prompt, interpret=interpret)
    attended = pt.call(
        lambda refs: _Program(refs, sizes, scale, value_dim, **how).run(),
        name="paged_attention",
        # The heads of one tile are neighbours, because the keys of all heads are.
        grid=(*grid, programs),
        inputs=dict(q=q, keys=keys, values=values, layer=rows.layer, page_table=page_table, gates=gates)
        | dict(cut._asdict(), row_end=None)
        | dict(unit=unit),
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
