"""The packed rows of an op's call: their tokens, and the blocks of a layer that they read and write."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from pallas_kernels._check import Arguments, require
from pallas_kernels.blocks import NULL_BLOCK
from pallas_kernels.chunks import Chunks

# The default, None, of fields that an op may require: see `Rows.having`. They are annotated as if they were given.
_ABSENT: Any = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RowCheckpoints(Arguments):
    """The states inside prefill rows that are kept, beside the state after each row's last token.

    Attributes:
        offset: The numbers of tokens of the row after which its state is kept, in ascending order.
        block: The block that receives each of these states. NULL_BLOCK means no checkpoint, whatever its offset is. It may
            be the row's own read block.
    """

    offset: Int32[Array, "rows checkpoints"]
    block: Int32[Array, "rows checkpoints"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class BoundaryWindow(Arguments):
    """The convolution window of a boundary that each row has passed, which is kept beside the row's new window.

    Attributes:
        row: The first row of that window in the block `Rows.window_read`.
        block: The block that receives it. NULL_BLOCK means no boundary, whatever `row` is. It may be the row's own read
            block, and must not be the block that receives the row's new window.
    """

    row: Int32[Array, " rows"]
    block: Int32[Array, " rows"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Fold(Arguments):
    """The slots, bases and folds of decode and verify rows with deferred states.

    Ops of deferred states write a state only where a group of tokens ends. Instead of a state after each token they keep an
    entry for each token in a ring. Positions are cut into groups of L tokens, at the multiples of L, and a ring has 2 L ring
    slots. A row has its state at position `base` in the block `Rows.read`, and the entries of the positions from base to its
    own position - 1 in the ring of its slot, position i in ring slot i mod 2 L. Its own position is its
    `Rows.num_computed_tokens`. Let E = (base // L + 1) * L be the end of base's group. The row adds the entries of its own
    tokens and then

    - if position >= E, it folds the group: the state at position E is written to `block` and used by the row's tokens. The
      caller's next `base` is E.
    - if position < E, nothing is written to the pool. Tokens from E on use the same fold, which is not kept, because some
      of its entries may be drafts. `base` remains.

    To reject drafts, the caller gives a smaller position to the next call. Nothing is moved. A row whose position is at
    least E folds even if it has no tokens, if `block` is not NULL_BLOCK. All other rows without tokens take no part. The
    blocks of rows that do not fold are not touched.

    A row's position is at least `base`, and its last token must be before position E + L. That holds if every call since
    `base` had at most `Rows.max_query_tokens` tokens per row, and 2 * max_query_tokens - 2 < L.

    Attributes:
        slot: The slot of each row, whose ring it reads and writes. Two rows with tokens have different slots.
        base: The position of the state in the block `Rows.read`: the number of tokens that it has read.
        block: The block that receives the state at the end of base's group of tokens, if the row's position has reached it.
            NULL_BLOCK skips the write. It may be the row's own read block.
    """

    slot: Int32[Array, " rows"]
    base: Int32[Array, " rows"]
    block: Int32[Array, " rows"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Rows(Arguments):
    """The packed rows of a call: their tokens, and the blocks of a layer that they read and write.

    An op reads the fields that its docstring names, and refuses rows in which one of them is None. Rows of several groups
    of layers have arrays of blocks with an axis of groups in front; `of_group` gives the rows of one group, which ops take.

    Attributes:
        query_start_loc: Index of each row's first token; the last entry is the end of the last row. Padding rows repeat that
            entry.
        layer: The layer whose blocks are read and written. None in rows of several groups.
        num_computed_tokens: Position of each row's first token in its sequence.
        read: The block that holds each row's recurrent state. NULL_BLOCK (0) reads as zeros.
        window_read: The block that holds each row's convolution window. NULL_BLOCK reads as zeros.
        window_row: The first row of that window in its block.
        write: The blocks that each row writes. An op that keeps a state after each token writes the state after token t of
            row r to write[r, t], and a row has at most `writes` tokens. Other ops write the state or window at a row's
            end to write[r, 0]. NULL_BLOCK skips the write. A block may be one that the row reads.
        checkpoints: The states inside prefill rows that are kept; None for none.
        boundary: The windows of boundaries that decode and verify rows have passed; None for none.
        fold: The folds of decode and verify rows with deferred states. None without deferred states.
        chunks: The rows cut into chunks by `chunk_rows`, which the ops for prefill rows take.
        max_query_tokens: The largest number of tokens of any row. None if it is not known. Static.
    """

    query_start_loc: Int32[Array, " rows_plus_1"]
    layer: int | Int32[Array, ""] = _ABSENT
    num_computed_tokens: Int32[Array, " rows"] = _ABSENT
    read: Int32[Array, " rows"] = _ABSENT
    window_read: Int32[Array, " rows"] = _ABSENT
    window_row: Int32[Array, " rows"] = _ABSENT
    write: Int32[Array, "rows writes"] = _ABSENT
    checkpoints: RowCheckpoints | None = None
    boundary: BoundaryWindow | None = None
    fold: Fold = _ABSENT
    chunks: Chunks = _ABSENT
    max_query_tokens: int = field(default=_ABSENT, metadata=dict(static=True))

    @property
    def num_rows(self) -> int:
        """The number of rows, padding rows included."""
        return self.query_start_loc.shape[0] - 1

    @property
    def checkpoint_inputs(self) -> dict[str, jax.Array | None]:
        """The checkpoints as inputs of a kernel; None without checkpoints."""
        if self.checkpoints is None:
            return dict(checkpoint_offset=None, checkpoint_block=None)
        return dict(checkpoint_offset=self.checkpoints.offset, checkpoint_block=self.checkpoints.block)

    @property
    def prefill_inputs(self) -> dict[str, Any]:
        """The rows as inputs of a Triton kernel that keeps a row's final state, and the states of checkpoints."""
        inputs = dict(layer=self.layer, query_start_loc=self.query_start_loc)
        return inputs | dict(read_block=self.read, write_block=self.write[:, 0]) | self.checkpoint_inputs

    @property
    def update_inputs(self) -> dict[str, Any]:
        """The rows as inputs of a Triton kernel that keeps the state after each token."""
        inputs = dict(layer=self.layer, query_start_loc=self.query_start_loc)
        return inputs | dict(read_block=self.read, write_blocks=self.write)

    @property
    def window_inputs(self) -> dict[str, Any]:
        """The rows as inputs of a kernel that reads and keeps convolution windows, without the layer."""
        inputs = dict(query_start_loc=self.query_start_loc, read_block=self.window_read, window_row=self.window_row)
        return inputs | dict(write_block=self.write[:, 0])

    @property
    def fold_inputs(self) -> dict[str, Any]:
        """The rows as inputs of a kernel of deferred states, without the blocks that they read and write."""
        inputs = dict(layer=self.layer, query_start_loc=self.query_start_loc, slot=self.fold.slot, base=self.fold.base)
        return inputs | dict(position=self.num_computed_tokens)

    def of_group(self, group: int, layer: int | jax.Array) -> "Rows":
        """Return the rows with their blocks of one group of layers, for one of its layers."""
        at = lambda blocks: None if blocks is None else blocks[group]
        inside = lambda value: None if value is None else replace(value, block=value.block[group])
        return replace(
            self,
            layer=layer,
            read=at(self.read),
            window_read=at(self.window_read),
            write=at(self.write),
            checkpoints=inside(self.checkpoints),
            boundary=inside(self.boundary),
            fold=inside(self.fold),
        )

    def having(self, op: str, *required: str, optional: Sequence[str] = ()) -> "Rows":
        """Return the rows with the fields that an op reads, beside layer and query_start_loc. Other fields become None.

        So arrays that the op does not read are no operands of its program. Checkpoints without columns become None.

        Args:
            op: The op's name, for messages.
            required: Fields that the op must have.
            optional: Fields that may be None.

        Raises:
            ValueError: A required field is None.
        """
        for name in ("layer", *required):
            require(getattr(self, name) is not None, f"{op}: rows.{name} must be given, got None")
        kept = {name: getattr(self, name) for name in (*required, *optional)}
        points = kept.get("checkpoints")
        if points is not None and points.offset.shape[1] == 0:
            kept["checkpoints"] = None
        return Rows(layer=jnp.int32(self.layer), query_start_loc=self.query_start_loc, **kept)


def cut_columns(x: jax.Array, sizes: Sequence[int]) -> tuple[jax.Array, ...]:
    """Cut [rows, columns] into one array [rows, size] for each of `sizes`, whose sum is the number of columns."""
    return tuple(jnp.split(x, list(itertools.accumulate(sizes))[:-1], axis=1))


class TokenRows(NamedTuple):
    """The row of each packed token, and its offset in the row.

    Attributes:
        row: The token's row, clipped to the existing rows for padding tokens.
        offset: The token's index within its row.
        valid: False for padding tokens, which belong to no row.
    """

    row: Int32[Array, " tokens"]
    offset: Int32[Array, " tokens"]
    valid: Bool[Array, " tokens"]


def token_rows(query_start_loc: jax.Array, num_tokens: int) -> TokenRows:
    """Find the row of each packed token and the token's offset in that row.

    Args:
        query_start_loc: Index of each row's first token; the last entry is the end of the last row. int32 [rows + 1].
        num_tokens: Number of packed tokens, padding included.
    """
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    # There are few rows. Comparing with all of them is one launch; a binary search is a loop of launches.
    row = jnp.searchsorted(query_start_loc[1:], token, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, query_start_loc.shape[0] - 2)
    valid = (token >= query_start_loc[0]) & (token < query_start_loc[-1])
    return TokenRows(row, token - query_start_loc[row], valid)


def kept_states(rows: Rows) -> tuple[jax.Array, jax.Array]:
    """Return the offsets in tokens, and the blocks, of all states that a prefill keeps.

    The final state is treated as one more checkpoint, at the row's end. A row without tokens keeps nothing.

    Returns:
        Offsets and blocks, each int32 [rows, checkpoints + 1].
    """
    length = jnp.diff(rows.query_start_loc)[:, None]
    offset, block = length, rows.write[:, :1]
    if rows.checkpoints is not None:
        offset = jnp.concatenate([rows.checkpoints.offset, offset], axis=1)
        block = jnp.concatenate([rows.checkpoints.block, block], axis=1)
    return offset, jnp.where(length > 0, block, NULL_BLOCK)
