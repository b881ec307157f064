"""Deferred states of the gated delta rule have the same bits under every schedule of drafts."""

import functools

import pytest
from kernels.common import skip_if_unavailable
from kernels.deferred_rows import Kind
from kernels.deferred_schedules import assert_same_bits, schedules, serve

from pallas_kernels.gated_delta_rule.deferred.config import DeferredConfig


@functools.cache
def wanted_bits(kind, implementation):
    return serve(kind, implementation, schedules(kind.length)["one"])


MOSAIC_GPU_BITS = [
    Kind("64 x 128", "bfloat16"),
    Kind("64 x 128", "bfloat16", "bfloat16"),
    Kind("kimi", "bfloat16", length=32),
]
BITS = [Kind("grouped", "bfloat16"), Kind("grouped", "bfloat16", "bfloat16"), Kind("narrow", length=4), Kind("kimi")]
CASES = [
    *((kind, implementation) for kind in BITS for implementation in ("xla", "interpret")),
    *(pytest.param(kind, "triton", marks=pytest.mark.gpu) for kind in BITS),
    *(pytest.param(kind, "mosaic_gpu", marks=pytest.mark.gpu) for kind in MOSAIC_GPU_BITS),
    (MOSAIC_GPU_BITS[0], "by hand"),
]


# One kind of each decay, and for Mosaic GPU, which has no decay per key channel, of the other one.
OF_EACH = [(kind, implementation) for kind in BITS[:1] for implementation in ("xla", "interpret")]
OF_EACH += [pytest.param(kind, "triton", marks=pytest.mark.gpu) for kind in BITS[:1]]
OF_EACH += [pytest.param(MOSAIC_GPU_BITS[0], "mosaic_gpu", marks=pytest.mark.gpu), (MOSAIC_GPU_BITS[0], "by hand")]


@pytest.mark.usefixtures("optimized_programs")
@pytest.mark.parametrize("schedule", ["all accepted", "three, all accepted", "one accepted", "random"])
@pytest.mark.parametrize(("kind", "implementation"), CASES, ids=str)
def test_schedules_of_drafts_change_no_bit(kind, schedule, implementation):
    """Folds, outputs and entries of accepted tokens are those of one token at a time.

    A CPU's programs are optimized, because in others the rows of a product of tiles may be summed in different ways.
    """
    skip_if_unavailable(implementation)
    found = serve(kind, implementation, schedules(kind.length)[schedule])
    assert_same_bits(found, wanted_bits(kind, implementation), kind.length)


@pytest.mark.usefixtures("optimized_programs")
@pytest.mark.parametrize(("kind", "implementation"), OF_EACH, ids=str)
def test_a_program_for_single_tokens_gives_the_bits_of_one_for_drafts(kind, implementation):
    skip_if_unavailable(implementation)
    found = serve(kind, implementation, schedules(kind.length)["one"], width=1)
    assert found == wanted_bits(kind, implementation)


@pytest.mark.usefixtures("optimized_programs")
@pytest.mark.parametrize(("kind", "implementation"), OF_EACH, ids=str)
def test_a_row_depends_on_that_row_alone(kind, implementation):
    """Neither the order of rows nor padding changes a bit."""
    skip_if_unavailable(implementation)
    schedule = schedules(kind.length)["three, all accepted"]
    found = serve(kind, implementation, schedule, order=(2, 0, 1), padding=4)
    assert found == serve(kind, implementation, schedule)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [Kind("kimi", "bfloat16"), Kind("kimi", "bfloat16", "bfloat16")], ids=str)
def test_the_number_of_tiles_of_a_program_changes_no_bit(kind):
    schedule = schedules(kind.length)["random"]
    configs = [DeferredConfig(block, 32, 128, 4, 3) for block in (32, 64, 128)]
    found = [serve(kind, "triton", schedule, config=config) for config in configs]
    assert found[0] == found[1] == found[2]
