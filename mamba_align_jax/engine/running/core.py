"""What an engine does between calls: it owns requests, cache, scheduler and device, runs steps, and recovers.

Whatever is raised, and wherever, costs at most the requests on whose account it was raised. A change of the bookkeeping
is announced first, so that one that was cut off is noticed, and `_recover` makes all parts agree again: it queues every
unfinished request once more. A request's tokens are always complete, and all else follows from them.
"""

import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from mamba_align_jax.cache.hybrid import HybridCache
from mamba_align_jax.cache.kv_pages import KVPageManager
from mamba_align_jax.cache.state_blocks import StateBlockManager
from mamba_align_jax.engine.config import SamplingParams
from mamba_align_jax.engine.device.model_worker import ModelWorker
from mamba_align_jax.engine.device.read_step import RowResult
from mamba_align_jax.engine.device.runner import Dispatched
from mamba_align_jax.engine.interrupts import as_exception, failure
from mamba_align_jax.engine.model import end_tokens
from mamba_align_jax.engine.running.admission import check_request
from mamba_align_jax.engine.running.block_size_warning import BlockSizeWatch, warn_of_rounding
from mamba_align_jax.engine.running.cache_reports import CacheReports, Listener
from mamba_align_jax.engine.running.changing import Changing
from mamba_align_jax.engine.running.results import count_row, end_reason, tokens_up_to_end
from mamba_align_jax.engine.running.trace import Tracing
from mamba_align_jax.engine.running.updates import Updates
from mamba_align_jax.engine.scheduling.buckets import Bucket
from mamba_align_jax.engine.scheduling.levels import Level, level_of
from mamba_align_jax.engine.scheduling.masks import Masks
from mamba_align_jax.engine.scheduling.request import Request, RequestOutput, RequestUpdate
from mamba_align_jax.engine.scheduling.scheduler import Row, Scheduler
from mamba_align_jax.engine.scheduling.stats import Counters
from mamba_align_jax.engine.scheduling.waiting import WaitingQueue, by_rank
from mamba_align_jax.engine.text.generated_text import GeneratedText
from mamba_align_jax.engine.text.grammar_state import GrammarCompiler
from mamba_align_jax.engine.text.tokenizer import Tokenizer
from mamba_align_jax.engine.turns import Turns
from mamba_align_jax.errors import GrammarError, OutOfBlocksError

P = ParamSpec("P")
R = TypeVar("R")
_LOG = logging.getLogger(__name__)


