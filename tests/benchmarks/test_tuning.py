"""Sweeps have every configuration, and named cases are measured within a budget."""

import dataclasses
from types import SimpleNamespace

import jax

from benchmarks import (
    tune,
)
from benchmarks.cases import options_parser, run_cases
from benchmarks.reading import read_rows
from pallas_kernels.state_copy.config import Config as CopyConfig


def test_a_sweep_has_every_combination_of_settings():
    configs = tune.sweep(CopyConfig, num_warps=(4,), tile=(1, 2), programs=(3, 5))
    assert [dataclasses.astuple(config) for config in configs] == [(1, 3, 4), (1, 5, 4), (2, 3, 4), (2, 5, 4)]


def test_configurations_that_compile_are_timed_and_the_fastest_comes_first(monkeypatch, capsys):
    def time_ours(benchmark, *, implementation, config):
        assert (benchmark, implementation) == ("a case", "triton")
        if config == 7:
            raise jax.errors.JaxRuntimeError("too much shared memory\nand more")
        return lambda: float(config or 5)

    monkeypatch.setattr(tune, "time_ours", time_ours)
    assert tune.time_each("a case", [None, 9, 7, 2]) == [(2.0, 2), (5.0, None), (9.0, 9)]
    assert capsys.readouterr().out == "7: too much shared memory\n"


def test_cases_that_are_named_are_measured_within_the_budget(tmp_path, capsys):
    cases, file, measured = [SimpleNamespace(name=name) for name in ("a 1", "a 16", "b 1")], tmp_path / "rows.jsonl", []

    def measure(case):
        measured.append(case.name)
        return [{"case": case.name, "candidate": name, "us": us} for us, name in enumerate(("fast", "slow", "xla"))]

    def run(*arguments, **more):
        options = options_parser("", budget=100).parse_args([*arguments, "--json", str(file), "--commit", "abc"])
        run_cases(options, cases, measure, **more)
        return capsys.readouterr().out

    said = run("--case", "^a", copy_rate=4.2e6, shown=1)
    assert measured == ["a 1", "a 16"]
    rows = read_rows(file)
    assert [(row["case"], row["candidate"]) for row in rows][:3] == [("a 1", "fast"), ("a 1", "slow"), ("a 1", "xla")]
    assert {(row["copy_bandwidth_tb_s"], row["commit"]) for row in rows} == {(4.2, "abc")}
    assert "fast" in said
    assert "xla" in said
    assert "slow" not in said
    assert "slow" in run("--case", "b")
    assert "b 1: no time left" in run("--case", "b", "--budget", "-1")
    assert measured == ["a 1", "a 16", "b 1"]
