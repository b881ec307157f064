"""Which columns a step needs and which may be released, by mode and policy: the promises of design section 5."""

from dataclasses import dataclass

from mamba_align_jax import _values as values
from mamba_align_jax.align.columns import blocks_per_request
from mamba_align_jax.cache.steps import Holder, Step, boundaries_of_step, columns_of_step, first_column_to_keep


@dataclass(frozen=True)
class ColumnRules:
    """The rules of one cache.

    Attributes:
        block_size: Tokens per column.
        num_speculative_tokens: The largest number of drafts in a step.
        mode: "align", "all" or "none".
        fold_length: Tokens of a fold group under policy "deferred"; None under the other policies.
    """

    block_size: int
    num_speculative_tokens: int
    mode: str
    fold_length: int | None = None

    def __post_init__(self) -> None:
        if self.fold_length is None:
            return
        length = values.integer("StateBlockManager: fold_length", self.fold_length, 1)
        doubled = 2 * self.num_speculative_tokens
        wanted = f"more than 2 * num_speculative_tokens = {doubled}"
        values.require(length > doubled, "StateBlockManager: fold_length", wanted, length)
        divides = self.mode == "none" or self.block_size % length == 0
        values.require(
            divides, "StateBlockManager: fold_length", f"a divisor of block_size = {self.block_size}", length
        )

    @property
    def keeps_interior(self) -> bool:
        """True if a chunk keeps the boundaries inside it."""
        return self.mode == "all"

    def blocks_needed(self, steps_in_flight: int) -> int:
        """Returns the largest number of blocks that a running request holds. In mode "all", chunks take more."""
        K = self.num_speculative_tokens
        if self.mode == "none":
            return 1 if self.fold_length else 1 + K
        return blocks_per_request(self.block_size, K, steps_in_flight, self.fold_length)

    def columns(self, min_computed: int, max_computed: int, num_tokens: int, num_drafts: int) -> range:
        """Returns the columns that a step may write: see `columns_of_step`."""
        if self.mode == "none":
            return range(self.blocks_needed(0))
        drafts, counts = self.num_speculative_tokens if num_drafts else 0, (min_computed, max_computed, num_tokens)
        own = self.fold_length is None
        return columns_of_step(self.block_size, drafts, *counts, interior=self.keeps_interior, drafts_have_columns=own)

    def boundaries(self, before: int, certain: int, computed: int) -> range:
        """Returns the boundaries whose states a step leaves in their columns: see `boundaries_of_step`. "none" has none."""
        if self.mode == "none":
            return range(0)
        return boundaries_of_step(self.block_size, before, certain, computed, interior=self.keeps_interior)

    def leaves_to_next_step(self, step: Step) -> bool:
        """True if the state of a boundary that `step` passed is written by the next step.

        That is so for decode and verify rows under policy "deferred". A row with one token counts as a decode row, although
        it may be a chunk.
        """
        return self.fold_length is not None and step.num_tokens == 1 + step.num_drafts

    def first_to_keep(self, record: Holder) -> int:
        """Returns the first column that a step which is not dispatched yet may read or write."""
        options = dict(interior=self.keeps_interior, fold_length=self.fold_length)
        return first_column_to_keep(self.block_size, record.committed, record.in_flight, **options)
