"""The engine: takes requests, steps them, hands out what they generated."""

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mamba_align_jax.cache.hybrid import HybridCache
from mamba_align_jax.cache.kv_pages import KVPageManager
from mamba_align_jax.cache.state_blocks import StateBlockManager
from mamba_align_jax.engine.config import EngineConfig, SamplingParams
from mamba_align_jax.engine.drafting import Drafter, NGramDrafter
from mamba_align_jax.engine.request import Request, RequestOutput
from mamba_align_jax.engine.runner import StepRunner
from mamba_align_jax.engine.scheduler import Plan, Scheduler
from mamba_align_jax.engine.sizing import PoolSizes, align_config, pool_sizes
from mamba_align_jax.engine.text import Tokenizer, load_tokenizer, token_ids, with_text
from mamba_align_jax.errors import OutOfBlocksError
from mamba_align_jax.kv import KVPages
from mamba_align_jax.models import load_model
from pallas_kernels import CHUNK_SIZE

_LOG = logging.getLogger(__name__)
_MAX_PREFILL_ROWS = 4


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was made.

    `prompt_tokens` counts each admitted prompt once, and `cached_tokens` what of it came from the cache; `prefill_tokens`
    counts prompt tokens computed, after preemptions again. `null_reads` are rows whose state was lost: more than 0 is a
    bug, which `EngineConfig(checked=True)` names. `draft_tokens[t]` counts verify rows with a draft in place t, and
    `accepted_tokens[t]` those whose draft in place t was accepted.
    """

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    state_bytes_copied: int = 0
    preemptions: int = 0
    evicted_state_blocks: int = 0
    null_reads: int = 0
    draft_tokens: tuple[int, ...] = ()
    accepted_tokens: tuple[int, ...] = ()


class Engine:
    """Continuous batching over one model on one device, with a prefix cache over states and keys."""

    def __init__(
        self,
        model: Any,
        config: EngineConfig | None = None,
        *,
        drafter: Drafter | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """An engine over a loaded model.

        Args:
            model: As `load_model` gives it.
            config: The defaults if None.
            drafter: Who proposes draft tokens; prompt lookup if None.
            tokenizer: What `generate` takes and returns text by; without one it takes ids only.

        Raises:
            ValueError: a pool is too small for one request, or `max_model_len` exceeds the model's.
        """
        config = config or EngineConfig()
        self.config = config
        self.model_config, self.tokenizer = model.config, tokenizer
        self.spec = align_config(config, model)
        if config.prefix_cache == "align" and config.block_size % CHUNK_SIZE:
            _LOG.warning(
                "block_size %d is no multiple of the gated delta rule's chunk_size %d: states resumed from the cache "
                "agree with uncached ones to rounding, not bit for bit",
                config.block_size,
                CHUNK_SIZE,
            )
        self.sizes: PoolSizes = pool_sizes(self.spec, config, model)
        self.cache = HybridCache(
            StateBlockManager(
                self.sizes.state_blocks, config.block_size, config.num_speculative_tokens, mode=config.prefix_cache
            ),
            KVPageManager(self.sizes.kv_pages, config.kv_page_size),
            checkpoint_interval=config.checkpoint_interval,
            check=config.checked,
        )
        K = config.num_speculative_tokens
        drafter = drafter or NGramDrafter(config.prompt_lookup_max, config.prompt_lookup_min)
        self.scheduler = Scheduler(
            self.cache,
            config.max_num_seqs,
            _MAX_PREFILL_ROWS,
            config.max_num_batched_tokens,
            drafter if K else None,
            K,
        )
        self.runner = StepRunner(
            model,
            self.spec,
            KVPages.create(model.kv_spec(), self.sizes.kv_pages, config.kv_page_size),
            self.sizes.state_blocks,
            _MAX_PREFILL_ROWS,
            config.max_num_batched_tokens,
        )
        self._requests: dict[int, Request] = {}
        self._ids = itertools.count()
        self._steps = self._prompt_tokens = self._cached_tokens = self._prefill_tokens = 0
        self._draft_tokens, self._accepted_tokens = [0] * K, [0] * K

    @classmethod
    def from_pretrained(
        cls, path: str | Path, config: EngineConfig | None = None, *, dtype: str | None = None
    ) -> "Engine":
        """An engine over a Hugging Face directory (config.json, safetensors, perhaps tokenizer.json).

        `dtype` None keeps the checkpoint's.

        Raises:
            ValueError: the architecture is unsupported, or a tensor is missing or misshapen.
        """
        return cls(load_model(path, dtype), config, tokenizer=load_tokenizer(path))

    @property
    def stats(self) -> EngineStats:
        """Counters since the engine was made."""
        return EngineStats(
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            prefill_tokens=self._prefill_tokens,
            state_bytes_copied=self.runner.state_bytes_copied,
            preemptions=self.scheduler.num_preemptions,
            evicted_state_blocks=self.cache.states.pool.num_evictions,
            null_reads=self.runner.null_reads,
            draft_tokens=tuple(self._draft_tokens),
            accepted_tokens=tuple(self._accepted_tokens),
        )

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._requests)

    def warmup(self, advance: Callable[[], None] = lambda: None) -> float:
        """Compiles every program that requests can need; `advance` is called after each, `num_programs` times in all.

        Returns:
            Seconds that it took.
        """
        begin = time.perf_counter()
        for bucket in self.runner.buckets:
            self.runner.warm(bucket)
            advance()
        return time.perf_counter() - begin

    @property
    def num_programs(self) -> int:
        """Programs that `warmup` compiles."""
        return len(self.runner.buckets)

    def add_request(self, prompt_token_ids: Sequence[int], params: SamplingParams | None = None) -> int:
        """Queues a request and returns its id. One that can't run now waits.

        Raises:
            ValueError: it could never run: empty, too long for the model or the pools, tokens outside the vocabulary, or
                more draft tokens than the engine's.
        """
        params = params or SamplingParams()
        prompt = tuple(int(t) for t in prompt_token_ids)
        if not prompt:
            raise ValueError("prompt_token_ids must not be empty")
        vocab = self.model_config.vocab_size
        outside = next((t for t in (*prompt, *params.stop_token_ids) if not 0 <= t < vocab), None)
        if outside is not None:
            raise ValueError(f"prompt_token_ids and stop_token_ids must be in [0, {vocab}), got {outside}")
        K = self.config.num_speculative_tokens
        if (params.num_speculative_tokens or 0) > K:
            raise ValueError(
                f"num_speculative_tokens must be at most the engine's {K}, got {params.num_speculative_tokens}"
            )
        length = len(prompt) + params.max_tokens
        if length > self.spec.max_model_len:
            raise ValueError(
                f"prompt_token_ids and max_tokens must fit in max_model_len = {self.spec.max_model_len}, "
                f"got {len(prompt)} + {params.max_tokens}"
            )
        pages = self.cache.kv.pages_for(length)
        if pages > self.sizes.kv_pages - 1:
            raise ValueError(
                f"prompt_token_ids and max_tokens must fit in {self.sizes.kv_pages - 1} KV pages of "
                f"{self.config.kv_page_size}, got {length} tokens"
            )
        request = Request(next(self._ids), prompt, params)
        self._requests[request.id] = request
        self.scheduler.add(request)
        return request.id

    def abort(self, request_id: int) -> RequestOutput | None:
        """Ends a request at once and frees exactly its blocks; None if it is finished or unknown."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        self.scheduler.remove(request)
        return request.output("abort")

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix, after the weights were replaced for one.

        Running requests go on with what they hold, but what they computed and will compute is never shared.
        """
        self.cache.reset_prefix_cache()

    def step(self) -> list[RequestOutput]:
        """Runs one step and returns the requests that finished in it.

        Raises:
            OutOfBlocksError: requests wait and none can run, which admission rules out.
        """
        plan = self.scheduler.schedule()
        if not plan.rows:
            if self._requests:
                raise OutOfBlocksError(f"the pools can't run one of {len(self._requests)} requests: {self.sizes}")
            return []
        try:
            result = self.runner.dispatch(plan)
            self.scheduler.dispatched(plan)
            sampled = self.runner.read(result)
        except BaseException:
            self.scheduler.withdraw(plan)
            raise
        sampling = [row.request for row in plan.rows if row.samples]
        self._count(plan, sampled)
        self.scheduler.finished(plan, {r.id: self._kept(r, sampled[r.id]) for r in sampling})
        outputs = []
        for request in sampling:
            reason = self._finish_reason(request)
            if reason:
                self.scheduler.remove(request)
                del self._requests[request.id]
                outputs.append(request.output(reason))
        return outputs

    def generate(
        self, prompts: str | Sequence[int] | Sequence[str | Sequence[int]], params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Runs one prompt, or several, each text or token ids, to their ends; outputs in the order of the prompts.

        Raises:
            ValueError: a prompt could never run, or is text and there is no tokenizer; none is then started.
        """
        ids: list[int] = []
        try:
            for prompt in token_ids(self.tokenizer, prompts):
                ids.append(self.add_request(prompt, params))
        except ValueError:
            for request_id in ids:
                self.abort(request_id)
            raise
        outputs: dict[int, RequestOutput] = {}
        while not outputs.keys() >= set(ids):
            outputs |= {output.request_id: output for output in self.step()}
        return [with_text(self.tokenizer, outputs[request_id]) for request_id in ids]

    def _count(self, plan: Plan, sampled: dict[int, list[int]]) -> None:
        self._steps += 1
        self._prefill_tokens += sum(row.num_tokens for row in plan.prefill)
        for row in plan.prefill:
            if row.enters and row.request.num_admissions == 1:
                self._prompt_tokens += len(row.request.prompt)
                self._cached_tokens += row.request.num_cached
        for row in plan.decode:
            accepted = len(sampled[row.request.id]) - 1
            row.request.num_draft_tokens += len(row.drafts)
            row.request.num_accepted_tokens += accepted
            for place in range(len(row.drafts)):
                self._draft_tokens[place] += 1
                self._accepted_tokens[place] += place < accepted

    def _stops(self, request: Request, token: int) -> bool:
        params = request.params
        return token in params.stop_token_ids or (token == self.model_config.eos_token_id and not params.ignore_eos)

    def _kept(self, request: Request, sampled: list[int]) -> list[int]:
        """The sampled tokens up to the first that ends the request."""
        ends = (n for n, token in enumerate(sampled, 1) if self._stops(request, token) or n == request.num_left)
        return sampled[: next(ends, None)]

    def _finish_reason(self, request: Request) -> str | None:
        if self._stops(request, request.tokens[-1]):
            return "stop"
        return None if request.num_left else "length"
