"""Which columns a step needs and which may be released, by mode and policy: the promises of design section 5."""

from dataclasses import dataclass

from mamba_align_jax import _values as values
from mamba_align_jax.align.columns import blocks_per_request, column_of, last_boundary
from mamba_align_jax.align.config import check_fold_length
from mamba_align_jax.cache.steps import Holder, Step


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
        if self.fold_length is not None:
            name = "StateBlockManager: fold_length"
            size = self.mode != "none" and self.block_size
            check_fold_length(name, values.integer(name, self.fold_length, 1), self.num_speculative_tokens, size)

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
        """Returns the columns that a step may write. For the arguments see `StateBlockManager.allocate`.

        A row with drafts may save any boundary that it passes. Other rows write only their running column, and in mode
        "all" also the columns of the boundaries inside them. Under policy "deferred" the states after drafts are not
        written.
        """
        if self.mode == "none":
            return range(self.blocks_needed(0))
        size, drafts = self.block_size, self.num_speculative_tokens if num_drafts else 0
        passes = drafts > 0 or (self.keeps_interior and num_tokens > 0)
        first = min_computed // size if passes else column_of(min_computed + num_tokens, size)
        own = drafts if self.fold_length is None else 0
        return range(first, column_of(max_computed + num_tokens, size) + 1 + own)

    def boundaries(self, before: int, certain: int, computed: int) -> range:
        """Returns the boundaries whose states a step leaves in their columns, in rising order. Mode "none" has none.

        Args:
            before: The tokens computed before the step.
            certain: The tokens that stay computed if all drafts are rejected.
            computed: The tokens that count as computed after it.
        """
        if self.mode == "none":
            return range(0)
        first = max(before + 1 if self.keeps_interior else certain, 1)
        return range(-(-first // self.block_size) * self.block_size, computed + 1, self.block_size)

    def leaves_to_next_step(self, step: Step) -> bool:
        """True if the state of a boundary that `step` passed is written by the next step.

        That is so for decode and verify rows under policy "deferred". A row with one token counts as a decode row, although
        it may be a chunk.
        """
        return self.fold_length is not None and step.num_tokens == 1 + step.num_drafts

    def first_to_keep(self, record: Holder) -> int:
        """Returns the first column that a step which is not dispatched yet may read or write.

        In mode "all" it goes past the oldest steps in flight if they were offered to the cache: what they leave is
        certain, and what others can use of it is findable already. Under policy "deferred" the state at the base is read
        until the next fold group is complete. Steps that were offered move the base to their end, so it goes past them,
        too.
        """
        committed, size = record.committed, self.block_size
        first = committed // size
        if self.fold_length is not None:
            first = column_of(last_boundary(committed, self.fold_length), size)
        for step in record.in_flight if self.keeps_interior or self.fold_length is not None else ():
            if not step.offered:
                break
            committed += step.num_tokens
            first = max(first, column_of(committed, size))
        return first
