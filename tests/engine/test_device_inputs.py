"""What a split model's devices get besides parameters and pools: inputs that did not change are not sent again."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from mamba_align_jax.align.pool import StatePool
from mamba_align_jax.engine.device.device_inputs import DeviceInputs, new_mailboxes
from mamba_align_jax.engine.device.packed import pack
from mamba_align_jax.kv import KVPages
from mamba_align_jax.sharding import AXIS, Layout


@pytest.fixture
def layout():
    mesh = Mesh(np.array(jax.devices()[:1]), (AXIS,))
    nothing = PartitionSpec()
    return Layout(mesh=mesh, params=(), pool=StatePool(states=()), kv=KVPages(keys=nothing, values=nothing))


def numbers(*values, extra=0):
    return pack(dict(rows=np.array(values, np.int32), more=np.full(extra, 7, np.float32)))


def test_the_same_inputs_are_sent_once(layout):
    inputs = DeviceInputs(layout)
    first = inputs.send(numbers(1, 2, 3))
    assert isinstance(first.words, jax.Array)
    assert inputs.send(numbers(1, 2, 3)) is first
    for other in (numbers(1, 2, 4), numbers(1, 2), numbers(1, 2, extra=1), numbers(1, 2, 3)):
        sent = inputs.send(other)
        assert sent is not first
        for got, wanted in zip(jax.tree.leaves(sent.unpack()), jax.tree.leaves(other.unpack()), strict=True):
            np.testing.assert_array_equal(np.asarray(got), wanted)


def test_equal_words_of_another_structure_are_sent(layout):
    """The same word is a whole number in one structure and a float in the other."""
    inputs = DeviceInputs(layout)
    word = np.array([7], np.float32)
    whole, real = pack({"a": word.view(np.int32)}), pack({"a": word})
    np.testing.assert_array_equal(whole.words, real.words)
    assert inputs.send(whole).unpack()["a"].dtype == np.int32
    assert inputs.send(real).unpack()["a"].dtype == np.float32


def test_one_device_gets_its_inputs_with_the_call():
    given = numbers(1, 2)
    assert DeviceInputs(None).send(given) is given


def test_there_are_no_mailboxes_without_gpus_that_can_write_each_other(layout):
    assert new_mailboxes(None, 64) is None
    assert new_mailboxes(layout, 0) is None
    if jax.default_backend() == "cpu":
        assert new_mailboxes(layout, 64) is None
