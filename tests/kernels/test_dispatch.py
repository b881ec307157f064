"""Who runs an op that Triton can't, and that a user of a GPU is told."""

import operator

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.dispatch import UnsupportedError, _say_once, dispatch


def run(implementation, unsupported="heads of 7 elements", op="op"):
    return dispatch(
        op, implementation, (jnp.int32(2),), xla=operator.neg, triton=lambda x: x * 10, unsupported=unsupported
    )


@pytest.mark.parametrize(("backend", "said"), [("gpu", True), ("cpu", False)])
def test_falling_back_is_said_once(monkeypatch, caplog, backend, said):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    _say_once.cache_clear()
    for _ in range(3):
        assert run(None) == -2
    assert run("xla") == run("xla", unsupported=None) == -2
    message = "op runs as XLA's code, more slowly than the Triton kernel would: heads of 7 elements"
    assert [record.message for record in caplog.records] == [message] * said
    run(None, op="another")
    assert len(caplog.records) == 2 * said


def test_what_is_named_runs_or_raises():
    assert run("triton", unsupported=None) == 20
    with pytest.raises(UnsupportedError, match="op: implementation='triton': heads of 7 elements"):
        run("triton")
    with pytest.raises(ValueError, match="implementation must be 'xla', 'triton' or None, got 'cuda'"):
        run("cuda")
