"""Tests of `benchmarks.server`, which says what the server adds to the bare engine. Its times mean something elsewhere."""

import math

import pytest

from benchmarks import server


def test_a_row_has_both_sides_of_the_door(engine):
    options = server.parser().parse_args(
        ["--runs=1", "--prompts=3", "--prefix=64", "--suffix=8", "--output=4", "--block-size=64"]
    )
    with server.served(engine) as url:
        row = server.measure(engine, url, 2, options)
    assert row["case"] == "server x2 byte_model sync"
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        sides = row[f"engine_{name}_p50"], row[f"server_{name}_p50"]
        assert all(math.isfinite(side) and side > 0 for side in sides)
        assert row[f"overhead_{name}_p50"] == pytest.approx(sides[1] - sides[0])
    assert engine.cache.states.pool.num_held == 0
