"""The harness itself: what it runs, what it counts, what it prints. Times need a GPU."""

import dataclasses
import json

import pytest

from benchmarks import workloads
from benchmarks.report import table

SMALL = {
    "state_copy": dict(layers=2, states=(((3, 64), "bfloat16"), ((2, 8, 16), "float32"))),
    "causal_conv1d_update": dict(channels=64),
    "gated_delta_rule_update": dict(key_heads=2, value_heads=2, key_dim=16, value_dim=16),
    "causal_conv1d_prefill": dict(channels=64, lengths=(9, 2)),
    "selective_scan": dict(head_dim=16, lengths=(9, 2)),
    "selective_state_update": dict(head_dim=16, groups=1, state_dim=16),
}
CASES = [(op, case) for op, (cases, _) in workloads.OPS.items() for case in cases]
KINDS = {case.name.split()[0]: (op, case) for op, case in reversed(CASES)}.values()


def small(op, case):
    if hasattr(case, "lengths"):
        case = dataclasses.replace(case, lengths=case.lengths[:8])
    return dataclasses.replace(case, **SMALL[op])


@pytest.mark.parametrize(("op", "case"), KINDS, ids=lambda x: x if isinstance(x, str) else x.name)
def test_every_kind_of_workload_runs_and_rotates(op, case, monkeypatch):
    monkeypatch.setattr(workloads, "ROTATION_BYTES", 1 << 16)
    workload = workloads.OPS[op][1](small(op, case))
    result = workload.run(2, implementation="xla")
    assert [x.shape for x in result] == [x.shape for x in workload.initial()]
    assert float(workload.error(implementation="xla")) == 0.0
    blocks = workload.given["read" if "read" in workload.given else "write"]
    assert blocks.min() > 0
    assert len(blocks) * workload.bytes >= 1 << 16 or op == "state_copy"


def test_bytes_are_those_of_the_formulas():
    def bytes_of(name):
        op, case = next((op, case) for op, case in CASES if case.name == name)
        return workloads.OPS[op][1](case).bytes

    state = 32 * 128 * 128 * 4
    # A state in, a state out; 2 * 16 * 128 + 32 * 128 inputs, two gates per head, 32 * 128 outputs, all bfloat16.
    assert bytes_of("gdn_decode float32 1") == 2 * state + 2 * (8192 + 64 + 4096)
    # Three states out per row.
    assert bytes_of("gdn_verify float32 8") == 8 * (4 * state + 3 * 2 * (8192 + 64 + 4096))
    # A window of three rows in and out, a token in, out; and the taps.
    assert bytes_of("conv_update 8") == 8 * 8 * 8192 * 2 + 4 * 8192 * 2
    assert bytes_of("state_copy idle 64") == 0
    assert bytes_of("state_copy 8") == 8 * 2 * 30 * (state + 3 * 8192 * 2)


def test_the_report_takes_the_newest_row_of_each_case(tmp_path):
    row = dict(case="a", us=2.0, bandwidth_fraction=0.5)
    rows = [row, dict(case="b", us=3.0, bandwidth_fraction=0.01), row | dict(us=1.0, peer="p", peer_us=4.0, ratio=0.25)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert table(file).splitlines()[2:] == ["| a | 1.0 us | 0.50 | p 4.0 us | 0.25 |", "| b | 3.0 us | - | - | - |"]
