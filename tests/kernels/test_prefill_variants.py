"""The delta rule's prefill carries states in one of two variants on Hopper GPUs, which have the same bits."""

import jax.numpy as jnp
import numpy as np
import pytest
from kernels.delta_rule_claims import Dims
from kernels.delta_rule_prefill_claims import make_prefill, prefill

from pallas_kernels.gated_delta_rule.prefill import chunk_states_64_sm90, chunk_states_128_sm90
from pallas_kernels.gated_delta_rule.prefill.per_head_sm90 import Plan
from pallas_kernels.gated_delta_rule.prefill.variants_sm90 import SMS, Variant, selects_first, variants

HEADS, DIM = 32, 128
PROGRAMS = HEADS * DIM // 64  # that carry a row's states in the first variant
# Lengths of several rows, and whether they are carried in the first variant. The first row is compared with itself alone.
LENGTHS = [
    ([200, 0, 0, 0], True),
    ([200, 3, 0, 5], True),
    ([200, 130, 0, 0], True),
    ([200, 200, 200, 0], False),
    ([70, 200, 130, 140], False),
    ([200, 64, 0, 130, 1, 200, 65, 3, 0, 190], False),  # programs of the second variant take several heads
]


@pytest.mark.parametrize(
    ("rows", "value_dim", "wanted"),
    [
        (1, 128, [chunk_states_64_sm90]),
        (2, 128, [chunk_states_64_sm90]),
        (4, 128, [chunk_states_64_sm90, chunk_states_128_sm90]),
        (4, 64, [chunk_states_64_sm90]),
        (24, 128, [chunk_states_128_sm90]),
    ],
)
def test_a_launch_has_the_forms_that_its_rows_may_need(rows, value_dim, wanted):
    assert [variant.module for variant in variants(rows, HEADS, value_dim)] == wanted


@pytest.mark.parametrize(("lengths", "wanted"), LENGTHS)
def test_the_first_form_carries_few_rows_and_long_ones(lengths, wanted):
    assert selects_first(jnp.asarray(np.cumsum([7, *lengths]), jnp.int32), len(lengths), PROGRAMS) == wanted


@pytest.mark.parametrize(("rows", "is_packed"), [(4, False), (5, True), (64, True)])
def test_many_heads_are_carried_while_few_programs_make_the_last_products(rows, is_packed):
    found = Plan.of(Variant.of(chunk_states_128_sm90, rows, HEADS, DIM))
    assert (found.makers, found.carrying.ctas, found.is_packed) == (SMS, min(rows * HEADS, SMS), is_packed)


@pytest.mark.gpu
@pytest.mark.parametrize("kda", [False, True])
@pytest.mark.parametrize("lengths", [lengths for lengths, _ in LENGTHS])
def test_both_forms_have_the_same_bits(rng, lengths, kda):
    key_heads = HEADS if kda else HEADS // 2
    inputs, before = make_prefill(rng, lengths, Dims(key_heads, HEADS, DIM, DIM), jnp.bfloat16, kda=kda)
    first = [x[: lengths[0]] for x in inputs]
    how = dict(implementation="mosaic_gpu", padded=False)
    checkpoints = np.array([[[64, 128]], [[8, 9]]])
    alone, wanted = prefill(first, before, lengths[:1], [0], [3], [6], checkpoints, **how)
    others = [0] * (len(lengths) - 1)
    checkpoints = np.pad(checkpoints, ((0, 0), (0, len(others)), (0, 0)))
    out, pool = prefill(inputs, before, lengths, [0, *others], [3, *others], [6, *others], checkpoints, **how)
    np.testing.assert_array_equal(np.asarray(out[: lengths[0]]), np.asarray(alone))
    np.testing.assert_array_equal(np.asarray(pool), np.asarray(wanted))
    assert np.isfinite(np.asarray(out, np.float32)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kda", [False, True])
@pytest.mark.parametrize(
    ("layout", "dtype"), [("VK", jnp.float32), ("VK", jnp.bfloat16), ("KV", jnp.float32), ("KV", jnp.float16)]
)
def test_states_of_many_heads_come_and_leave_as_those_of_few(rng, layout, dtype, kda):
    lengths = [200, 64, 0, 130, 1, 70, 65, 3, 0, 190]
    read, write = [3, 0, 5, 4, 8, 9, 0, 10, 7, 11], [3, 12, 13, 4, 14, 15, 16, 0, 17, 11]
    key_heads = HEADS if kda else HEADS // 2
    inputs, _ = make_prefill(rng, lengths, Dims(key_heads, HEADS, DIM, DIM), jnp.bfloat16, extra_tokens=100, kda=kda)
    before = rng.normal(size=(2, 20, HEADS, DIM, DIM)).astype(np.float32)
    before[:, [0, *set(write) - set(read)]] = np.nan
    before = jnp.asarray(before, dtype)
    how = dict(implementation="mosaic_gpu", layout=layout, padded=False)
    out, pool = prefill(inputs, before, lengths, [0] * len(lengths), read, write, **how)
    wanted, ends = before, np.cumsum(lengths)
    for row, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        if length:
            own = [np.full((max(lengths), *x.shape[1:]), np.nan, x.dtype) for x in inputs]
            for x, y in zip(own, inputs, strict=True):
                x[:length] = y[end - length : end]
            alone, wanted = prefill(own, wanted, [length], [0], [read[row]], [write[row]], **how)
            np.testing.assert_array_equal(float32(out[end - length : end]), float32(alone[:length]), f"row {row}")
    np.testing.assert_array_equal(float32(pool), float32(wanted))
    assert not float32(out[ends[-1] :]).any()


def float32(x):
    return np.asarray(x, np.float32)
