"""Every Triton kernel lowers for GPUs on a machine without one, for every case and every Config that may be chosen."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import gated_delta_rule_update, state_copy
from pallas_kernels.gated_delta_rule import cases as gated_delta_rule_cases
from pallas_kernels.state_copy import cases as state_copy_cases

CORES = {"NVIDIA H200": 132, "NVIDIA A100-SXM4-80GB": 108, "NVIDIA H100 80GB HBM3": 132, "NVIDIA B200": 148}


def lower(device, function, *arguments):
    abstract = AbstractDevice(device_kind=device, num_cores=CORES[device], platform="gpu")
    with use_abstract_mesh(AbstractMesh((1,), ("_",), abstract_device=abstract)):
        return jax.jit(function, donate_argnums=0).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def array(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


def rows(n):
    return array(jnp.int32, n)


def lower_state_copy(device, case, blocks=512):
    pool = array(case.dtype, case.layers, blocks, *case.state)
    offset = (rows(case.rows),) if case.shift else ()
    run = lambda pool, *plan: state_copy(pool, *plan, implementation="triton")
    return lower(device, run, pool, rows(case.rows), rows(case.rows), *offset)


def lower_update(device, case, layers=30, blocks=512, implementation="triton"):
    tokens, n, window = sum(case.lengths), len(case.lengths), max(case.lengths)
    pool = array(case.state_dtype, layers, blocks, case.value_heads, case.value_dim, case.key_dim)
    channels = 2 * case.key_heads * case.key_dim + case.value_heads * case.value_dim
    qkv, gate = array(case.dtype, tokens, channels), array(case.dtype, tokens, case.value_heads)
    head = array(jnp.float32, case.value_heads)
    run = lambda pool, qkv, a, b, A_log, dt_bias, layer, loc, read, write: gated_delta_rule_update(
        qkv, a, b, A_log, dt_bias, pool, layer, loc, read, write, implementation=implementation
    )
    indices = array(jnp.int32), rows(n + 1), rows(n), array(jnp.int32, n, window)
    return lower(device, run, pool, qkv, gate, gate, head, head, *indices)


@pytest.mark.parametrize("case", state_copy_cases.CASES, ids=lambda case: case.name)
def test_state_copy_lowers_for_h200(case):
    assert "__gpu$xla.gpu.triton" in lower_state_copy("NVIDIA H200", case)


@pytest.mark.parametrize("case", gated_delta_rule_cases.UPDATE_CASES, ids=lambda case: case.name)
def test_gated_delta_rule_update_lowers_for_h200(case):
    assert "__gpu$xla.gpu.triton" in lower_update("NVIDIA H200", case)


@pytest.mark.parametrize("device", [device for device in CORES if device != "NVIDIA H200"])
def test_one_case_of_each_op_lowers_for_other_gpus(device):
    assert "__gpu$xla.gpu.triton" in lower_state_copy(device, state_copy_cases.CASES[2])
    assert "__gpu$xla.gpu.triton" in lower_update(device, gated_delta_rule_cases.UPDATE_CASES[0])


def test_the_default_is_triton_on_cuda_and_xla_elsewhere():
    case = gated_delta_rule_cases.UPDATE_CASES[0]
    assert "__gpu$xla.gpu.triton" in lower_update("NVIDIA H200", case, implementation=None)
    pool = array(jnp.float32, 1, 4, 8, 16)
    copy = jax.jit(lambda p, s: state_copy(p, s, s)).trace(pool, rows(2))
    on_cpu = copy.lower(lowering_platforms=("cpu",)).as_text()
    assert "triton" not in on_cpu


@pytest.mark.parametrize("op", ["state_copy", "gated_delta_rule_update"])
def test_pools_of_more_than_2_to_the_31_elements_have_64_bit_offsets(op, monkeypatch, capsys):
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, debug=True))

    def triton_ir(blocks):
        if op == "state_copy":
            lower_state_copy("NVIDIA H200", state_copy_cases.CASES[2], blocks=blocks)
        else:
            lower_update("NVIDIA H200", gated_delta_rule_cases.UPDATE_CASES[0], blocks=blocks)
        return capsys.readouterr().out.split("The Triton module")[1]

    assert "xi64>" not in triton_ir(33)  # 30 layers of 33 blocks: 5.2e8 elements
    assert "xi64>" in triton_ir(4097)
