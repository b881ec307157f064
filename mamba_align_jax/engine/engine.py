"""The engine: takes requests, steps them, hands out what they generated."""

import contextlib
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from mamba_align_jax.cache.hybrid import HybridCache
from mamba_align_jax.cache.kv_pages import KVPageManager
from mamba_align_jax.cache.state_blocks import StateBlockManager
from mamba_align_jax.engine.block_size import BlockSizeWatch
from mamba_align_jax.engine.config import EngineConfig, SamplingParams
from mamba_align_jax.engine.drafting.mtp import MTPDrafter
from mamba_align_jax.engine.drafting.prompt_lookup import Drafter, PromptLookupDrafter
from mamba_align_jax.engine.drafting.prompt_lookup_device import DevicePromptLookup
from mamba_align_jax.engine.request import Request, RequestOutput
from mamba_align_jax.engine.runner import Dispatched, RowResult, StepRunner
from mamba_align_jax.engine.scheduler import Plan, Row, Scheduler
from mamba_align_jax.engine.sizing import PoolSizes, align_config, pool_sizes
from mamba_align_jax.engine.text import Tokenizer, load_tokenizer, token_ids, with_text
from mamba_align_jax.engine.trace import TracedStep, traced_row, write_trace
from mamba_align_jax.errors import OutOfBlocksError
from mamba_align_jax.models import load_model
from mamba_align_jax.models.tensor_parallel import shard_model, share
from pallas_kernels import CHUNK_SIZE

