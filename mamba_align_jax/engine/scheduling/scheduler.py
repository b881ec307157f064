"""Plans steps: continuous batching, chunked prefill and preemption. Holds no JAX arrays."""

from bisect import insort
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from mamba_align_jax.cache.hybrid import Allocation, HybridCache, HybridHit
from mamba_align_jax.engine.drafting.protocols import UNKNOWN, Drafter
from mamba_align_jax.engine.interrupts import failure
from mamba_align_jax.engine.scheduling.masks import Masks
from mamba_align_jax.engine.scheduling.request import Request, TokenLogprobs
from mamba_align_jax.engine.scheduling.stats import Counters
from mamba_align_jax.engine.scheduling.waiting import WaitingQueue, by_rank


@dataclass(slots=True)
class Row:
    """Tokens of one request that run in one step.

    Attributes:
        request: The request.
        start: Position of the first token. While a step with drafts is unread, the earliest position that the device
            may be at.
        num_tokens: Number of tokens, drafts included.
        is_prefilling: Whether the row runs known tokens: a prompt's or a preempted request's.
        allocation: The blocks and pages that are new in the request's rows of the tables.
        enters: True in the request's first step after admission, when its slot is initialised.
        drafts: The last tokens of the row; `UNKNOWN` for those that only the device knows.
        slot: The request's slot when the row was planned. `slot` and `admission` identify the request when the result
            arrives after other steps were planned.
        admission: Number of the request's admissions when the row was planned.
        published: The boundary that the row offered to the cache, in tokens; 0 for none.
        scores_prompt: Whether the request asks how likely the tokens after these are, which are its prompt's.
        masks: The tokens that the request's grammar allows in the places of the tokens that the row samples; None
            without a grammar. See `GrammarState.allow`.
    """

    request: Request
    start: int
    num_tokens: int
    is_prefilling: bool
    allocation: Allocation
    enters: bool = False
    drafts: tuple[int, ...] = ()
    slot: int = -1
    admission: int = 0
    published: int = 0
    scores_prompt: bool = False
    masks: np.ndarray | None = None

    @property
    def certain(self) -> int:
        """The number of tokens that are not drafts, so that no rejection removes them."""
        return self.num_tokens - len(self.drafts)

    @property
    def samples(self) -> bool:
        """Whether a token is sampled after the row's last one."""
        return not self.is_prefilling or self.start + self.num_tokens == self.request.prefill_end

    @property
    def is_current(self) -> bool:
        """Whether the request still occupies the slot that it had when the row was planned.

        If not, the request was finished, or preempted and perhaps readmitted since.
        """
        return (self.slot, self.admission) == (self.request.slot, self.request.num_admissions)

    @property
    def following(self) -> int:
        """The token after the row's last one if it is known already, `UNKNOWN` otherwise."""
        return UNKNOWN if self.samples else self.request.tokens[self.start + self.num_tokens]

    @property
    def tokens(self) -> list[int]:
        """The row's tokens before the step is dispatched: `UNKNOWN` where only the device knows them."""
        certain = self.certain
        known = self.request.tokens[self.start : self.start + certain]
        if len(known) < certain:
            known += [UNKNOWN] * (certain - len(known))
        return known + list(self.drafts) if self.drafts else known


@dataclass
class Plan:
    """The rows of one step.

    Attributes:
        decode: Rows that verify drafts or only decode.
        prefill: Rows that run known tokens.
        is_short: True if rows were left out because there were too few blocks while results were unread.
        awaits_token: True if a request has no row because its grammar must know a token that is unread.
        awaits_masks: True if a request has no row because its masks are not made yet.
        failed: The requests for which the drafter or the grammar raised, each with the exception. They have no rows.
    """

    decode: list[Row] = field(default_factory=list)
    prefill: list[Row] = field(default_factory=list)
    is_short: bool = False
    awaits_token: bool = False
    awaits_masks: bool = False
    failed: list[tuple[Request, Exception]] = field(default_factory=list)

    @property
    def rows(self) -> list[Row]:
        """All rows, decode rows first."""
        return self.decode + self.prefill


