"""Chains whose norms add up what several devices have, run in NumPy, and by XLA on one simulated device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from kernels import programs_in_numpy
from kernels.chains import OF_TOKENS, SMALL, draw, oracle, whole
from kernels.common import assert_close

from pallas_kernels import Mailboxes, Run, UnsupportedError, all_reduce_product_chain, product_chain
from pallas_kernels.product_chain import Norm

PROGRAMS = 132
PARTS = next(case for case in OF_TOKENS if case.name == "parts of one block")


def over_devices(steps):
    """The same steps, with norms over devices."""
    return tuple(dataclasses.replace(step, over_devices=True) if isinstance(step, Norm) else step for step in steps)


def drawn_for(rng, case, tokens, devices):
    """Returns the arguments of each device. All devices have the same residual stream and norms; the rest is their own."""
    every = [draw(rng, case, tokens) for _ in range(devices)]
    residual = every[0][2]
    norms = [step for step in every[0][1] if isinstance(step, Norm)]
    found = []
    for x, steps, _ in every:
        shared = iter(norms)
        found.append((x, over_devices(next(shared) if isinstance(step, Norm) else step for step in steps), residual))
    return found


def oracle_of_devices(arguments, dtype):
    """Runs each device's steps in float64 up to the next norm, which all devices run with the sum of their results."""
    values = [x for x, _, _ in arguments]
    (_, steps, residual), start = arguments[0], 0
    norms = [number for number, step in enumerate(steps) if isinstance(step, Norm)]
    for end in [*norms, len(steps)]:
        own = [(value, given[1][start:end]) for value, given in zip(values, arguments, strict=True)]
        # The oracle rounds no results of the last step that it runs.
        values = [oracle(value, part, residual, dtype)[0] if part else np.asarray(value) for value, part in own]
        if end < len(steps):
            normed, residual, _ = oracle(sum(values)[None], steps[end : end + 1], residual, dtype)
            rounded = np.asarray(jnp.asarray(normed, dtype), np.float64)
            values, start = [rounded] * len(values), end + 1
    return values, residual


@pytest.mark.parametrize(
    ("case", "tokens", "devices", "epoch"),
    [
        pytest.param(PARTS, 3, 2, 1, id="parts of one block"),
        pytest.param(OF_TOKENS[0], 1, 2, 3, id="sums of splits, one token"),
        pytest.param(OF_TOKENS[3], 9, 3, 5, id="more pairs than threads", marks=pytest.mark.deep),
        pytest.param(OF_TOKENS[5], 16, 4, 7, id="heads of 128 channels", marks=pytest.mark.deep),
    ],
)
def test_all_programs_of_all_devices_together_match_the_oracle(rng, monkeypatch, case, tokens, devices, epoch):
    arguments = drawn_for(rng, case, tokens, devices)
    wanted, wanted_total = oracle_of_devices(arguments, case.dtype)
    results, epochs = programs_in_numpy.run_on_devices(monkeypatch, arguments, case.parts, PROGRAMS, epoch)
    steps = arguments[0][1]
    norms = sum(isinstance(step, Norm) for step in steps)
    assert epochs == [epoch + 2 * norms] * devices
    roundings, terms = 2 * len(steps), devices * case.inputs
    for (found, total), own in zip(results, wanted, strict=True):
        found = whole(tuple(found) if case.parts else jnp.asarray(found))
        assert_close(found / roundings, own / roundings, case.dtype, terms, "results")
        assert_close(np.asarray(total, np.float64) / roundings, wanted_total / roundings, case.dtype, terms, "residual")
        np.testing.assert_array_equal(total, results[0][1])


def on_one_device(function):
    """Runs a function of mailboxes inside a `shard_map` of one device."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("tensor",))
    boxes = Mailboxes.create(mesh, "tensor", 4096)
    run = jax.shard_map(function, mesh=mesh, in_specs=(boxes.partition(),), out_specs=P(), check_vma=False)
    return jax.jit(run)(boxes)


def test_on_one_device_the_sum_is_what_it_has(rng):
    x, steps, residual = draw(rng, SMALL[0], 3)
    run = lambda boxes: all_reduce_product_chain(x, over_devices(steps), residual, boxes, jnp.int32(1))
    out, total, epoch = on_one_device(run)
    wanted, wanted_total = jax.jit(product_chain)(x, steps, residual)
    np.testing.assert_array_equal(out, wanted)
    np.testing.assert_array_equal(total, wanted_total)
    assert epoch == 1  # XLA's sums take no epoch.


def test_norms_over_devices_need_mailboxes_that_hold_the_tokens(rng):
    x, steps, residual = draw(rng, PARTS, 16)
    with pytest.raises(ValueError, match="only all_reduce_product_chain has norms over devices"):
        product_chain(x, over_devices(steps), residual)
    more = jnp.tile(x, (4, 1))[:16], over_devices(steps), residual
    run = lambda boxes: all_reduce_product_chain(*more, boxes, jnp.int32(1), run=Run(implementation="mosaic_gpu"))
    with pytest.raises(UnsupportedError, match="a mailbox must hold 4096 elements, got 4095"):
        on_one_device(lambda boxes: run(dataclasses.replace(boxes, capacity=4095)))
