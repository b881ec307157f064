"""A benchmark that is asked for a case that does not exist says so, and which ones there are."""

import sys
from types import SimpleNamespace

import pytest

from benchmarks import deferred, kernels, model, tune
from benchmarks.cases import cases_matching, cases_named

CASES = [SimpleNamespace(name=name) for name in ("decode 1x8", "decode 2x8", "prompt 8")]


def test_cases_are_chosen_by_name_in_their_own_order():
    names = lambda *wanted, prefix="": [case.name for case in cases_named(CASES, wanted, prefix)]
    assert names() == ["decode 1x8", "decode 2x8", "prompt 8"]
    assert names("prompt 8", "decode 1x8") == ["decode 1x8", "prompt 8"]
    assert names("moe decode 2x8", "prompt 8", prefix="moe ") == ["decode 2x8", "prompt 8"]
    assert [case.name for case in cases_matching(CASES, "2|prompt")] == ["decode 2x8", "prompt 8"]


def test_a_case_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(SystemExit, match=r"must be one of 'moe decode 1x8', .*'moe prompt 8', got decode 9x8"):
        cases_named(CASES, ["prompt 8", "decode 9x8"], "moe ")
    with pytest.raises(SystemExit, match="must be found in one of 'decode 1x8', 'decode 2x8', 'prompt 8', got verify"):
        cases_matching(CASES, "verify")


@pytest.mark.parametrize(
    ("main", "options"), [(model.main, []), (kernels.main, []), (tune.main, ["--op", "ssd"]), (deferred.main, [])]
)
def test_benchmarks_refuse_a_case_that_does_not_exist(monkeypatch, main, options):
    monkeypatch.setattr(sys, "argv", ["benchmark", *options, "--case", "decode 3x5"])
    with pytest.raises(SystemExit, match=r"--case must be .*, got decode 3x5"):
        main()


def test_the_model_has_a_case_of_eight_rows():
    assert [case.rows for case in cases_named(model.CASES, ["decode 8x4096"])] == [8]