_LOG = logging.getLogger(__name__)
_MAX_PREFILL_ROWS = 4


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was made.

    `admitted_requests` have run, `hit_requests` of them on a cached prefix; finished, aborted and failed ones have left,
    some of them before they ran. `prompt_tokens` counts each admitted prompt once, and `cached_tokens` what of it came from
    the cache; `prefill_tokens` counts prompt tokens computed, after preemptions again. `null_reads` are rows whose state was
    lost: more than 0 is a bug, which `EngineConfig(checked=True)` names. `draft_tokens[t]` counts verify rows with a draft
    in place t, and `accepted_tokens[t]` those whose draft in place t was accepted.
    """

    steps: int = 0
    admitted_requests: int = 0
    hit_requests: int = 0
    finished_requests: int = 0
    aborted_requests: int = 0
    failed_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    state_bytes_copied: int = 0
    preemptions: int = 0
    evicted_state_blocks: int = 0
    evicted_kv_pages: int = 0
    null_reads: int = 0
    draft_tokens: tuple[int, ...] = ()
    accepted_tokens: tuple[int, ...] = ()


class Engine:
    """Continuous batching over one model, on one device or split over several, with a prefix cache over states and keys."""

    def __init__(
        self,
        model: Any,
        config: EngineConfig | None = None,
        *,
        drafter: Drafter | None = None,
        tokenizer: Tokenizer | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        """An engine over a loaded model.

        Args:
            model: As `load_model` gives it.
            config: The defaults if None.
            drafter: Who proposes draft tokens, under synchronous stepping; prompt lookup if None.
            tokenizer: What `generate` takes and returns text by; without one it takes ids only.
            mesh: Splits the model over the devices of its axis "tensor", as `shard_model` does. Sizes and bytes are then
                those of one device.

        Raises:
            ValueError: a pool is too small for one request, `max_model_len` exceeds the model's, the model lacks the draft
                head that is asked for or can't be split, or there is a drafter where drafts are made on the device.
        """
        config = config or EngineConfig()
        self.config = config
        self.model_config, self.tokenizer = model.config, tokenizer
        layout, devices, own = None, (), model
        if mesh is not None:
            model, layout = shard_model(model, mesh)
            devices, own = mesh.local_devices, share(model)
        self.spec = align_config(config, own)
        if config.prefix_cache == "align" and config.block_size % CHUNK_SIZE:
            _LOG.warning(
                "block_size %d is no multiple of the gated delta rule's chunk_size %d: states resumed from the cache "
                "agree with uncached ones to rounding, not bit for bit",
                config.block_size,
                CHUNK_SIZE,
            )
        self._watch = None
        if config.prefix_cache == "align":
            self._watch = BlockSizeWatch(config.block_size, self.spec.max_model_len)
        if drafter is not None and (config.async_stepping or config.drafts_with_head):
            raise ValueError(
                f"drafter must be None under async_stepping or speculation='mtp', which draft on the device, got {drafter!r}"
            )
        if config.drafts_with_head and model.mtp is None:
            raise ValueError("speculation='mtp' needs a model with an MTP head, got a checkpoint without mtp.* tensors")
        self.sizes: PoolSizes = pool_sizes(self.spec, config, own, devices)
        K = config.num_speculative_tokens
        lookup = config.prompt_lookup_max, config.prompt_lookup_min
        self._drafter = (drafter or PromptLookupDrafter(*lookup)) if K and not config.drafts_on_device else None
        on_device = MTPDrafter() if config.drafts_with_head else DevicePromptLookup(*lookup)
        self._make_cache()
        self.runner = StepRunner(
            model,
            self.spec,
            self.sizes,
            config.kv_page_size,
            _MAX_PREFILL_ROWS,
            config.max_num_batched_tokens,
            drafter=on_device if config.drafts_on_device else None,
            layout=layout,
        )
        self._requests: dict[int, Request] = {}
        self._ids = itertools.count()
        # Steps whose results are unread, the oldest first, and finished requests that no caller has seen yet.
        self._in_flight: deque[tuple[Plan, Dispatched]] = deque()
        self._outputs: list[RequestOutput] = []
        self._trace: Callable[[TracedStep], None] | None = None
        self._steps = self._prompt_tokens = self._cached_tokens = self._prefill_tokens = 0
        self._admitted = self._hits = 0
        # By finish_reason.
        self._ended: Counter[str] = Counter()
        self._draft_tokens, self._accepted_tokens = [0] * K, [0] * K

    def _make_cache(self) -> None:
        """An empty cache, and a scheduler over it."""
        config = self.config
        self.cache = HybridCache(
            StateBlockManager(
                self.sizes.state_blocks,
                config.block_size,
                config.num_speculative_tokens,
                mode=config.prefix_cache,
                steps_in_flight=config.steps_in_flight,
            ),
            KVPageManager(self.sizes.kv_pages, config.kv_page_size),
            checkpoint_interval=config.checkpoint_interval,
            check=config.checked,
        )
        self.scheduler = Scheduler(
            self.cache,
            config.max_num_seqs,
            _MAX_PREFILL_ROWS,
            config.max_num_batched_tokens,
            self._drafter,
            config.num_speculative_tokens,
            config.max_waiting,
        )

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        config: EngineConfig | None = None,
        *,
        dtype: str | None = None,
        advance: Callable[[int, int], None] = lambda done, total: None,
    ) -> "Engine":
        """An engine over a Hugging Face directory (config.json, safetensors, perhaps tokenizer.json).

        `dtype` None keeps the checkpoint's; `advance` is called as `load_model` does.

        Raises:
            ValueError: the architecture is unsupported, or a tensor is missing or misshapen.
        """
        return cls(load_model(path, dtype, advance), config, tokenizer=load_tokenizer(path))

    @property
    def stats(self) -> EngineStats:
        """Counters since the engine was made."""
        return EngineStats(
            steps=self._steps,
            admitted_requests=self._admitted,
            hit_requests=self._hits,
            finished_requests=self._ended["stop"] + self._ended["length"],
            aborted_requests=self._ended["abort"],
            failed_requests=self._ended["error"],
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            prefill_tokens=self._prefill_tokens,
            state_bytes_copied=self.runner.state_bytes_copied,
            preemptions=self.scheduler.num_preemptions,
            evicted_state_blocks=self.cache.states.pool.num_evictions,
            evicted_kv_pages=self.cache.kv.pool.num_evictions,
            null_reads=self.runner.null_reads,
            draft_tokens=tuple(self._draft_tokens),
            accepted_tokens=tuple(self._accepted_tokens),
        )

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or runs, or has an output that `step` has not returned yet."""
        return bool(self._requests or self._outputs)

    def warmup(self, advance: Callable[[], None] = lambda: None) -> float:
        """Compiles every program that requests can need; `advance` is called after each, `num_programs` times in all.

        Returns:
            Seconds that it took.
        """
        begin = time.perf_counter()
        for _ in self.runner.compile():
            advance()
        for bucket in self.runner.buckets:
            self.runner.warm(bucket)
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
            QueueFullError: `max_waiting` requests wait already; this one does not.
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
        self.scheduler.add(request)
        self._requests[request.id] = request
        return request.id

    def abort(self, request_id: int) -> RequestOutput | None:
        """Ends a request at once and frees exactly its blocks; None if it is finished or unknown."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        self.scheduler.remove(request)
        self._ended["abort"] += 1
        return request.output("abort")

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix, after the weights were replaced for one.

        Running requests go on with what they hold, but what they computed and will compute is never shared.
        """
        self.cache.reset_prefix_cache()

    @contextlib.contextmanager
    def trace(self, path: str | Path) -> Iterator[None]:
        """Writes each step to `path` whose result is read in this context: see `TracedStep`, `mamba-align trace`.

        Raises:
            ValueError: a trace is being written already.
            OSError: the file can't be written.
        """
        if self._trace is not None:
            raise ValueError(f"trace: one is being written already, got {str(path)!r} for another")
        with write_trace(path) as self._trace:
            try:
                yield
            finally:
                self._trace = None

    def step(self) -> list[RequestOutput]:
        """Dispatches one step, reads the oldest unread one, and returns the requests that finished.

        Under asynchronous stepping that is the step before, unless nothing could be dispatched.

        If a step raises, its pools are gone: the requests that ran end with `finish_reason` "error", what was cached is
        forgotten, and those that wait are served next. What isn't an Exception, an interrupt from the keyboard for one, is
        raised again after that; between steps it changes nothing.

        Raises:
            OutOfBlocksError: requests wait and none can run, which admission rules out.
        """
        try:
            self._step()
        except OutOfBlocksError:
            raise
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
        outputs, self._outputs = self._outputs, []
        return outputs

    def _step(self) -> None:
        plan = self.scheduler.schedule(settled=not self._in_flight)
        if plan.rows:
            self._in_flight.append((plan, self.runner.dispatch(plan)))
            self.scheduler.dispatched(plan)
        elif not self._in_flight and self._requests:
            raise OutOfBlocksError(f"the pools can't run one of {len(self._requests)} requests: {self.sizes}")
        # What is short of blocks waits for all results, which free some or show who has to give way.
        unread = self.config.steps_in_flight if plan.rows and not plan.is_short else 0
        while len(self._in_flight) > unread or (self._in_flight and not self._requests):
            self._read(*self._in_flight.popleft())

    def _read(self, plan: Plan, dispatched: Dispatched) -> None:
        """Takes in a step's result. Rows whose request has ended meanwhile came to nothing."""
        self._steps += 1
        copied, lost = self.runner.state_bytes_copied, self.runner.null_reads
        traced = []
        for row, result in self.runner.read(dispatched):
            current = row.is_current
            if current:
                self._take_in(row, result)
            if self._trace:
                size = self.spec.state_block_size
                traced.append(traced_row(row, result.num_drafts, result.tokens, not current, size))
        if self._trace:
            copied, lost = self.runner.state_bytes_copied - copied, self.runner.null_reads - lost
            self._trace(TracedStep(step=self._steps, copied_bytes=copied, null_reads=lost, rows=tuple(traced)))

    def _take_in(self, row: Row, result: RowResult) -> None:
        request = row.request
        self._count(row, result)
        self.scheduler.finished(row, self._kept(request, result.tokens))
        reason = self._finish_reason(request) if row.samples else None
        if reason:
            self.scheduler.remove(request)
            self._end(request, reason)

    def _fail(self, error: BaseException) -> None:
        """A step raised: ends who ran, and makes everything anew."""
        _LOG.error("a step failed, and with it %d requests", len(self.scheduler.running), exc_info=error)
        old = self.scheduler
        for request in old.running:
            if self._drafter:
                self._drafter.forget(request.id)
            self._end(request, "error", error)
        self._in_flight.clear()
        self._make_cache()
        self.scheduler.waiting, self.scheduler.num_preemptions = old.waiting, old.num_preemptions
        self.cache.states.pool.num_evictions = old.cache.states.pool.num_evictions
        self.cache.kv.pool.num_evictions = old.cache.kv.pool.num_evictions
        self.runner.reset()

    def _end(self, request: Request, reason: str, error: BaseException | None = None) -> None:
        # An abort may have come before: the caller has its output.
        if self._requests.pop(request.id, None) is not None:
            self._ended[reason] += 1
            self._outputs.append(request.output(reason, error))

    def generate(
        self, prompts: str | Sequence[int] | Sequence[str | Sequence[int]], params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Runs one prompt, or several, each text or token ids, to their ends; outputs in the order of the prompts.

        Whatever is raised, none of the prompts goes on running. Other requests run along; `step` returns those that end.

        Raises:
            ValueError: a prompt could never run, or is text and there is no tokenizer; none is then started.
            QueueFullError: nor is one if there are more prompts than may wait.
            Exception: what a step raised that one of them ran in.
        """
        ids: list[int] = []
        outputs: dict[int, RequestOutput] = {}
        try:
            for prompt in token_ids(self.tokenizer, prompts):
                ids.append(self.add_request(prompt, params))
            while not outputs.keys() >= set(ids):
                outputs |= {output.request_id: output for output in self.step()}
        except BaseException:
            for request_id in ids:
                self.abort(request_id)
            raise
        finally:
            ended = [*outputs.values(), *self._outputs]
            self._outputs = [output for output in ended if output.request_id not in ids]
        outputs = {request_id: outputs[request_id] for request_id in ids}
        for output in outputs.values():
            if output.error is not None:
                raise output.error
        return [with_text(self.tokenizer, outputs[request_id]) for request_id in ids]

    def _count(self, row: Row, result: RowResult) -> None:
        request = row.request
        if row.is_prefilling:
            self._prefill_tokens += row.num_tokens
            if row.enters and row.admission == 1:
                self._admitted += 1
                self._hits += request.num_cached > 0
                if self._watch:
                    self._watch.admitted(len(request.prompt))
                self._prompt_tokens += len(request.prompt)
                self._cached_tokens += request.num_cached
            return
        accepted = len(result.tokens) - 1
        request.num_draft_tokens += result.num_drafts
        request.num_accepted_tokens += accepted
        for place in range(result.num_drafts):
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
