"""What one layer needs to know of a step: the step's rows, and the layer's group and index in the pools."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from mamba_align_jax import _values as values
from mamba_align_jax.align.batch import StepBatch
from mamba_align_jax.align.step import StepIndices
from mamba_align_jax.metadata.interior import InteriorBoundaries
from mamba_align_jax.metadata.rows import RowSplit, split_rows
from pallas_kernels import Chunks, Implementation, PageIndices, Rows, Run


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TokenPages:
    """The position of each token of a step, and the place of its key and value in the pages. Attention layers need it.

    Attributes:
        positions: Absolute position of each token; 0 for padding tokens. int32 [tokens]
        kv_page: Page that takes each token's key and value. It is out of range for padding tokens, which are dropped.
            int32 [tokens]
        kv_offset: Index of each token in its page. int32 [tokens]
        page_tables: Pages of each slot, in the order of their positions. int32 [slots, pages]
        slots: The slot of each row, 0 for padding rows. int32 [rows]
    """

    positions: jax.Array
    kv_page: jax.Array
    kv_offset: jax.Array
    page_tables: jax.Array
    slots: jax.Array

    @property
    def page_table(self) -> jax.Array:
        """Pages of each row, int32 [rows, pages]: a copy, which grows with the longest sequence that a slot can hold."""
        return self.page_tables[self.slots]

    def indices(self, layer: jax.Array) -> PageIndices:
        """Returns where each token's key and value go in the pages of `layer`."""
        return PageIndices(layer=layer, page=self.kv_page, offset=self.kv_offset)

    def put(self, pool: jax.Array, layer: jax.Array, values: jax.Array) -> jax.Array:
        """Writes each token's key, or its value, to its page.

        Args:
            pool: Pages of all layers, [layers, pages, page_size, heads, dim]. `pool` is donated.
            layer: Index of the layer. int32 scalar
            values: What is written. [tokens, heads, dim]

        Returns:
            The updated pool.
        """
        return pool.at[layer, self.kv_page, self.kv_offset].set(values.astype(pool.dtype), mode="drop")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LayerStep:
    """Where one layer is in one step. A `Mixer` takes it together with its inputs and its pools.

    Attributes:
        rows: The step's rows by kind.
        chunks: The chunks of the prefill rows; None in a step without prefill rows.
        layer: Index of the layer among the layers of its group, which is its index in the pools. int32 scalar
        pages: The positions of tokens, and the places of keys and values; None in a step without attention layers.
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
    def has_decode_rows(self) -> bool:
        """Whether the step may have decode and verify rows. Static."""
        return self.rows.decode.num_rows > 0

    @property
    def run(self) -> Run:
        """How the ops run: by `implementation`."""
        return Run(implementation=self.implementation)

    @property
    def single_token_rows(self) -> Rows | None:
        """The rows, if none of them may have more than one token or keeps a boundary's window, and else None. Static."""
        rows = self.rows.decode
        has_others = self.rows.prefill.num_rows > 0 or rows.max_query_tokens != 1 or rows.boundary is not None
        return None if has_others else rows.of_group(self.group, self.layer)

    @property
    def token_pages(self) -> TokenPages:
        """`pages`, which attention layers need.

        Raises:
            ValueError: the step has no pages.
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
        interior: InteriorBoundaries | None = None,
    ) -> "LayerStep":
        """Makes the value for layer 0 of group 0, in a step without attention layers. `at` makes those of other layers.

        Args:
            batch: The step's rows, decode and verify rows first.
            indices: The result of `begin_step`.
            num_decode_rows: Number of decode and verify rows, padding rows among them included. Static.
            num_tokens: Number of packed tokens, padding included. Static.
            implementation: Implementation of the ops; None chooses by platform.
            interior: The boundaries inside the prefill rows, whose states they keep in mode "all"; None to keep none.

        Raises:
            ValueError: `num_decode_rows` or `num_tokens` is no whole number, or out of range.
        """
        num_tokens = values.integer("LayerStep: num_tokens", num_tokens, 0)
        rows = split_rows(batch, indices, num_decode_rows, interior=interior)
        chunks = rows.chunks(num_tokens)
        return cls(rows=rows, chunks=chunks, layer=jnp.int32(0), implementation=implementation)

    def at(self, layer: int | jax.Array, group: int = 0) -> "LayerStep":
        """Returns the same step for another layer.

        Args:
            layer: Index of the layer among the layers of its group. A number that is too large is not noticed.
            group: Index of the group.

        Raises:
            ValueError: There is no such group, or `layer` is negative or no whole number.
        """
        groups = self.rows.num_groups
        group = values.integer("LayerStep.at: group", group, 0, max(groups - 1, 0))
        layer = layer if isinstance(layer, jax.Array) else values.integer("LayerStep.at: layer", layer, 0)
        return replace(self, layer=jnp.int32(layer), group=group)

    def apply(
        self,
        decode: Callable[..., tuple[jax.Array, ...]],
        prefill: Callable[..., tuple[jax.Array, ...]],
        tokens: tuple[jax.Array, ...],
        pools: tuple[jax.Array, ...],
    ) -> tuple[jax.Array, ...]:
        """Runs a function for each kind of rows: `f(rows, *tokens, *pools) -> (outputs, *pools)`.

        `rows` are those of this layer, with the blocks of its group, and the prefill rows with their chunks.

        Args:
            decode: Runs the decode and verify rows.
            prefill: Runs the prefill rows.
            tokens: Arrays whose first axis is the packed tokens.
            pools: Arrays that both functions take and return.

        Returns:
            The outputs of all tokens in packed order, followed by the pools. See `RowSplit.apply`.
        """

        def run(function: Callable[..., tuple[jax.Array, ...]], chunks: Chunks | None) -> Any:
            return lambda rows, *arrays: function(
                replace(rows.of_group(self.group, self.layer), chunks=chunks), *arrays
            )

        return self.rows.apply(run(decode, None), run(prefill, self.chunks), tokens, pools)
