"""Where each token stands and where its keys go: what a hybrid model needs of a step beside the state indices."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from mamba_align_jax.align.batch import StepBatch
from mamba_align_jax.align.step import StepIndices
from mamba_align_jax.metadata.positions import token_positions
from mamba_align_jax.metadata.rows import Rows, RowSplit, split_rows
from pallas_kernels import Chunks, chunk_rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """One step as a model takes it.

    Attributes:
        split: Rows by kind, with their state indices.
        chunks: The prefill rows cut into chunks of `CHUNK_SIZE`, once for all layers; None without such rows.
        positions: Absolute position of each token. int32 [tokens].
        kv_page: Page that takes each token's keys; out of range for padding tokens, so that scatters drop them.
        kv_offset: Place in that page. int32 [tokens].
        page_table: Pages of each row, by position. int32 [rows, pages].
        num_decode_tokens: Static bound on the tokens of decode and verify rows.
    """

    split: RowSplit
    chunks: Chunks | None
    positions: jax.Array
    kv_page: jax.Array
    kv_offset: jax.Array
    page_table: jax.Array
    num_decode_tokens: int = field(metadata=dict(static=True))


def step_inputs(
    batch: StepBatch,
    indices: StepIndices,
    *,
    num_decode_rows: int,
    num_decode_tokens: int,
    page_tables: jax.Array,
    num_tokens: int,
    page_size: int,
    num_pages: int,
) -> StepInputs:
    """Derives a step's inputs on the device.

    Args:
        batch: The rows, decode and verify rows first.
        indices: What `begin_step` found.
        num_decode_rows: How many rows, padding included, are decode or verify rows.
        num_decode_tokens: Bound on their tokens.
        page_tables: int32 [slots, pages].
        num_tokens: Packed tokens, padding included.
        page_size: Tokens of a page.
        num_pages: Pages of the pool.
    """
    split = split_rows(batch, indices, num_decode_rows)
    chunks = None
    if split.prefill.num_rows:
        num_prefill_tokens = num_tokens - (num_decode_tokens if num_decode_rows else 0)
        chunks = chunk_rows(split.prefill.query_start_loc, split.prefill.num_computed_tokens, num_prefill_tokens)
    tokens = token_positions(batch.query_start_loc, indices.num_computed_tokens, num_tokens)
    page_table = page_tables[jnp.maximum(batch.idx_mapping, 0)]
    page = page_table[tokens.row, tokens.position // page_size]
    return StepInputs(
        split=split,
        chunks=chunks,
        positions=tokens.position,
        kv_page=jnp.where(tokens.valid, page, num_pages),
        kv_offset=tokens.position % page_size,
        page_table=page_table,
        num_decode_tokens=num_decode_tokens,
    )


def single_token_inputs(
    page_table: jax.Array, position: jax.Array, alive: jax.Array, *, page_size: int, num_pages: int
) -> StepInputs:
    """One token of each row, for attention layers alone: there are no states to read or write.

    Keys at a position that has no page go to the NULL page: their own pass reads them there, and others that did the same.

    Args:
        page_table: Pages of each row, by position; 0 where it has none yet. int32 [rows, pages].
        position: Of each row's token. int32 [rows].
        alive: Rows whose keys are kept; the others' outputs mean nothing. bool [rows].
        page_size: Tokens of a page.
        num_pages: Pages of the pool.
    """
    count, number = position.shape[0], position // page_size
    row = jnp.arange(count, dtype=jnp.int32)
    page = page_table.at[row, number].get(mode="fill", fill_value=num_pages)
    nowhere = jnp.zeros((1, count), jnp.int32)
    rows = Rows(
        query_start_loc=jnp.arange(count + 1, dtype=jnp.int32),
        num_computed_tokens=position,
        recurrent_read=nowhere,
        conv_read=nowhere,
        window_row=nowhere[0],
        write=nowhere[..., None],
    )
    none = jax.tree.map(lambda x: x[..., :0], rows)
    return StepInputs(
        split=RowSplit(decode=rows, prefill=none, first_prefill_token=row[0] + count),
        chunks=None,
        positions=position,
        kv_page=jnp.where(alive, page, num_pages),
        kv_offset=position % page_size,
        page_table=page_table,
        num_decode_tokens=count,
    )
