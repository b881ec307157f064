"""The bytes that an op must move are those of a formula by hand."""

from benchmarks import (
    prefill,
)
from benchmarks.kernels import OPS

CASES = [(op, case) for op, (cases, _) in OPS.items() for case in cases]


def test_bytes_equal_the_formulas():
    def bytes_of(name):
        op, case = next((op, case) for op, case in CASES if case.name == name)
        return OPS[op][1](case).bytes

    state = 32 * 128 * 128 * 4
    # A state is read and one is written. Inputs are 2 * 16 * 128 + 32 * 128 and two gates per head, outputs 32 * 128, all
    # of them bfloat16.
    assert bytes_of("gdn_decode float32 1") == 2 * state + 2 * (8192 + 64 + 4096)
    # Each row writes three states.
    assert bytes_of("gdn_verify float32 8") == 8 * (4 * state + 3 * 2 * (8192 + 64 + 4096))
    # A window of three rows and a token are read and written, and the taps are read.
    assert bytes_of("conv_update 8") == 8 * 8 * 8192 * 2 + 4 * 8192 * 2
    assert bytes_of("state_copy idle 64") == 0
    assert bytes_of("state_copy 8") == 8 * 2 * 30 * (state + 3 * 8192 * 2)
    # Each head has two float32 gates per token.
    assert bytes_of("gdn_prefill 1x8192") == 2 * state + 8192 * (2 * (8192 + 4096) + 4 * 64)
    # Each key channel has a gate, and there are as many key heads as value heads.
    assert bytes_of("kda_prefill 1x8192") == 2 * state + 8192 * (2 * 4 * 4096 + 4 * (32 * 128 + 32))
    # The row without tokens moves nothing.
    assert bytes_of("gdn_prefill olmo") == 8 * 30 * 96 * 192 * 4 + 894 * (2 * 2 * 30 * (96 + 192) + 4 * 60)
    assert bytes_of("conv_prefill ragged") == 2 * 8192 * (4 * 6 + 2 * 894 + 4)


def test_bytes_of_state_space_prefill_equal_the_formulas():
    def bytes_of(op, name):
        cases, make = prefill.OPS[op]
        return make(next(case for case in cases if case.name == name)).bytes

    assert bytes_of("ssd", "ssd_prefill 4x2048") == (
        8 * 128 * 64 * 128 * 4 + 8192 * 2 * (2 * 8192 + 128 + 2 * 1024) + 4 * 128
    )
    assert bytes_of("selective_scan", "selective_scan 4x2048") == (
        8 * 8192 * 16 * 4 + 8192 * 2 * (3 * 8192 + 32) + 4 * 8192 * 16
    )
