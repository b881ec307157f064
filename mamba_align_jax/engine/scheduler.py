"""Which requests run next and on what: continuous batching, chunked prefill, preemption. No JAX in here."""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from mamba_align_jax.cache.hybrid import Allocation, HybridCache, HybridHit
from mamba_align_jax.engine.drafting.prompt_lookup import UNKNOWN, Drafter
from mamba_align_jax.engine.request import Request
from mamba_align_jax.engine.waiting import WaitingQueue, by_rank


@dataclass
class Row:
    """`num_tokens` tokens of one request from `start` on, the last of them `drafts` if there are any.

    While a step with drafts is unread, `start` is the earliest position that the device may be at. `enters`: its slot is
    seeded in this step. `slot` and `admission` say whom a result is for that comes late. `published` is the boundary that it
    offered to the cache, in tokens; 0 for none.
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

    @property
    def certain(self) -> int:
        """Tokens that no rejection takes back."""
        return self.num_tokens - len(self.drafts)

    @property
    def samples(self) -> bool:
        """Whether a token is sampled behind the row's last one."""
        return not self.is_prefilling or self.start + self.num_tokens == self.request.prefill_end

    @property
    def is_current(self) -> bool:
        """Whether the request is still what it was when the row was planned: neither gone nor in for another time."""
        return (self.slot, self.admission) == (self.request.slot, self.request.num_admissions)

    @property
    def tokens(self) -> list[int]:
        """What it runs, before the step is dispatched: `UNKNOWN` where only the device knows."""
        known = self.request.tokens[self.start : self.start + self.certain]
        return [*known, *[UNKNOWN] * (self.certain - len(known)), *self.drafts]


@dataclass
class Plan:
    """One step's rows. `is_short`: rows were left out because blocks ran out while results were still to come."""

    decode: list[Row] = field(default_factory=list)
    prefill: list[Row] = field(default_factory=list)
    is_short: bool = False

    @property
    def rows(self) -> list[Row]:
        """All rows, decode first."""
        return self.decode + self.prefill


