"""Where a prefill chunk has to end."""

from collections.abc import Iterable

from mamba_align_jax.align.columns import last_boundary


def next_chunk_end(start: int, proposed: int, prompt: int, block_size: int, stops: Iterable[int] = ()) -> int:
    """The position at which the chunk that starts at `start` must end, so that column states mean what they should.

    A state exists only where a chunk ends. So chunks end on block boundaries, the last one of a prompt excepted; a chunk
    that starts inside a block ends at that block's end at the latest; and the prompt's last cacheable boundary, which
    leaves at least one token to compute, is always stopped at. A budget smaller than a block gives chunks inside it.

    Args:
        start: First position to compute.
        proposed: Where the budget would end the chunk.
        prompt: End of the tokens known so far; for a resumed request its own output counts.
        block_size: Tokens between boundaries.
        stops: Further positions wanted as boundaries; those that aren't multiples of `block_size` are ignored.

    Returns:
        The chunk's end in (start, min(proposed, prompt)]; 0 if nothing can be scheduled.
    """
    end = min(proposed, prompt)
    if end <= start:
        return 0
    wanted = {last_boundary(prompt - 1, block_size), *(s for s in stops if s % block_size == 0)}
    if start % block_size:
        wanted.add((start // block_size + 1) * block_size)
    end = min([end, *(stop for stop in wanted if start < stop)])
    if end < prompt:
        aligned = last_boundary(end, block_size)
        end = aligned if aligned > start else end
    return end
