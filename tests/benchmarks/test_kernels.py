"""The benchmarks of states' and prompts' kernels agree with float64, rotate through their blocks, and compute every turn."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes.small_cases import small

from benchmarks import (
    kernel_benchmark,
    prefill,
)
from benchmarks.kernels import OPS
from benchmarks.workloads import gated_delta_rule as gated_delta_rule_cases

CASES = [(op, case) for op, (cases, _) in OPS.items() for case in cases]
KINDS = {case.name.split()[0]: (op, case) for op, case in reversed(CASES)}.values()

UPDATES = [(op, case) for op, case in KINDS if op not in prefill.OPS]


@pytest.mark.parametrize(("op", "case"), UPDATES, ids=lambda x: x if isinstance(x, str) else x.name)
def test_every_kind_of_benchmark_runs_and_rotates_through_its_blocks(op, case, monkeypatch):
    monkeypatch.setattr(kernel_benchmark, "ROTATION_BYTES", 1 << 19)
    benchmark = OPS[op][1](small(op, case))
    result = jax.jit(lambda inputs: benchmark.run(2, inputs, implementation="xla"))(benchmark.inputs)
    assert [x.shape for x in result] == [x.shape for x in benchmark.initial()]
    assert float(benchmark.error(implementation="xla")) == 0.0
    blocks = benchmark.given["read" if "read" in benchmark.given else "write"]
    assert blocks.min() > 0
    assert len(blocks) * benchmark.bytes >= 1 << 19 or op == "state_copy"


PREFILL = [
    (op, case) for op, case in CASES if op in prefill.OPS and ((op, case) in KINDS or case.name.endswith("olmo"))
]


@pytest.mark.parametrize(("op", "case"), PREFILL, ids=lambda x: x if isinstance(x, str) else x.name)
def test_prefill_agrees_with_float64_and_returns_the_outputs_of_every_turn(op, case, monkeypatch):
    case = small(op, case, dtype="float32", lengths=(1, 70, 0, 130))
    monkeypatch.setattr(kernel_benchmark, "ROTATION_BYTES", 2 * prefill.OPS[op][1](case).bytes)
    benchmark = prefill.OPS[op][1](case)
    pool, out = benchmark.first_turn(implementation="xla")
    assert benchmark.rms_error(out) < 1e-5
    assert benchmark.rms_error(2 * out) == pytest.approx(1, rel=1e-4)
    # Errors are measured over the longest row, which is not the first one.
    assert benchmark.part[0] == slice(71, 201)
    # Every turn has outputs of its own. Rows without tokens are not given to a peer.
    sets = len(benchmark.given["write"])
    assert sets == 2
    after, *outputs = benchmark.run_sets(1, benchmark.inputs, implementation="xla")
    assert len(outputs) == sets
    assert benchmark.rms_error(outputs[0]) < 1e-5
    written = benchmark.given["write"][0]
    np.testing.assert_array_equal(after[0, written], pool[0, written])
    assert benchmark.given["query_start_loc"].tolist() == [0, 1, 71, 201]


def test_the_compiler_does_not_merge_turns():
    """What depends only on the inputs is computed again in every turn, in a loop and unrolled."""
    case = small("gated_delta_rule_prefill", gated_delta_rule_cases.PREFILL_CASES[0])
    benchmark = prefill.delta_rule_benchmark(case)
    work = lambda turn, carry, x: (carry[0] + 1, jnp.sin(x))
    benchmark = dataclasses.replace(
        benchmark, step=work, draw=lambda: dict(x=jnp.ones(3)), initial=lambda: (jnp.zeros(3), jnp.zeros(3))
    )
    for run, wanted in ((benchmark.run, 1), (benchmark.run_sets, benchmark.span_sets)):
        lowered = jax.jit(lambda inputs, run=run: run(4, inputs)).lower(benchmark.inputs)
        body = lowered.as_text().split("while")[1]
        assert body.count("optimization_barrier") == body.count("stablehlo.sine") == wanted
