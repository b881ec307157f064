"""The serving benchmark: what it sends, what it counts, what it reads out of a trace. Its times need a GPU."""

import json
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import idle, load, report, serving
from benchmarks.load import ClosedLoop, MultiTurn, OpenLoop, PrefixRepetition, Served, attainable, serve, summary
from mamba_align_jax import EngineConfig, RequestOutput
from mamba_align_jax.cli import main
from mamba_align_jax.demo import MODES
from mamba_align_jax.engine import runner

REPETITION = PrefixRepetition(prefix=32, suffix=8, output=4, prompts=10)
TALKS = MultiTurn(conversations=4, turns=3, first=20, turn=5, output=4)


class Clock:
    """Stands still but for `sleep`, instead of `time`."""

    now = 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        assert seconds >= 0
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(load, "time", clock)
    return clock


class FakeEngine:
    """Runs `rows` requests, first come, first served; a step takes two seconds and gives each a token."""

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
    """A loop whose sessions begin at these times."""

    def __new__(cls, *times):
        return super().__new__(cls, times)

    def due(self, sessions):
        assert sessions == len(self)
        return list(self)


def common(a, b):
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def attainable_by_definition(requests, size):
    """Every pair, token by token."""
    result = []
    for request in requests:
        shared = [0]
        for other in requests:
            if other.times[0] <= request.admitted:
                shared.append(common(request.prompt[:-1], other.prompt))
            if other.times[-1] <= request.admitted:
                shared.append(common(request.prompt[:-1], other.prompt + other.tokens[:-1]))
        result.append(max(shared) // size * size)
    return result


@st.composite
def histories(draw):
    """Requests over two tokens, many of which continue others."""
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
def test_attainable_is_what_its_definition_says(requests, size):
    assert attainable(requests, size) == attainable_by_definition(requests, size)


@pytest.mark.parametrize("loop", [ClosedLoop(3), OpenLoop(0.25)], ids=lambda loop: loop.name)
@pytest.mark.parametrize("workload", [REPETITION, TALKS], ids=lambda workload: workload.name)
def test_every_turn_is_sent_once_and_continues_the_answer(clock, workload, loop):
    sessions = workload.sessions(100, 1)
    assert sessions == workload.sessions(100, 1) != workload.sessions(100, 2)
    engine = FakeEngine(3, clock)
    run = serve(engine, sessions, workload.output, loop)
    assert len(run.requests) == engine.sent == workload.num_requests
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


def test_a_prefix_is_shared_and_suffixes_are_not():
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


def test_waiting_for_the_engine_counts(clock):
    # All at once, one after another, each for four steps.
    run = serve(FakeEngine(1, clock), REPETITION.sessions(100, 0), 4, OpenLoop(1e9))
    ttft = [2 * (4 * number + 1) for number in range(10)]
    np.testing.assert_allclose([request.ttft for request in run.requests], ttft, atol=1e-6)
    np.testing.assert_allclose([request.e2e for request in run.requests], np.add(ttft, 6), atol=1e-6)
    assert {request.tpot for request in run.requests} == {2}
    # One that is due within a step is sent after it, and has waited since.
    (first, second), due = serve(FakeEngine(2, clock), REPETITION.sessions(100, 0)[:2], 4, At(1.0, 1.5)).requests, 1.5
    assert (first.arrival, first.ttft, second.arrival, second.ttft) == (1.0, 2.0, due, 3.0 + 2.0 - due)


def test_open_loops_have_their_rate():
    arrivals = OpenLoop(50.0, seed=3).due(2000)
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(40, rel=0.1)


def test_latencies_by_hand():
    served = [
        Served((1, 2, 3, 4, 5), (6, 7, 8), 0, 1.0, 2.0, (3.0, 3.0, 5.0)),
        Served((1, 2, 3, 4, 9), (6,), 4, 3.0, 3.0, (7.0,)),
    ]
    row = summary(load.Run(served, 10.0, [0.1, 0.3]), 2)
    assert (row["ttft_ms_mean"], row["tpot_ms_mean"], row["e2e_ms_mean"]) == (3000, 500, 4000)
    assert row["itl_ms_mean"] == row["itl_ms_p99"] == 2000
    assert row["output_tokens_per_s"] == 0.4
    assert (row["attainable_tokens"], row["hit_rate_of_attainable"]) == (4, 1.0)
    assert row["step_ms_mean"] == pytest.approx(200)


SIZES = dict(prefix=64, suffix=6, output=16, prompts=6, conversations=2, turns=2, first=20, turn=6, turn_output=5)
SIZES |= dict(concurrency=2, block_size=16, kv_page_size=8, max_num_batched_tokens=32, runs=2, idle=2)
CHOICES = dict(model="tiny", mode="align/copy_free", speculation="mtp", drafts=1, stepping="async", commit="abc")


def finite(value):
    return all(map(finite, value)) if isinstance(value, list) else isinstance(value, str) or math.isfinite(value)


def test_rows_are_complete(tmp_path, capsys, monkeypatch):
    # Here is no GPU to trace; what leads to the trace runs.
    monkeypatch.setattr(idle, "read", lambda trace, count: idle.measure(idle.kernels(xspace(steps(count))), count))
    # Greedy requests need no more programs.
    monkeypatch.setattr(runner.StepRunner, "buckets", [runner.Bucket(2, 8, 32), runner.Bucket(2, 0, 0, draws=False)])
    file = tmp_path / "serving.jsonl"
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in (SIZES | CHOICES).items()]
    workloads = ["--workload=prefix_repetition", "--workload=multi_turn"]
    assert main(["bench", *arguments, *workloads, f"--json={file}", f"--trace-dir={tmp_path / 'traces'}"]) == 0
    waits, *rows = (json.loads(line) for line in file.read_text().splitlines())
    about = dict(workload="decode_idle", rows=2, steps=2, context="prefix_repetition")
    assert {name: waits[name] for name in about} == about
    assert waits["idle_share"] == pytest.approx(0.05)
    about = [("prefix_repetition", 1), ("multi_turn", 1), ("prefix_repetition", 2), ("multi_turn", 2)]
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
        assert row["hit_rate_of_attainable"] >= 0.8
        (acceptance,) = row["acceptance"]
        assert 0 <= acceptance < 0.5, "the head is random"
    assert rows[0]["steps"] >= 6 * 16 / 2 / 2
    assert rows[0]["attainable_tokens"] >= 3 * 64
    printed = capsys.readouterr().out
    assert "2 programs" in printed
    assert "multi_turn x4 closed align/copy_free mtp K1 async" in printed
    lines = report.table(file).splitlines()
    assert lines[0].startswith("| workload | loop | mode |")
    assert len([line for line in lines if "copy_free" in line and "| 1, mtp |" in line]) == 3


