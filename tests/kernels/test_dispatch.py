"""Which implementation an op runs, and that a user of a GPU is told if Triton cannot run it."""

import functools
import operator
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import Rows, Run, UnsupportedError, linear, selective_state_update
from pallas_kernels.dispatch import dispatch


def run(implementation, unsupported="heads of 7 elements", op="op"):
    return dispatch(
        op, implementation, (jnp.int32(2),), xla=operator.neg, triton=lambda x: x * 10, unsupported=unsupported
    )


@pytest.mark.parametrize(("backend", "warns"), [("gpu", True), ("cpu", False)])
def test_fallback_to_xla_on_a_gpu_is_logged_once_per_op(monkeypatch, caplog, backend, warns):
    # Each message is logged once per process, so every case of this test uses op names of its own.
    op, other = f"op on {backend}", f"another op on {backend}"
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    for _ in range(3):
        assert run(None, op=op) == -2
    assert run("xla", op=op) == run("xla", unsupported=None, op=op) == -2
    message = f"{op} runs as XLA code, more slowly than the Triton kernel: heads of 7 elements"
    assert [record.message for record in caplog.records] == [message] * warns
    run(None, op=other)
    assert len(caplog.records) == 2 * warns


def test_the_named_implementation_runs_or_raises():
    assert run("triton", unsupported=None) == 20
    with pytest.raises(UnsupportedError, match=r"op: implementation='triton' cannot run .*: heads of 7 elements"):
        run("triton")
    with pytest.raises(ValueError, match="implementation must be 'xla', 'triton', 'mosaic_gpu' or None, got 'cuda'"):
        run("cuda")
    with pytest.raises(UnsupportedError, match=r"implementation='mosaic_gpu' cannot run .*: the op has no such kernel"):
        run("mosaic_gpu", unsupported=None)


@pytest.mark.parametrize("implementation", ["xla", "triton", "mosaic_gpu", None])
@pytest.mark.parametrize("reason", [None, "heads of 7 elements"])
def test_mosaic_gpu_comes_first_if_it_can_run(implementation, reason):
    """Which kernel a program for CUDA would contain, by what its other platforms run."""
    kernels = dict(triton=lambda x: x + 1.5, mosaic_gpu=reason or (lambda x: x + 2.5))

    def step(x):
        return dispatch("op", implementation, (x,), xla=lambda x: x + 0.5, **kernels)

    if implementation == "mosaic_gpu" and reason:
        with pytest.raises(UnsupportedError, match=reason):
            step(jnp.float32(0))
        return
    text = jax.jit(step).trace(jnp.float32(0)).lower(lowering_platforms=("cuda",)).as_text()
    kernel = "1.5" if reason else "2.5"
    wanted = {"xla": "0.5", "triton": "1.5", "mosaic_gpu": "2.5", None: kernel}[implementation]
    assert [number for number in ("0.5", "1.5", "2.5") if f"{float(number):e}" in text.lower()] == [f"{wanted}"]


@pytest.mark.parametrize("implementation", ["triton", "mosaic_gpu", None])
def test_the_derivative_of_a_kernel_is_refused_by_name(implementation):
    """`None` runs XLA code here, but the program could be lowered for a GPU."""
    kernels = dict(triton=lambda x, n, _: x * 10, mosaic_gpu=lambda x, n, _: x * 100)
    step = lambda x, how: dispatch("op", how, (x, jnp.float32(3), None), xla=lambda x, n, _: x * n, **kernels)
    # Ops call `dispatch` in a jitted function.
    for derivative in (jax.grad(jax.jit(step, static_argnums=1)), jax.jit(jax.grad(step), static_argnums=1)):
        with pytest.raises(UnsupportedError, match=r"op: .* no derivative; only implementation='xla' can be"):
            derivative(jnp.float32(2), implementation)
        assert derivative(jnp.float32(2), "xla") == 3


def test_a_kernel_on_a_cpu_names_interpret_mode():
    arguments = jnp.ones((3, 8)), jnp.ones((4, 8))
    run = functools.partial(linear, run=Run(implementation="triton"))
    for call in (run, jax.jit(run), jax.vmap(run, in_axes=(None, None), axis_size=2)):
        with pytest.raises(ValueError, match=r"linear: implementation='triton' .* interpret=True"):
            call(*arguments)
    (out,) = linear(*arguments, run=Run(implementation="triton", interpret=True))
    assert (out == 8).all()


@pytest.fixture
def hopper_without_mosaic_gpu(monkeypatch):
    """JAX seems to be recent and its default device a Hopper GPU, but Mosaic GPU cannot be imported."""
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(compute_capability="9.0")])
    monkeypatch.setitem(sys.modules, "pallas_kernels.hopper", None)


def kernels_of(heads, implementation):
    """Returns the program of an op that has all three kernels. Programs of other numbers of heads are traced anew."""
    ones, index = lambda *shape: jnp.ones(shape), jnp.zeros(1, jnp.int32)
    rows = Rows(layer=0, query_start_loc=jnp.array([0, 1]), read=index, write=index[None] + 1)
    arrays = ones(1, heads, 64), ones(1, heads), ones(heads), ones(1, 1, 128), ones(1, 1, 128)
    run = functools.partial(selective_state_update, rows=rows, run=Run(implementation=implementation))
    return str(jax.make_jaxpr(run)(*arrays, pool=ones(1, 2, heads, 64, 128)))


@pytest.mark.usefixtures("hopper_without_mosaic_gpu")
def test_triton_runs_where_mosaic_gpu_cannot_be_imported_and_a_warning_says_why(caplog):
    assert "pallas_call" in kernels_of(3, None)
    assert [record.message.split(":")[:2] for record in caplog.records] == [
        ["no Mosaic GPU kernel can run, and Triton's run instead", " JAX's Mosaic GPU cannot be imported"]
    ]


@pytest.mark.usefixtures("hopper_without_mosaic_gpu")
def test_naming_mosaic_gpu_where_it_cannot_be_imported_raises():
    with pytest.raises(
        UnsupportedError, match=r"selective_state_update: .* JAX's Mosaic GPU cannot be imported: import of"
    ):
        kernels_of(5, "mosaic_gpu")
