"""A hybrid cache with a log of events, and what a mirror of it must hold."""

from fakes.cache_machine import BLOCK, PAGE, K

from mamba_align_jax.cache.events import (
    CacheLog,
    block_hash,
)
from mamba_align_jax.cache.hybrid import HybridCache
from mamba_align_jax.cache.kv_pages import KVPageManager
from mamba_align_jax.cache.state_blocks import StateBlockManager


def make(num_blocks=12, num_pages=34, **options):
    log = CacheLog()
    states = StateBlockManager(num_blocks, BLOCK, K)
    return HybridCache(states, KVPageManager(num_pages, PAGE), check=True, log=log, **options), log


def taken(log):
    events, log.pending = log.pending, []
    return events


def assert_mirrors(mirror, cache):
    assert mirror.pages == set(map(block_hash, cache.kv.pool.keys))
    assert mirror.states.keys() == set(map(block_hash, cache.states.pool.keys))


def run_prompt(cache, name, tokens, salt=b""):
    hit = cache.lookup(tokens, salt)
    start = hit.length
    keep = cache.checkpoints(len(tokens), (), hit.junction)
    while start < len(tokens):
        end = cache.chunk_end(start, 99, 99, len(tokens), keep.stops(start))
        assert cache.allocate(name, start, start, end - start, hit=hit, keep=keep) is not None
        cache.dispatched(name, tokens[:end])
        cache.commit(name, tokens[:end], end)
        start = end
    cache.free(name)
    cache.forget(name)
