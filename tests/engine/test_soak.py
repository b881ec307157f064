"""Whole workloads through the engine: every token is right and every block is returned.

There is a small soak, and a search by hypothesis over workloads, budgets, room in the pools and drafts.
"""

import dataclasses
import functools
import itertools
from dataclasses import dataclass
from pathlib import Path

import depth
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import soak
from fakes.engines import launch_ahead, load_two_layers, poison
from fakes.foresight import Foresight, in_turn, one_by_one
from fakes.speller import VOCAB, Speller, next_token
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.cache.hashing import HashChain
from mamba_align_jax.cache.hybrid import HybridCache
from mamba_align_jax.data import BYTE_MODEL
from mamba_align_jax.engine.drafting.prompt_lookup import PromptLookupDrafter
from mamba_align_jax.engine.scheduling.waiting import WaitingQueue
from mamba_align_jax.engine.tenants import Lines

pytestmark = pytest.mark.usefixtures("one_program")
# Budgets and the room in the pools are drawn without changing what is compiled, so that there are few programs.
SIZES = dict(max_num_seqs=4, max_num_batched_tokens=48, max_model_len=64, prompt_lookup_min=1)
PAGES, LONGEST_ANSWER = 36, 12
CONFIGS = {
    "copy_free": dict(block_size=8, kv_page_size=4, num_speculative_tokens=3, num_state_blocks=25),
    "pre_copy, asynchronous": dict(
        block_size=16, kv_page_size=4, num_state_blocks=20, policy="pre_copy", async_stepping=True
    ),
    "windows as wide as blocks, asynchronous": dict(
        block_size=8, kv_page_size=8, num_speculative_tokens=7, num_state_blocks=38, checked=True, async_stepping=True
    ),
    "deferred": dict(
        block_size=8, kv_page_size=4, num_speculative_tokens=3, num_state_blocks=25, policy="deferred", fold_length=8
    ),
    "deferred, every boundary, asynchronous": dict(
        prefix_cache="all",
        block_size=16,
        kv_page_size=4,
        num_speculative_tokens=3,
        num_state_blocks=34,
        policy="deferred",
        fold_length=8,
        checked=True,
        async_stepping=True,
    ),
    "every boundary, asynchronous": dict(
        prefix_cache="all",
        block_size=8,
        kv_page_size=4,
        num_speculative_tokens=3,
        num_state_blocks=34,
        checked=True,
        async_stepping=True,
    ),
}
MODEL = dict(block_size=16, kv_page_size=8, num_speculative_tokens=3, num_state_blocks=33)
SPELLER = Speller(soak.STUTTER, adds=True)


def configured(**options):
    return EngineConfig(**SIZES, num_kv_pages=PAGES, **options)


def soaked(count, seed=0):
    """Runs a small soak; returns its engine and what `soak.soak` returns."""
    config = configured(**CONFIGS["copy_free"], max_waiting=2)
    engine = Engine(SPELLER, config)
    poison(engine)
    books = np.random.default_rng(seed).integers(0, VOCAB, (4, 200)).tolist()
    return engine, soak.soak(engine, soak.SoakTraffic(seed, books, config, levels=True), soak.Exactly(), count)


def test_small_soak():
    engine, (wrong, done, ties, leaked, aborted, refused) = soaked(250, seed=1)
    assert (wrong, done, ties, leaked) == ([], 250, 0, 0)
    stats = engine.stats
    assert min(aborted, refused, stats.preemptions, stats.evicted_state_blocks, stats.cached_tokens) > 10
    assert all(
        0 < accepted < drafts for accepted, drafts in zip(stats.accepted_tokens, stats.draft_tokens, strict=True)
    )


def wrapped(monkeypatch, owner, name, instead):
    """Replaces a method of `owner` by `instead(method, *arguments)`."""
    method = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **options: instead(method, *args, **options))


def release_at_commit(commit, cache, request, *args):
    commit(cache, request, *args)
    cache.states.release(request)


def shift_columns(allocate, *args, **options):
    given = allocate(*args, **options)
    if given is None or len(given.columns) < 2:
        return given
    columns, blocks = zip(*given.columns, strict=True)
    return dataclasses.replace(given, columns=list(zip(columns, blocks[1:] + blocks[:1], strict=True)))


def leave_out(every):
    """Leaves out every `every`-th call."""
    turn = itertools.count(1)
    return lambda method, *args: None if next(turn) % every == 0 else method(*args)


def last_come_first(add, lines, tenant, item):
    add(lines, tenant, item)
    lines._lines[tenant] = {item.id: item, **lines._lines[tenant]}


def ignore_priority(add, queue, request):
    request.params = dataclasses.replace(request.params, priority=0)
    add(queue, request)


