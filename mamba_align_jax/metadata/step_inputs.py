"""The inputs of a step as a model takes them: its rows, and the place of each token's key and value."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mamba_align_jax import _values as values
from mamba_align_jax.align.batch import StepBatch
from mamba_align_jax.align.step import StepIndices
from mamba_align_jax.metadata.interior import InteriorBoundaries
from mamba_align_jax.metadata.layer_step import LayerStep, TokenPages
from mamba_align_jax.metadata.rows import RowSplit, split_rows
from pallas_kernels import Chunks, Implementation, Rows
from pallas_kernels.rows import TokenRows
from pallas_kernels.rows import token_rows as rows_of_tokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """What all layers of a model share in one step.

    Attributes:
        rows: The step's rows by kind.
        chunks: The chunks of the prefill rows; None in a step without prefill rows.
        pages: The position of each token, and the place of its key and value.
        valid: False for padding tokens, which choose no experts. bool [tokens]
    """

    rows: RowSplit
    chunks: Chunks | None
    pages: TokenPages
    valid: jax.Array

    def layer(
        self, layer: int | jax.Array, *, group: int = 0, implementation: Implementation | None = None
    ) -> LayerStep:
        """Returns the step for layer `layer` of group `group`. `implementation` None chooses the ops by platform."""
        return LayerStep(
            rows=self.rows,
            chunks=self.chunks,
            pages=self.pages,
            layer=jnp.int32(layer),
            group=group,
            implementation=implementation,
        )


def step_inputs(
    batch: StepBatch,
    indices: StepIndices,
    *,
    num_decode_rows: int,
    page_tables: jax.Array,
    num_tokens: int,
    page_size: int,
    num_pages: int,
    num_decode_tokens: int | None = None,
    token_rows: TokenRows | None = None,
    interior: InteriorBoundaries | None = None,
) -> StepInputs:
    """Computes a step's inputs. It can be called inside a jitted step.

    Args:
        batch: The step's rows, decode and verify rows first.
        indices: The result of `begin_step`.
        num_decode_rows: Number of decode and verify rows, padding rows among them included. Static.
        page_tables: Pages of each slot, in the order of their positions. int32 [slots, pages]
        num_tokens: Number of packed tokens, padding included. Static.
        page_size: Number of tokens of a page. Static.
        num_pages: Number of pages of the pool. Static.
        num_decode_tokens: Static bound on the tokens of the decode and verify rows, for which `num_tokens` leaves room
            beside the prefill rows; None if it may not. See `split_rows`.
        token_rows: The row of each packed token, as `pallas_kernels.rows.token_rows` finds it; None computes it.
        interior: The boundaries inside the prefill rows, whose states they keep in mode "all"; None to keep none.

    Raises:
        ValueError: A static size is no whole number, or out of range.
    """
    num_tokens = values.integer("step_inputs: num_tokens", num_tokens, 1)
    page_size = values.integer("step_inputs: page_size", page_size, 1)
    num_pages = values.integer("step_inputs: num_pages", num_pages, 1)
    rows = split_rows(batch, indices, num_decode_rows, num_decode_tokens, interior)
    tokens = token_rows or rows_of_tokens(batch.query_start_loc, num_tokens)
    positions = jnp.where(tokens.valid, indices.num_computed_tokens[tokens.row] + tokens.offset, 0)
    slots = jnp.maximum(batch.idx_mapping, 0)
    page = page_tables[slots[tokens.row], positions // page_size]
    pages = TokenPages(
        positions=positions,
        kv_page=jnp.where(tokens.valid, page, num_pages),
        kv_offset=positions % page_size,
        page_tables=page_tables,
        slots=slots,
    )
    return StepInputs(rows=rows, chunks=rows.chunks(num_tokens), pages=pages, valid=tokens.valid)


def single_token_inputs(
    page_table: jax.Array,
    position: jax.Array,
    alive: jax.Array,
    *,
    page_size: int,
    num_pages: int,
    slots: jax.Array | None = None,
) -> StepInputs:
    """Computes the inputs of a step with one token per row, for attention layers only. No state is read or written.

    If a row has no page for its token, the token's key goes to page 0. All such rows share that page, so one of them
    may read the key of another.

    Args:
        page_table: Pages of each row, in the order of their positions; 0 where the row has none yet. int32
            [rows, pages]. With `slots`, the pages of each slot, int32 [slots, pages].
        position: Position of each row's token. int32 [rows]
        alive: Whether a row's key is written. The outputs of the other rows have no meaning. bool [rows]
        page_size: Number of tokens of a page. Static.
        num_pages: Number of pages of the pool. Static.
        slots: The slot of each row, or None. int32 [rows]
    """
    count, number = position.shape[0], position // page_size
    row = jnp.arange(count, dtype=jnp.int32)
    slots = row if slots is None else slots
    page = page_table.at[slots, number].get(mode="fill", fill_value=num_pages)

    def single_token_rows(count: int) -> Rows:
        no_block = jnp.zeros((1, count), jnp.int32)
        return Rows(
            query_start_loc=jnp.arange(count + 1, dtype=jnp.int32),
            num_computed_tokens=position[:count],
            read=no_block,
            window_read=no_block,
            window_row=no_block[0],
            write=no_block[..., None],
            max_query_tokens=1,
        )

    decode, prefill = single_token_rows(count), single_token_rows(0)
    rows = RowSplit(decode=decode, prefill=prefill, first_prefill_token=row[0] + count, num_decode_tokens=count)
    pages = TokenPages(
        positions=position,
        kv_page=jnp.where(alive, page, num_pages),
        kv_offset=position % page_size,
        page_tables=page_table,
        slots=slots,
    )
    return StepInputs(rows=rows, chunks=None, pages=pages, valid=alive)
