"""A counting sort of pairs of a token and one of its experts by expert, and its cut into tiles of one expert each.

`tiles` is plain jax.numpy. `tiles_by_kernels` returns the same by two launches: one counts the pairs of each expert in every
block of pairs, and the other computes each pair's index in the sorted order from the counts.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from pallas_kernels import _pallas_triton as pt

# The counts of blocks, the pairs and the tiles that a program handles at a time.
_COUNTS, _PAIRS, _TILES = 16, 16, 4
# An iteration waits for its loads, so it loads `_AHEAD` times `_PAIRS` pairs, or twice `_COUNTS` counts.
_AHEAD = 4


class Tiles(NamedTuple):
    """Tiles of pairs, each of one expert. A tile without pairs has length 0.

    Attributes:
        expert: The tile's expert.
        start: The index of the tile's first pair in `order`.
        length: The number of the tile's pairs.
        order: All pairs, sorted by expert. Pairs without an expert come last.
    """

    expert: Int32[Array, " tiles"]
    start: Int32[Array, " tiles"]
    length: Int32[Array, " tiles"]
    order: Int32[Array, " pairs"]


def tiles(chosen: jax.Array, experts: int, rows: int, *, has_rest: bool = False) -> Tiles:
    """Cut each expert's pairs into tiles of `rows` pairs; its last tile may be shorter.

    Args:
        chosen: The expert of each pair; an index out of range for none. int32 [pairs]
        experts: The number of experts.
        rows: The most pairs of a tile.
        has_rest: Whether the pairs without an expert have tiles too, as if `experts` were their expert.
    """
    pairs, classes = chosen.shape[0], experts + has_rest
    key = _keys(chosen, experts)
    order = jax.lax.sort_key_val(key, jnp.arange(pairs, dtype=jnp.int32))[1]
    each = jnp.sum(key[None] == jnp.arange(classes, dtype=jnp.int32)[:, None], axis=1, dtype=jnp.int32)
    end = jnp.cumsum(each, dtype=jnp.int32)
    last = jnp.cumsum(-(-each // rows), dtype=jnp.int32)
    tile = jnp.arange(_most_tiles(pairs, classes, rows), dtype=jnp.int32)
    # Tiles after the last one get a start after their expert's end.
    expert = jnp.searchsorted(last, tile, side="right", method="compare_all").astype(jnp.int32)
    expert = jnp.minimum(expert, classes - 1)
    start = (end - each)[expert] + (tile - (last - -(-each // rows))[expert]) * rows
    return Tiles(expert, start, jnp.clip(end[expert] - start, 0, rows), order)


def _most_tiles(pairs: int, classes: int, rows: int) -> int:
    return min(pairs, classes) + pairs // rows


def _keys(chosen: jax.Array, experts: int) -> jax.Array:
    """Return the key of each pair by which it is sorted: its expert, or `experts` for none."""
    return jnp.where((chosen >= 0) & (chosen < experts), chosen, experts)


def _load_keys(refs, pair: jax.Array, experts: int) -> jax.Array:
    """Load the keys of pairs. Pairs that do not exist get the key -1, which belongs to no class."""
    exists = pair < refs.chosen.shape[0]
    key = _keys(pt.load(refs.chosen.at[pair], mask=exists, other=-1), experts)
    return jnp.where(exists, key, -1)


def _count_kernel(refs, *, experts: int, block: int):
    """Count the pairs of each class, the experts and `experts` for none, in the program's block of pairs."""
    own, classes = pt.program_id(0), refs.counts.shape[1]
    class_, _ = pt.lanes(0, classes, classes)

    def advance(iteration, counts):
        first = own * (block // _PAIRS) + iteration * _AHEAD
        keys = [_load_keys(refs, pt.lanes(first + ahead, _PAIRS, block)[0], experts) for ahead in range(_AHEAD)]
        for key in keys:
            counts = counts + (class_[:, None] == key[None, :]).astype(jnp.int32)
        return counts

    counts = jnp.zeros((classes, _PAIRS), jnp.int32)
    counts = jax.lax.fori_loop(jnp.int32(0), jnp.int32(block // (_AHEAD * _PAIRS)), advance, counts)
    pt.store(refs.counts.at[own, class_], jnp.sum(counts, axis=1, dtype=jnp.int32))


def _order_kernel(refs, *, experts: int, has_rest: bool, rows: int, block: int, interpret: bool):
    """Store the pairs of the program's block in sorted order, and describe its range of the tiles."""
    own, (blocks, classes) = pt.program_id(0), refs.counts.shape
    class_, _ = pt.lanes(0, classes, classes)

    def add(iteration, carry):
        """Add the counts of some blocks to the totals of all blocks and of the blocks before this one."""
        total, before = carry
        others = [pt.lanes(iteration * 2 + ahead, _COUNTS, blocks) for ahead in range(2)]
        loaded = [
            pt.load(
                refs.counts.at[other[:, None], class_[None, :]],
                mask=jnp.broadcast_to(exists[:, None], (_COUNTS, classes)),
                other=0,
            )
            for other, exists in others
        ]
        for (other, _), counts in zip(others, loaded, strict=True):
            total, before = total + counts, before + jnp.where((other < own)[:, None], counts, 0)
        return total, before

    none = jnp.zeros((_COUNTS, classes), jnp.int32)
    total, before = jax.lax.fori_loop(jnp.int32(0), jnp.int32(-(-blocks // (2 * _COUNTS))), add, (none, none))
    each, before = (jnp.sum(counts, axis=0, dtype=jnp.int32) for counts in (total, before))
    begin = jnp.cumsum(each, axis=0, dtype=jnp.int32) - each
    # A pair needs the offset of its own class, which another thread has, so the offsets go through GMEM.
    pt.store(refs.offsets.at[own, class_], begin + before)
    if not interpret:
        pt.barrier()

    lane, _ = pt.lanes(0, block, block)
    pair = own * block + lane
    key = _load_keys(refs, pair, experts)

    def rank(iteration, equal):
        others = [pt.lanes(iteration * _AHEAD + ahead, _PAIRS, block)[0] for ahead in range(_AHEAD)]
        keys = [_load_keys(refs, own * block + other, experts) for other in others]
        for other, other_key in zip(others, keys, strict=True):
            is_before = (other_key[None, :] == key[:, None]) & (other[None, :] < lane[:, None])
            equal = equal + is_before.astype(jnp.int32)
        return equal

    equal = jnp.zeros((block, _PAIRS), jnp.int32)
    equal = jax.lax.fori_loop(jnp.int32(0), jnp.int32(block // (_AHEAD * _PAIRS)), rank, equal)
    exists = pair < refs.chosen.shape[0]
    index = pt.load(refs.offsets.at[own, key], mask=exists, other=0) + jnp.sum(equal, axis=1, dtype=jnp.int32)
    # Interpreted, a masked store writes the old value, which would undo another lane's store.
    pt.store(refs.order.at[jnp.where(exists, index, refs.order.shape[0])], pair, mask=exists)

    cut = jnp.where(class_ < experts + has_rest, jax.lax.div(each + (rows - 1), jnp.int32(rows)), 0)
    last = jnp.cumsum(cut, axis=0, dtype=jnp.int32)
    num_tiles = refs.expert.shape[0]
    per_program = -(-num_tiles // (blocks * _TILES))

    def describe(iteration, _):
        tile, exists = pt.lanes(own * per_program + iteration, _TILES, num_tiles)
        expert = jnp.sum((last[None, :] <= tile[:, None]).astype(jnp.int32), axis=1, dtype=jnp.int32)
        expert = jnp.minimum(expert, experts + has_rest - 1)
        is_own = class_[None, :] == expert[:, None]
        of = lambda values: jnp.sum(jnp.where(is_own, values[None, :], 0), axis=1, dtype=jnp.int32)
        start = of(begin) + (tile - of(last - cut)) * rows
        length = jnp.minimum(jnp.maximum(of(begin + each) - start, 0), rows)
        for ref, value in ((refs.expert, expert), (refs.start, start), (refs.length, length)):
            pt.store(ref.at[tile], value, mask=exists)

    jax.lax.fori_loop(jnp.int32(0), jnp.int32(per_program), describe, None)


def tiles_by_kernels(
    chosen: jax.Array, experts: int, rows: int, *, has_rest: bool = False, interpret: bool = False
) -> Tiles:
    """Compute the result of `tiles` by two launches."""
    pairs, classes = chosen.shape[0], pt.power_of_two(experts + 1)
    block = 256 if pairs <= 1 << 16 else 512
    blocks = -(-pairs // block)
    launch = functools.partial(pt.call, grid=(blocks,), num_warps=8, interpret=interpret)
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.int32)
    counts = launch(
        functools.partial(_count_kernel, experts=experts, block=block),
        name="mixture_of_experts_count",
        inputs=dict(chosen=chosen),
        outputs=dict(counts=shape(blocks, classes)),
    )["counts"]
    num_tiles = _most_tiles(pairs, experts + has_rest, rows)
    found = launch(
        functools.partial(
            _order_kernel, experts=experts, has_rest=has_rest, rows=rows, block=block, interpret=interpret
        ),
        name="mixture_of_experts_order",
        inputs=dict(chosen=chosen, counts=counts),
        outputs=dict(
            expert=shape(num_tiles), start=shape(num_tiles), length=shape(num_tiles), order=shape(pairs),
            offsets=shape(blocks, classes),
        ),
    )  # fmt: skip
    return Tiles(**{name: found[name] for name in Tiles._fields})