def lose_place(put_back, queue, request):
    request.rank = request.params.priority, next(queue._arrivals), 0
    put_back(queue, request)


def count_preempted(put_back, queue, request):
    put_back(queue, request)
    queue._returned.clear()


BUGS = {
    "a column is released before the step that reads it is dispatched": (HybridCache, "commit", release_at_commit),
    "blocks are in the wrong columns": (HybridCache, "allocate", shift_columns),
    "requests with different salts share blocks": (
        HashChain,
        "__init__",
        lambda make, chain, size, salt=b"", memo=None: make(chain, size, memo=memo),
    ),
    "some requests return no blocks": (HybridCache, "free", leave_out(90)),
    "names of finished requests are kept": (HybridCache, "forget", leave_out(1)),
    "tokens of finished requests stay in the drafter": (PromptLookupDrafter, "forget", leave_out(10)),
    "the last request comes first": (Lines, "add", last_come_first),
    "priorities are ignored": (WaitingQueue, "add", ignore_priority),
    "a preempted request loses its place in the queue": (WaitingQueue, "put_back", lose_place),
    "a preempted request counts against max_waiting": (WaitingQueue, "put_back", count_preempted),
}


@pytest.mark.parametrize("bug", BUGS)
def test_soak_finds_bug(bug, monkeypatch):
    wrapped(monkeypatch, *BUGS[bug])
    soaks = (soaked(100, seed)[1] for seed in range(8))
    assert any(wrong or leaked for wrong, _, _, leaked, *_ in soaks)


@dataclass(frozen=True)
class Ask:
    """A request that is added `wait` steps after the last one.

    Attributes:
        wait: Steps before it is added.
        earlier: Which earlier request it shares tokens with.
        shared: How many of that request's tokens (prompt and answer) it begins with.
        fresh: How many tokens of its own follow.
        params: Its parameters.
        ends: After how many steps it is aborted; None for never.
        resets: Whether the prefix cache is reset before it is added.
        poisons: Whether free blocks are overwritten before it is added.
    """

    wait: int
    earlier: int
    shared: int
    fresh: int
    params: SamplingParams
    ends: int | None
    resets: bool
    poisons: bool


def asks(config, vocab, min_budget=3):
    """A strategy of workloads: requests, and what else decides how they run (budget, room in the pools, drafts)."""
    size, K = config.block_size, config.num_speculative_tokens
    edge = st.sampled_from([0, 1, size - 1, size, size + 1, 2 * size, 2 * size + 1, 3 * size])
    often = lambda usual, other: st.one_of(st.just(usual), st.just(usual), other)
    params = st.builds(
        SamplingParams,
        max_tokens=st.integers(1, LONGEST_ANSWER),
        temperature=often(0.0, st.floats(0.5, 2)),
        top_k=st.sampled_from([0, 1, 5]),
        seed=st.integers(0, 3),
        stop_token_ids=often((), st.tuples(st.integers(0, vocab - 1))),
        ignore_eos=st.just(True),
        cache_salt=often("", st.just("another")),
        checkpoint_at=often((), st.lists(st.integers(0, config.max_model_len), max_size=2)),
        num_speculative_tokens=often(None, st.integers(0, K)),
        priority=often(0, st.integers(-1, 1)),
    )
    ask = st.builds(
        Ask,
        wait=st.integers(0, 6),
        earlier=st.integers(0, 7),
        shared=st.one_of(edge, st.just(config.max_model_len)),
        fresh=st.one_of(edge, st.integers(1, 20)),
        params=params,
        ends=often(None, st.integers(0, 8)),
        resets=st.sampled_from([False] * 9 + [True]),
        poisons=st.booleans(),
    )
    return st.fixed_dictionaries(
        dict(
            requests=st.lists(ask, min_size=1, max_size=8),
            budget=st.sampled_from([min_budget, size - 1, size, size + 1, 2 * size + 5, config.max_num_batched_tokens]),
            room=st.tuples(st.sampled_from([0, 0, 2, 100]), st.sampled_from([0, 0, 8, 100])),
            drafts=st.lists(st.tuples(st.integers(0, K), st.integers(0, K)), min_size=1, max_size=6),
            prompt_lookup=st.booleans(),
        )
    )


def foresight(plan):
    """A drafter of the speller's tokens; `plan` has pairs of (drafts, right drafts)."""
    return Foresight(one_by_one(functools.partial(next_token, stutter=soak.STUTTER, adds=True)), in_turn(plan), VOCAB)


