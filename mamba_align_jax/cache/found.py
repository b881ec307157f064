"""What a hybrid cache says of a prefix that it has, and what it gives to a step."""

from collections.abc import Sequence
from dataclasses import dataclass

from mamba_align_jax.cache.steps import Copy, Hit


@dataclass(frozen=True)
class HybridHit:
    """A cached prefix.

    Attributes:
        length: Its number of tokens, a multiple of the cache's granularity.
        state: Its state block, and the hashes by which it was looked up.
        pages: Its KV pages, in order.
        junction: A boundary up to which pages are cached but no state is, or 0. A chunk should end there, so that the
            next request that shares this prefix finds a state.
        miss: Why the hit ends before the prompt's last cacheable boundary, or None if it does not. "below one block"
            means that the prompt has no such boundary. "no checkpoint" means that more pages are cached, but no state
            was kept. "evicted" means that the state or a page was cached earlier. "not identical" means that no request
            with the tokens that follow has been published. "prompt_logprobs" means that the request asks for those, which
            need the whole prompt to run.
    """

    length: int
    state: Hit
    pages: tuple[int, ...] = ()
    junction: int = 0
    miss: str | None = None


@dataclass(frozen=True)
class CachedPrefix:
    """What is cached of a prompt.

    Attributes:
        num_tokens: The number of tokens from whose states and keys a request with this prompt would start.
        num_paged_tokens: The number of its first tokens whose keys and values are cached, at least `num_tokens`.
        boundaries: The positions in the prompt at which a state is cached, in tokens.
        miss: Why a request would not start from more tokens: see `HybridHit.miss`.
    """

    num_tokens: int
    num_paged_tokens: int
    boundaries: tuple[int, ...]
    miss: str | None


@dataclass(frozen=True)
class Allocation:
    """What a request gets for a step.

    Attributes:
        columns: The new (column, block) entries of its row of the block table.
        pages: The new (number, page) entries of its row of the page table.
        load: A state that must be copied before the step, from the first block to the second one. Only a request that
            enters inside a block has one.
        save: A state that must be copied after the step and before any later one, from the first block to the second
            one. Only a chunk that ends inside a block, where the request keeps its state, has one.
    """

    columns: Sequence[tuple[int, int]]
    pages: Sequence[tuple[int, int]]
    load: Copy | None = None
    save: Copy | None = None
