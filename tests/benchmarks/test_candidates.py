"""Benchmarks of single ops compare every candidate with the op's equation, and name what they try."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
    all_reduce,
    attention,
    chains,
    drawing,
    experts,
    rotary,
)
from benchmarks.workloads.least_kept import CASES as DRAWING_CASES
from benchmarks.workloads.mixture_of_experts import Case as ExpertsCase
from benchmarks.workloads.paged_attention import Case as AttentionCase
from benchmarks.workloads.product_chain import Case as ChainCase
from benchmarks.workloads.product_chain import Mixture
from benchmarks.workloads.rotary import CASES as ROTARY_CASES
from pallas_kernels import Run
from pallas_kernels.product_chain import product_chain

# What benchmarks of two candidates compare.
CANDIDATES = dict(
    xla=dict(run=Run(implementation="xla")), triton=dict(run=Run(implementation="triton", interpret=True))
)


@pytest.mark.parametrize(
    "case",
    [
        AttentionCase("decode", (1, 1), (100, 20), heads=4, kv_heads=2, key_dim=32, page_size=16, max_model_len=128),
        AttentionCase(
            "prompt", (70, 5), (10, 3), None, heads=2, kv_heads=1, key_dim=48, value_dim=32, max_model_len=128
        ),
    ],
    ids=lambda case: case.name,
)
def test_attention_benchmark_compares_every_path_with_float32(case, monkeypatch):
    monkeypatch.setattr(attention, "ROTATION_BYTES", 1 << 16)
    paths = attention.candidates_of(case, tune=False)
    assert list(paths) == ["triton", "xla", "gather"]
    paths["triton"] = attention.candidates_of(case, tune=False, interpret=True)["triton"]
    for row in attention.measure(case, paths, time_it=False):
        assert 0 < row["rms_error"] < 4e-3
    # What is timed: calls on one layer after another.
    setup = attention.prepare(case)
    assert setup.layers > 1
    out = attention.compile_turns(setup, paths["xla"])
    assert not np.array_equal(np.asarray(out(1)), np.asarray(out(2)))


def test_attention_benchmark_names_every_configuration_that_it_tries():
    for case in attention.DECODE_CASES + attention.PROMPT_CASES:
        paths = attention.candidates_of(case, tune=True)
        assert len(paths) == 1 + len(attention.tuned(case))


def test_chain_benchmark_runs_every_chain_with_weights_of_its_own():
    chain = ChainCase("small", (256, "norm", ("gated", 512), 256, "norm", 64), 512, (32, 16, 16))
    case = chains.ChainOfTokens(chain, 3)
    drawn = [case.draw(seed) for seed in range(2)]
    found = chains.turn(drawn, parts=chain.parts, run=Run(implementation="xla"))
    alone = [product_chain(*each, parts=chain.parts, run=Run(implementation="xla")) for each in drawn]
    assert [chains.difference(out, wanted) for (out, _), (wanted, _) in zip(found, alone, strict=True)] == [0.0, 0.0]
    assert chains.difference(found[0][0], found[1][0]) > 1
    assert case.weight_bytes() == 2 * (256 * 512 + 1024 * 256 + 256 * 512 + 64 * 256)


def test_chain_benchmark_counts_the_chosen_experts():
    mixture = Mixture(routed=8, top_k=2, size=64, outputs=128)
    case = chains.ChainOfTokens(ChainCase("experts", ("norm", mixture, "norm"), 128), 1)
    assert case.weight_bytes() == 2 * (9 * 128 + 3 * (2 * 64 * 128 + 128 * 64))
    assert len({case.name for case in chains.CASES}) == len(chains.CASES)


@pytest.mark.parametrize("case", ROTARY_CASES[-2:], ids=lambda case: case.name)
def test_rotary_benchmark_compares_every_candidate_with_float64(case):
    rows = rotary.measure(case, CANDIDATES, rate=None)
    assert [row["candidate"] for row in rows] == list(CANDIDATES)
    for row in rows:
        assert "failed" not in row
        assert 0 < row["rms_error"] < (1e-6 if case.dtype == "float32" else 1e-3)


def test_drawing_benchmark_compares_every_candidate_with_sorting():
    rows = drawing.measure(DRAWING_CASES[-1], CANDIDATES, time_it=False)
    assert [row["candidate"] for row in rows] == list(CANDIDATES)
    for row in rows:
        assert "failed" not in row
        assert row["difference"] == 0
    weights = jnp.asarray([[1.0, 0.5, 0.25]])
    assert drawing.kept_difference(weights, jnp.asarray([0.25]), 0, 0.5) == 2  # it keeps three tokens instead of one


def test_drawing_benchmark_tries_configurations_of_every_large_case():
    assert min(len(drawing.tuned(case)) for case in DRAWING_CASES[:-1]) > 1


def test_rotary_benchmark_tries_configurations_of_every_case():
    assert min(len(rotary.tuned(case)) for case in ROTARY_CASES) > 1


@pytest.mark.parametrize("case", [
    ExpertsCase("few", 5, experts=6, top_k=2, hidden=64, size=32, dtype="float32"),
    ExpertsCase("many", 280, experts=6, top_k=2, hidden=48, size=24, activation="relu2"),
], ids=lambda case: case.name)  # fmt: skip
def test_experts_benchmark_compares_every_path_with_float32(case, monkeypatch):
    monkeypatch.setattr(experts, "TURNS", 2)
    paths = experts.candidates_of(case, tune=False)
    assert ("ragged_dot" in paths) == (case.name == "few")
    interpreted = experts.candidates_of(case, tune=False, interpret=True)
    paths |= {name: run for name, run in interpreted.items() if name.endswith("triton")}
    for row in experts.measure(case, paths, time_it=False):
        assert "failed" not in row
        assert row["error"] < (1e-5 if case.dtype == "float32" else 1e-2)
    wrong = {"wrong": lambda arguments: 1.1 * experts.call(case, arguments, Run(implementation="xla"))}
    (row,) = experts.measure(case, wrong, time_it=False)
    assert "above" in row["failed"]
    # The floor is that of the weights for few tokens, and of the operations for many.
    setup = experts.prepare(case)
    size, operations = case.hidden * (case.up_size + case.size), 2 * case.tokens * case.top_k
    assert setup.chosen == 6 or case.name == "few"
    few = 4 * size * setup.chosen / 4e6
    assert setup.floor_us(4e6) == pytest.approx(few if case.name == "few" else max(few / 2, size * operations / 790e6))


def test_experts_benchmark_names_every_configuration_that_it_tries():
    for case in experts.QWEN_CASES:
        assert len(experts.candidates_of(case, tune=True)) == 1 + len(experts.tuned(case))


def test_sums_over_devices_are_compared_with_xla(monkeypatch):
    monkeypatch.setattr(all_reduce, "ROUNDS", 1)
    monkeypatch.setattr(all_reduce, "CALLS", 2)
    case = next(case for case in all_reduce.CASES if case.name == "all_reduce_rms_norm odd 5")
    (row,) = all_reduce.measure(case, 1, {"xla": CANDIDATES["xla"]})
    assert (row["candidate"], row["error"], row["same_on_all"]) == ("xla", 0.0, True)
    names = all_reduce.tuned(case)
    configs = [options["run"].config for options in names.values()]
    assert all(config.num_warps * 32 * config.pack <= 1024 for config in configs)
    assert "w8_p4" in names
