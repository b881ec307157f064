"""Decides where a prefill chunk ends."""

from collections.abc import Collection

from mamba_align_jax import _values as values
from mamba_align_jax.align.columns import last_boundary


def next_chunk_end(
    start: int,
    proposed: int,
    prompt: int,
    block_size: int,
    stops: Collection[int] = (),
    granularity: int | None = None,
) -> int:
    """Returns the position at which the chunk that starts at `start` ends.

    A state exists only where a chunk ends. Therefore a chunk ends on a block boundary or at a stop, except for the last
    chunk of a prompt. A chunk that starts inside a block ends at the end of that block or before. One chunk always ends
    on the prompt's last cacheable boundary, which leaves at least one token to compute. If the budget is smaller than a
    block, chunks may end inside a block.

    Args:
        start: The first position to compute.
        proposed: The end of the chunk according to the token budget.
        prompt: The number of tokens known so far. For a resumed request this includes its own output.
        block_size: Tokens between boundaries.
        stops: Further positions at which a chunk should end. Those that are not multiples of `granularity` are ignored.
        granularity: Tokens between positions at which a state may be kept, a divisor of `block_size`; None is
            `block_size`.

    Returns:
        The end of the chunk, greater than `start` and at most min(proposed, prompt), or 0 if no token can be scheduled.

    Raises:
        ValueError: An argument is no whole number, or negative.
    """
    start = values.integer("next_chunk_end: start", start, 0)
    proposed = values.integer("next_chunk_end: proposed", proposed)
    prompt = values.integer("next_chunk_end: prompt", prompt, 0)
    block_size = values.integer("next_chunk_end: block_size", block_size, 1)
    stops = values.integers("next_chunk_end: stops", stops, ordered=False)
    granularity = values.optional_integer("next_chunk_end: granularity", granularity, 1) or block_size
    end = min(proposed, prompt)
    if end <= start:
        return 0
    wanted = {last_boundary(prompt - 1, block_size), *(s for s in stops if s % granularity == 0)}
    if start % block_size:
        wanted.add((start // block_size + 1) * block_size)
    end = min([end, *(stop for stop in wanted if start < stop)])
    return end if end in wanted else aligned_end(start, end, prompt, block_size)


def aligned_end(start: int, proposed: int, prompt: int, block_size: int) -> int:
    """Returns the last block boundary up to `proposed`, where a chunk that doesn't end the prompt ends.

    It returns `proposed` if there is no boundary after `start`. The arguments are those of `next_chunk_end`.
    """
    aligned = last_boundary(proposed, block_size)
    return aligned if proposed < prompt and aligned > start else proposed
