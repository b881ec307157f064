"""Decides which boundaries of a request stay cached.

The decision depends on the request's tokens and options, and on what the cache contained when the request entered.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mamba_align_jax import _values as values
from mamba_align_jax.align.columns import last_boundary


@dataclass(frozen=True)
class Checkpoints:
    """The positions at which one request keeps its state.

    Positions in `offsets` and multiples of `interval` stay cached. Any other boundary, where decoding or the end of a chunk
    has left a state, stays cached until the request passes the next one. So a request that ends or is preempted anywhere
    leaves the state of the last boundary that it has computed. In mode "all" a boundary that was passed stays cached, too,
    but is expendable.

    Attributes:
        offsets: The positions that stay cached, in tokens, in rising order: boundaries, and multiples of the cache's
            granularity inside blocks.
        interval: Tokens between further boundaries that stay cached, or None.
    """

    offsets: tuple[int, ...] = ()
    interval: int | None = None

    def __post_init__(self) -> None:
        """Checks the fields. A ValueError names the field."""
        object.__setattr__(self, "offsets", values.integers("Checkpoints: offsets", self.offsets))
        object.__setattr__(self, "interval", values.optional_integer("Checkpoints: interval", self.interval, 1))

    def stays(self, boundary: int) -> bool:
        """True if the state at `boundary` stays cached whatever the request does later."""
        return boundary in self.offsets or (self.interval is not None and boundary % self.interval == 0)

    def stops(self, start: int) -> list[int]:
        """Returns the positions after `start` at which a chunk must end. It includes only one multiple of `interval`."""
        periodic = [] if self.interval is None else [(start // self.interval + 1) * self.interval]
        return [offset for offset in self.offsets if offset > start] + periodic


def requested_offsets(wanted: Collection[int], prompt: int, granularity: int) -> tuple[int, ...]:
    """Rounds offsets down to multiples of `granularity`, and drops 0, duplicates and offsets after the prompt."""
    prompt = values.integer("requested_offsets: prompt", prompt, 0)
    granularity = values.integer("requested_offsets: granularity", granularity, 1)
    wanted = values.integers("requested_offsets: wanted", wanted, ordered=False)
    return tuple(sorted({last_boundary(offset, granularity) for offset in wanted if offset <= prompt} - {0}))


def request_checkpoints(
    prompt: int, block_size: int, *, requested: Sequence[int] = (), junction: int = 0, interval: int | None = None
) -> Checkpoints:
    """Returns what a request keeps: the prompt's last cacheable boundary, the junction, and the requested positions.

    At least one of the prompt's tokens is always computed, never taken from the cache. `junction` is the boundary up to
    which pages but no state were cached (`HybridHit.junction`), or 0.
    """
    prompt = values.integer("request_checkpoints: prompt", prompt, 1)
    block_size = values.integer("request_checkpoints: block_size", block_size, 1)
    junction = values.integer("request_checkpoints: junction", junction, 0)
    requested = values.integers("request_checkpoints: requested", requested)
    last = last_boundary(prompt - 1, block_size)
    return Checkpoints(tuple(sorted({last, junction, *requested} - {0})), interval)
