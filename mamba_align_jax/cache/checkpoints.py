"""Which boundaries of a request stay cached: a function of its tokens and options, and of what it found when it entered."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mamba_align_jax.align.columns import last_boundary


@dataclass(frozen=True)
class Checkpoints:
    """What one request keeps of the states at its boundaries.

    Boundaries in `offsets` and multiples of `interval` stay. Of those from `prompt` on, which decoding passes, the newest
    stays as well, until the next one is passed. All others are let go with their columns: where a token budget happened
    to end a chunk means nothing.

    Attributes:
        prompt: Tokens of the prompt.
        offsets: Boundaries that stay, rising.
        interval: Every so many tokens a boundary stays; None for none.
    """

    prompt: int
    offsets: tuple[int, ...] = ()
    interval: int | None = None

    def stays(self, boundary: int) -> bool:
        """Whether the state there stays cached whatever comes after."""
        return boundary in self.offsets or (self.interval is not None and boundary % self.interval == 0)

    def rolls(self, boundary: int) -> bool:
        """Whether the state there stays cached until the request passes the next boundary."""
        return boundary >= self.prompt and not self.stays(boundary)

    def stops(self, start: int) -> list[int]:
        """Where chunks from `start` on must end; of the interval's boundaries only the next one."""
        periodic = [] if self.interval is None else [(start // self.interval + 1) * self.interval]
        return [offset for offset in self.offsets if offset > start] + periodic


def requested_offsets(wanted: Iterable[int], prompt: int, block_size: int) -> tuple[int, ...]:
    """The boundaries that a caller's offsets mean: rounded down, without 0, duplicates and what the prompt doesn't reach."""
    return tuple(sorted({last_boundary(offset, block_size) for offset in wanted if offset < prompt} - {0}))


def request_checkpoints(
    prompt: int, block_size: int, *, requested: Sequence[int] = (), junction: int = 0, interval: int | None = None
) -> Checkpoints:
    """What a request keeps: the prompt's last cacheable boundary, its branch point, and what it or the engine asks for.

    Args:
        prompt: Tokens of the prompt; one of them is never taken from the cache.
        block_size: Tokens between boundaries.
        requested: Boundaries that the caller wants.
        junction: Where the cached keys end that no state goes with; 0 if they don't.
        interval: Every so many tokens a boundary stays; None for none.
    """
    last = last_boundary(prompt - 1, block_size)
    return Checkpoints(prompt, tuple(sorted({last, junction, *requested} - {0})), interval)
