"""The benchmarks' cases of kernels with sizes that a CPU computes at once."""

import dataclasses

SMALL = {
    "state_copy": dict(layers=2, states=(((3, 64), "bfloat16"), ((2, 8, 16), "float32"))),
    "causal_conv1d_update": dict(channels=64),
    "causal_conv1d_prefill": dict(channels=64),
    "gated_delta_rule_update": dict(key_heads=2, value_heads=2, key_dim=16, value_dim=16),
    "gated_delta_rule_prefill": dict(key_heads=2, key_dim=16, value_dim=32),
    "selective_state_update": dict(head_dim=16, groups=1, state_dim=16),
    "ssd": dict(heads=4, head_dim=16, groups=2, state_dim=16),
    "selective_scan": dict(head_dim=128, state_dim=16),
}


def small(op, case, **fields):
    if hasattr(case, "lengths"):
        fields = dict(lengths=tuple(min(length, 70) for length in case.lengths[:8])) | fields
    if op == "gated_delta_rule_prefill":
        fields |= dict(value_heads=2 if case.kda else 4)
    return dataclasses.replace(case, **SMALL[op], **fields)
