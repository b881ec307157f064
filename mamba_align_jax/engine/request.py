"""A request on its way through the engine, and what its caller gets."""

import time
from dataclasses import dataclass, field

from mamba_align_jax.cache.checkpoints import Checkpoints
from mamba_align_jax.cache.hashing import HashChain
from mamba_align_jax.engine.config import SamplingParams


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A finished request.

    Attributes:
        request_id: As `add_request` returned it.
        prompt_token_ids: The prompt.
        token_ids: The generated tokens, a stop token included.
        num_cached_tokens: Prompt tokens whose states and keys came from the cache.
        cache_miss: Why not more of them did: see `HybridHit.miss`; None if no more could, or nothing is cached.
        checkpoint_at: The boundaries that `SamplingParams.checkpoint_at` came to. Those inside `num_cached_tokens` were not
            made again.
        num_draft_tokens: Tokens that were proposed for it by speculation.
        num_accepted_tokens: Proposed tokens that the model agreed with, those behind a stop token included.
        finish_reason: "stop", "length", "abort", or "error".
        error: What a step raised that the request ran in; None unless `finish_reason` is "error".
        token_times: Seconds from arrival to each token of `token_ids`; those of one step came together.
        ttft_s: Seconds from arrival to the first token; None if there is none.
        tpot_s: Mean seconds per token after the first; None for fewer than two.
        e2e_s: Seconds from arrival to the end.
        text: Of the generated tokens, where `Engine.generate` has a tokenizer.
    """

    request_id: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    num_cached_tokens: int
    cache_miss: str | None
    checkpoint_at: tuple[int, ...]
    num_draft_tokens: int
    num_accepted_tokens: int
    finish_reason: str
    token_times: tuple[float, ...]
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float
    error: BaseException | None = None
    text: str | None = None


@dataclass
class Request:
    """The host's view of a request.

    `num_computed` counts tokens whose states exist on the device, as far as results are read. Of the steps that are planned
    and unread, `num_ahead` tokens will be added for certain, and up to `num_unsure` drafts.
    """

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    tokens: list[int] = field(init=False)
    slot: int = -1
    # Priority and arrival: who comes first. Set when it is queued, and kept.
    rank: tuple[int, int] = (0, 0)
    num_computed: int = 0
    num_ahead: int = 0
    num_unsure: int = 0
    # End of the tokens that must be run before the next one is sampled: the prompt, or all tokens after a preemption.
    prefill_end: int = 0
    num_admissions: int = 0
    num_cached: int = 0
    cache_miss: str | None = None
    checkpoint_at: tuple[int, ...] = ()
    keep: Checkpoints | None = None
    chain: HashChain | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    arrival: float = field(default_factory=time.perf_counter)
    token_times: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.prefill_end = len(self.prompt)

    @property
    def generated(self) -> tuple[int, ...]:
        """Tokens sampled so far."""
        return tuple(self.tokens[len(self.prompt) :])

    @property
    def num_left(self) -> int:
        """Tokens that may still be sampled."""
        return self.params.max_tokens - (len(self.tokens) - len(self.prompt))

    @property
    def least(self) -> int:
        """Fewest tokens that will be computed once all planned steps are done."""
        return self.num_computed + self.num_ahead

    @property
    def most(self) -> int:
        """Most of them."""
        return self.least + self.num_unsure

    @property
    def is_prefilling(self) -> bool:
        """Whether known tokens must be planned before one can be sampled."""
        return self.least < self.prefill_end

    def append(self, *tokens: int) -> None:
        """Takes in what a step sampled."""
        self.tokens += tokens
        self.token_times += [time.perf_counter() - self.arrival] * len(tokens)

    def output(self, reason: str, error: BaseException | None = None) -> RequestOutput:
        """What the caller gets."""
        times = self.token_times
        return RequestOutput(
            request_id=self.id,
            prompt_token_ids=self.prompt,
            token_ids=self.generated,
            num_cached_tokens=self.num_cached,
            cache_miss=self.cache_miss,
            checkpoint_at=self.checkpoint_at,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            finish_reason=reason,
            token_times=tuple(times),
            ttft_s=times[0] if times else None,
            tpot_s=(times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None,
            e2e_s=time.perf_counter() - self.arrival,
            error=error,
        )