class Scheduler:
    """By priority, then first come, first served. Running requests decode every step; prompt chunks fill the token budget.

    Steps may be planned while results of earlier ones are unread: what they add to a request is then known within bounds,
    `Request.least` and `Request.most`.

    Decode rows verify as many drafts as the request has use and the pools have room for: those of the drafter, or, without
    one, as many as the device may have guessed. When blocks run out and no result is to come the youngest of the least
    important running requests is preempted: it gives everything back, waits in its old place in the queue, and resumes from
    what is still cached. Nobody enters before one who waits ahead of it, nor while somebody who runs waits for blocks, so
    that within a priority nobody waits for ever.
    """

    def __init__(
        self,
        cache: HybridCache,
        max_num_seqs: int,
        max_prefill_rows: int,
        max_num_batched_tokens: int,
        drafter: Drafter | None = None,
        num_speculative_tokens: int = 0,
        max_waiting: int | None = None,
    ) -> None:
        self.cache = cache
        self.max_prefill_rows = max_prefill_rows
        self.max_num_batched_tokens = max_num_batched_tokens
        self.drafter = drafter
        self.num_speculative_tokens = num_speculative_tokens
        self.waiting = WaitingQueue(max_waiting)
        # By rank too: rows are planned from the front on, and whoever gives way is the last.
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            QueueFullError: as many wait as may; nothing is changed.
        """
        self.waiting.add(request)
        request.checkpoint_at = self.cache.requested_offsets(request.params.checkpoint_at, len(request.prompt))

    def schedule(self, *, settled: bool = True) -> Plan:
        """Plans one step and allocates for it; an empty plan means that nothing can run before a result is read.

        Args:
            settled: Whether every result is read. If not, nobody is preempted: what is missing may be about to come.
        """
        while True:
            plan = Plan()
            self._plan_decode(plan, settled)
            self._plan_prefill(plan)
            if plan.rows or not self.running or not settled:
                return plan
            # Prompts that wait for each other's blocks: the last gives way.
            self._preempt(self.running[-1])

    def dispatched(self, plan: Plan) -> None:
        """The plan's step is on its way: columns that no later step reads may go, and what prompts fill is published."""
        for row in plan.rows:
            tokens = row.request.tokens[: row.start + row.num_tokens] if row.is_prefilling else None
            row.published = self.cache.dispatched(row.request.id, tokens)

    def finished(self, row: Row, tokens: Sequence[int]) -> None:
        """Takes in what a row of the oldest unread step came to: accepted drafts first, nothing behind a stop.

        Rows that are no longer current came to nothing.
        """
        request = row.request
        row.start = request.num_computed
        request.append(*tokens)
        # The last sampled token has no state yet; drafts have one only as far as they are among the others.
        request.num_computed += row.certain + max(len(tokens) - 1, 0)
        request.num_ahead -= row.certain
        request.num_unsure -= len(row.drafts)
        row.published = self.cache.commit(request.id, request.tokens, request.num_computed) or row.published

    def remove(self, request: Request) -> None:
        """A request finished or was aborted: frees exactly its blocks."""
        if self.drafter:
            self.drafter.forget(request.id)
        if request in self.running:
            self._leave(request)
        else:
            self.waiting.remove(request)
        self.cache.forget(request.id)

    def _leave(self, request: Request) -> None:
        self.cache.free(request.id)
        self.running.remove(request)
        self._free_slots.append(request.slot)
        request.slot, request.num_ahead, request.num_unsure = -1, 0, 0

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        request.num_computed, request.prefill_end = 0, len(request.tokens)
        self.waiting.put_back(request)
        self.num_preemptions += 1

    def _plan_decode(self, plan: Plan, settled: bool) -> None:
        for request in list(self.running):
            # A step samples one token more than it accepts. As max_tokens is within max_model_len, so are the drafts.
            room = len(request.prompt) + request.params.max_tokens - request.most - 1
            if request.is_prefilling or room < 1:
                continue
            drafts = self._drafts(request, room - 1)
            while (row := self._verify_row(request, drafts)) is None:
                # A guess is no reason to take anything away from anybody.
                if drafts:
                    drafts.pop()
                    continue
                if not settled:
                    plan.is_short = True
                    break
                # Rows are planned by rank, so the last is not in the plan unless it is this one.
                victim = self.running[-1]
                self._preempt(victim)
                if victim is request:
                    break
            if row is not None:
                plan.decode.append(row)

    def _verify_row(self, request: Request, drafts: list[int]) -> Row | None:
        count = 1 + len(drafts)
        allocation = self.cache.allocate(request.id, request.least, request.most, count, len(drafts))
        if allocation is None:
            return None
        return self._row(Row(request, request.least, count, False, allocation, drafts=tuple(drafts)))

    def _row(self, row: Row) -> Row:
        row.slot, row.admission = row.request.slot, row.request.num_admissions
        row.request.num_ahead += row.certain
        row.request.num_unsure += len(row.drafts)
        return row

    def _drafts(self, request: Request, room: int) -> list[int]:
        own = request.params.num_speculative_tokens
        most = min(self.num_speculative_tokens if own is None else own, room)
        if most < 1:
            return []
        return self.drafter.draft(request.id, request.tokens, most)[:most] if self.drafter else [UNKNOWN] * most

    def _plan_prefill(self, plan: Plan) -> None:
        budget, blocked = self.max_num_batched_tokens, plan.is_short
        for request in self.running:
            if request.is_prefilling:
                used = self._plan_chunk(plan, request, budget, None)
                budget -= used or 0
                blocked |= used is None
        # Whoever enters holds blocks: those that a running request waits for are not for others.
        while self.waiting and self._free_slots and not blocked:
            request = self.waiting.first
            hit = self.cache.lookup(request.tokens, request.params.cache_salt.encode(), request.chain)
            request.num_computed, request.chain = hit.length, hit.state.chain
            if request.num_admissions == 0:
                # What a request keeps is settled when it first enters: a preemption doesn't change it.
                request.num_cached, request.cache_miss = hit.length, hit.miss
                request.keep = self.cache.checkpoints(len(request.prompt), request.checkpoint_at, hit.junction)
            used = self._plan_chunk(plan, request, budget, hit)
            if not used:
                # A request that can't run now waits, and keeps its place: nobody overtakes.
                request.num_computed = 0
                return
            budget -= used
            self.waiting.remove(request)
            insort(self.running, request, key=by_rank)

    def _plan_chunk(self, plan: Plan, request: Request, budget: int, hit: HybridHit | None) -> int | None:
        """Adds a row if the budget and the pools allow; returns its tokens, None if it is the pools that don't."""
        if budget <= 0 or len(plan.prefill) == self.max_prefill_rows:
            return 0
        start = request.least
        stops = request.keep.stops(start) if request.keep else ()
        end = self.cache.chunk_end(start, budget, self.max_num_batched_tokens, request.prefill_end, stops)
        if end == 0:
            return 0
        allocation = self.cache.allocate(request.id, start, start, end - start, hit=hit, keep=request.keep)
        if allocation is None:
            return None
        if hit is not None:
            request.slot = self._free_slots.pop()
            request.num_admissions += 1
        plan.prefill.append(self._row(Row(request, start, end - start, True, allocation, enters=hit is not None)))
        return end - start
