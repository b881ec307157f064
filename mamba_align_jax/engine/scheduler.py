"""Which requests run next and on what: continuous batching, chunked prefill, preemption. No JAX in here."""

from collections import deque
from dataclasses import dataclass, field

from mamba_align_jax.cache.hybrid import Allocation, HybridCache, HybridHit, Published
from mamba_align_jax.engine.drafting import Drafter
from mamba_align_jax.engine.request import Request


@dataclass
class Row:
    """`num_tokens` tokens of one request from its computed position on, the last of them `drafts` if there are any.

    `enters`: its slot is seeded in this step.
    """

    request: Request
    start: int
    num_tokens: int
    is_prefilling: bool
    allocation: Allocation
    enters: bool = False
    drafts: tuple[int, ...] = ()

    @property
    def samples(self) -> bool:
        """Whether the row runs the request's last known token."""
        return self.start + self.num_tokens - len(self.drafts) == len(self.request.tokens)


@dataclass
class Plan:
    """One step's rows, and what its dispatch made findable."""

    decode: list[Row] = field(default_factory=list)
    prefill: list[Row] = field(default_factory=list)
    published: list[Published] = field(default_factory=list)

    @property
    def rows(self) -> list[Row]:
        """All rows, decode first."""
        return self.decode + self.prefill


class Scheduler:
    """First come, first served. Running requests decode every step; prompt chunks fill the rest of the token budget.

    With a drafter, decode rows verify as many drafts as the request has use and the pools have room for. When blocks run
    out the youngest running request is preempted: it gives everything back, waits at the head of the queue, and resumes
    from what is still cached.
    """

    def __init__(
        self,
        cache: HybridCache,
        max_num_seqs: int,
        max_prefill_rows: int,
        max_num_batched_tokens: int,
        drafter: Drafter | None = None,
        num_speculative_tokens: int = 0,
    ) -> None:
        self.cache = cache
        self.max_prefill_rows = max_prefill_rows
        self.max_num_batched_tokens = max_num_batched_tokens
        self.drafter = drafter
        self.num_speculative_tokens = num_speculative_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    def add(self, request: Request) -> None:
        """Queues a request."""
        request.checkpoint_at = self.cache.requested_offsets(request.params.checkpoint_at, len(request.prompt))
        self.waiting.append(request)

    def schedule(self) -> Plan:
        """Plans one step and allocates for it; an empty plan means that nothing is left to run."""
        while True:
            plan = Plan()
            self._plan_decode(plan)
            self._plan_prefill(plan)
            if plan.rows or not self.running:
                return plan
            # Prompts that wait for each other's blocks: the youngest gives way.
            self._preempt(self.running[-1])

    def dispatched(self, plan: Plan) -> None:
        """The plan's step is on its way: columns that no later step reads may go, and what prompts fill is published."""
        for row in plan.rows:
            tokens = row.request.tokens[: row.start + row.num_tokens] if row.is_prefilling else None
            plan.published.append(self.cache.dispatched(row.request.id, tokens))

    def withdraw(self, plan: Plan) -> None:
        """The plan's step raised: nobody finds what it published; who ran in it, or holds some of it, starts again."""
        lost = {row.request.id for row in plan.rows}.union(*map(self.cache.withdraw, plan.published))
        for row in plan.rows:
            row.request.num_admissions -= row.enters
        for request in self.running[::-1]:
            if request.id in lost:
                self._requeue(request)

    def finished(self, plan: Plan, sampled: dict[int, list[int]]) -> None:
        """Takes in a step's result: `sampled` maps request ids to tokens, accepted drafts first, none behind a stop."""
        for row in plan.rows:
            request, tokens = row.request, sampled[row.request.id] if row.samples else []
            for token in tokens:
                request.append(token)
            # The last sampled token has no state yet; drafts have one only as far as they are among the others.
            request.num_computed += row.num_tokens - len(row.drafts) + max(len(tokens) - 1, 0)
            self.cache.commit(request.id, request.tokens[: request.num_computed])

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
        request.slot = -1

    def _preempt(self, request: Request) -> None:
        self._requeue(request)
        self.num_preemptions += 1

    def _requeue(self, request: Request) -> None:
        self._leave(request)
        request.num_computed, request.prefill_end = 0, len(request.tokens)
        self.waiting.appendleft(request)

    def _plan_decode(self, plan: Plan) -> None:
        for request in list(self.running):
            if request.is_prefilling:
                continue
            start, drafts = request.num_computed, self._drafts(request)
            while (row := self._verify_row(request, start, drafts)) is None:
                # A guess is no reason to take anything away from anybody.
                if drafts:
                    drafts.pop()
                    continue
                # Rows are planned from the oldest on, so the youngest is not in the plan unless it is this one.
                victim = self.running[-1]
                self._preempt(victim)
                if victim is request:
                    break
            if row is not None:
                plan.decode.append(row)

    def _verify_row(self, request: Request, start: int, drafts: list[int]) -> Row | None:
        count = 1 + len(drafts)
        allocation = self.cache.allocate(request.id, start, start, count, len(drafts))
        return None if allocation is None else Row(request, start, count, False, allocation, drafts=tuple(drafts))

    def _drafts(self, request: Request) -> list[int]:
        own = request.params.num_speculative_tokens
        # A step samples one token more than it accepts. As max_tokens is within max_model_len, so are the drafts.
        most = min(self.num_speculative_tokens if own is None else own, request.num_left - 1)
        return self.drafter.draft(request.id, request.tokens, most)[:most] if self.drafter and most > 0 else []

    def _plan_prefill(self, plan: Plan) -> None:
        budget = self.max_num_batched_tokens
        for request in self.running:
            if request.is_prefilling:
                budget -= self._plan_chunk(plan, request, budget, None)
        while self.waiting and self._free_slots:
            request = self.waiting[0]
            hit = self.cache.lookup(request.tokens, request.params.cache_salt.encode(), request.chain)
            request.num_computed, request.chain = hit.length, hit.state.chain
            if request.num_admissions == 0:
                # What a request keeps is settled when it first enters: a preemption doesn't change it.
                request.num_cached, request.cache_miss = hit.length, hit.miss
                request.keep = self.cache.checkpoints(len(request.prompt), request.checkpoint_at, hit.junction)
            used = self._plan_chunk(plan, request, budget, hit)
            if used == 0:
                # A request that can't run now waits, and keeps its place: nobody overtakes.
                request.num_computed = 0
                return
            budget -= used
            self.waiting.popleft()
            self.running.append(request)
            request.slot = self._free_slots.pop()
            request.num_admissions += 1

    def _plan_chunk(self, plan: Plan, request: Request, budget: int, hit: HybridHit | None) -> int:
        """Adds a row if the budget and the pools allow; returns its tokens."""
        if budget <= 0 or len(plan.prefill) == self.max_prefill_rows:
            return 0
        start = request.num_computed
        stops = request.keep.stops(start) if request.keep else ()
        end = self.cache.chunk_end(start, budget, self.max_num_batched_tokens, request.prefill_end, stops)
        if end == 0:
            return 0
        allocation = self.cache.allocate(request.id, start, start, end - start, hit=hit, keep=request.keep)
        if allocation is None:
            return 0
        plan.prefill.append(Row(request, start, end - start, True, allocation, enters=hit is not None))
        return end - start
