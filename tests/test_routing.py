"""A router sends a prompt where its states are, and the simulation of replicas counts what they resume from."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from fakes.cache_machine import BLOCK, PAGE
from fakes.reported_cache import make, run_prompt, taken
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import routing as benchmark
from benchmarks.report import tables
from mamba_align_jax.cache.events import CacheCleared, PageRemoved, StateRemoved
from mamba_align_jax.load.workloads import MultiTurn
from mamba_align_jax.routing import Reach, StateRouter

PROMPT = [*range(1, 12)]
prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=18), min_size=1, max_size=12)


def two_replicas():
    """Replica "deep" has served the whole prompt, and "short" its first five tokens."""
    router = StateRouter(["short", "deep"], PAGE)
    for name, prompt in (("short", PROMPT[:5]), ("deep", PROMPT)):
        cache, log = make()
        run_prompt(cache, name, prompt)
        router.apply(name, taken(log))
    return router


def test_a_prompt_goes_where_it_resumes_from_the_most_tokens():
    router = two_replicas()
    assert router.reaches(PROMPT) == {"short": Reach(4, 4), "deep": Reach(8, 10)}
    assert router.choose(PROMPT, {"short": 0, "deep": 7}) == "deep"


def test_a_page_without_its_state_is_no_place_to_resume_from():
    router = two_replicas()
    states = [StateRemoved(name) for name in router.mirrors["deep"].states]
    router.apply("deep", states)
    assert router.reaches(PROMPT) == {"short": Reach(4, 4), "deep": Reach(0, 10)}
    assert router.choose(PROMPT, {"short": 7, "deep": 0}) == "short"
    # Where nothing resumes, the load counts, and then the pages.
    assert router.choose(PROMPT, {"deep": 0}) == "deep"
    assert router.choose([9] * 9, {"short": 1, "deep": 2}) == "short"
    router.apply("short", [StateRemoved(name) for name in router.mirrors["short"].states])
    assert router.choose(PROMPT, {"short": 1, "deep": 1}) == "deep"


def test_a_state_behind_a_page_that_is_gone_is_out_of_reach():
    router = two_replicas()
    first = min(router.mirrors["short"].pages & router.mirrors["deep"].pages)
    router.apply("deep", [PageRemoved(first)])
    assert router.reaches(PROMPT)["deep"].num_resumable_tokens < 8
    assert router.choose(PROMPT) == "short"


def test_a_prompt_under_another_salt_resumes_nowhere():
    assert set(two_replicas().reaches(PROMPT, b"tenant").values()) == {Reach(0, 0)}


@settings(max_examples=60, deadline=None)
@given(prompts, prompts)
def test_a_router_knows_what_a_lookup_finds(first, second):
    """Pools are small, so that pages and states are evicted."""
    caches = {}
    router = StateRouter(["first", "second"], PAGE)
    for name, some in (("first", first), ("second", second)):
        cache, log = caches[name] = make(num_blocks=6, num_pages=12)
        for number, prompt in enumerate(some):
            run_prompt(cache, number, prompt)
            router.apply(name, taken(log))
    for prompt in [*first, *second]:
        for name, reach in router.reaches(prompt).items():
            assert reach.num_resumable_tokens == caches[name][0].lookup(prompt).length
        best = router.choose(prompt)
        assert caches[best][0].lookup(prompt).length == max(each.lookup(prompt).length for each, _ in caches.values())


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: StateRouter([], PAGE), "StateRouter: replicas must be at least one name"),
        (lambda: StateRouter(["a"], 0), "StateRouter: page_size must be"),
        (lambda: two_replicas().apply("none", []), r"replica must be one of \['short', 'deep'\], got 'none'"),
        (lambda: two_replicas().choose(PROMPT, {}), "StateRouter: loads must be at least one replica"),
        (lambda: two_replicas().choose(PROMPT, {"none": 0}), "replica must be one of"),
        (lambda: two_replicas().choose("text"), "StateRouter: tokens must be a sequence of tokens"),
        (lambda: StateRouter(5, PAGE), "StateRouter: replicas must be an iterable of names, got 5"),
        (lambda: StateRouter("ab", PAGE), "StateRouter: replicas must be an iterable of names, got 'ab'"),
        (lambda: StateRouter([["a"]], PAGE), r"StateRouter: replica must be a hashable name, got \['a'\]"),
        (lambda: two_replicas().apply(["a"], []), r"StateRouter: replica must be a hashable name, got \['a'\]"),
        (lambda: two_replicas().apply("deep", None), "events must be an iterable of CacheEvents, got None"),
        (
            lambda: two_replicas().apply("deep", CacheCleared()),
            "events must be an iterable of CacheEvents, got CacheCle",
        ),
        (lambda: two_replicas().choose(PROMPT, ["deep"]), r"StateRouter: loads must be a number for each.*\['deep'\]"),
        *[
            (
                lambda load=load: two_replicas().choose(PROMPT, {"deep": load, "short": 1}),
                "loads must be a number for each",
            )
            for load in ("x", None, math.nan, np.float32("nan"), True, 1j)
        ],
    ],
)
def test_bad_arguments_are_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_an_unknown_event_is_refused_and_none_is_followed():
    router = two_replicas()
    before = router.reaches(PROMPT)
    for unknown in (None, "cleared", CacheCleared, object()):
        with pytest.raises(ValueError, match="events must be an iterable of CacheEvents"):
            router.apply("deep", [CacheCleared(), unknown])
        assert router.reaches(PROMPT) == before
    router.apply("deep", iter([CacheCleared()]))
    assert router.reaches(PROMPT)["deep"] == Reach(0, 0)


def test_a_load_is_any_number():
    for low, high in ((0, 1), (-math.inf, 5), (1, math.inf), (np.float32(0.5), np.int8(1)), (10**300, 10**400)):
        assert two_replicas().choose([9] * 9, {"deep": high, "short": low}) == "short"


def test_the_router_imports_without_jax():
    program = "import sys; sys.modules['jax'] = None; import mamba_align_jax.routing"
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=600)


SMALL = benchmark.Circumstances(
    workload=MultiTurn(conversations=30, turns=4, first=3 * BLOCK, turn=BLOCK, output=3),
    **dict(system_prompts=3, system_tokens=4 * BLOCK, edits=0.3, pause=4.0, rate=3.0, replicas=3, max_num_seqs=2),
    **dict(num_state_blocks=14, num_kv_pages=120, block_size=BLOCK, kv_page_size=PAGE, max_num_batched_tokens=32),
)


def test_the_simulation_serves_every_turn_under_every_policy():
    rows = {policy: benchmark.simulate(SMALL, policy) for policy in benchmark.POLICIES}
    assert all(row["requests"] == 120 for row in rows.values())
    assert all(0 < row["reached_tokens"] <= row["attainable_tokens"] <= row["prompt_tokens"] for row in rows.values())
    assert rows["states"]["share"] > rows["pages"]["share"] > rows["round_robin"]["share"]
    assert rows["states"] == benchmark.simulate(SMALL, "states"), "equal seeds give equal results"


def test_with_room_for_all_states_the_best_replica_is_chosen_each_time():
    row = benchmark.simulate(replace(SMALL, num_state_blocks=900, num_kv_pages=4000), "states")
    assert row["share"] == 1.0


def test_rows_of_the_benchmark_have_a_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "CASES", {"small": SMALL})
    file = tmp_path / "rows.jsonl"
    rows = benchmark.main(["--json", str(file), "--commit", "abc"])
    assert [json.loads(line) for line in file.read_text().splitlines()] == rows
    assert "of attainable" in capsys.readouterr().out
    (lines,) = (table.splitlines() for name, table in tables(rows).items() if name == "routing")
    assert lines[0] == "| case | states | pages | round_robin |"
    assert len(lines) == 3
