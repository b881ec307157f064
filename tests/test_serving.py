"""Tests of the serving benchmark: what it sends, what it counts, and what it reads from a trace. Its times need a GPU."""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import cells, idle, report, serving
from benchmarks.random_model import TINY, random_model
from mamba_align_jax import EngineConfig, RequestOutput
from mamba_align_jax.engine.device import runner
from mamba_align_jax.engine.scheduling import buckets
from mamba_align_jax.engine.scheduling.levels import Level
from mamba_align_jax.load import client, metrics
from mamba_align_jax.load.bench import COMPARED_MODES
from mamba_align_jax.load.client import Run, Served, serve
from mamba_align_jax.load.metrics import attainable, summary
from mamba_align_jax.load.workloads import Agents, ClosedLoop, MultiTurn, OpenLoop, PrefixRepetition

REPETITION = PrefixRepetition(prefix=32, suffix=8, output=4, prompts=10)
TALKS = MultiTurn(conversations=4, turns=3, first=20, turn=5, output=4)


class Clock:
    """Stands in for the module `time`: the time changes only in `sleep`."""

    now = 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        assert seconds >= 0
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(client, "time", clock)
    return clock


class FakeEngine:
    """Runs up to `rows` requests in order of arrival. A step takes two seconds and gives each of them one token."""

    def __init__(self, rows, clock):
        self.clock, self.rows, self.sent, self.waiting, self.scheduler = clock, rows, 0, [], SimpleNamespace(running=[])

    def add_request(self, prompt, params):
        request = SimpleNamespace(id=self.sent, prompt=prompt, left=params.max_tokens, begin=self.clock.now)
        request.times = []
        self.waiting.append(request)
        self.sent += 1
        return request.id

    def step(self):
        running = self.scheduler.running
        while self.waiting and len(running) < self.rows:
            running.append(self.waiting.pop(0))
        self.clock.sleep(2)
        for request in running:
            request.times.append(self.clock.now - request.begin)
            request.left -= 1
        done = [request for request in running if request.left == 0]
        self.scheduler.running = [request for request in running if request.left]
        return [self.output(request) for request in done]

    def output(self, request):
        fields = dict.fromkeys(RequestOutput.__dataclass_fields__)
        fields |= dict(request_id=request.id, prompt_token_ids=request.prompt, num_cached_tokens=0)
        fields |= dict(token_ids=tuple(range(len(request.times))), token_times=tuple(request.times))
        return RequestOutput(**fields)


class At(tuple):
    """A loop whose sessions begin at given times."""

    def __new__(cls, *times):
        return super().__new__(cls, times)

    def due(self, sessions):
        assert sessions == len(self)
        return list(self)


def common(a, b):
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def attainable_by_definition(requests):
    """Computes `attainable` from its definition: compares every pair of requests token by token."""
    result = []
    for request in requests:
        shared = [0]
        for other in requests:
            if other.times[0] <= request.admitted:
                shared.append(common(request.prompt[:-1], other.prompt))
            if other.times[-1] <= request.admitted:
                shared.append(common(request.prompt[:-1], other.prompt + other.tokens[:-1]))
        result.append(max(shared))
    return result


@st.composite
def histories(draw):
    """Draws requests over a vocabulary of two tokens. Many of them continue other requests."""
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)
    requests = []
    for _ in range(draw(st.integers(1, 7))):
        base = draw(st.sampled_from([(), *(r.prompt + r.tokens for r in requests)]))
        admitted = draw(st.integers(0, 6))
        first = admitted + draw(st.integers(1, 3))
        answer = draw(tokens)
        times = tuple(float(first + n) for n in range(len(answer)))
        requests.append(Served(base[: draw(st.integers(0, 12))] + draw(tokens), answer, 0, 0.0, float(admitted), times))
    return requests


