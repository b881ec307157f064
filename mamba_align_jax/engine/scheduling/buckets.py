"""The sizes of the compiled programs, and which of them runs a plan."""

import functools
from collections.abc import Iterable
from typing import NamedTuple

from mamba_align_jax.engine.scheduling.levels import Level
from mamba_align_jax.engine.scheduling.scheduler import Plan, Row

# The fewest decode rows of a program that also has prefill rows, if it is not the only one.
_MIN_MIXED_ROWS = 64
# The smallest number of prompt tokens that a program is compiled for.
_MIN_PREFILL_TOKENS = 128
# The levels of the programs that `all_buckets` lists. The others are compiled when a step first needs them.
LISTED = (Level.MOST_LIKELY, Level.DRAW)


class Bucket(NamedTuple):
    """The sizes of one compiled program.

    Attributes:
        decode_rows: Number of decode and verify rows.
        prefill_rows: Number of prefill rows.
        prefill_tokens: Number of tokens of the prefill rows.
        level: What the program can do when it samples.
    """

    decode_rows: int
    prefill_rows: int
    prefill_tokens: int
    level: Level = Level.DRAW

    @property
    def num_rows(self) -> int:
        """The number of all rows."""
        return self.decode_rows + self.prefill_rows

    def holds(self, other: "Bucket") -> bool:
        """Whether the program can run a step of the sizes `other`."""
        return (
            self.decode_rows >= other.decode_rows
            and self.prefill_rows >= other.prefill_rows
            and self.prefill_tokens >= other.prefill_tokens
            and self.level >= other.level
        )

    def places(self, plan: Plan) -> list[Row | None]:
        """Returns the row in each place of the program, decode rows first; None is padding."""
        decode = [*plan.decode, *[None] * (self.decode_rows - len(plan.decode))]
        return [*decode, *plan.prefill, *[None] * (self.prefill_rows - len(plan.prefill))]


def choose_bucket(buckets: Iterable[Bucket], plan: Plan) -> Bucket:
    """Returns the smallest of the programs that can run a plan: the one with the fewest decode rows comes first.

    Programs of levels above `Level.DRAW` have the sizes of those that draw.
    """
    levels = [row.request.level for row in plan.decode] + [_level(row) for row in plan.prefill]
    level = max(levels)
    exact = Bucket(
        len(plan.decode),
        len(plan.prefill),
        sum(row.num_tokens for row in plan.prefill),
        min(level, Level.DRAW),
    )
    chosen = min(bucket for bucket in buckets if bucket.holds(exact))
    return chosen._replace(level=max(chosen.level, level))


def _level(row: Row) -> Level:
    """Returns the level that a prefill row needs."""
    if row.scores_prompt:
        return Level.PROMPT
    return row.request.level if row.samples else Level.MOST_LIKELY


def programs_of(buckets: Iterable[Bucket], *, draws: bool = True, full: bool = False) -> list[Bucket]:
    """Returns the programs that an engine's requests can need.

    Args:
        buckets: Those that `all_buckets` lists.
        draws: Whether requests draw tokens at random.
        full: Whether requests need levels above `Level.DRAW`.
    """
    chosen = [bucket for bucket in buckets if draws or bucket.level == Level.MOST_LIKELY]
    drawing = [
        bucket for bucket in buckets if bucket.level == Level.DRAW and full
    ]  # the higher levels have their sizes
    chosen += [bucket._replace(level=level) for bucket in drawing for level in (Level.FULL, Level.CONSTRAINED)]
    return chosen + [bucket._replace(level=Level.PROMPT) for bucket in drawing if bucket.prefill_rows]


@functools.lru_cache
def all_buckets(
    max_num_seqs: int, max_prefill_rows: int, max_num_batched_tokens: int, max_mixed_tokens: int | None = None
) -> tuple[Bucket, ...]:
    """Returns every bucket that a plan can need, up to the level `Level.DRAW`: see "Programs" in docs/scheduling.md.

    Args:
        max_num_seqs: Number of requests that run at once.
        max_prefill_rows: Number of prefill rows of a step.
        max_num_batched_tokens: Number of tokens of these rows.
        max_mixed_tokens: Their number in a step that has decode rows too; None is the same.
    """
    sizes = [(0, tokens) for tokens in prefill_sizes(max_num_batched_tokens)]
    mixed = prefill_sizes(max_mixed_tokens or max_num_batched_tokens)
    sizes += [(rows, tokens) for tokens in mixed for rows in mixed_sizes(max_num_seqs)]
    prefill = [Bucket(rows, max_prefill_rows, tokens, level) for rows, tokens in sizes for level in LISTED]
    decode = [Bucket(rows, 0, 0, level) for rows in decode_sizes(max_num_seqs) for level in LISTED]
    return (*prefill, *decode)


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Returns the numbers of rows of decode-only programs, rising: 1, 4, 8, 16, 24, 32, 48, 64, 96 and so on.

    From 8 rows on, at most a third of a program's rows are padding, or 7 rows.
    """
    sizes, power = [1, 4, 8], 16
    while power < max_num_seqs:
        sizes += [power, power + power // 2]
        power *= 2
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


def mixed_sizes(max_num_seqs: int) -> list[int]:
    """Returns the numbers of decode rows of programs that have prefill rows too, falling: each a quarter of the last."""
    sizes = [max_num_seqs]
    while sizes[-1] // 4 >= _MIN_MIXED_ROWS:
        sizes.append(sizes[-1] // 4)
    return sizes


def prefill_sizes(max_num_batched_tokens: int) -> list[int]:
    """Returns the numbers of prompt tokens of programs with prefill rows, falling: each half of the last."""
    sizes = [max_num_batched_tokens]
    while sizes[-1] // 2 >= _MIN_PREFILL_TOKENS:
        sizes.append(sizes[-1] // 2)
    return sizes