class EngineCore:
    """What an engine owns, and all changes of it, one thread at a time.

    `Engine` holds it, as do the other parts that change what is in it. They change it inside `alone`, and read it anywhere.

    Attributes:
        config: The engine's configuration, complete.
        model_config: The model's configuration.
        tokenizer: Turns text into token ids and back; None if there is none.
        align: How states are kept.
        sizes: Sizes of the pools, on one device.
        explanation: What was chosen, and what fits.
        cache: Assigns blocks and pages to requests.
        scheduler: Plans steps.
        runner: Runs them.
        steps_in_flight: How many steps may be dispatched while the result of an earlier one is unread.
        unread_steps: The steps that were dispatched and not read, the oldest first.
        counters: What has been counted.
        waiting: The requests that wait.
        grammars: Compiles grammars.
        masks: Makes their masks.
        reports: Tells a listener what the cache stores and loses.
        requests: The requests that have not ended, by id.
        outputs: The outputs that `Engine.step` has not returned yet, by id.
        updates: Makes updates of requests.
        tracing: Writes a trace of the steps that are read.
        turns: Lets one thread at a time change what is here.
        changing: The context in which the bookkeeping is changed.
    """

    def __init__(self, worker: ModelWorker, tokenizer: Tokenizer | None) -> None:
        """Makes the core of an engine over a model that is on its devices."""
        self.config, self.model_config, self.tokenizer = worker.config, worker.model_config, tokenizer
        self.align, self.sizes, self.runner = worker.align, worker.sizes, worker.runner
        self.explanation, self._granularity = worker.explanation, worker.granularity
        self.steps_in_flight, self._drafter = worker.steps_in_flight, worker.drafters.host
        config = self.config
        self._watch = None
        if config.prefix_cache != "none":
            warn_of_rounding(config.block_size, [group.name for group in self.align.groups])
            self._watch = BlockSizeWatch(config.block_size, self.align.max_model_len)
        self.masks = Masks()
        self.grammars = GrammarCompiler(tokenizer, self.model_config.vocab_size, end_tokens(self.model_config))
        self.counters = Counters(config.num_speculative_tokens)
        self.waiting = WaitingQueue(config.max_waiting, config.overtaking_limit)
        self.reports = CacheReports()
        self.cache = self._new_cache()
        self.scheduler = self._new_scheduler()
        self.unread_steps: deque[Dispatched] = deque()
        # The rows of the step that is being dispatched or read.
        self._rows_at_work: Sequence[Row | None] = ()
        self.requests: dict[int, Request] = {}
        self._ids = itertools.count()
        self.outputs: dict[int, RequestOutput] = {}
        self.updates = Updates()
        self.tracing = Tracing()
        self.turns = Turns("the engine", lambda: self.runner.is_current_thread())
        self.changing = Changing()

    def _new_cache(self) -> HybridCache:
        """Makes an empty cache, which reports into the engine's counters."""
        config, counters = self.config, self.counters
        return HybridCache(
            StateBlockManager(
                self.sizes.state_blocks,
                config.block_size,
                config.num_speculative_tokens,
                mode=config.prefix_cache,
                steps_in_flight=self.steps_in_flight,
                fold_length=self.align.fold_length if self.align.is_deferred else None,
                granularity=self._granularity,
                on_eviction=counters.evict_state_block,
            ),
            KVPageManager(self.sizes.kv_pages, config.kv_page_size, on_eviction=counters.evict_kv_page),
            checkpoint_interval=config.checkpoint_interval,
            check=config.checked,
            log=self.reports.new_log(),
        )

    def _new_scheduler(self) -> Scheduler:
        """Makes a scheduler over the cache and the queue, which runs no request."""
        config = self.config
        return Scheduler(
            self.cache,
            config.max_num_seqs,
            config.max_prefill_rows,
            config.max_num_batched_tokens,
            self._drafter,
            config.num_speculative_tokens,
            self.waiting,
            max_mixed_tokens=config.max_mixed_tokens,
            counters=self.counters,
            masks=self.masks,
            fold=lambda slot: self.runner.fold(slot),
        )

    def alone(self, change: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Makes a change while no other thread makes one, over bookkeeping that is whole, and leaves it whole."""
        return self.turns.take(self._make_whole_and, change, *args, **kwargs)

    def _make_whole_and(self, change: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        if self.changing.is_torn:
            self._recover()
        try:
            return change(*args, **kwargs)
        except BaseException:
            if self.changing.is_torn:
                self._recover()
            raise

    def checked(self, prompt: Any, params: Any) -> tuple[tuple[int, ...], SamplingParams]:
        """Returns a request's prompt and parameters as `add` takes them. Any thread may call it at any time.

        Raises:
            ValueError: The request can never run: see `Engine.add_request`.
        """
        checked = check_request(
            prompt,
            params,
            config=self.config,
            cache=self.cache,
            vocab_size=self.model_config.vocab_size,
            max_model_len=self.align.max_model_len,
            has_tokenizer=self.tokenizer is not None,
        )
        _, params = checked
        if params.grammar is not None:
            # Another thread may step the engine while a grammar is compiled.
            self.grammars.check(params.grammar)
        return checked

    def add(self, prompt: tuple[int, ...], params: SamplingParams, outbox: dict[int, RequestOutput]) -> int:
        """Queues a request that was checked, whose output goes to `outbox`, and returns its id."""
        self.waiting.check_room(params.tenant)
        if level_of(params) >= Level.FULL:
            self.runner.make_sampler()
        text = self._text_after(prompt, params)
        grammar = self.grammars.start(params.grammar) if params.grammar else None
        request = Request(next(self._ids), prompt, params, outbox, text=text, grammar=grammar)
        try:
            with self.changing:
                self.scheduler.add(request)
                self.requests[request.id] = request
            return request.id
        except BaseException:
            # The caller doesn't know the request, even if the change was whole. The flag is set without a call, because
            # a second interrupt may come at the beginning of one.
            self.changing.is_torn = True
            self.requests.pop(request.id, None)
            raise

    def _text_after(self, prompt: tuple[int, ...], params: SamplingParams) -> GeneratedText | None:
        if self.tokenizer is None:
            return None
        skip = params.skip_special_tokens
        return GeneratedText.after(prompt, self.tokenizer, params.stop, params.min_tokens, skip_special_tokens=skip)

    def abort(self, request_id: int, outbox: dict[int, RequestOutput]) -> None:
        """Ends a request at once, if it has not ended. The output goes to `outbox`, and to whoever else waits for it."""
        request = self.requests.get(request_id)
        if request is not None:
            self._abort(request, outbox)

    def abort_all(self, outbox: dict[int, RequestOutput]) -> None:
        """Ends the requests whose outputs would go to `outbox`."""
        for request in [request for request in self.requests.values() if request.outbox is outbox]:
            self._abort(request, outbox)

    def _abort(self, request: Request, outbox: dict[int, RequestOutput]) -> None:
        """Ends a request at once. The output goes to `outbox`, and to whoever else waits for it."""
        with self.changing:
            self.scheduler.remove(request)
            own = outbox if request.outbox is self.outputs and not self.updates.have_reader else request.outbox
            outbox[request.id] = self._end(request, "abort", outbox=own)
            self.reports.flush()

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix: see `Engine.reset_prefix_cache`."""
        with self.changing:
            self.cache.reset_prefix_cache()
            self.reports.flush()

    def listen(self, listener: Listener | None) -> None:
        """Tells a function what the cache stores and loses from now on: see `Engine.on_cache_event`."""
        with self.changing:
            self.reports.listen(listener)
            self._recover()

    def warm(self, bucket: Bucket) -> None:
        """Runs one program on padding rows, and waits for it."""
        with self.changing:
            self.runner.warm(bucket)

    def advance(self) -> None:
        """Dispatches one step and reads the oldest unread one. What a request makes it raise ends that request."""
        if not self.unread_steps:
            self.check_launches()
        with self.changing:
            try:
                self._step()
                self.reports.flush()
            except BaseException as raised:
                # An interrupt is raised again, and the caller's turn ends with `_recover`.
                self._fail(failure(raised), self._failed_requests())

    def check_launches(self) -> None:
        """Waits until all that was begun is launched. If something was not, those end that run, because they need it."""
        error = self.runner.failure
        if error is not None:
            with self.changing:
                self._fail(as_exception(error), {})

    def advance_and_update(self) -> dict[int, RequestUpdate]:
        """Makes a step, and an update of each request with new tokens. Returns the updates of those that have ended."""
        self.advance()
        for request in list(self.scheduler.running):
            if request.outbox is not self.outputs or self.updates.shows_all(request):
                continue
            try:
                request.read_text()
            except BaseException as raised:
                error = failure(raised)
                with self.changing:
                    self.scheduler.remove(request)
                    self._end_alone(request, error)
            else:
                self.updates.add(request)
        self.updates.forget_all_but(self.requests, self.outputs)
        return self.updates.last(self.outputs)

    def _step(self) -> None:
        scheduler = self.scheduler
        plan = scheduler.schedule(settled=not self.unread_steps)
        for request, error in plan.failed:
            scheduler.current = request
            scheduler.remove(request)
            self._end_alone(request, error)
        scheduler.current = None
        if plan.rows:
            self._rows_at_work = plan.rows
            self.unread_steps.append(self.runner.dispatch(plan))
            self._rows_at_work = ()
            scheduler.dispatched(plan)
        elif not self.unread_steps and plan.awaits_masks:
            self.masks.await_any([*scheduler.running, *itertools.islice(self.waiting, 1)])
        elif not self.unread_steps and self.waiting and not plan.failed:
            # The checks of `add_request` rule this out.
            scheduler.current = self.waiting.first
            raise OutOfBlocksError(f"the pools can't run request {self.waiting.first.id}: {self.sizes}")
        # A plan that is short of blocks waits for all results: they free blocks, or allow a preemption.
        max_unread = self.steps_in_flight if plan.rows and not plan.is_short else 0
        if plan.awaits_token:
            # The request that waits gets a row in the next plan.
            max_unread = min(max_unread, 1)
        while len(self.unread_steps) > max_unread or (self.unread_steps and not self.requests):
            self._rows_at_work = self.unread_steps[0].places
            self._read(self.unread_steps.popleft())

    def _read(self, dispatched: Dispatched) -> None:
        """Reads a step's result. Rows whose request has ended since are dropped."""
        self.counters.add(steps=1)
        read = self.runner.read(dispatched)
        self._rows_at_work = ()
        self.counters.add(state_bytes_copied=read.copied_bytes, null_reads=read.null_reads)
        late = []
        for row, result in read.rows:
            if row.is_current:
                self._take_in(row, result)
            else:
                late.append(row)
        self.scheduler.current = None
        self.tracing.record(read, self.counters["steps"], late, self.align.state_block_size)

    def _take_in(self, row: Row, result: RowResult) -> None:
        """Adds a row's result to its request, and ends the request if a token ends it."""
        request = self.scheduler.current = row.request
        is_first = count_row(self.counters, row, result)
        if self._watch and is_first:
            self._watch.admitted(len(request.prompt))
        tokens, reason = tokens_up_to_end(request, result.tokens, self.model_config.eos_token_id)
        if result.prompt_logprobs:
            request.score_prompt(row.start, result.prompt_logprobs)
        self.scheduler.finished(row, tokens, result.logprobs[: len(tokens)])
        if reason:
            self.scheduler.remove(request)
            self._end(request, reason)

    def _end(
        self,
        request: Request,
        reason: str,
        error: Exception | None = None,
        outbox: dict[int, RequestOutput] | None = None,
    ) -> RequestOutput:
        """Gives a request's output to the request's outbox, or to another one, and returns it."""
        output = request.output(reason, error, self.model_config.eos_token_id)
        # From here on the request has ended. `_recover` does what is cut off after this line.
        request.ended = output
        (request.outbox if outbox is None else outbox)[request.id] = output
        self.requests.pop(request.id, None)
        self.counters.end(reason)
        return output

    def _end_alone(self, request: Request, error: Exception) -> None:
        """Ends a request that has failed by itself. What its grammar says is told to its caller, and not logged."""
        if not isinstance(error, GrammarError):
            _LOG.error("request %d has failed", request.id, exc_info=error)
        self._end(request, "error", error)

    def _fail(self, error: Exception, failed: dict[int, Request]) -> None:
        """Ends the requests on whose account a step raised, and goes on with the others."""
        if not self.runner.is_intact():
            # Whatever ran would need the pools that are lost.
            failed = failed | {request.id: request for request in self.requests.values() if request.slot >= 0}
        _LOG.error("a step failed, and with it %d requests", len(failed), exc_info=error)
        for request in failed.values():
            self._end(request, "error", error)
            self._forget_drafts(request)
        self._recover()

    def _failed_requests(self) -> dict[int, Request]:
        """Returns the requests on whose account a step raised, by id.

        These are the one that the scheduler was at, or those of the step that the runner was at. If it was neither, the
        request of the highest rank answers for it, so that a failure that comes again and again ends.
        """
        scheduler = self.scheduler
        if scheduler.current is not None:
            failed = [scheduler.current]
        elif self._rows_at_work:
            failed = [row.request for row in self._rows_at_work if row is not None and row.is_current]
        else:
            failed = sorted(self.requests.values(), key=by_rank)[:1]
        return {request.id: request for request in failed if request.id in self.requests}

    def _recover(self) -> None:
        """Makes requests, queue, scheduler, cache and pools agree after a change was cut off anywhere.

        Every unfinished request waits again, with the tokens that it has. What is cached stays if the pools exist and the
        cache accounts for every block. This method may be cut off itself: it does nothing that it can't repeat.
        """
        with self.changing:
            self._requeue_all()

    def _requeue_all(self) -> None:
        self.unread_steps.clear()
        self._rows_at_work = ()
        for request in list(self.requests.values()):
            if request.ended is not None:
                request.outbox[request.id] = request.ended
                del self.requests[request.id]
            elif not self._ends_by_its_tokens(request):
                self.counters.add(preemptions=request.slot >= 0)
                request.wait()
        is_intact = self.runner.is_intact()
        if not is_intact or not self.reports.knows(self.cache) or not self._vacate_cache():
            # The cache goes first, so that it never describes pools that it doesn't belong to.
            self.cache = self._new_cache()
        if not is_intact:
            self.runner.reset()
        self.reports.restart(self.cache)
        self.waiting.replace(self.requests.values())
        self.scheduler = self._new_scheduler()

    def _ends_by_its_tokens(self, request: Request) -> bool:
        """Ends a request if its tokens, or a tokenizer that raises, end it, and returns whether they did."""
        try:
            reason = end_reason(request, self.model_config.eos_token_id)
            if reason is not None:
                self._forget_drafts(request)
                self._end(request, reason)
        except BaseException as raised:
            error = failure(raised)
            self._forget_drafts(request)
            self._end_alone(request, error)
            return True
        return reason is not None

    def _vacate_cache(self) -> bool:
        """Takes all blocks from the requests. Returns False if the cache has lost count of them."""
        try:
            self.cache.vacate(self.requests)
        except BaseException as raised:
            _LOG.error("the cache is emptied, because a change of it was cut off", exc_info=failure(raised))
            return False
        return True

    def _forget_drafts(self, request: Request) -> None:
        self.masks.forget(request)
        if self._drafter is not None:
            self._drafter.forget(request.id)