def crowd(engine, states, pages):
    """Takes blocks and pages until one request and so many more fit; returns the names that hold them."""
    cache, config = engine.cache, engine.config
    size = cache.kv.page_size
    max_blocks = engine.align.blocks_per_request(engine.steps_in_flight, max_chunk=config.max_num_batched_tokens)
    # A request that holds a block holds a page.
    pages = max(cache.kv.pool.num_available - cache.kv.pages_for(config.max_model_len) - pages, 0)
    states = min(max(cache.states.pool.num_available - max_blocks - states, 0), pages)
    names = [("elsewhere", n) for n in range(states)]
    for n, name in enumerate(names):
        tokens = 1 if n else size * (pages - states + 1)
        assert cache.allocate(name, 0, 0, tokens) is not None
    return names


@functools.partial(jax.jit, donate_argnums=0)
def overwrite(arrays, dead):
    return jax.tree.map(
        lambda x: jnp.where(dead.reshape(1, -1, *[1] * (x.ndim - 2)), jnp.asarray(jnp.nan, x.dtype), x), arrays
    )


def poison_free(engine):
    """Overwrites the blocks that are neither held nor cached."""
    state, arrays = engine.runner.device_state, []
    for old, pool in ((state.pool.states, engine.cache.states.pool), (state.kv, engine.cache.kv.pool)):
        dead = np.zeros(pool.num_blocks, bool)
        dead[[0, *pool._free]] = True
        arrays.append(overwrite(old, jnp.asarray(dead)))
    states, kv = arrays
    engine.runner.device_state = dataclasses.replace(state, pool=dataclasses.replace(state.pool, states=states), kv=kv)


def run(engine, drawn, vocab, judge):
    """Serves a drawn workload; every token is right and everything is returned."""
    watch, served, known, aborts = soak.Watch(engine), [], [], {}
    engine.scheduler.max_num_batched_tokens = drawn["budget"]
    elsewhere = crowd(engine, *drawn["room"])

    def steps(count):
        for _ in range(count):
            for number in [number for number, left in aborts.items() if left == 0]:
                served.extend(watch.abort(number))
            for number in aborts:
                aborts[number] -= 1
            served.extend(watch.step())

    for n, ask in enumerate(drawn["requests"]):
        steps(ask.wait)
        if ask.resets:
            engine.reset_prefix_cache()
        if ask.poisons:
            poison_free(engine)
        earlier = known[ask.earlier % n] if n else ((), None)
        came = next((output.token_ids for _, output in served if output.request_id == earlier[1]), ())
        fresh = np.random.default_rng(n).integers(0, vocab, ask.fresh).tolist()
        prompt = [*[*earlier[0], *came][: ask.shared], *fresh][: engine.config.max_model_len - ask.params.max_tokens]
        prompt = prompt or [1]
        number = watch.add(prompt, ask.params)
        known.append((prompt, number))
        if ask.ends is not None:
            aborts[number] = ask.ends
    for _ in range(1000):
        if not watch.live:
            break
        steps(1)
    assert not watch.live, f"unfinished after 1000 steps: {watch.live}"
    for name in elsewhere:
        engine.cache.free(name)
        engine.cache.forget(name)
    watch.rest()
    wrong, ties = judge(served)
    assert len(served) == len(drawn["requests"])
    assert (wrong, watch.wrong, watch.leaked, engine.stats.null_reads) == ([], [], 0, 0)
    assert ties <= 1, "ties are rare"
    return served


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_any_workload_of_the_speller_is_right(name, ahead, monkeypatch):
    """Also where steps are launched ahead, as those of a split model are. A checker would wait for each launch."""
    config = configured(**CONFIGS[name] | (dict(async_stepping=True, checked=False) if ahead else {}))
    if ahead:
        launch_ahead(monkeypatch)

    @settings(max_examples=depth.examples(quick=5, full=40), deadline=None)
    @given(drawn=asks(config, VOCAB))
    def matrix(drawn):
        drafter = None if config.async_stepping or drawn["prompt_lookup"] else foresight(drawn["drafts"])
        engine = Engine(SPELLER, config, drafter=drafter)
        poison(engine)
        run(engine, drawn, VOCAB, soak.Exactly())

    matrix()


@pytest.mark.deep
@pytest.mark.parametrize("name", ["bundled", "tiny"])
def test_any_workload_is_right_by_the_reference(name):
    """Random prompts repeat nothing, but their answers do, so that prompt lookup guesses some of their tokens."""
    path = BYTE_MODEL if name == "bundled" else Path(__file__).parents[1] / "data" / "qwen3_5_text"
    model = load_two_layers(path)
    config = configured(**MODEL, async_stepping=name == "bundled")
    judge = soak.ByReference(model)

    @settings(max_examples=depth.examples(quick=4, full=12), deadline=None)
    @given(drawn=asks(config, 256, min_budget=10))
    def matrix(drawn):
        engine = Engine(model, config)
        poison(engine)
        run(engine, drawn, 256, judge)

    matrix()