class Group:
    """Cells that take ten seconds on engines that take a hundred, by the clock."""

    def __init__(self, monkeypatch, clock, **choices):
        self.alive, self.clock = [], clock
        self.options = serving._parser().parse_args([f"--{name}={value}" for name, value in choices.items()])
        self.cells, self.results = list(serving.cells(self.options)), serving.Results(self.options)
        config = SimpleNamespace(**dict.fromkeys(EngineConfig.__dataclass_fields__, 0))
        for name, value in dict(time=clock, _start=self.start, run_cell=self.run_cell, free=self.alive.remove).items():
            monkeypatch.setattr(serving, name, value)
        self.engine = lambda cell: SimpleNamespace(of=cell.engine, config=config)

    def start(self, model, cell, longest, results):
        self.clock.sleep(100)
        self.alive.append(self.engine(cell))
        return self.alive[-1]

    def run_cell(self, engine, cell, options):
        assert engine in self.alive
        assert engine.of == cell.engine
        self.clock.sleep(10)
        times = dict.fromkeys(("ttft_ms_mean", "ttft_ms_p99", "tpot_ms_mean", "itl_ms_p99"), self.clock.now)
        return times | dict(seconds=10.0, output_tokens_per_s=1.0, hit_rate_of_attainable=1.0)

    def run(self, deadline):
        serving.run_group(None, self.cells, 100, self.results, deadline)
        assert not self.alive
        return [(row["mode"], row["runs"]) for row in self.results.rows]


def test_all_modes_have_their_first_run_before_any_has_its_second(clock, monkeypatch, tmp_path):
    group = Group(monkeypatch, clock, runs=2, prompts=512, json=tmp_path / "rows")
    assert group.run(math.inf) == [(mode, runs) for runs in (1, 2) for mode in MODES]
    assert clock.now == 3 * 100 + 6 * 10
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert rows == group.results.rows
    assert (rows[3]["ttft_ms_runs"], rows[3]["ttft_ms_mean"]) == ([110, 340], 225)
    assert rows[0]["case"] == "prefix_repetition x512 closed none K0 sync"


