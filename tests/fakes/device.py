"""A device without arrays, which records the tokens that each block stands for, and a loop that serves requests on it."""

from collections import deque

import numpy as np
import pytest
from fakes.foresight import Foresight, in_turn, one_by_one

from mamba_align_jax.cache.hashing import HashChain
from mamba_align_jax.cache.hybrid import HybridCache
from mamba_align_jax.cache.kv_pages import KVPageManager
from mamba_align_jax.cache.state_blocks import StateBlockManager
from mamba_align_jax.engine.config import SamplingParams
from mamba_align_jax.engine.drafting import UNKNOWN
from mamba_align_jax.engine.scheduling.request import Request
from mamba_align_jax.engine.scheduling.scheduler import Scheduler
from mamba_align_jax.engine.scheduling.waiting import WaitingQueue
from mamba_align_jax.errors import QueueFullError

BLOCK, PAGE, SEQS, VOCAB = 8, 4, 3, 1000


def make(
    num_blocks=40,
    num_pages=60,
    mode="align",
    budget=16,
    prefill_rows=2,
    drafter=None,
    K=0,
    interval=None,
    steps_in_flight=0,
    queue=None,
    granularity=BLOCK,
):
    """A scheduler over caches that check themselves. `queue` is the most requests that may wait."""
    states = StateBlockManager(
        num_blocks, BLOCK, K, mode=mode, steps_in_flight=steps_in_flight, granularity=granularity
    )
    cache = HybridCache(states, KVPageManager(num_pages, PAGE), checkpoint_interval=interval, check=True)
    return Scheduler(cache, SEQS, prefill_rows, budget, drafter, K, WaitingQueue(queue))


def kept(scheduler, tokens):
    """The boundaries of `tokens` whose states the cache finds."""
    find, chain = scheduler.cache.states.pool.find, HashChain(PAGE)
    return [end for end in range(BLOCK, len(tokens) + 1, BLOCK) if find(chain.at(tokens, end)) is not None]


def next_token(tokens):
    """The token that the device samples after `tokens`."""
    return (sum(tokens) * 31 + len(tokens)) % VOCAB


def foresight(pairs):
    """A drafter of the device's tokens; `pairs` of (drafts, right drafts) are used in turn."""
    return Foresight(one_by_one(next_token), in_turn(pairs), VOCAB)


