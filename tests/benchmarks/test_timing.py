"""The time of a turn is the difference of two runs."""

from types import SimpleNamespace

import pytest

from benchmarks import (
    timing,
)


def test_the_span_of_a_turn_is_the_difference_of_two_runs(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def launch(rounds):
        clock[0] += 1.0 + 3e-5 * rounds

    assert timing.span_per_turn(launch, rounds=10, turns=3) == pytest.approx(10.0)