def test_nothing_starts_that_would_end_too_late(clock, monkeypatch):
    """By a guess at first, then by the run before."""
    cells = list(serving.cells(serving._parser().parse_args(["--prompts=512"])))
    first, *_, last = (serving._COMPILE_S + cell.guess_s for cell in cells)

    def run(deadline, runs):
        clock.now = 0
        return Group(monkeypatch, clock, prompts=512, runs=runs).run(deadline)

    assert run(first - 1, 1) == [("align/pre_copy", 1)], "then it is too late for the other"
    assert run(220 + last - 1, 1) == [("none", 1), ("align/pre_copy", 1)]
    assert [runs for _, runs in run(375, 3)] == [1, 1, 1, 2, 2, 2, 3]


def test_cells_of_one_speculation_follow_each_other():
    options = [
        "--drafts=0",
        "--drafts=3",
        "--speculation=prompt_lookup",
        "--speculation=mtp",
        "--loop=open",
        "--loop=closed",
    ]
    cells = list(serving.cells(serving._parser().parse_args([*options, "--prompts=9"])))
    kinds = [("none", 0), ("prompt_lookup", 3), ("mtp", 3)]
    wanted = [(*kind, loop, mode) for kind in kinds for loop in ("open", "closed") for mode in MODES]
    assert [(cell.speculation, cell.drafts, cell.loop.name, cell.mode) for cell in cells] == wanted
    assert len({cell.name for cell in cells}) == len(cells)
    assert cells[-1].name == "prefix_repetition x9 closed align/copy_free mtp K3"


def test_more_steps_than_answers_have_are_not_traced():
    engine: object = SimpleNamespace(config=SimpleNamespace(num_speculative_tokens=3))
    with pytest.raises(ValueError, match="--idle must be at most 32 for answers of 512 tokens, got 33"):
        serving.decode_idle(engine, PrefixRepetition(), 33)


def xspace(events, line="Stream #13(Compute)", plane="/device:GPU:0"):
    """A profile whose events are (name, start, duration) in microseconds."""
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
    """Kernels of 40 and 50 us with a pause of 5 between, then a gap of 5; a copy in the gap; b may begin in a's time."""
    events = []
    for n in range(count):
        events += [("a", 100 * n, 40), ("b", 100 * n + 45, 50), ("MemcpyH2D", 100 * n + 95, 5)]
    return [*events, *stray]


def test_idle_share_of_a_trace():
    row = idle.measure(idle.kernels(xspace(steps(6))), 6)
    assert row == pytest.approx(
        dict(steps=6, kernels=2, idle_share=0.05, idle_share_mean=0.05, gap_us=5, step_us=100, busy_share=0.9)
    )
    # What isn't in every step is in none.
    assert idle.measure(idle.kernels(xspace(steps(6, [("odd", 97, 1)]))), 6)["gap_us"] == pytest.approx(5)
    # Two kernels at once, the later starting one ending first.
    overlapping = [("a", 0, 90), ("b", 10, 10), ("a", 100, 90), ("b", 110, 10)]
    row = idle.measure(idle.kernels(xspace(overlapping)), 2)
    assert (row["gap_us"], row["busy_share"]) == pytest.approx((10, 0.9))


def test_a_trace_that_does_not_divide_is_refused():
    with pytest.raises(RuntimeError, match="don't divide into 4 equal steps"):
        idle.measure(idle.kernels(xspace(steps(6))), 4)
    uneven = [("a", 0, 1), ("a", 2, 1), ("b", 4, 1), ("b", 6, 1)]
    with pytest.raises(RuntimeError, match="2 equal steps"):
        idle.measure(idle.kernels(xspace(uneven)), 2)
    with pytest.raises(RuntimeError, match="no kernels in the trace, which has /host:CPU"):
        idle.kernels(xspace(steps(1), plane="/host:CPU"))
    with pytest.raises(RuntimeError, match="at least 2"):
        idle.measure(idle.kernels(xspace(steps(1))), 1)


def test_a_trace_is_recorded(tmp_path):
    f = jax.jit(lambda x: x + 1)
    trace = idle.record(lambda: f(1.0).block_until_ready(), tmp_path)
    assert trace.is_file()
    with pytest.raises(RuntimeError, match="no kernels"):
        idle.read(trace, 2)