class Device:
    """Records the tokens that each state block and page stands for, and checks what each row reads.

    It knows the tokens that it has sampled. Where a row's drafts are UNKNOWN it drafts by itself, as `plan` says.

    Args:
        mode: "align", "all" or "none".
        max_blocks: the most state blocks that a row may be given.
        plan: pairs of (drafts, right drafts), used in turn.
    """

    def __init__(self, mode, max_blocks=99, plan=((0, 0),)):
        self.max_blocks, self.drafter = max_blocks, foresight(plan)
        self.mode, self.column = mode, (lambda end: 0) if mode == "none" else (lambda end: (end - 1) // BLOCK)
        self.rows, self.states, self.pages, self.entered = {}, {}, {}, []
        # By slot: its tokens, how many of them are computed, and the column of its live state.
        self.tokens, self.computed, self.live = {}, {}, {}

    def run(self, plan):
        slots = [row.request.slot for row in plan.rows]
        assert len(set(slots)) == len(slots)
        return [(row, self.run_row(row, row.request.slot)) for row in plan.rows]

    def run_row(self, row, slot):
        if row.enters:
            self.rows[slot] = {}, {}
            self.tokens[slot], self.computed[slot] = list(row.request.tokens), row.start
            self.live[slot] = self.column(row.start)
            self.entered.append(row.request.id)
        columns, pages = self.rows[slot]
        assert len(row.allocation.columns) <= self.max_blocks, "the runner has no room for more"
        columns.update(row.allocation.columns)
        pages.update(row.allocation.pages)
        if row.allocation.load:
            source, own = row.allocation.load
            self.states[own] = self.states[source]
        known, start = self.tokens[slot], self.computed[slot]
        assert row.start <= start
        drafts, count = list(row.drafts), len(row.drafts)
        if UNKNOWN in drafts:
            # The row has `count` drafts. Those that the drafter does not propose run as well.
            drafts = self.drafter.drafts_after(known, count)
            count, drafts = len(drafts), drafts + [1234] * (len(row.drafts) - len(drafts))
        known_to_host = [t for t in row.tokens[: row.certain] if t != UNKNOWN]
        assert known_to_host == known[row.start : row.start + len(known_to_host)]
        end, tokens = start + row.num_tokens, (*known, *drafts)
        if start:
            assert self.states[columns[self.live[slot]]] == tokens[:start]
        for position in range(start):
            assert self.pages[pages[position // PAGE]][position % PAGE] == tokens[: position + 1]
        for position in range(start, end):
            self.pages.setdefault(pages[position // PAGE], {})[position % PAGE] = tokens[: position + 1]
        if self.mode == "all" and row.is_prefilling:
            for boundary in range((start // BLOCK + 1) * BLOCK, end, BLOCK):
                self.states[columns[self.column(boundary)]] = tokens[:boundary]
        if row.allocation.save:
            assert row.is_prefilling
            assert row.allocation.save[0] == columns[self.column(end)]
            self.states[row.allocation.save[1]] = tokens[:end]
        if not row.samples:
            self.states[columns[self.column(end)]] = tokens[:end]
            self.live[slot], self.computed[slot] = self.column(end), end
            return []
        # Each token leaves a state in a column of its own. The last accepted one is live, and a passed boundary is saved.
        certain, sampled = end - len(drafts), [next_token(known)]
        assert certain == len(known)
        while len(sampled) <= count and sampled[-1] == drafts[len(sampled) - 1]:
            sampled.append(next_token([*known, *sampled]))
        for n in range(1 + len(drafts)):
            self.states[columns[self.column(end) + n]] = tokens[: certain + n]
        computed = certain + len(sampled) - 1
        self.live[slot] = self.column(end) + len(sampled) - 1
        boundary = computed // BLOCK * BLOCK
        if boundary >= certain and self.mode != "none":
            self.states[columns[self.column(boundary)]] = tokens[:boundary]
            if self.column(boundary) == self.column(end):
                self.live[slot] = self.column(end)
        self.tokens[slot], self.computed[slot] = [*known, *sampled], computed
        return sampled


def assert_order(rank, before, plan, scheduler):
    """Checks the order of requests.

    The queue is sorted by rank, admitted requests rank before waiting ones, and preempted ones after running ones.
    """
    waits = [rank[r.id] for r in scheduler.waiting]
    assert waits == sorted(waits)
    admitted = [rank[row.request.id] for row in plan.rows if row.enters]
    assert max(admitted, default=(-np.inf,)) < min(waits, default=(np.inf,))
    preempted = [rank[r.id] for r in before if r in scheduler.waiting]
    assert max((rank[r.id] for r in scheduler.running), default=(-np.inf,)) < min(preempted, default=(np.inf,))


def serve(
    scheduler,
    requests,
    arrivals=None,
    aborts=(),
    device=None,
    between=lambda step: None,
    steps_in_flight=0,
    plan=((0, 0),),
    heard=lambda row, tokens, gone: None,
    tenants=False,
):
    """Serves requests to their end, checks the scheduler at every step, and returns their ids in the order of finishing.

    Args:
        scheduler: from `make`.
        requests: from `request`.
        arrivals: the step at which each request is added; None for the first.
        aborts: pairs of (step, place in `requests`).
        device: None for a new one.
        between: called with the number of each step before it is planned.
        steps_in_flight: steps that are dispatched before the last one's tokens are read.
        plan: drafts of a new device.
        heard: called with a row, its tokens and whether they came too late, when they are read.
        tenants: whether requests have several tenants, which do not run in the order of their arrival.
    """
    states = scheduler.cache.states
    inside = -(-scheduler.max_num_batched_tokens // BLOCK) if states.mode == "all" else 0
    device, done, step = device or Device(states.mode, states.blocks_needed(steps_in_flight) + inside, plan), [], 0
    arrivals = arrivals or [0] * len(requests)
    waiting = sorted(zip(arrivals, range(len(requests)), strict=True))
    gone, in_flight = set(), deque()
    limit = scheduler.waiting.overtaking_limit
    place = lambda priority, arrival: (priority, arrival) if limit is None else (arrival + limit * priority, priority)
    rank = {r.id: place(r.params.priority, n) for n, r in enumerate(scheduler.waiting)}
    while waiting or scheduler.waiting or scheduler.running:
        between(step)
        while waiting and waiting[0][0] <= step:
            request = requests[waiting[0][1]]
            full = sum(r.num_admissions == 0 for r in scheduler.waiting) == scheduler.waiting.limit
            if full:
                before = list(scheduler.waiting)
                with pytest.raises(QueueFullError, match=f"max_waiting = {scheduler.waiting.limit} requests wait"):
                    scheduler.add(request)
                assert list(scheduler.waiting) == before
                break
            scheduler.add(request)
            waiting.pop(0)
            rank[request.id] = place(request.params.priority, len(rank))
        for at, number in aborts:
            request = requests[number]
            if at == step and number not in gone and (request in scheduler.waiting or request in scheduler.running):
                scheduler.remove(request)
                gone.add(number)
        preemptions, before = scheduler.counters["preemptions"], list(scheduler.running)
        plan = scheduler.schedule(settled=not in_flight)
        assert not in_flight or scheduler.counters["preemptions"] == preemptions, "an unread result may free blocks"
        if not tenants:
            assert_order(rank, before, plan, scheduler)
        assert sum(row.num_tokens for row in plan.prefill) <= scheduler.max_num_batched_tokens
        assert len(plan.prefill) <= scheduler.max_prefill_rows
        if plan.rows:
            in_flight.append(device.run(plan))
            scheduler.dispatched(plan)
        unread = steps_in_flight if plan.rows and not plan.is_short else 0
        while len(in_flight) > unread:
            for row, tokens in in_flight.popleft():
                late = not row.is_current
                if not late:
                    row.request.is_counted = True
                    scheduler.finished(row, tokens)
                    if len(row.request.generated) == row.request.params.max_tokens:
                        scheduler.remove(row.request)
                        done.append(row.request.id)
                heard(row, tokens, late)
        scheduler.cache.check()
        step += 1
        assert step < 3000, "no progress"
    assert scheduler.cache.states.pool.num_held == scheduler.cache.kv.pool.num_held == 0
    return done


def request(number, prompt, max_tokens=6, K=None, **params):
    return Request(number, tuple(prompt), SamplingParams(max_tokens=max_tokens, num_speculative_tokens=K, **params))


def assert_complete(requests):
    for r in requests:
        tokens = list(r.prompt)
        for _ in range(r.params.max_tokens):
            tokens.append(next_token(tokens))
        assert r.tokens == tokens