class Scheduler:
    """Plans steps by priority, then tenant by tenant, and a tenant's requests in the order of their arrival.

    Running requests decode in every step, and prompt chunks fill the token budget. Steps may be planned while results
    of earlier ones are unread: what they add to a request is then known only within bounds, `Request.min_computed` and
    `Request.max_computed`.

    A decode row verifies as many drafts as the request can use and the pools have room for. The drafts come from the
    drafter. Without one they are `UNKNOWN`, and the device fills in those that it has made.

    If there are too few free blocks and no result is unread, a running request is preempted: the one that entered last
    among those with the highest priority number. It gives all blocks back, waits before all of its priority that never
    ran, and resumes from what is still cached. No request enters before one that waits ahead of it, nor while a running
    request waits for blocks; but one whose grammar has dear masks is overtaken while these are made, or while requests
    like it have half of the slots. Therefore requests of the same priority never keep one of them waiting for ever.

    Attributes:
        current: The request whose row is being planned, recorded or removed; None between requests. If anything is
            raised, it is raised on account of this request.
    """

    def __init__(
        self,
        cache: HybridCache,
        max_num_seqs: int,
        max_prefill_rows: int,
        max_num_batched_tokens: int,
        drafter: Drafter | None = None,
        num_speculative_tokens: int = 0,
        waiting: WaitingQueue | None = None,
        *,
        max_mixed_tokens: int | None = None,
        counters: Counters | None = None,
        masks: Masks | None = None,
        fold: Callable[[int], object] = lambda slot: None,
    ) -> None:
        """Makes a scheduler without requests.

        Args:
            cache: The cache, which holds no request.
            max_num_seqs: Number of requests that run at once.
            max_prefill_rows: Number of prefill rows of a step.
            max_num_batched_tokens: Number of tokens of these rows.
            drafter: Proposes drafts on the host; None if the device drafts, or if nothing does.
            num_speculative_tokens: Largest number of drafts per row, K.
            waiting: The queue of requests; a new one without limits if None.
            max_mixed_tokens: Number of tokens of the prefill rows in a step that has decode rows too; None is the same.
            counters: The engine's counters, in which preemptions are counted; new ones if None.
            masks: Makes the masks of grammars; a new one if None.
            fold: Starts the fold of a slot under policy "deferred", whose request leaves on a boundary that no step has
                folded.
        """
        self.cache = cache
        self.max_prefill_rows = max_prefill_rows
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_mixed_tokens = max_mixed_tokens
        self.drafter = drafter
        self.num_speculative_tokens = num_speculative_tokens
        self.waiting = WaitingQueue() if waiting is None else waiting
        # By rank: rows are planned from the front on, and the last request is preempted first.
        self.running: list[Request] = []
        self.counters = counters or Counters()
        self.masks = masks or Masks()
        self.current: Request | None = None
        self._fold = fold
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._max_dear = max(1, max_num_seqs // 2)

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            QueueFullError: The queue is full. Nothing has changed.
        """
        self.waiting.add(request)
        request.checkpoint_at = self.cache.requested_offsets(request.params.checkpoint_at, len(request.prompt))

    def schedule(self, *, settled: bool = True) -> Plan:
        """Plans one step and allocates its blocks. An empty plan means that nothing can run before a result is read.

        Args:
            settled: Whether every result has been read. If not, no request is preempted, because the unread results may
                free the blocks that are missing.
        """
        while True:
            plan = Plan()
            self._begin_masks()
            self._plan_decode(plan, settled)
            self._plan_prefill(plan)
            self.current = None
            if plan.rows or plan.failed or plan.awaits_masks or not self.running or not settled:
                return plan
            # The running requests wait for each other's blocks, in the middle of their prompts.
            self._preempt(self.running[-1])

    def dispatched(self, plan: Plan) -> None:
        """Takes note that the plan's step was dispatched.

        Columns that no later step reads are released, and the boundaries that prompts have reached are published.
        """
        for row in plan.rows:
            self.current = row.request
            tokens = row.request.tokens[: row.start + row.num_tokens] if row.is_prefilling else None
            row.published = self.cache.dispatched(row.request.id, tokens)
        self.current = None

    def finished(self, row: Row, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> None:
        """Records the result of one row of the oldest step whose result has not been read.

        Args:
            row: A row that is current: see `Row.is_current`.
            tokens: The tokens that it sampled, accepted drafts first. They end at a stop token, if there is one.
            logprobs: The tokens' log-probabilities, if the request asks for them.
        """
        request, certain = row.request, row.certain
        row.start = request.num_computed
        if tokens:
            request.append(*tokens, logprobs=logprobs)
        # The last sampled token has no state yet. All other sampled tokens are accepted drafts, whose states exist.
        request.num_computed += certain + max(len(tokens) - 1, 0)
        request.num_ahead -= certain
        request.num_unsure -= len(row.drafts)
        row.published = self.cache.commit(request.id, request.tokens, request.num_computed) or row.published

    def remove(self, request: Request) -> None:
        """Removes a request that finished or was aborted, and frees exactly its blocks."""
        if self.drafter is not None:
            self.drafter.forget(request.id)
        self.masks.forget(request)
        if request.slot < 0:
            self.waiting.remove(request)
        else:
            self._leave(request)
        self.cache.forget(request.id)

    def _leave(self, request: Request) -> None:
        if self.cache.unfolded(request.id):
            self._fold(request.slot)
            self.cache.folded(request.id)
        self.cache.free(request.id)
        self.running.remove(request)
        self._free_slots.append(request.slot)
        request.leave()

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        request.wait()
        self.waiting.put_back(request)
        self.counters.add(preemptions=1)

    def _begin_masks(self) -> None:
        """Begins the masks of all requests that decode, and waits for the cheap ones."""
        decoding = [
            request
            for request in self.running
            if request.grammar and not request.num_ahead and not request.is_prefilling and _room(request) > 0
        ]
        for request in decoding:
            self.current = request
            self.masks.begin(request, partial(self._drafts, request, _room(request) - 1))
        self.current = None
        self.masks.await_cheap(decoding)

    def _plan_decode(self, plan: Plan, settled: bool) -> None:
        for request in list(self.running):
            self.current = request
            room = _room(request)
            if request.is_prefilling or room < 1:
                continue
            if request.grammar and request.num_ahead:
                # What the grammar allows depends on a token that has not been read.
                plan.awaits_token = True
                continue
            try:
                allowed = self.masks.find(request) if request.grammar else (self._drafts(request, room - 1), None)
            except BaseException as raised:
                plan.failed.append((request, failure(raised)))
                continue
            if allowed is None:
                plan.awaits_masks = True
                continue
            drafts, masks = allowed
            while (row := self._verify_row(request, drafts)) is None:
                # Drafts are given up before any request is preempted for them.
                if drafts:
                    drafts.pop()
                    continue
                if not settled:
                    plan.is_short = True
                    break
                # Rows are planned by rank, so the last request has no row in the plan yet, unless it is this one.
                victim = self.running[-1]
                self._preempt(victim)
                if victim is request:
                    break
            if row is not None:
                row.masks = masks
                plan.decode.append(row)

    def _verify_row(self, request: Request, drafts: list[int]) -> Row | None:
        start, num_tokens = request.min_computed, 1 + len(drafts)
        allocation = self.cache.allocate(request.id, start, request.max_computed, num_tokens, len(drafts))
        if allocation is None:
            return None
        return self._planned(Row(request, start, num_tokens, False, allocation, drafts=tuple(drafts)))

    def _planned(self, row: Row) -> Row:
        request = row.request
        row.slot, row.admission = request.slot, request.num_admissions
        request.num_ahead += row.certain
        request.num_unsure += len(row.drafts)
        return row

    def _drafts(self, request: Request, room: int) -> list[int]:
        if not self.num_speculative_tokens:
            return []
        own = request.params.num_speculative_tokens
        max_drafts = min(self.num_speculative_tokens if own is None else own, room)
        if max_drafts < 1:
            return []
        if self.drafter is None:
            # A grammar must know the drafts.
            return [] if request.grammar else [UNKNOWN] * max_drafts
        return self.drafter.draft(request.id, request.tokens, max_drafts)[:max_drafts]

    def _plan_prefill(self, plan: Plan) -> None:
        budget, blocked = self._budget(plan), plan.is_short
        for request in self.running:
            self.current = request
            if request.is_prefilling:
                used, lacks_blocks = self._plan_chunk(plan, request, budget, None)
                budget -= used
                blocked |= lacks_blocks
        # A request that enters takes blocks, so none enters while a running request waits for some.
        lack_masks = set[int]()
        while self._free_slots and not blocked and (request := self._next_to_enter(lack_masks)) is not None:
            self.current = request
            hit = self._lookup(request)
            request.num_computed, request.chain = hit.length, hit.state.chain
            if not request.is_counted:
                # A request whose first result was never read begins again, with what is cached now.
                request.num_cached, request.cache_miss = hit.length, hit.miss
            if request.num_admissions == 0:
                # What a request keeps is decided when it first enters. A preemption doesn't change it.
                request.keep = self.cache.checkpoints(len(request.prompt), request.checkpoint_at, hit.junction)
            others_await_masks, plan.awaits_masks = plan.awaits_masks, False
            used, blocked = self._plan_chunk(plan, request, budget, hit)
            awaits_masks, plan.awaits_masks = plan.awaits_masks, plan.awaits_masks or others_await_masks
            if not used:
                # The request keeps its place; if it has failed, it leaves before the next plan.
                request.num_computed = 0
                if not request.is_counted:
                    # It may end before it uses what was found.
                    request.num_cached, request.cache_miss = 0, None
                if not awaits_masks:
                    return
                # Only a request whose masks are not made is overtaken.
                lack_masks.add(request.id)
                continue
            budget -= used
            self.waiting.enter(request, self.running)
            insort(self.running, request, key=by_rank)

    def _next_to_enter(self, lack_masks: Container[int]) -> Request | None:
        """Returns the first waiting request that may enter: not one of `lack_masks`, whose masks are not made yet.

        Requests with dear masks wait for them in their slots, so they get half of the slots at most.
        """
        if not self.waiting:
            return None
        may_be_dear = sum(map(_is_dear, self.running)) < self._max_dear
        return self.waiting.first_that(
            lambda request: request.id not in lack_masks and (may_be_dear or not _is_dear(request))
        )

    def _budget(self, plan: Plan) -> int:
        """Returns the number of prompt tokens of a step with the plan's decode rows."""
        mixed, most = self.max_mixed_tokens, self.max_num_batched_tokens
        return most if mixed is None or not plan.decode else min(mixed, most)

    def _lookup(self, request: Request) -> HybridHit:
        salt = request.params.cache_salt.encode()
        if request.lacks_prompt_logprobs:
            # The logits after every token are needed, and what is cached has none.
            return self.cache.no_hit("prompt_logprobs", salt, request.chain)
        return self.cache.lookup(request.tokens, salt, request.chain)

    def _plan_chunk(self, plan: Plan, request: Request, budget: int, hit: HybridHit | None) -> tuple[int, bool]:
        """Adds a prefill row if the budget and the pools allow it. A row is shorter where the pools allow no longer one.

        Returns:
            The number of its tokens, 0 for no row, and whether a pool has too few blocks for the row that the budget allows.
        """
        if budget <= 0 or len(plan.prefill) == self.max_prefill_rows:
            return 0, False
        start = request.min_computed
        stops = request.keep.stops(start) if request.keep else ()
        end = self.cache.chunk_end(start, budget, self._budget(plan), request.prefill_end, stops)
        if end == 0:
            return 0, False
        masks = None
        if end == request.prefill_end and request.grammar:
            try:
                # Before anything is allocated, so that a request whose grammar fails ends without a trace.
                self.masks.begin(request, list)
                self.masks.await_cheap([request])
                allowed = self.masks.find(request)
            except BaseException as raised:
                plan.failed.append((request, failure(raised)))
                return 0, False
            if allowed is None:
                plan.awaits_masks = True
                return 0, False
            # Masks that were made with drafts before a preemption begin with the one that is wanted.
            masks = allowed[1][:1]
        allocation = self.cache.allocate(request.id, start, start, end - start, hit=hit, keep=request.keep)
        lacks_blocks = allocation is None
        if lacks_blocks and (end := self.cache.shorter_end(request.id, start, end, hit)):
            allocation = self.cache.allocate(request.id, start, start, end - start, hit=hit, keep=request.keep)
        if allocation is None:
            return 0, True
        if hit is not None:
            request.slot = self._free_slots.pop()
            request.num_admissions += 1
        row = Row(request, start, end - start, True, allocation, enters=hit is not None)
        row.scores_prompt = request.lacks_prompt_logprobs
        row.masks = masks if row.samples else None
        plan.prefill.append(self._planned(row))
        return end - start, lacks_blocks


def _is_dear(request: Request) -> bool:
    return request.grammar is not None and not request.grammar.is_cheap


def _room(request: Request) -> int:
    """Returns how many tokens a step may add, drafts included.

    A step samples one token more than it accepts. max_tokens keeps the request within max_model_len.
    """
    return request.max_length - request.max_computed - 1
