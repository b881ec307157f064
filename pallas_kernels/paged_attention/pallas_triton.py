"""paged_attention as Pallas kernels: one attends tiles of queries to shares of their rows' keys, one merges the shares."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels._dot import dot
from pallas_kernels.paged_attention._tiles import keys_of_tokens, tiles
from pallas_kernels.paged_attention.config import Config, default_config, default_programs, default_stages
from pallas_kernels.rows import token_rows

_LOW = -1e30  # below every score, and finite: a block that a token does not see leaves its sums as they are
_SHARED_BYTES = 220 * 1024  # of an H200's 227 KiB
_MERGED_ELEMENTS = 8192  # of a tile of the merging kernel


class _Tile(NamedTuple):
    """The shape of a tile: `heads` of the `group` heads that share keys, and up to `tokens` tokens, in `queries` rows."""

    group: int
    heads: int
    tokens: int
    queries: int

    @property
    def per_group(self) -> int:
        """The number of tiles that a group's heads take."""
        return -(-self.group // self.heads)


def _tile(group: int, config: Config, max_query_tokens: int | None) -> _Tile:
    heads = min(group, config.queries)
    tokens = config.queries // heads
    tokens = tokens if max_query_tokens is None else min(tokens, max_query_tokens)
    return _Tile(group, heads, tokens, max(16, pt.power_of_two(tokens * heads)))


def _default_config(q, max_query_tokens: int | None, value_dim: int, is_latent: bool) -> Config:
    dims = q.shape[2] + (0 if is_latent else value_dim)
    return default_config(dims, q.dtype.itemsize, is_prompt=max_query_tokens is None, is_latent=is_latent)


def unsupported(
    q, keys, *, is_latent: bool, max_query_tokens: int | None, value_dim: int, config: Config | None
) -> str | None:
    """Returns why the kernels cannot run these arguments, or None if they can."""
    if q.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"q must be float32, bfloat16 or float16, got {q.dtype}"
    config = config or _default_config(q, max_query_tokens, value_dim, is_latent)
    tile = _tile(q.shape[1] // keys.shape[3], config, max_query_tokens)
    dims = q.shape[2] + (0 if is_latent else value_dim)
    needed = (config.block * config.num_stages * dims + tile.queries * q.shape[2]) * q.dtype.itemsize
    if needed > _SHARED_BYTES:
        return f"keys of {q.shape[2]} and values of {value_dim} dims take {needed} bytes of {_SHARED_BYTES}"
    return None


def _ceil(x, n: int):
    return jax.lax.div(x + (n - 1), jnp.int32(n))


class _Dims(NamedTuple):
    """Some dims of a head: their indices [size], and which of them exist; None if all do."""

    index: jax.Array
    exists: jax.Array | None


def _dims(begin: int, end: int) -> Iterator[_Dims]:
    """Cuts dims begin .. end - 1 into parts of a power of two and at least 16, the largest first."""
    while begin < end:
        size = max(16, 1 << ((end - begin).bit_length() - 1))
        index, _ = pt.lanes(0, size, size)
        index = begin + index
        yield _Dims(index, None if begin + size <= end else index < end)
        begin += size


def _mask(rows, dims: _Dims):
    """The mask of a tile [rows, dims]."""
    exists = jnp.ones(dims.index.shape, bool) if dims.exists is None else dims.exists
    return rows[:, None] & exists[None, :]


def _load(at, mask):
    return pt.load(at) if mask is None else pt.load(at, mask=mask, other=0.0)


def _gated(refs, x, token, head, dims: _Dims, mask, value_dim: int):
    """Multiplies a tile [pairs, dims] of results by the sigmoids of its gates, if there are any."""
    if refs.gates is None:
        return x
    index = refs.gates.shape[2] - value_dim + dims.index
    gates = pt.load(refs.gates.at[token[:, None], head[:, None], index[None, :]], mask=mask, other=0.0)
    return x * jax.nn.sigmoid(gates.astype(jnp.float32))


def _attend_kernel(
    refs, *, tile: _Tile, config: Config, programs: int, scale: float, value_dim: int, is_prompt: bool, interpret: bool
):
    key_dim, dtype, is_latent = refs.q.shape[2], refs.q.dtype, refs.values is None
    page_size = refs.keys.shape[2]
    block, split, shares = config.block, config.split, config.shares
    head_tile, number, program = pt.program_id(0), pt.program_id(1), pt.program_id(2)
    # The last tiles of a prompt see the most keys. They go first.
    number = pt.num_programs(1) - 1 - number if is_prompt else number
    table, start, length, first = refs.table[number], refs.start[number], refs.length[number], refs.position[number]
    layer = refs.layer[...]
    end = first + length
    used = jnp.minimum(_ceil(end, split), shares)  # shares that have keys

    kv_head = jax.lax.div(head_tile, jnp.int32(tile.per_group))
    query, _ = pt.lanes(0, tile.queries, tile.queries)
    token = jax.lax.div(query, jnp.int32(tile.heads))
    of_group = jax.lax.rem(head_tile, jnp.int32(tile.per_group)) * tile.heads + query - token * tile.heads
    inside = (token < length) & (of_group < tile.group)
    packed, head, position_of = start + token, kv_head * tile.group + of_group, first + token

    value_dims = list(_dims(0, value_dim))
    key_dims = [*value_dims, *_dims(value_dim, key_dim)] if is_latent else list(_dims(0, key_dim))
    lane, _ = pt.lanes(0, block, block)
    one_page = page_size % block == 0  # a block's keys lie in one page

    def page_of(begin):
        """The page of the block at position `begin`, or of each of its keys. Only pages that the row has are looked up."""
        position = jnp.minimum(begin if one_page else begin + lane, end - 1)
        at = refs.page_table.at[table, jax.lax.div(position, jnp.int32(page_size))]
        return pt.load(at)

    def attend(queries, share):
        per_split = split // block

        def blocks_below(count):
            """How many of a row's first `count` blocks belong to the share."""
            whole = jax.lax.div(count, jnp.int32(per_split))
            own = jax.lax.div(whole - share + (shares - 1), jnp.int32(shares))
            last = jax.lax.rem(whole - share, jnp.int32(shares)) == 0
            return own * per_split + jnp.where(last, count - whole * per_split, 0)

        def begin_of(n):
            turn = jax.lax.div(n, jnp.int32(per_split))
            return (share + turn * shares) * split + (n - turn * per_split) * block

        def advance(is_masked, n, carry):
            page, top, total, sums = carry
            begin = begin_of(n)
            position = begin + lane
            exists = position < end
            upcoming = page_of(begin_of(n + 1))
            if one_page:
                place = jax.lax.rem(begin, jnp.int32(page_size)) + lane
            else:
                place, page = jax.lax.rem(jnp.minimum(position, end - 1), jnp.int32(page_size)), page[:, None]

            def take(ref, dims, is_masked):
                at = ref.at[layer, page, place[:, None], kv_head, dims.index[None, :]]
                is_masked = is_masked or dims.exists is not None
                return _load(at, _mask(exists, dims) if is_masked else None).astype(dtype)

            # Scores of keys that do not exist are replaced below. A weight of 0 does not hide a value that is NaN.
            keys = [take(refs.keys, d, is_masked and is_latent and i < len(value_dims)) for i, d in enumerate(key_dims)]
            scores = dot(queries[0], keys[0], contract=(1, 1), interpret=interpret)
            for q, k in zip(queries[1:], keys[1:], strict=True):
                scores = scores + dot(q, k, contract=(1, 1), interpret=interpret)
            if is_masked:
                seen = exists[None, :] & (position[None, :] <= position_of[:, None])
                scores = jnp.where(seen, scores, -jnp.inf)
            new_top = jnp.maximum(top, jnp.max(scores, axis=1) * (scale * pt.LOG2_E))
            weights = pt.exp2_of_sum(scores, scale * pt.LOG2_E, -new_top[:, None], interpret)
            decay = pt.exp2(top - new_top, interpret)
            values = keys[: len(value_dims)] if is_latent else [take(refs.values, d, is_masked) for d in value_dims]
            narrow = weights.astype(dtype)
            sums = [x * decay[:, None] + dot(narrow, v, interpret=interpret) for x, v in zip(sums, values, strict=True)]
            return upcoming, new_top, total * decay + jnp.sum(weights, axis=1), sums

        zeros = lambda *shape: jnp.zeros(shape, jnp.float32)
        sums = [zeros(tile.queries, d.index.shape[0]) for d in value_dims]
        carry = page_of(begin_of(jnp.int32(0))), jnp.full((tile.queries,), _LOW, jnp.float32), zeros(tile.queries), sums
        count, plain = blocks_below(_ceil(end, block)), jnp.int32(0)
        if is_prompt:
            # Every token of the tile sees all keys of the first blocks.
            plain = jnp.minimum(blocks_below(jax.lax.div(first + 1, jnp.int32(block))), count)
            carry = jax.lax.fori_loop(jnp.int32(0), plain, functools.partial(advance, False), carry)
        _, top, total, sums = jax.lax.fori_loop(plain, count, functools.partial(advance, True), carry)

        # A token whose keys are one split has its result here. Shares of the others are merged later.
        is_whole = position_of < split
        for dims, x in zip(value_dims, sums, strict=True):
            at = packed[:, None], head[:, None], dims.index[None, :]
            mask = _mask(inside & is_whole & (share == 0), dims)
            result = _gated(refs, x / jnp.where(total > 0, total, 1.0)[:, None], packed, head, dims, mask, value_dim)
            pt.store(refs.out.at[at], result.astype(dtype), mask=mask)
            pt.store(refs.sums.at[(share, *at)], x, mask=_mask(inside & ~is_whole, dims))
        pt.store(refs.tops.at[share, packed, head], top, mask=inside & ~is_whole)
        pt.store(refs.totals.at[share, packed, head], total, mask=inside & ~is_whole)

    @pt.when((length > 0) & (program < used))
    def _():
        queries = [
            _load(refs.q.at[packed[:, None], head[:, None], d.index[None, :]], _mask(inside, d)) for d in key_dims
        ]
        if programs == shares:
            attend(queries, program)
        else:
            turns = _ceil(used - program, programs)
            each = lambda turn, _: attend(queries, program + turn * programs)
            jax.lax.fori_loop(jnp.int32(0), turns, each, None)


def _merge_kernel(refs, *, split: int, pairs: int, interpret: bool):
    """Merges the shares of `pairs` pairs of a token and a head, and writes 0 for padding tokens."""
    shares, num_tokens, heads, value_dim = refs.sums.shape
    pair, exists = pt.lanes(pt.program_id(0), pairs, num_tokens * heads)
    token = jax.lax.div(pair, jnp.int32(heads))
    head = pair - token * heads
    num_keys = pt.load(refs.num_keys.at[token], mask=exists, other=1)
    used = jnp.where(num_keys > split, jnp.minimum(_ceil(num_keys, split), shares), 0)
    written = exists & ((num_keys > split) | (num_keys == 0))

    @pt.when(jnp.max(written.astype(jnp.int32)) > 0)
    def _():
        share, _ = pt.lanes(0, pt.power_of_two(shares), shares)
        live = share[:, None] < used[None, :]
        stat = lambda ref, other: pt.load(ref.at[share[:, None], token[None, :], head[None, :]], mask=live, other=other)
        tops, totals = stat(refs.tops, _LOW), stat(refs.totals, 0.0)
        factors = pt.exp2(tops - jnp.max(tops, axis=0)[None, :], interpret)
        total = jnp.sum(factors * totals, axis=0)
        total = jnp.where(total > 0, total, 1.0)
        for dims in _dims(0, value_dim):
            at = share[:, None, None], token[None, :, None], head[None, :, None], dims.index[None, None, :]
            mask = live[:, :, None]
            mask = jnp.broadcast_to(mask, (*live.shape, dims.index.shape[0]))
            mask = mask if dims.exists is None else mask & dims.exists[None, None, :]
            sums = pt.load(refs.sums.at[at], mask=mask, other=0.0)
            out = jnp.sum(sums * factors[:, :, None], axis=0) / total[:, None]
            out = _gated(refs, out, token, head, dims, _mask(exists & (num_keys > split), dims), value_dim)
            at = refs.out.at[token[:, None], head[:, None], dims.index[None, :]]
            pt.store(at, out.astype(refs.out.dtype), mask=_mask(written, dims))


def paged_attention(
    q,
    keys,
    values,
    layer,
    query_start_loc,
    num_computed_tokens,
    page_table,
    slots,
    gates,
    *,
    max_query_tokens: int | None,
    value_dim: int,
    scale: float,
    config: Config | None = None,
    interpret: bool = False,
):
    """See api.py."""
    num_tokens, heads, _ = q.shape
    kv_heads, is_prompt = keys.shape[3], max_query_tokens is None
    used = config or _default_config(q, max_query_tokens, value_dim, values is None)
    tile = _tile(heads // kv_heads, used, max_query_tokens)
    cut = tiles(query_start_loc, num_computed_tokens, num_tokens, tile.tokens, max_query_tokens, slots)
    grid = kv_heads * tile.per_group, cut.table.shape[0]
    num_tiles = grid[0] * grid[1]
    programs = used.programs or default_programs(used, num_tiles, is_prompt=is_prompt)
    num_stages = used.num_stages if config else default_stages(used, num_tiles)

    of_shares = (used.shares, num_tokens, heads)
    array = lambda shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
    attended = pt.call(
        functools.partial(
            _attend_kernel,
            tile=tile,
            config=used,
            programs=programs,
            scale=scale,
            value_dim=value_dim,
            is_prompt=is_prompt,
            interpret=interpret,
        ),
        name="paged_attention",
        # The heads of one tile are neighbours, because the keys of all heads are.
        grid=(*grid, programs),
        inputs=dict(q=q, keys=keys, values=values, layer=layer, page_table=page_table, gates=gates) | cut._asdict(),
        outputs=dict(
            out=array((num_tokens, heads, value_dim), q.dtype),
            sums=array((*of_shares, value_dim)),
            tops=array(of_shares),
            totals=array(of_shares),
        ),
        updates={},
        num_warps=used.num_warps,
        num_stages=num_stages,
        interpret=interpret,
    )
    out = attended.pop("out")
    rows = token_rows(query_start_loc, num_tokens)
    pairs = max(1, _MERGED_ELEMENTS // pt.power_of_two(used.shares * value_dim))
    merged = pt.call(
        functools.partial(_merge_kernel, split=used.split, pairs=pairs, interpret=interpret),
        name="paged_attention_merge",
        grid=(-(-num_tokens * heads // pairs),),
        inputs=dict(num_keys=keys_of_tokens(rows, num_computed_tokens), gates=gates) | attended,
        outputs={},
        updates=dict(out=out),
        num_warps=4,
        interpret=interpret,
    )
    return merged["out"]
