"""Tables and plots have the newest row of each case, and every file of results has a table."""

import json
from pathlib import Path

import pytest

from benchmarks import (
    plot,
)
from benchmarks.reading import read_rows
from benchmarks.report import machines, table, tables
from docs import generate

RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.jsonl"))


def test_tables_hold_the_newest_row_of_each_case(tmp_path):
    row = dict(case="a", us=2.0, bandwidth_fraction=0.5)
    rows = [row, dict(case="b", us=3.0, bandwidth_fraction=0.01), row | dict(us=1.0, peer="p", peer_us=4.0, ratio=0.25)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert table(file).splitlines()[2:] == ["| a | 1.0 us | 0.50 | p 4.0 us | 0.25 |", "| b | 3.0 us | - | - | - |"]


def test_tables_name_a_gpu_that_is_not_the_usual_one(tmp_path):
    row, file = dict(case="a", us=2.0, bandwidth_fraction=0.5), tmp_path / "rows.jsonl"
    for gpu, name in (("NVIDIA H200", "a"), ("NVIDIA H100 80GB HBM3", "a, H100")):
        file.write_text(json.dumps(row | dict(gpu=gpu)) + "\n")
        assert table(file).splitlines()[2] == f"| {name} | 2.0 us | 0.50 | - | - |"


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_every_results_file_has_a_table(file):
    lines = table(file).splitlines()
    assert len(lines) > 2
    assert all(line.startswith("|") for line in lines if line)


def test_plot_groups_serving_rows_by_load_with_a_bar_for_each_mode():
    (file,) = (file for file in RESULTS if file.stem == "serving")
    loads = plot.bars(read_rows(file))
    assert any(len(load) > 1 for load in loads.values())
    for name, load in loads.items():
        assert all(row["mode"] == mode and name.endswith(row["commit"]) for mode, row in load.items())


def test_spans_and_errors_have_a_table_with_only_the_rows_that_have_them(tmp_path):
    row = dict(case="a", us=2.0, bandwidth_fraction=0.5)
    more = dict(case="b", span_us=3.5, rms_error=0.00234, peer_span_us=None)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in (row, row | more)))
    assert table(file).splitlines()[-1] == "| b | 3.5 us | - | 2.3e-03 | - |"


