"""Whatever fails or is interrupted, an engine's cache events tell what is cached, and a listener that fails harms no one."""

import logging

import depth
import numpy as np
import pytest
from fakes.letters import Letters
from fakes.raising import PACKAGE, Calls, Interrupt
from fakes.reported_cache import assert_mirrors
from fakes.spelling_engine import DRAFTS, PARAMS, SIZES, SPELLER, assert_nothing_is_held

from mamba_align_jax import Engine, EngineConfig
from mamba_align_jax.cache.events import CacheCleared, CacheLog, PageRemoved, PageStored, StateRemoved, StateStored
from mamba_align_jax.cache.kv_pages import KVPageManager
from mamba_align_jax.engine.device.runner import StepRunner
from mamba_align_jax.routing import CacheMirror, StateRouter

pytestmark = pytest.mark.usefixtures("one_program")
STEPPING = {
    "sync": DRAFTS,
    "async": DRAFTS | dict(async_stepping=True),
    "all": dict(prefix_cache="all", num_state_blocks=20),
    "deferred": dict(policy="deferred", fold_length=8),
}


class Watched:
    """An engine with a mirror of its events, which is compared with its cache after every whole call."""

    def __init__(self, stepping="sync"):
        self.engine = Engine(SPELLER, EngineConfig(**SIZES | STEPPING[stepping]), tokenizer=Letters())
        self.mirror, self.kinds, self.cleared = CacheMirror(), set(), 0
        self.engine.on_cache_event(self.hear)
        self.calls = Calls(self.engine, np.random.default_rng(3))

    def hear(self, events):
        self.kinds |= set(map(type, events))
        self.cleared += events.count(CacheCleared())
        self.mirror.apply(events)

    def check(self):
        assert_mirrors(self.mirror, self.engine.cache)

    def call(self, *names):
        for name in names:
            getattr(self.calls, name)()
            self.check()

    def drain(self):
        while self.engine.has_unfinished:
            self.call(("step", "update")[self.calls.rng.integers(2)])
        self.calls.check()


@pytest.mark.parametrize("stepping", STEPPING)
def test_a_mirror_has_the_keys_of_the_cache_after_every_call(stepping):
    """Requests are preempted, aborted and evict what others have cached, and the cache is reset."""
    watched = Watched(stepping)
    for _ in range(depth.examples(3, 8)):
        watched.call(*["add"] * 4, *["step"] * 7, "abort", *["update"] * 3)
        watched.drain()
    assert watched.engine.stats.preemptions > 0
    assert watched.kinds == {CacheCleared, PageStored, PageRemoved, StateStored, StateRemoved}
    assert watched.cleared == 1, "nothing failed, so nothing is reported anew"
    watched.engine.reset_prefix_cache()
    watched.check()
    assert not watched.mirror.pages
    watched.call("generate")
    assert watched.mirror.states


def test_a_boundary_that_an_abort_folds_is_told_at_once():
    """Under "deferred" the end of a request writes the state of its last boundary. No step follows."""
    watched = Watched("deferred")
    request = watched.engine.add_request([3, 1, 4, 1, 5], PARAMS)
    while not watched.engine.cache.states.unfolded(request):
        watched.engine.step()
    before = len(watched.mirror.states)
    watched.engine.abort(request)
    assert len(watched.mirror.states) == before + 1
    watched.check()


@pytest.mark.parametrize("stepping", ["sync", "async"])
def test_an_interrupt_at_any_line_loses_no_event(stepping):
    watched, lines, rng = Watched(stepping), 300, np.random.default_rng(7)
    watched.call("generate")
    for _ in range(depth.examples(25, 250)):
        watched.call(*["add"] * rng.integers(1, 4), *["step"] * rng.integers(0, 9))
        with Interrupt(int(rng.integers(lines))) as interrupt:
            watched.calls.step()
        lines = max(lines if interrupt.place else interrupt.lines, 10)
        watched.check()
        watched.drain()
    assert watched.cleared > 1


