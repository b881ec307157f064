"""What a layer knows of a step: the step's rows, and the layer's own place in the pools."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from mamba_align_jax.align.batch import StepBatch
from mamba_align_jax.align.step import StepIndices
from mamba_align_jax.metadata.rows import RowSplit, split_rows
from pallas_kernels import Chunks, Implementation


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TokenPages:
    """Where each token of a step stands in its sequence, and where its keys and values go: for attention layers.

    Attributes:
        positions: Absolute position of each token. int32 [tokens]
        kv_page: Page that takes each token's keys; out of range for padding tokens, so that scatters drop them.
            int32 [tokens]
        kv_offset: Place of each token in its page. int32 [tokens]
        page_table: Pages of each row, in the order of their positions. int32 [rows, pages]
    """

    positions: jax.Array
    kv_page: jax.Array
    kv_offset: jax.Array
    page_table: jax.Array

    def put(self, pool: jax.Array, layer: jax.Array, values: jax.Array) -> jax.Array:
        """Writes a value per token, [tokens, heads, dim], to a layer of [layers, pages, page_size, heads, dim].

        `pool` is donated.
        """
        return pool.at[layer, self.kv_page, self.kv_offset].set(values.astype(pool.dtype), mode="drop")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LayerStep:
    """Where one layer is in one step: what a `Mixer` takes beside its inputs and its pools.

    Attributes:
        rows: The step's rows by kind.
        chunks: The chunks of the prefill rows; None without such rows.
        layer: Index of the layer among the layers of its group, which is its index in the pools. int32 scalar
        pages: Where keys and values go; None in a step without attention layers.
        group: Index of the group whose block ids the layer uses.
        implementation: Implementation of the ops; None chooses by platform.
    """

    rows: RowSplit
    chunks: Chunks | None
    layer: jax.Array
    pages: TokenPages | None = None
    group: int = field(default=0, metadata=dict(static=True))
    implementation: Implementation | None = field(default=None, metadata=dict(static=True))

    @property
    def token_pages(self) -> TokenPages:
        """`pages`, for attention layers, which can't do without.

        Raises:
            ValueError: the step was made without pages.
        """
        if self.pages is None:
            raise ValueError("LayerStep: pages must be given to a step with attention layers, got None")
        return self.pages

    @classmethod
    def create(
        cls,
        batch: StepBatch,
        indices: StepIndices,
        *,
        num_decode_rows: int,
        num_tokens: int,
        implementation: Implementation | None = None,
    ) -> "LayerStep":
        """The first layer of the first group in a step; `at` gives the others.

        Args:
            batch: The step's rows, decode and verify rows first.
            indices: The result of `begin_step`.
            num_decode_rows: How many rows are decode or verify rows, padding included. Static.
            num_tokens: Number of packed tokens, padding included. Static.
            implementation: Implementation of the ops.
        """
        rows = split_rows(batch, indices, num_decode_rows)
        chunks = rows.chunks(num_tokens)
        return cls(rows=rows, chunks=chunks, layer=jnp.int32(0), implementation=implementation)

    def at(self, layer: int | jax.Array, group: int = 0) -> "LayerStep":
        """The same step for another layer, given by its index in its group."""
        return replace(self, layer=jnp.int32(layer), group=group)

    def apply(
        self,
        decode: Callable[..., tuple[jax.Array, ...]],
        prefill: Callable[..., tuple[jax.Array, ...]],
        tokens: tuple[jax.Array, ...],
        pools: tuple[jax.Array, ...],
    ) -> tuple[jax.Array, ...]:
        """Runs each kind's function: `f(rows, *tokens, *pools) -> (outputs, *pools)`, `rows` being `LayerRows`.

        See `RowSplit.apply`, which passes the rows with the blocks of all groups.
        """

        def of_group(function: Callable[..., tuple[jax.Array, ...]]) -> Callable[..., tuple[jax.Array, ...]]:
            return lambda rows, *arrays: function(rows.of_group(self.group), *arrays)

        return self.rows.apply(of_group(decode), of_group(prefill), tokens, pools)
