"""paged_attention for prompts on Hopper GPUs. A CTA attends 128 queries, the tokens of one or two heads, to their keys.

One warpgroup copies pages of keys and values to SMEM. The other two have 64 queries each, and alternate: while one
multiplies on the tensor cores, the other one computes its softmax. The keys of a row are cut into splits and shards, as by
the Triton kernels, and the same second launch merges the shards.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import hopper as hp
from pallas_kernels.hopper.partial_tiles import keep_rows, store_rows
from pallas_kernels.paged_attention._arguments import Attention
from pallas_kernels.paged_attention._merge import LOW, merge
from pallas_kernels.paged_attention._shards import PROMPT_SHARDS, ceil
from pallas_kernels.paged_attention._tiles import padded_indices, tiles
from pallas_kernels.paged_attention.config import default_programs
from pallas_kernels.rows import Rows, token_rows

_QUERIES = 64  # of a warpgroup
_DIMS = 64  # of a head in a tile of SMEM
_STAGES = 2  # blocks of keys, and of values, in SMEM


def unsupported(inputs: Attention, rows: Rows, *, value_dim: int, scale: float) -> str | None:
    """Return the reason why the kernel cannot run these arguments, or None if it can."""
    q, keys, values, _, _, gates = inputs
    page_size, _, key_dim = keys.shape[2:]
    if rows.max_query_tokens is not None:
        return "the kernel is for prompts, whose max_query_tokens is None"
    if values is None:
        return "the kernel is not for latent attention"
    given = [x.dtype for x in (q, keys, values, gates) if x is not None]
    if given[0] not in (jnp.bfloat16, jnp.float16) or any(dtype != given[0] for dtype in given):
        names = ", ".join(str(dtype) for dtype in given)
        return f"q, keys, values and gates must all be bfloat16 or all float16, got {names}"
    if gates is not None and (gates.shape[2] - key_dim) % _DIMS:
        return f"gates must have {key_dim} dims and a multiple of {_DIMS} before them, got {gates.shape[2]}"
    if key_dim % _DIMS or key_dim > 4 * _DIMS or values.shape[4] != key_dim:
        return f"keys and values must have 64, 128, 192 or 256 dims, got {key_dim} and {values.shape[4]}"
    if page_size % 16 or (page_size % _block(key_dim) and _block(key_dim) % page_size):
        return f"page_size must be a multiple of 16 and a multiple or divisor of {_block(key_dim)}, got {page_size}"
    return None


def _block(dim: int) -> int:
    """Return the number of keys of a block: as many as have room in registers for their scores beside the sums."""
    return 128 if dim <= 128 else 64


class _Cta:
    """The work of a CTA: a tile of tokens of one or two heads, which share one head of keys, and some shards of their keys.

    `ctas` CTAs divide the shards of a tile among them. "full" barriers complete when a stage of SMEM has been filled, "free"
    barriers when it may be filled again.
    """

    def __init__(self, refs: Any, heads_of_tile: int, ctas: int, scale: float) -> None:
        self.refs, self.heads_of_tile, self.ctas, self.scale = refs, heads_of_tile, ctas, scale
        self.query_rows, self.query_tiles = refs.queries
        self.cta = hp.axis_index("cta")
        # The last tiles of a prompt see the most keys. They go first.
        self.tile_index = refs.length.shape[0] - 1 - hp.axis_index("tile")
        self.page_size, kv_heads, self.dim = refs.keys.shape[2:]
        self.block, self.dim_tiles = _block(self.dim), range(self.dim // _DIMS)
        self.first_head = hp.axis_index("heads") * heads_of_tile
        self.kv_head = jax.lax.div(self.first_head, jnp.int32(refs.q.shape[1] // kv_heads))
        of_tile = refs.start, refs.length, refs.position, refs.row_end
        self.start, self.length, self.first, self.row_end = (ref[self.tile_index] for ref in of_tile)
        self.layer, self.table = refs.layer[0], refs.table[self.tile_index]
        self.seen = self.first + self.length  # the number of keys that the tile's last token sees
        used = PROMPT_SHARDS.used(self.seen)
        has_tokens = self.length > 0
        own = jax.lax.div(jnp.maximum(used - self.cta, 0) + (ctas - 1), jnp.int32(ctas))
        self.num_shards = jnp.where(has_tokens, own, 0)

    def shard_of(self, iteration: Any) -> Any:
        """Return the shard of an iteration. Shard 0 comes last: its results overwrite the queries in SMEM."""
        return self.cta + (self.num_shards - 1 - iteration) * self.ctas

    def blocks_of(self, shard: Any) -> Any:
        """Return the number of a shard's blocks that the tile's last token sees."""
        return PROMPT_SHARDS.blocks_below(shard, ceil(self.seen, self.block), self.block)

    def queries_of(self, warpgroup: Any) -> tuple[Any, Any]:
        """Return the first token and the head of a warpgroup's queries."""
        if self.heads_of_tile == 2:
            return self.start, self.first_head + warpgroup
        return self.start + warpgroup * _QUERIES, self.first_head

    def fetch(self) -> None:
        """Copy the queries, and the blocks of keys and values in the order of `attend`, from GMEM to SMEM."""
        hp.set_max_registers(40, action="decrease")

        @hp.when(self.num_shards > 0)
        def _():
            for warpgroup in range(2):
                token, head = self.queries_of(warpgroup)
                for n in self.dim_tiles:
                    source = self.refs.q.at[hp.ds(token, _QUERIES), head, _dims(n)]
                    hp.copy_gmem_to_smem(source, self.query_rows.at[warpgroup, n], self.refs.queries_full)

        def copy_shard(iteration, step):
            shard = self.shard_of(iteration)
            copy = lambda n, step: self.copy_block(shard, n, step)
            return jax.lax.fori_loop(0, self.blocks_of(shard), copy, step)

        steps = jax.lax.fori_loop(0, self.num_shards, copy_shard, jnp.int32(0))
        hp.wait_for_last(steps, _STAGES, self.refs.keys_free, self.refs.values_free)

    def copy_block(self, shard: Any, n: Any, step: Any) -> Any:
        """Copy the keys and values of a shard's n-th block. Return the next step."""
        refs, begin, at = self.refs, PROMPT_SHARDS.begin_of(shard, n, self.block), _stage(step)
        copied = min(self.page_size, self.block)  # keys of one copy, which lie in one page
        copies = range(self.block // copied)
        addresses = [self.address_of(begin + n * copied) for n in copies]

        def copy(pool, target, full):
            for n, (page, offset) in zip(copies, addresses, strict=True):
                source = pool.at[self.layer, page, hp.ds(offset, copied), self.kv_head]
                hp.copy_gmem_to_smem(source, target.at[hp.ds(n * copied, copied)], full)

        hp.when(step >= _STAGES)(lambda: hp.barrier_wait(refs.keys_free.at[at]))
        copy(refs.keys, refs.key_tiles.at[at], refs.keys_full.at[at])
        hp.when(step >= _STAGES)(lambda: hp.barrier_wait(refs.values_free.at[at]))
        target, is_end = refs.value_tiles.at[at], begin + self.block > self.row_end
        hp.when(~is_end)(lambda: copy(refs.values, target, refs.values_full.at[at]))

        @hp.when(is_end)
        def _():
            # A probability of 0 does not hide a value that is NaN.
            copy(refs.values, target, refs.values_arrived)
            hp.barrier_wait(refs.values_arrived)
            for n in self.dim_tiles:
                keep_rows(target.at[:, _dims(n)], self.row_end - begin)
            hp.commit_smem()
            for _ in copies:
                hp.barrier_arrive(refs.values_full.at[at])

        return step + 1

    def address_of(self, position: Any) -> tuple[Any, Any]:
        """Return the page of a block's keys from `position` on, and their offset in it. It reads the row's own pages."""
        nearest = jax.lax.div(jnp.minimum(position, self.row_end - 1), jnp.int32(self.page_size))
        page = self.refs.page_table[self.table, nearest]
        return page, hp.multiple_of(jax.lax.rem(position, jnp.int32(self.page_size)), 8)


class _Attention:
    """The work of a warpgroup that attends 64 of a CTA's queries."""

    def __init__(self, cta: _Cta) -> None:
        hp.set_max_registers(232, action="increase")
        self.cta, self.refs, self.warpgroup = cta, cta.refs, hp.axis_index(hp.WARPGROUP)
        self.token, self.head = cta.queries_of(self.warpgroup)
        self.position = cta.first + (self.token - cta.start)  # of the first query
        self.own = jnp.clip(cta.length - (self.token - cta.start), 0, _QUERIES)

    def run(self) -> None:
        """Attend all of the CTA's shards."""

        @hp.when(self.cta.num_shards > 0)
        def _():
            hp.barrier_wait(self.refs.queries_full)
            hp.when(self.warpgroup == 1)(self.hand_over)
            jax.lax.fori_loop(0, self.cta.num_shards, self.attend_shard, jnp.int32(0))
            hp.when(self.warpgroup == 0)(self.hand_over)

    def hand_over(self) -> None:
        """Let the other warpgroup use the tensor cores, and wait until it does the same."""
        hp.barrier_arrive(self.refs.pingpong)
        hp.barrier_wait(self.refs.pingpong)

    def advance(self, is_masked: bool, shard: Any, n: Any, carry: Any) -> Any:
        """Attend a shard's n-th block. `is_masked` says that not all queries see all of its keys."""
        refs, block, shape = self.refs, self.cta.block, (_QUERIES, self.cta.block)
        step, top, total, sums = carry
        at = _stage(step)
        hp.barrier_wait(refs.keys_full.at[at])
        queries = self.cta.query_tiles
        pairs = [(queries.at[self.warpgroup, p], refs.key_tiles.at[at, :, _dims(p)].T) for p in self.cta.dim_tiles]
        (scores,) = hp.multiply_all(shape, [pairs], self.hand_over)
        hp.barrier_arrive(refs.keys_free.at[at])
        if is_masked:
            ahead = PROMPT_SHARDS.begin_of(shard, n, block) - self.position  # of the first key before the first query
            visible = hp.columns(shape) - hp.rows(shape) <= -ahead
            scores = jnp.where(visible, scores, -jnp.inf)
        factor = self.cta.scale * math.log2(math.e)
        new_top = jnp.maximum(top, scores.max(axis=1) * factor)
        decay = jnp.exp2(top - new_top)
        probabilities = jnp.exp2(scores * factor - hp.along_rows(new_top, block))
        sums = hp.scale_rows(sums, decay)  # seldom changes them, because new maxima become rare
        narrow = probabilities.astype(refs.q.dtype)
        sums, narrow, new_top, probabilities, decay = hp.optimization_barrier(
            (sums, narrow, new_top, probabilities, decay)
        )
        hp.barrier_arrive(refs.pingpong)
        hp.barrier_wait(refs.values_full.at[at])
        hp.barrier_wait(refs.pingpong)
        # The tensor cores work on the other warpgroup's products meanwhile.
        total = total * decay + probabilities.sum(axis=1)
        sums = hp.accumulate(sums, narrow, refs.value_tiles.at[at])
        hp.barrier_arrive(refs.values_free.at[at])
        return step + 1, new_top, total, sums

    def attend_shard(self, iteration: Any, step: Any) -> Any:
        """Attend a shard, and store its results. Return the next step."""
        cta = self.cta
        shard = cta.shard_of(iteration)
        count = cta.blocks_of(shard)
        # Every token of the tile sees all keys of the first blocks.
        plain = PROMPT_SHARDS.blocks_below(shard, jax.lax.div(cta.first + 1, jnp.int32(cta.block)), cta.block)
        plain = jnp.minimum(plain, count)
        top = hp.zeros_per_row(_QUERIES, jnp.float32) + LOW
        carry = step, top, hp.zeros_per_row(_QUERIES, jnp.float32), hp.zeros((_QUERIES, cta.dim), jnp.float32)
        carry = jax.lax.fori_loop(0, plain, functools.partial(self.advance, False, shard), carry)
        step, top, total, sums = jax.lax.fori_loop(plain, count, functools.partial(self.advance, True, shard), carry)
        hp.when(cta.seen > PROMPT_SHARDS.split)(lambda: self.store_partial(shard, top, total, sums))
        whole = jnp.clip(PROMPT_SHARDS.split - self.position, 0, self.own)  # tokens whose keys are one split
        hp.when((shard == 0) & (whole > 0))(lambda: self.store_whole(whole, total, sums))
        return step

    def store_partial(self, shard: Any, top: jax.Array, total: jax.Array, sums: jax.Array) -> None:
        """Store the results of a shard for `merge`."""
        refs, warpgroup = self.refs, self.warpgroup
        tokens_of_tile = 2 * _QUERIES // self.cta.heads_of_tile
        entry = self.cta.tile_index * tokens_of_tile + (self.token - self.cta.start)
        refs.tops_tile[warpgroup] = top
        refs.totals_tile[warpgroup] = total
        hp.commit_smem()
        here = hp.ds(entry, _QUERIES)
        hp.copy_smem_to_gmem(refs.tops_tile.at[warpgroup], refs.tops.at[shard, self.head, here])
        hp.copy_smem_to_gmem(refs.totals_tile.at[warpgroup], refs.totals.at[shard, self.head, here])
        hp.store_gmem(refs.sums.at[shard, here, self.head], sums)
        hp.wait_smem_to_gmem(0, wait_read_only=True)

    def store_whole(self, whole: Any, total: jax.Array, sums: jax.Array) -> None:
        """Store the outputs of the first `whole` tokens, over the queries in SMEM."""
        refs, warpgroup, dim, tiles = self.refs, self.warpgroup, self.cta.dim, self.cta.dim_tiles
        rows, query_tiles, here = self.cta.query_rows, self.cta.query_tiles, hp.ds(self.token, _QUERIES)
        out = sums / hp.along_rows(total, dim)
        if refs.gates is not None:
            from_dim = refs.gates.shape[2] - dim
            for n in tiles:
                source = refs.gates.at[here, self.head, hp.ds(from_dim + n * _DIMS, _DIMS)]
                hp.copy_gmem_to_smem(source, rows.at[warpgroup, n], refs.gates_full.at[warpgroup])
            hp.barrier_wait(refs.gates_full.at[warpgroup])
        for n in tiles:
            result = out[:, n * _DIMS : (n + 1) * _DIMS]
            if refs.gates is not None:
                gates = hp.load_tile(query_tiles.at[warpgroup, n]).astype(jnp.float32)
                result = result / (1.0 + jnp.exp(-gates))
            query_tiles.at[warpgroup, n][...] = result.astype(refs.q.dtype)
        hp.commit_smem()
        for n in tiles:
            store_rows(rows.at[warpgroup, n], whole, refs.out.at[here, self.head, _dims(n)])
        hp.wait_smem_to_gmem(0, wait_read_only=True)


def _dims(n: int) -> Any:
    """Return the slice of the n-th tile of a head's dims."""
    return hp.ds(n * _DIMS, _DIMS)


def _stage(step: Any) -> Any:
    """Return the stage of SMEM that a step's block is in."""
    return jax.lax.rem(step, jnp.int32(_STAGES))


def _kernel(refs: Any, *, heads_of_tile: int, ctas: int, scale: float) -> None:
    """Attend one tile of tokens of one or two heads to some shards of their keys, by three warpgroups."""
    cta, warpgroup = _Cta(refs, heads_of_tile, ctas, scale), hp.axis_index(hp.WARPGROUP)
    hp.when(warpgroup < 2)(lambda: _Attention(cta).run())
    hp.when(warpgroup == 2)(cta.fetch)
    hp.finish_together(refs.done)


def paged_attention(inputs: Attention, rows: Rows, *, value_dim: int, scale: float) -> jax.Array:
    """Launch the kernel, and then `merge`. See api.py."""
    q, keys, values, page_table, slots, gates = inputs
    num_tokens, heads, dim = q.shape
    heads_of_tile = 2 if heads // keys.shape[3] % 2 == 0 else 1
    tokens_of_tile = 2 * _QUERIES // heads_of_tile
    cut = tiles(rows, num_tokens, tokens_of_tile, slots)
    num_tiles = cut.table.shape[0]
    ctas = default_programs(PROMPT_SHARDS.count, num_tiles * heads // heads_of_tile, is_prompt=True)
    given = dict(q=q, keys=keys, values=values, layer=jnp.reshape(rows.layer, 1), page_table=page_table)
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    entries = num_tiles * tokens_of_tile
    outputs = dict(
        out=jax.ShapeDtypeStruct(q.shape, q.dtype),
        sums=array(PROMPT_SHARDS.count, entries, heads, dim),
        tops=array(PROMPT_SHARDS.count, heads, entries),
        totals=array(PROMPT_SHARDS.count, heads, entries),
    )
    copies = _block(dim) // min(keys.shape[2], _block(dim))
    tile = (dim // _DIMS, _QUERIES, _DIMS)
    of_stage = _STAGES, _block(dim), dim
    scratch = dict(
        queries=hp.token_tiles((2, *tile), q.dtype),
        key_tiles=hp.tiled(*of_stage, dtype=q.dtype),
        value_tiles=hp.tiled(*of_stage, dtype=q.dtype),
        tops_tile=hp.SMEM((2, _QUERIES), jnp.float32),
        totals_tile=hp.SMEM((2, _QUERIES), jnp.float32),
        queries_full=hp.Barrier(num_arrivals=2 * tile[0]),
        gates_full=hp.Barrier(num_arrivals=tile[0], num_barriers=2),
        keys_full=hp.Barrier(num_arrivals=copies, num_barriers=_STAGES),
        keys_free=hp.Barrier(num_arrivals=2, num_barriers=_STAGES),
        values_full=hp.Barrier(num_arrivals=copies, num_barriers=_STAGES),
        values_free=hp.Barrier(num_arrivals=2, num_barriers=_STAGES),
        values_arrived=hp.Barrier(num_arrivals=copies),
        pingpong=hp.Barrier(num_arrivals=2),
        done=hp.Barrier(num_arrivals=3),
    )
    attended = hp.launch(
        functools.partial(_kernel, heads_of_tile=heads_of_tile, ctas=ctas, scale=scale),
        name="paged_attention",
        # The heads of one tile are neighbours, because the keys of all heads are.
        grid=dict(tile=num_tiles, cta=ctas, heads=heads // heads_of_tile),
        inputs=given | cut._asdict() | dict(gates=gates),
        outputs=outputs,
        scratch=scratch,
        warpgroups=3,
        is_fast=True,
    )
    entry = padded_indices(rows, token_rows(rows.query_start_loc, num_tokens), tokens_of_tile)
    cut = dict(split=PROMPT_SHARDS.split, shards=PROMPT_SHARDS.count, entry=entry)
    return merge(attended, rows, gates, **cut, interpret=False)
