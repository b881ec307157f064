"""A trace has everything that its steps did: a replay of it ends where the requests ended."""

import dataclasses

import pytest
from fakes.device import BLOCK, assert_complete, foresight, make, request, serve
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.traces import Listener, replay

from mamba_align_jax.cache.state_blocks import StateBlockManager
from mamba_align_jax.cli.commands import main
from mamba_align_jax.engine.running.trace import TracedRow, TracedStep, read_trace, traced_row, write_trace

ROW = TracedRow(
    request=7,
    prefill=False,
    enters=False,
    computed=14,
    scheduled=4,
    drafts=3,
    proposed=2,
    accepted=1,
    columns=((2, 31), (3, 9)),
    saved=16,
    published=16,
    gone=False,
)
PROMPT = dataclasses.replace(
    ROW, request=12, prefill=True, enters=True, computed=8, scheduled=9, drafts=0, proposed=0, accepted=0, saved=0
)
STEPS = [
    TracedStep(step=1, copied_bytes=0, null_reads=0, rows=(dataclasses.replace(PROMPT, columns=(), published=0),)),
    TracedStep(step=2, copied_bytes=2048, null_reads=1, rows=(ROW, dataclasses.replace(PROMPT, gone=True))),
]


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_trace_of_any_schedule_agrees_with_its_requests(data):
    """The schedules have chunks, hits, drafts, preemptions, aborts and late results."""
    K, in_flight = data.draw(st.sampled_from([0, 3])), data.draw(st.integers(0, 1))
    requests = [
        request(n, [7] * data.draw(st.integers(0, 25)) + [n], data.draw(st.integers(1, 20)))
        for n in range(data.draw(st.integers(1, 6)))
    ]
    plan = data.draw(st.lists(st.tuples(st.integers(0, K), st.integers(0, K)), min_size=1, max_size=5))
    scheduler = make(
        num_blocks=1 + StateBlockManager(99, BLOCK, K).blocks_needed(in_flight) + data.draw(st.integers(0, 12)),
        num_pages=data.draw(st.integers(14, 40)),
        budget=data.draw(st.integers(1, 40)),
        drafter=None if in_flight else foresight(plan),
        K=K,
        steps_in_flight=in_flight,
    )
    listener, rows = Listener(scheduler.cache.states), []
    number = st.integers(0, len(requests) - 1)
    aborts = data.draw(st.lists(st.tuples(st.integers(0, 15), number), max_size=2))
    serve(
        scheduler,
        requests,
        aborts=aborts,
        steps_in_flight=in_flight,
        plan=plan,
        heard=lambda row, tokens, late: rows.append(traced_row(row, len(row.drafts), tokens, late, BLOCK)),
    )
    computed = replay(rows, BLOCK)
    assert sorted(listener.heard) == sorted((row.request, row.published) for row in rows if row.published)
    complete = [r for r in requests if r.id not in {number for _, number in aborts}]
    assert_complete(complete)
    for r in complete:
        assert r.num_computed == len(r.tokens) - 1
        # Drafts accepted after the last token count on the device.
        assert computed[r.id] >= r.num_computed
        assert next(row.computed for row in rows if row.enters and row.request == r.id) == r.num_cached


def test_written_trace_is_read_back(tmp_path):
    file = tmp_path / "trace.jsonl"
    with write_trace(file) as write:
        for number, step in enumerate(STEPS, start=1):
            write(step)
            assert len(list(read_trace(file))) == number, "it is in the file at once"
    assert list(read_trace(file)) == STEPS


def test_wrong_lines_are_named(tmp_path):
    file = tmp_path / "trace.jsonl"
    with write_trace(file) as write:
        write(STEPS[0])
    good = file.read_text()
    for bad in ("{", "[]", "{}", '{"rows": [{}]}', '{"rows": [], "step": 1}', good[:-20], good.replace("gone", "went")):
        file.write_text(f"{good}{bad}\n{good}")
        with pytest.raises(ValueError, match=r"trace.jsonl: line 2 is not a step of a trace: "):
            list(read_trace(file))
    for bad in (b"\xff\xfe", b"[" * 200_000):
        file.write_bytes(good.encode() + bad)
        with pytest.raises(ValueError, match=r"trace.jsonl: line 2 is not a step of a trace: "):
            list(read_trace(file))


def test_command_prints_a_line_per_row(tmp_path, capsys):
    file = tmp_path / "trace.jsonl"
    with write_trace(file) as write:
        for step in STEPS:
            write(step)
    assert main(["trace", str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "  step request row     computed scheduled accepted   saved published     copied  new columns",
        "     1      12 enters         8         9",
        "     2 1 rows had lost their states",
        "     2       7 decode        14         4      1/2      16        16       2048  2:31 3:9",
        "     2      12 gone           8         9                         16       2048  2:31 3:9",
    ]
    assert main(["trace", str(file), "--request", "12"]) == 0
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines()] == ["row", "enters", "rows", "gone"]
    assert main(["trace", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err
