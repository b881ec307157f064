"""An engine without a model, whose scheduler and cache are real: it counts what a load would hit, in little time."""

import itertools
import time

from mamba_align_jax.cache.hybrid import HybridCache
from mamba_align_jax.cache.kv_pages import KVPageManager
from mamba_align_jax.cache.state_blocks import StateBlockManager
from mamba_align_jax.engine.scheduling.request import Request
from mamba_align_jax.engine.scheduling.scheduler import Scheduler


class CountingEngine:
    """Samples tokens that nothing depends on."""

    def __init__(self, *, mode, block_size, page_size, num_blocks, num_pages, rows, budget):
        states = StateBlockManager(num_blocks, block_size, mode=mode, granularity=page_size)
        self.cache = HybridCache(states, KVPageManager(num_pages, page_size))
        self.scheduler = Scheduler(self.cache, rows, 4, budget)
        self._ids, self._sampled = itertools.count(), itertools.count(10**6)

    def add_request(self, prompt, params):
        request = Request(next(self._ids), tuple(prompt), params, arrival=time.perf_counter())
        self.scheduler.add(request)
        return request.id

    def step(self):
        plan, done = self.scheduler.schedule(), []
        self.scheduler.dispatched(plan)
        for row in plan.rows:
            request = row.request
            request.is_counted = True
            self.scheduler.finished(row, [next(self._sampled)] if row.samples else [])
            if request.num_left == 0:
                self.scheduler.remove(request)
                done.append(request.output("length"))
        return done