@pytest.mark.parametrize("file", ["engine/running/cache_reports", "cache/events"])
def test_every_line_that_reports_may_be_interrupted(file):
    watched = Watched()
    for turn in range(0, 600, 1 if depth.is_full() else 7):
        watched.call("add", *["step"] * 2)
        with Interrupt(turn, f"{PACKAGE}/{file}.py") as interrupt:
            for _ in range(12):
                watched.calls.step()
        watched.check()
        watched.drain()
        if interrupt.place is None:
            break
    assert interrupt.place is None
    assert turn > 20


@pytest.mark.parametrize("call", [(KVPageManager, "publish"), (StepRunner, "read"), (CacheLog, "store_state")])
def test_a_failure_in_a_step_loses_no_event(call, monkeypatch):
    watched = Watched()
    watched.call("generate", "add", "add", "step")
    whole = getattr(*call)

    def fails(*arguments, **options):
        monkeypatch.undo()
        raise RuntimeError("out of luck")

    monkeypatch.setattr(*call, fails)
    while getattr(*call) is not whole:
        watched.engine.step()
        watched.check()
    while watched.engine.has_unfinished:
        watched.engine.step()
        watched.check()
    assert watched.cleared == 2
    assert_nothing_is_held(watched.engine)


def test_lost_pools_empty_the_mirror(monkeypatch):
    watched = Watched()
    watched.call("generate", "add", "step")
    monkeypatch.setattr(watched.engine.runner, "is_intact", lambda: False)
    with Interrupt(200):
        watched.engine.step()
    monkeypatch.undo()
    watched.check()
    assert not watched.mirror.pages
    watched.call("generate")
    assert watched.mirror.states


def test_a_listener_that_raises_hears_nothing_more_and_harms_no_request(caplog):
    engine = Engine(SPELLER, EngineConfig(**SIZES))
    heard = []

    def listener(events):
        heard.append(events)
        if len(heard) == 2:
            raise RuntimeError("deaf")

    engine.on_cache_event(listener)
    with caplog.at_level(logging.ERROR):
        outputs = engine.generate([[1, 2, 3] * 6], PARAMS)
    assert outputs[0].finish_reason == "length"
    assert len(heard) == 2
    assert "deaf" in caplog.text
    # Another listener hears all from the beginning.
    mirror = CacheMirror()
    engine.on_cache_event(mirror.apply)
    engine.generate([[1, 2, 3] * 6], PARAMS)
    assert_mirrors(mirror, engine.cache)
    assert mirror.states
    engine.on_cache_event(None)
    assert engine.cache.log is None


def test_a_listener_may_come_while_requests_run():
    watched = Watched()
    watched.call("add", "add", "step", "step")
    watched.mirror, watched.cleared = CacheMirror(), 0
    watched.engine.on_cache_event(watched.hear)
    watched.drain()
    assert watched.cleared == 1


def test_what_is_imported_is_reported_without_its_tokens():
    first, second = Watched(), Watched()
    prompt = [*range(1, 30)]
    first.engine.generate(prompt, PARAMS)
    data = first.engine.export_prefix(prompt)
    length = second.engine.import_prefix(data, prompt)
    second.check()
    router = StateRouter(["first", "second"], SIZES["kv_page_size"])
    router.mirrors = {"first": first.mirror, "second": second.mirror}
    assert router.reaches(prompt)["second"].num_resumable_tokens == length == 24
    # What was imported is told again after a failure, and is evicted as anything else.
    with Interrupt(100):
        second.engine.generate(prompt, PARAMS)
    second.check()
    for _ in range(3):
        second.call(*["add"] * 3, *["step"] * 6)
        second.drain()
    assert PageRemoved in second.kinds


def test_only_what_can_be_called_may_listen():
    with pytest.raises(ValueError, match="listener must be a function or None, got 3"):
        Engine(SPELLER, EngineConfig(**SIZES)).on_cache_event(3)