def test_step_tables_compare_policies_side_by_side(tmp_path):
    step = dict(case="a", policy="none", rows=1, drafts=0, crossing="0", us=100.0, span_us=250.4, state_bytes=2e6)
    step |= dict(copied_bytes=0.0)
    other = dict(case="b", policy="pre_copy", crossing="1/8", us=200.0, copied_bytes=5e5)
    books = dict(case="c", policy="pre_copy", drafts=3, layers=1, groups=4, us=12.34, kernels=8)
    rows = [step | dict(us=1.0), step, step | other, step | other | dict(crossing="1"), step | dict(case="d", rows=8)]
    rows += [books, books | dict(case="e", layers=30, us=9.0)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert table(file).splitlines() == [
        "| policy | drafts | 1 layers | 30 layers |",
        "|---|---|---|---|",
        "| pre_copy | 3 | 12.3 us, 8 kernels | 9.0 us, 8 kernels |",
        "",
        "| rows | drafts | none | pre_copy 1/8 | pre_copy 1 |",
        "|---|---|---|---|---|",
        "| 1 | 0 | 100 / 250 us | 200 / 250 us | 200 / 250 us |",
        "| 8 | 0 | 100 / 250 us | - | - |",
        "",
        "| rows | drafts | none | pre_copy 1/8 | pre_copy 1 |",
        "|---|---|---|---|---|",
        "| 1 | 0 | 2.0 MB | 2.5 MB | 2.5 MB |",
        "| 8 | 0 | 2.0 MB | - | - |",
    ]


def test_tables_have_names_and_machines_are_listed_once():
    about = dict(gpu="NVIDIA H200", driver="580", jax="0.11.2", commit="abc", date="2026-11-20")
    row = dict(case="a", us=2.0, bandwidth_fraction=0.5) | about
    rows = [row, row | dict(case="b", span_us=3.0, date="2026-11-22"), row | dict(case="c", commit="def")]
    assert list(tables(rows)) == ["kernels", "kernel spans"]
    assert tables(rows)["kernels"].count("\n") == 1 + len(rows)
    assert machines(rows) == "- NVIDIA H200, driver 580, JAX 0.11.2, at abc, def, 2026-11-20 to 2026-11-22"
    assert machines([row, row | dict(driver="590")]) == "- NVIDIA H200, driver 590, JAX 0.11.2, at abc, 2026-11-20"


MODEL = dict(
    case="decode 1x4096", model="qwen3.5-4b", commit="abc", floor_us=1000.0, step_us=2000.0, policy="copy_free"
)
DEFAULTS = dict(configuration="defaults", async_stepping=True, block_size=256, max_num_seqs=192)


def test_defaults_are_tabulated_beside_the_configuration_of_the_benchmark_at_the_same_commit():
    rows = [MODEL, MODEL | DEFAULTS | dict(step_us=2100.0), MODEL | DEFAULTS | dict(case="prompt 512", ttft_ms=3.0)]
    made = tables(rows)
    assert list(made) == ["models", "model defaults"]
    assert made["models"].splitlines()[2:] == ["| decode 1x4096 | 2.00 ms | 1.00 ms | 2.00 | - | - | abc |"]
    assert made["model defaults"].splitlines()[2:] == [
        "| decode 1x4096 | 2.10 ms | 2.00 ms | 1.05 | copy_free, asynchronous, blocks of 256, 192 requests |",
        "| prompt 512 | 3.00 ms | - | - | copy_free, asynchronous, blocks of 256, 192 requests |",
    ]
    other = tables([MODEL | dict(commit="old"), MODEL | DEFAULTS])
    assert other["model defaults"].endswith(
        "| 2.00 ms | - | - | copy_free, asynchronous, blocks of 256, 192 requests |"
    )
    assert "model defaults" not in tables([MODEL])


def test_defaults_under_load_are_tabulated_beside_the_configuration_of_the_benchmark():
    load = dict(
        case="a", workload="w", requests=64, loop="closed", mode="none", drafts=0, speculation="none", commit="abc"
    )
    load |= dict(max_num_batched_tokens=2048, hit_rate_of_attainable=1.0, output_tokens_per_s=100.0, runs=3)
    load |= {f"{name}_ms_{of}": 1.5 for name in ("ttft", "tpot", "itl", "e2e") for of in ("mean", "p99")}
    chosen = dict(configuration="defaults", max_num_batched_tokens=4096, output_tokens_per_s=98.0)
    made = tables([load, load | chosen])
    assert made["serving"].splitlines()[2:] == [
        "| w x64 | closed | none | 0 | 1.5 / 1.5 | 1.50 | 1.5 / 1.5 | 2 | 100 | 1.000 | 1.00 | 1.00 | 3 at abc |"
    ]
    assert made["serving defaults"].splitlines()[2:] == [
        "| w x64 | closed | none | 0 | 1.5 / 1.5 | 1.50 / 1.50 | 1.5 / 1.5 | 98 / 100 | 4096 tokens a step |"
    ]


def test_starts_have_a_column_for_each_part():
    start = dict(case="first start", model="qwen3.5-4b", gpu="NVIDIA H200", first_answer_s=42.04, all_programs_s=110.0)
    rows = [
        start | dict(tracing_s=9.0),
        start | dict(case="second start", gpu="none", first_answer_s=8.0, weights_s=1.0),
    ]
    assert tables(rows)["starts"].splitlines() == [
        "| start | model | on | first answer, s | all programs, s | tracing, s | weights, s | commit |",
        "|---|---|---|---|---|---|---|---|",
        "| first start | qwen3.5-4b | H200 | 42.0 | 110.0 | 9.0 | - | - |",
        "| second start | qwen3.5-4b | CPU | 8.0 | 110.0 | - | 1.0 | - |",
    ]


def test_a_run_of_the_suite_is_a_check():
    row = dict(kind="suite", commit="abc", jax="0.11.2", date="2026-11-30", passed=7000, failed=0, cpu_seconds=881.4)
    line = "| suite | - | 0.11.2 | abc | 2026-11-30 | 7000 passed, 0 failed, 881 CPU seconds |"
    assert tables([row])["checks"].splitlines()[2:] == [line]


def test_a_page_may_have_a_table_without_rows_yet_but_no_table_that_there_is_not(monkeypatch):
    monkeypatch.setattr(generate, "rows", lambda name: [])
    assert generate.part("table start starts") == f"{generate.NOT_YET}\n"
    with pytest.raises(ValueError, match=r"a table must be one of kernels, .*, got start"):
        generate.part("table start start")
