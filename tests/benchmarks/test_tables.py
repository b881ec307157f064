"""Tables and plots have the newest row of each case, and every file of results has a table."""

import json
from pathlib import Path

import pytest

from benchmarks import (
    plot,
)
from benchmarks.report import machines, read_rows, table, tables

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
    assert {"none", "align/pre_copy", "align/copy_free"} == set(loads["prefix_repetition x64\nopen, no drafts"])
    assert all(row["mode"] == mode for load in loads.values() for mode, row in load.items())
    assert any("by prompt_lookup" in load for load in loads)


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
