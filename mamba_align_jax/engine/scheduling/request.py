"""A request on its way through the engine, and the output that its caller gets."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from mamba_align_jax.cache.checkpoints import Checkpoints
from mamba_align_jax.cache.hashing import HashChain
from mamba_align_jax.engine.config import SamplingParams
from mamba_align_jax.engine.interrupts import failure
from mamba_align_jax.engine.scheduling.levels import Level, level_of
from mamba_align_jax.engine.text.generated_text import GeneratedText
from mamba_align_jax.engine.text.grammar_state import GrammarState

# A model's end token or end tokens; None if it has none.
EndTokens = int | Sequence[int] | None


class TokenLogprobs(NamedTuple):
    """The log-probability of a token, and the tokens that were most likely in its place.

    Attributes:
        token_id: The token.
        logprob: The logarithm of its probability.
        top: The most likely tokens with their log-probabilities, the most likely first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """The output of a request that has ended.

    Attributes:
        request_id: The id that `add_request` returned.
        prompt_token_ids: The prompt.
        token_ids: The generated tokens, a stop token included.
        num_cached_tokens: Number of prompt tokens whose states and keys came from the cache.
        cache_miss: Why not more of them came from the cache: see `HybridHit.miss`. None if no more could, or if nothing
            is cached.
        checkpoint_at: The boundaries that `SamplingParams.checkpoint_at` asked for. Those within `num_cached_tokens`
            were cached before.
        num_draft_tokens: Number of draft tokens that were proposed for the request.
        num_accepted_tokens: Number of drafts that the model agreed with, those after a stop token included.
        finish_reason: "stop", "length", "abort", or "error".
        error: The exception of the step that ended the request; None unless `finish_reason` is "error".
        token_times: Seconds from arrival to each token of `token_ids`. Tokens of one step have equal times.
        ttft_s: Seconds from arrival to the first token; None if there is none.
        tpot_s: Mean seconds per token after the first; None if there are fewer than two tokens.
        e2e_s: Seconds from arrival to the end.
        text: The generated text as it follows the prompt's, up to a stop token or a stop string; None if the engine has no
            tokenizer.
        stop_reason: The stop string or the token of `SamplingParams.stop_token_ids` that ended the request; None if anything
            else did, the model's own end token too, unless `ignore_eos` makes it a token like any other.
        logprobs: The log-probabilities of `token_ids`; None unless they were asked for.
        prompt_logprobs: Those of the prompt's tokens, None for the first; None unless they were asked for and the whole
            prompt has run.
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
    error: Exception | None = None
    text: str | None = None
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class RequestUpdate:
    """What is new of a request since its last update.

    The token ids of all updates of a request, one after the other, are those of its output, and so are the texts.

    Attributes:
        request_id: The id that `add_request` returned.
        token_ids: The new tokens.
        text: The new text; None if the engine has no tokenizer. Text that may still become part of a stop string, and
            tokens that end in the middle of a character, come with a later update.
        logprobs: The log-probabilities of the new tokens; None unless they were asked for.
        prompt_logprobs: Those of the prompt's tokens, in one update of each request; None otherwise.
        num_cached_tokens: See `RequestOutput`.
        cache_miss: See `RequestOutput`.
        output: The output, in the last update; None while the request goes on.
    """

    request_id: int
    token_ids: tuple[int, ...]
    text: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: int = 0
    cache_miss: str | None = None
    output: RequestOutput | None = None

    def followed_by(self, later: "RequestUpdate") -> "RequestUpdate":
        """Returns one update that stands for this one and the next one of the same request."""
        both = lambda first, second: second if first is None else first if second is None else first + second
        return replace(
            later,
            token_ids=self.token_ids + later.token_ids,
            text=both(self.text, later.text),
            logprobs=both(self.logprobs, later.logprobs),
            prompt_logprobs=both(self.prompt_logprobs, later.prompt_logprobs),
        )


@dataclass(eq=False)
class Request:
    """What the host knows of a request.

    Attributes:
        id: The request's name in the scheduler, the cache and the drafter.
        prompt: The prompt's tokens.
        params: How it is sampled.
        tokens: The prompt and the tokens sampled so far.
        max_length: The number of tokens at which the request ends.
        level: The level of the programs that sample its tokens.
        slot: The request's place in the device's arrays; -1 while it waits.
        rank: Priority, arrival and turn. Lower ranks run first. The queue sets it when the request comes and when it runs
            for the first time.
        num_computed: Number of tokens whose states exist on the device, as far as results were read.
        num_ahead: Number of tokens that planned, unread steps will add to them for certain.
        num_unsure: Number of drafts that these steps may add besides.
        prefill_end: End of the tokens that must run before the next one is sampled: of the prompt, or of all tokens
            after a preemption.
        num_admissions: How often the request got a slot.
        is_counted: Whether a result of the request was read, and the engine's counters count it as admitted.
        num_cached: Number of prompt tokens that came from the cache at the last admission before a result was read.
        cache_miss: Why not more did: see `RequestOutput`.
        checkpoint_at: The boundaries that the caller asked for.
        keep: The boundaries whose states stay cached; None before the first admission.
        chain: The hashes of the tokens; None before the first lookup.
        num_draft_tokens: Number of drafts that were proposed.
        num_accepted_tokens: Number of drafts that were accepted.
        arrival: When the request came, in seconds of `time.perf_counter`.
        token_times: Seconds from arrival to each sampled token.
        outbox: Where the output goes, by the request's id.
        ended: The output; None before the request has ended.
        text: The text of the tokens that were read so far; None without a tokenizer. `read_text` reads the others.
        logprobs: The log-probabilities of the sampled tokens, if the caller asks for them.
        prompt_logprobs: Those of the prompt's tokens that are known, None for the first.
        grammar: Says which tokens may follow; None if any may.
    """

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    outbox: dict[int, RequestOutput] = field(default_factory=dict)
    tokens: list[int] = field(init=False)
    max_length: int = field(init=False)
    level: Level = field(init=False)
    slot: int = -1
    rank: tuple[int, int, int] = (0, 0, 0)
    num_computed: int = 0
    num_ahead: int = 0
    num_unsure: int = 0
    prefill_end: int = 0
    num_admissions: int = 0
    is_counted: bool = False
    num_cached: int = 0
    cache_miss: str | None = None
    checkpoint_at: tuple[int, ...] = ()
    keep: Checkpoints | None = None
    chain: HashChain | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    arrival: float = field(default_factory=time.perf_counter)
    token_times: list[float] = field(default_factory=list)
    ended: RequestOutput | None = None
    text: GeneratedText | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    grammar: GrammarState | None = None
    _text_error: Exception | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.max_length = len(self.prompt) + self.params.max_tokens
        self.level = level_of(self.params)
        self.prefill_end = len(self.prompt)

    @property
    def generated(self) -> tuple[int, ...]:
        """The tokens sampled so far."""
        return tuple(self.tokens[len(self.prompt) :])

    @property
    def num_left(self) -> int:
        """The number of tokens that may still be sampled."""
        return self.max_length - len(self.tokens)

    @property
    def min_computed(self) -> int:
        """The smallest number of tokens that can be computed once all planned steps are done."""
        return self.num_computed + self.num_ahead

    @property
    def max_computed(self) -> int:
        """The largest number of tokens that can be computed once all planned steps are done."""
        return self.num_computed + self.num_ahead + self.num_unsure

    @property
    def is_prefilling(self) -> bool:
        """Whether known tokens must be planned before the next one can be sampled."""
        return self.num_computed + self.num_ahead < self.prefill_end

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether the caller asks for log-probabilities of the prompt's tokens that are not known yet."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt)

    @property
    def known_prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """The log-probabilities of the prompt's tokens if the caller asks for them and all are known; None otherwise."""
        is_known = self.params.prompt_logprobs is not None and not self.lacks_prompt_logprobs
        return tuple(self.prompt_logprobs) if is_known else None

    def ends_at(self, token: int, eos_token_id: EndTokens) -> bool:
        """Whether a generated token is one of the model's end tokens, and the caller does not ignore them."""
        ends = eos_token_id if isinstance(eos_token_id, Sequence) else (eos_token_id,)
        return token in ends and not self.params.ignore_eos

    def append(self, *tokens: int, logprobs: Sequence[TokenLogprobs] = ()) -> None:
        """Appends the tokens that a step sampled, with their log-probabilities if the caller asks for them."""
        # In this order, so that no token lacks its time if the caller is interrupted: see `wait`.
        self.token_times.extend([time.perf_counter() - self.arrival] * len(tokens))
        self.logprobs.extend(logprobs)
        self.tokens.extend(tokens)

    def score_prompt(self, start: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Stores the log-probabilities of the prompt's tokens after `start`. They may be stored again."""
        self.prompt_logprobs[start + 1 : start + 1 + len(logprobs)] = logprobs

    def read_text(self, *, has_stop_token: bool = False) -> GeneratedText | None:
        """Reads the text of all tokens, and returns it; None without a tokenizer.

        Args:
            has_stop_token: Whether the last token is a stop token, if it was not read yet.

        Raises:
            Exception: The tokenizer's.
        """
        text, num_tokens = self.text, len(self.tokens) - len(self.prompt)
        if text is not None and text.num_tokens != num_tokens:
            if text.num_tokens > num_tokens:
                # Tokens were read, and then the step was cut off before the request had them.
                text = text.fresh()
            new = self.tokens[len(self.prompt) + text.num_tokens :]
            old, stop = text, has_stop_token
            text = self.text = self.read(lambda: old.read(new[:-1]).read_stop_token() if stop else old.read(new))
        return text

    def read(self, read: Callable[[], GeneratedText]) -> GeneratedText:
        """Returns a text that is read with the tokenizer. Once that has raised, it is not used again for this request.

        Raises:
            Exception: The tokenizer's, now or earlier.
        """
        if self._text_error is not None:
            raise self._text_error
        try:
            return read()
        except BaseException as raised:
            self._text_error = failure(raised)
            raise self._text_error  # noqa: B904

    def _last_text(self, reason: str) -> str | None:
        if self.text is None:
            return None
        has_stop_token = reason == "stop" and self.text.found is None
        try:
            if self.text.num_tokens or self.text.stop:
                text = self.read_text(has_stop_token=has_stop_token) or self.text
                self.text = self.read(text.ended)
            else:
                # Nothing was shown, so nothing has to follow from it, and one call is quicker than one for each token.
                text, tokens = self.text, self.generated[:-1] if has_stop_token else self.generated
                self.text = self.read(lambda: text.of_all(tokens))
        except Exception:
            # A request that ends otherwise has the text that could be decoded.
            if reason in ("stop", "length"):
                raise
        return self.text.text

    def leave(self) -> None:
        """Takes the request from its slot."""
        self.slot, self.num_ahead, self.num_unsure = -1, 0, 0

    def wait(self) -> None:
        """Makes the request one that waits: it has no slot, and all its tokens must run again or come from the cache."""
        self.leave()
        self.num_computed, self.prefill_end = 0, len(self.tokens)
        if not self.is_counted:
            # It may end before it runs again.
            self.num_cached, self.cache_miss = 0, None
        for told in (self.token_times, self.logprobs):
            del told[self.prefill_end - len(self.prompt) :]

    def output(self, reason: str, error: Exception | None = None, eos_token_id: EndTokens = None) -> RequestOutput:
        """Returns the output for the caller, with `reason` as its `finish_reason`.

        Raises:
            Exception: The tokenizer's, if `reason` is "stop" or "length".
        """
        times, text, stop_reason = self.token_times, self._last_text(reason), None
        if reason == "stop":
            stop_reason, token = None if self.text is None else self.text.found, self.tokens[-1]
            # An end token is one even if it is among the stop tokens as well.
            if stop_reason is None and token in self.params.stop_token_ids and not self.ends_at(token, eos_token_id):
                stop_reason = token
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
            text=text,
            stop_reason=stop_reason,
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=self.known_prompt_logprobs,
        )