@given(histories(), st.integers(1, 4))
@settings(deadline=None)
def test_attainable_equals_its_definition(requests, size):
    """Whatever the size of the pieces in which prompts are compared."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "_PIECE", size)
        assert attainable(requests) == attainable_by_definition(requests)


@pytest.mark.parametrize("loop", [ClosedLoop(3), OpenLoop(0.25)], ids=lambda loop: loop.name)
@pytest.mark.parametrize("workload", [REPETITION, TALKS], ids=lambda workload: workload.name)
def test_every_turn_is_sent_once_and_continues_the_previous_answer(clock, workload, loop):
    sessions = workload.sessions(100, 1)
    assert sessions == workload.sessions(100, 1) != workload.sessions(100, 2)
    engine = FakeEngine(3, clock)
    run = serve(engine, sessions, workload.output, loop)
    assert len(run.requests) == engine.sent == sum(map(len, sessions))
    answer = tuple(range(workload.output))
    wanted = []
    for turns in sessions:
        prompt = ()
        for turn in turns:
            prompt += turn
            wanted.append(prompt)
            prompt += answer
    assert sorted(request.prompt for request in run.requests) == sorted(wanted)
    assert max(len(prompt) + workload.output for prompt in wanted) == workload.longest
    for request in run.requests:
        assert 0 <= request.arrival <= request.admitted <= request.times[0] <= request.times[-1] <= run.seconds
        assert len(request.times) == len(request.tokens) == workload.output


def test_prompts_of_agents_leave_out_earlier_reasoning_and_name_where_they_part(clock):
    agents = Agents(agents=2, turns=3, tools=10, turn=4, reasoning=5, answer=2)
    sessions, engine, asked = agents.sessions(100, 1), FakeEngine(2, clock), []
    add = engine.add_request
    engine.add_request = lambda prompt, params: (asked.append((prompt, params.checkpoint_at)), add(prompt, params))[1]
    run = serve(engine, sessions, agents.output, ClosedLoop(2), agents=agents)
    assert sessions[0][0][:10] == sessions[1][0][:10]
    # The answers are the numbers from 0 to 6.
    prompts = [sum(((*turn, 5, 6) for turn in session[:n]), ()) + session[n] for session in sessions for n in range(3)]
    assert sorted(prompt for prompt, _ in asked) == sorted(prompts)
    assert {at for _, at in asked} == {(10, 14), (10, 20), (10, 26)}
    assert all(set(at) == {10, len(prompt)} for prompt, at in asked)
    assert max(len(prompt) for prompt, _ in asked) + agents.output == agents.longest
    assert len(run.requests) == 6


def test_prompts_share_their_prefix_and_differ_in_their_suffix():
    first, *others = (prompt for (prompt,) in REPETITION.sessions(100, 0))
    assert len(others) == 9
    assert all(prompt[:32] == first[:32] and prompt[32:] != first[32:] for prompt in others)
    several = PrefixRepetition(prefix=32, suffix=8, output=4, prompts=10, prefixes=3).sessions(100, 0)
    assert len({prompt[:32] for (prompt,) in several}) == 3


def test_a_closed_loop_keeps_its_concurrency(clock):
    engine = FakeEngine(10, clock)
    running = []
    step = engine.step
    engine.step = lambda: (running.append(len(engine.scheduler.running) + len(engine.waiting)), step())[1]
    serve(engine, REPETITION.sessions(100, 0), 4, ClosedLoop(4))
    assert max(running) == 4
    assert running.count(4) >= len(running) - 4


def test_latencies_include_the_time_that_a_request_waits_for_the_engine(clock):
    # All requests are due at once. The engine runs them one after another, each for four steps.
    run = serve(FakeEngine(1, clock), REPETITION.sessions(100, 0), 4, OpenLoop(1e9))
    ttft = [2 * (4 * number + 1) for number in range(10)]
    np.testing.assert_allclose([request.ttft for request in run.requests], ttft, atol=1e-6)
    np.testing.assert_allclose([request.e2e for request in run.requests], np.add(ttft, 6), atol=1e-6)
    assert {request.tpot for request in run.requests} == {2}
    # A request that is due during a step is sent after the step. Its waiting time counts from when it was due.
    (first, second), due = serve(FakeEngine(2, clock), REPETITION.sessions(100, 0)[:2], 4, At(1.0, 1.5)).requests, 1.5
    assert (first.arrival, first.ttft, second.arrival, second.ttft) == (1.0, 2.0, due, 3.0 + 2.0 - due)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: PrefixRepetition(prompts=0), "PrefixRepetition: prompts"),
        (lambda: PrefixRepetition(prefix=0, suffix=0), "PrefixRepetition: suffix"),
        (lambda: MultiTurn(turns=1.5), "MultiTurn: turns"),
        (lambda: ClosedLoop(0), "ClosedLoop: concurrency"),
        (lambda: OpenLoop(0.0), "OpenLoop: rate"),
        (lambda: OpenLoop("1"), "OpenLoop: rate"),
        (lambda: OpenLoop(1.0, -1), "OpenLoop: seed"),
        (lambda: TALKS.sessions(0, 0), "vocab"),
        (lambda: TALKS.sessions(9, -1), "seed"),
        (lambda: Agents(tools=0), "Agents: tools"),
        (lambda: Agents(reasoning=-1), "Agents: reasoning"),
        (lambda: summary(Run([], 1.0, [])), "run"),
    ],
    ids=range(12),
)
def test_a_bad_load_is_refused_by_name(make, name):
    with pytest.raises(ValueError, match=f"^{name} must be "):
        make()


def test_an_open_loop_begins_sessions_at_its_rate():
    arrivals = OpenLoop(50.0, seed=3).due(2000)
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(40, rel=0.1)


def test_summary_equals_latencies_computed_by_hand():
    served = [
        Served((1, 2, 3, 4, 5), (6, 7, 8), 0, 1.0, 2.0, (3.0, 3.0, 5.0)),
        Served((1, 2, 3, 4, 9), (6,), 4, 3.0, 3.0, (7.0,)),
    ]
    row = summary(client.Run(served, 10.0, [0.1, 0.3]))
    assert (row["ttft_ms_mean"], row["tpot_ms_mean"], row["e2e_ms_mean"]) == (3000, 500, 4000)
    assert row["itl_ms_mean"] == row["itl_ms_p99"] == 2000
    assert row["output_tokens_per_s"] == 0.4
    assert (row["attainable_tokens"], row["hit_rate_of_attainable"]) == (4, 1.0)
    assert row["step_ms_mean"] == pytest.approx(200)


SIZES = dict(prefix=64, suffix=6, output=16, prompts=6, conversations=2, turns=2, first=20, turn=6, turn_output=5)
SIZES |= dict(agents=2, agent_turns=2, tools=20, agent_turn=6, reasoning=3, answer=2)
SIZES |= dict(concurrency=2, block_size=16, kv_page_size=8, max_num_batched_tokens=32, runs=2, idle=2)
CHOICES = dict(model="tiny", mode="align/copy_free", speculation="mtp", drafts=1, stepping="async", commit="abc")


def finite(value):
    return all(map(finite, value)) if isinstance(value, list) else isinstance(value, str) or math.isfinite(value)


@pytest.mark.deep
def test_the_serving_benchmark_writes_complete_rows(tmp_path, capsys, monkeypatch):
    # There is no GPU to trace, so the trace that is read is a made one. Everything before that runs.
    monkeypatch.setattr(idle, "read", lambda trace, count: idle.measure(idle.kernels(xspace(steps(count))), count))
    # These two programs are enough for greedy requests.
    monkeypatch.setattr(
        runner.StepRunner,
        "buckets",
        [buckets.Bucket(2, 8, 32, Level.MOST_LIKELY), buckets.Bucket(2, 0, 0, Level.MOST_LIKELY)],
    )
    file = tmp_path / "serving.jsonl"
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in (SIZES | CHOICES).items()]
    # For each workload, the tokens that a later prompt shares, and those of them that are whole blocks.
    shared = {"prefix_repetition": (64, 64), "multi_turn": (20 + 5 - 1, 16), "agents": (20 + 6, 16)}
    workloads = [f"--workload={name}" for name in shared]
    serving.main([*arguments, *workloads, f"--json={file}", f"--trace-dir={tmp_path / 'traces'}"])
    waits, *rows = (json.loads(line) for line in file.read_text().splitlines())
    about = dict(workload="decode_idle", rows=2, steps=2, context="prefix_repetition")
    assert {name: waits[name] for name in about} == about
    assert waits["idle_share"] == pytest.approx(0.05)
    about = [(name, runs) for runs in (1, 2) for name in shared]
    assert [(row["workload"], row["runs"]) for row in rows] == about
    for row in [waits, *rows]:
        assert all(map(finite, row.values())), row
        about = row["mode"], row["speculation"], row["drafts"], row["async_stepping"]
        assert about == ("align/copy_free", "mtp", 1, True)
        assert (row["commit"], row["model"], row["block_size"]) == ("abc", "tiny", 16)
    for row in rows:
        for name in ("ttft", "tpot", "itl", "e2e"):
            assert 0 < row[f"{name}_ms_p50"] <= row[f"{name}_ms_p99"]
        assert (len(row["ttft_ms_runs"]), row["null_reads"], row["preemptions"]) == (row["runs"], 0, 0)
        attainable, whole = shared[row["workload"]]
        assert row["hit_rate_of_attainable"] >= 0.8 * whole / attainable
        (acceptance,) = row["acceptance"]
        assert 0 <= acceptance < 0.5, "a random head is almost never right"
    assert rows[0]["steps"] >= 6 * 16 / 2 / 2
    assert rows[0]["attainable_tokens"] >= 3 * 64
    printed = capsys.readouterr().out
    assert "compiled in" in printed
    assert "multi_turn x4 closed align/copy_free mtp K1: run 1" in printed
    lines = report.table(file).splitlines()
    assert lines[0].startswith("| workload | loop | mode |")
    assert len([line for line in lines if "copy_free" in line and "| 1, mtp |" in line]) == 4


class Group:
    """Runs cells that take ten seconds by the clock, on engines that take a hundred seconds to start."""

    def __init__(self, monkeypatch, clock, **choices):
        self.alive, self.clock = [], clock
        self.options = serving.parser().parse_args([f"--{name}={value}" for name, value in choices.items()])
        self.cells, self.results = list(cells.cells(self.options)), serving.Results(self.options)
        config = SimpleNamespace(**dict.fromkeys(EngineConfig.__dataclass_fields__, 0))
        fakes = dict(time=clock, start_engine=self.start, run_load=self.run_load, free_pools=self.alive.remove)
        for name, fake in fakes.items():
            monkeypatch.setattr(serving, name, fake)
        self.engine = lambda cell: SimpleNamespace(of=cell.engine, config=config)

    def start(self, model, cell, longest, results):
        self.clock.sleep(100)
        self.alive.append(self.engine(cell))
        return self.alive[-1]

    def run_load(self, engine, workload, loop, seed):
        assert engine in self.alive
        self.clock.sleep(10)
        times = dict.fromkeys(("ttft_ms_mean", "ttft_ms_p99", "tpot_ms_mean", "itl_ms_p99"), self.clock.now)
        return times | dict(seconds=10.0, output_tokens_per_s=1.0, hit_rate_of_attainable=1.0)

    def run(self, deadline):
        serving.run_group(None, self.cells, 100, self.results, deadline)
        assert not self.alive
        return [(row["mode"], row["runs"]) for row in self.results.rows]


def test_every_mode_has_its_first_run_before_any_mode_has_its_second(clock, monkeypatch, tmp_path):
    group = Group(monkeypatch, clock, runs=2, prompts=512, json=tmp_path / "rows")
    assert group.run(math.inf) == [(mode, runs) for runs in (1, 2) for mode in COMPARED_MODES]
    assert clock.now == 3 * 100 + 6 * 10
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert rows == group.results.rows
    assert (rows[3]["ttft_ms_runs"], rows[3]["ttft_ms_mean"]) == ([110, 340], 225)
    assert rows[0]["case"] == "prefix_repetition x512 closed none K0 sync"


def test_no_run_starts_that_is_expected_to_end_after_the_deadline(clock, monkeypatch):
    """The first run of a cell is expected to take its guess, a later one as long as the one before."""
    chosen = cells.cells(serving.parser().parse_args(["--prompts=512"]))
    first, *_, last = (cells.COMPILE_S + cell.guess_s for cell in chosen)

    def run(deadline, runs):
        clock.now = 0
        return Group(monkeypatch, clock, prompts=512, runs=runs).run(deadline)

    assert run(first - 1, 1) == [("align/pre_copy", 1)], "no time is left for the third mode"
    assert run(220 + last - 1, 1) == [("none", 1), ("align/pre_copy", 1)]
    assert [runs for _, runs in run(375, 3)] == [1, 1, 1, 2, 2, 2, 3]


def test_cells_that_draft_in_the_same_way_follow_each_other():
    options = [
        "--drafts=0",
        "--drafts=3",
        "--speculation=prompt_lookup",
        "--speculation=mtp",
        "--loop=open",
        "--loop=closed",
    ]
    chosen = list(cells.cells(serving.parser().parse_args([*options, "--prompts=9"])))
    kinds = [("none", 0), ("prompt_lookup", 3), ("mtp", 3)]
    wanted = [(*kind, loop, mode) for kind in kinds for loop in ("open", "closed") for mode in COMPARED_MODES]
    assert [(cell.speculation, cell.num_drafts, cell.loop.name, cell.mode) for cell in chosen] == wanted
    assert len({cell.name for cell in chosen}) == len(chosen)
    assert chosen[-1].name == "prefix_repetition x9 closed align/copy_free mtp K3"


def test_a_mode_that_only_some_models_serve_runs_if_it_is_named():
    options = serving.parser().parse_args(["--mode=align/deferred", "--prompts=9"])
    (cell,) = cells.cells(options)
    config = cells.engine_config(options, cell, random_model(TINY), 1000)
    assert (config.prefix_cache, config.policy) == ("align", "deferred")
    assert "align/deferred" not in {cell.mode for cell in cells.cells(serving.parser().parse_args(["--prompts=9"]))}


def test_idle_refuses_more_steps_than_the_answers_have():
    engine: object = SimpleNamespace(config=SimpleNamespace(num_speculative_tokens=3))
    with pytest.raises(ValueError, match="--idle must be at most 32 for answers of 512 tokens, got 33"):
        idle.decode_idle(engine, PrefixRepetition(), 33)


def xspace(events, line="Stream #13(Compute)", plane="/device:GPU:0"):
    """Makes a profile of events (name, start, duration) in microseconds."""
    names = {name: number for number, name in enumerate(dict.fromkeys(name for name, *_ in events), 1)}
    text = f'planes {{ name: "{plane}" lines {{ name: "{line}" timestamp_ns: 0 '
    for name, start, duration in events:
        us = 1_000_000
        text += f"events {{ metadata_id: {names[name]} offset_ps: {start * us} duration_ps: {duration * us} }} "
    text += "} "
    for name, number in names.items():
        text += f'event_metadata {{ key: {number} value {{ id: {number} name: "{name}" }} }} '
    return jax.profiler.ProfileData.from_text_proto(text + "}")


def steps(count, stray=()):
    """Events of `count` steps of 100 us: kernels of 40 and 50 us, a pause of 5 between them, and a copy in a gap of 5."""
    events = []
    for n in range(count):
        events += [("a", 100 * n, 40), ("b", 100 * n + 45, 50), ("MemcpyH2D", 100 * n + 95, 5)]
    return [*events, *stray]


def test_idle_share_gap_and_busy_share_are_those_of_a_made_trace():
    row = idle.measure(idle.kernels(xspace(steps(6))), 6)
    assert row == pytest.approx(
        dict(steps=6, kernels=2, idle_share=0.05, idle_share_mean=0.05, gap_us=5, step_us=100, busy_share=0.9)
    )
    # A kernel that is not in every step belongs to no step.
    assert idle.measure(idle.kernels(xspace(steps(6, [("odd", 97, 1)]))), 6)["gap_us"] == pytest.approx(5)
    # Two kernels run at once, and the one that starts later ends first.
    overlapping = [("a", 0, 90), ("b", 10, 10), ("a", 100, 90), ("b", 110, 10)]
    row = idle.measure(idle.kernels(xspace(overlapping)), 2)
    assert (row["gap_us"], row["busy_share"]) == pytest.approx((10, 0.9))


def test_a_trace_that_does_not_divide_into_steps_is_refused():
    with pytest.raises(RuntimeError, match="do not divide into 4 equal steps"):
        idle.measure(idle.kernels(xspace(steps(6))), 4)
    uneven = [("a", 0, 1), ("a", 2, 1), ("b", 4, 1), ("b", 6, 1)]
    with pytest.raises(RuntimeError, match="2 equal steps"):
        idle.measure(idle.kernels(xspace(uneven)), 2)
    with pytest.raises(RuntimeError, match="the trace has no kernels; it has /host:CPU"):
        idle.kernels(xspace(steps(1), plane="/host:CPU"))
    with pytest.raises(RuntimeError, match="at least 2"):
        idle.measure(idle.kernels(xspace(steps(1))), 1)


def test_record_writes_a_trace_and_returns_its_path(tmp_path):
    f = jax.jit(lambda x: x + 1)
    trace = idle.record(lambda: f(1.0).block_until_ready(), tmp_path)
    assert trace.is_file()
    with pytest.raises(RuntimeError, match="no kernels"):
        idle.read(trace, 2)


@pytest.mark.parametrize(("module", "option"), [("benchmarks.serving", "--prompts"), ("benchmarks.idle", "--steps")])
def test_the_commands_of_the_repository_list_their_options(module, option):
    command = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    assert option in done.stdout
