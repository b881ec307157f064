"""Every Triton kernel lowers for GPUs, on a machine without one, for every case and every default configuration."""

import dataclasses
import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from kernels.lowered_cases import (
    EVERY,
    OPS,
    SMS,
    array,
    lower,
    lower_gated_delta_rule,
    lower_gated_delta_rule_deferred,
    lower_gated_delta_rule_prefill,
    lower_linear,
    lower_paged_attention,
    lower_product_chain,
    lower_selective_state_deferred,
    lower_selective_state_update,
    lower_ssd,
    on,
    rows,
    state_rows,
)

from benchmarks import deferred_delta_rule, deferred_mamba2, pipeline
from benchmarks.workloads import gated_delta_rule as gated_delta_rule_cases
from benchmarks.workloads import gated_delta_rule_deferred as deferred_cases
from benchmarks.workloads import linear as linear_cases
from benchmarks.workloads import paged_attention as paged_attention_cases
from benchmarks.workloads import product_chain as product_chain_cases
from benchmarks.workloads import selective_state_deferred as deferred_mamba2_cases
from benchmarks.workloads import selective_state_update as selective_state_update_cases
from benchmarks.workloads import ssd as ssd_cases
from pallas_kernels import (
    Gates,
    Run,
    gated_delta_rule_update,
    state_copy,
)
from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.product_chain import api as product_chain_api


@pytest.mark.parametrize(
    ("op", "case"),
    [(op, case) for op in EVERY for case in EVERY[op][1]],
    ids=lambda x: x if isinstance(x, str) else x.name,
)
def test_every_case_lowers_for_h200(op, case):
    assert "__gpu$xla.gpu.triton" in EVERY[op][0]("NVIDIA H200", case)


def test_a_whole_step_lowers_with_the_expected_number_of_launches():
    """With 30 layers each of two ops is called 30 times, and states and windows may be copied before and after them."""
    case = pipeline.Case("pre_copy", 8, 3)
    with on("NVIDIA H200"):
        text = pipeline.trace(case, "triton").lower(lowering_platforms=("cuda",)).as_text()
    copies = dict(state_copy=2, state_copy_shift=2)
    assert launches(text) == dict(causal_conv1d_update=30, gated_delta_rule_update=30) | copies


def launches(text):
    """Returns how often a lowered program launches each Triton kernel. Layers share a function for each op."""
    counts = Counter()
    for function in re.split(r"(?=func\.func )", text)[1:]:
        name = re.match(r"func\.func \w+ @(\w+)", function)[1]
        for kernel in re.findall(r'@__gpu\$xla.gpu.triton.*?name = "(\w+)"', function):
            counts[kernel] += len(re.findall(rf"call @{name}\(", text))
    return counts


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_step_of_deferred_states_lowers_to_two_ops_per_layer_and_no_copy(drafts):
    case = pipeline.Case("deferred", 8, drafts)
    with on("NVIDIA H200"):
        text = pipeline.trace(case, "triton").lower(lowering_platforms=("cuda",)).as_text()
    assert launches(text) == dict(causal_conv1d_update=30, gated_delta_rule_deferred=30)
    # The kernel that keeps windows of boundaries has two more inputs.
    (operands,) = set(re.findall(r"custom_call @__gpu\$xla.gpu.triton\(([^)]*)\).*causal_conv1d_update", text))
    assert operands.count("%") == (10 if drafts else 8)


def test_shift_of_windows_of_layout_ds_lowers_for_h200():
    run = lambda *arguments: state_copy(*arguments, layout="DS", run=Run(implementation="triton"))
    pool = array(jnp.bfloat16, 30, 512, 8192, 3)
    assert "__gpu$xla.gpu.triton" in lower("NVIDIA H200", run, pool, *[rows(8)] * 3)


@pytest.mark.parametrize("op", ["gated_delta_rule_update", "selective_state_update", "selective_scan"])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("lengths", [(1,), (1,) * 8, (3, 1)], ids=str)
def test_every_configuration_lowers(op, state_dtype, lengths):
    """Covers what `default_config` depends on beyond the named cases."""
    run, cases, _ = OPS[op]
    sizes = lambda c: (c.key_dim, c.value_dim, c.layout) if hasattr(c, "key_dim") else (c.head_dim, c.state_dim)
    dims = {sizes(c): c for c in cases}
    for case in dims.values():
        case = dataclasses.replace(case, lengths=lengths, state_dtype=state_dtype)
        assert "__gpu$xla.gpu.triton" in run("NVIDIA H200", case)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_every_variant_of_deferred_states_lowers(state_dtype, tokens):
    """What `benchmarks.deferred` times."""
    case = deferred_cases.Case("any", (tokens,) * 64, state_dtype=state_dtype)
    for config in filter(None, deferred_delta_rule.variants(case, every=True)):
        assert "__gpu$xla.gpu.triton" in lower_gated_delta_rule_deferred("NVIDIA H200", case, config=config)
    case = deferred_mamba2_cases.Case("any", (tokens,) * 64, state_dtype=state_dtype)
    for config in filter(None, deferred_mamba2.variants(case, every=True)):
        assert "__gpu$xla.gpu.triton" in lower_selective_state_deferred("NVIDIA H200", case, config=config)


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="Mosaic GPU kernels need JAX 0.11.2")
@pytest.mark.parametrize("tokens", [1, 4, 8])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "float16"])
def test_deferred_states_lower_by_mosaic_gpu(state_dtype, tokens):
    """Layouts of registers and shared memory are found, and the kernel's memory fits. Only a GPU can compile it further."""
    case = deferred_cases.Case("any", (tokens,) * 8, state_dtype=state_dtype)
    text = lower_gated_delta_rule_deferred("NVIDIA H200", case, implementation="mosaic_gpu")
    assert "mosaic_gpu" in text
    assert "__gpu$xla.gpu.triton" not in text  # one launch
    for dims in (dict(), dict(heads=80, state_dim=64, groups=1), dict(heads=48, state_dim=256, groups=1)):
        case = deferred_mamba2_cases.Case("any", (tokens,) * 8, state_dtype=state_dtype, **dims)
        text = lower_selective_state_deferred("NVIDIA H200", case, implementation="mosaic_gpu")
        assert "mosaic_gpu" in text
        assert "selective_state_deferred_coefficients" in text


UPDATES = [
    *((lower_gated_delta_rule, case) for case in gated_delta_rule_cases.UPDATE_CASES),
    *((lower_selective_state_update, case) for case in selective_state_update_cases.CASES),
]


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="Mosaic GPU kernels need JAX 0.11.2")
@pytest.mark.parametrize(("lower", "case"), UPDATES, ids=lambda x: getattr(x, "name", ""))
def test_updates_lower_by_mosaic_gpu(lower, case):
    """Those with a decay, or parameters, per head do, in the default layout, if a state row fills a lane's loads."""
    is_mamba = lower is lower_selective_state_update
    is_other = case.is_mamba1 if is_mamba else not case.packed or case.layout == "KV" or case.key_dim == 96
    if not is_other:
        assert lower("NVIDIA H200", case, implementation="mosaic_gpu").count("@mosaic_gpu_v2(") == 1
        return
    with pytest.raises(UnsupportedError, match=r"must|no such kernel"):
        lower("NVIDIA H200", case, implementation="mosaic_gpu")


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="Mosaic GPU kernels need JAX 0.11.2")
@pytest.mark.parametrize("options", [dict(scale=1, gates=Gates(lower_bound=-5)), dict(scale=np.float32(0.5))], ids=str)
@pytest.mark.parametrize("name", ["float32", "float8_e4m3fn"])
def test_the_update_takes_any_real_number_and_leaves_narrow_gates_to_triton(name, options):
    f32, heads = jnp.float32, array(name, 4)
    inputs = array(jnp.bfloat16, 8, 1024), array(f32, 8, 4), array(f32, 8, 4), heads, array(f32, 4)
    given = *inputs, array(f32, 2, 9, 4, 128, 128), state_rows(4, 3)
    run = lambda *x: gated_delta_rule_update(*x, **options, run=Run(implementation="mosaic_gpu"))
    if name == "float32":
        assert "mosaic_gpu" in lower("NVIDIA H200", run, *given, donated=(5,))
        return
    with pytest.raises(UnsupportedError, match="arrays must have 16 or 32 bits"):
        lower("NVIDIA H200", run, *given, donated=(5,))


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="Mosaic GPU kernels need JAX 0.11.2")
@pytest.mark.parametrize(
    ("lower", "cases", "module"),
    [
        (lower_gated_delta_rule_deferred, deferred_cases, deferred_delta_rule),
        (lower_selective_state_deferred, deferred_mamba2_cases, deferred_mamba2),
    ],
)
def test_a_configuration_of_triton_is_refused_by_the_mosaic_gpu_kernels_of_deferred_states(lower, cases, module):
    case = cases.Case("any", (4,) * 8)
    config = module.default(case)
    with pytest.raises(UnsupportedError, match="a configuration of the Triton kernel is given"):
        lower("NVIDIA H200", case, implementation="mosaic_gpu", config=config)


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="Mosaic GPU kernels need JAX 0.11.2")
@pytest.mark.parametrize(
    "changes", [{}, dict(gated=True, checkpoints=2), dict(state_dim=64), dict(head_dim=128)], ids=str
)
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "float16"])
def test_ssd_lowers_by_mosaic_gpu(state_dtype, changes):
    case = dataclasses.replace(ssd_cases.CASES[0], lengths=(130, 0, 65), state_dtype=state_dtype, **changes)
    text = lower_ssd("NVIDIA H200", case, implementation="mosaic_gpu")
    assert "mosaic_gpu" in text
    assert "ssd_decays" in text


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="Mosaic GPU kernels need JAX 0.11.2")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(lengths=(130,)),
        dict(layout="KV"),
        dict(key_dim=64, value_dim=192),
        dict(value_heads=48),
        dict(kda=True, key_heads=32),
        dict(kda=True, key_heads=32, lengths=(130,)),
    ],
    ids=str,
)
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "float16"])
def test_prefill_of_the_delta_rule_lowers_by_mosaic_gpu(state_dtype, changes):
    base = gated_delta_rule_cases.PREFILL_CASES[0]
    case = dataclasses.replace(base, **dict(lengths=(130, 0, 65), state_dtype=state_dtype) | changes)
    text = lower_gated_delta_rule_prefill("NVIDIA H200", case, implementation="mosaic_gpu")
    assert text.count("@mosaic_gpu_v2(") == 1 + case.kda  # launches


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="Mosaic GPU kernels need JAX 0.11.2")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(page_size=16),
        dict(page_size=32),
        dict(page_size=512, dtype="float16"),
        dict(key_dim=192),
        dict(key_dim=128, heads=6, kv_heads=2),
        dict(key_dim=64, kv_heads=16),
    ],
    ids=str,
)
def test_attention_of_prompts_lowers_by_mosaic_gpu(changes):
    (ragged,) = [case for case in paged_attention_cases.CASES if case.name == "attention prompt ragged"]
    text = lower_paged_attention("NVIDIA H200", dataclasses.replace(ragged, **changes), implementation="mosaic_gpu")
    assert "mosaic_gpu" in text
    assert "paged_attention_merge" in text


@pytest.mark.parametrize("device", [device for device in SMS if device != "NVIDIA H200"])
@pytest.mark.parametrize("op", EVERY)
def test_one_case_of_each_op_lowers_for_other_gpus(op, device):
    run, _, case = EVERY[op]
    assert "__gpu$xla.gpu.triton" in run(device, case)


@pytest.mark.parametrize("op", EVERY)
def test_the_default_is_triton_on_cuda(op):
    run, _, case = EVERY[op]
    assert "__gpu$xla.gpu.triton" in run("NVIDIA H200", case, implementation=None)


def test_the_default_is_xla_elsewhere():
    pool = array(jnp.float32, 1, 4, 8, 16)
    copy = jax.jit(lambda p, s: state_copy(p, s, s)).trace(pool, rows(2))
    assert "triton" not in copy.lower(lowering_platforms=("cpu",)).as_text()


@pytest.mark.parametrize("op", OPS)
def test_pools_of_more_than_2_to_the_31_elements_have_64_bit_offsets(op, monkeypatch, capsys):
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, debug=True))
    run, _, case = OPS[op]

    def triton_ir(blocks):
        run("NVIDIA H200", case, blocks=blocks)
        return capsys.readouterr().out.partition("The Triton module")[2]

    # With 30 layers, a window of 3 x 8192 has 1/21 of the elements of a state of 32 x 128 x 128.
    few, many = (500, 4097 * 24) if op.startswith("causal_conv1d") else (33, 4097)
    assert "xi64>" not in triton_ir(few)
    assert "xi64>" in triton_ir(many)


def test_weights_of_more_than_2_to_the_31_elements_have_64_bit_offsets(monkeypatch, capsys):
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, debug=True))

    def triton_ir(outputs):
        lower_linear("NVIDIA H200", linear_cases.CASES[0], outputs=outputs)
        return capsys.readouterr().out.partition("The Triton module")[2]

    assert "xi64>" not in triton_ir(800000)
    assert "xi64>" in triton_ir(840000)


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="Mosaic GPU kernels need JAX 0.11.2")
@pytest.mark.parametrize("case", product_chain_cases.CASES, ids=lambda case: case.name)
def test_chains_of_products_lower_by_mosaic_gpu(case):
    assert "mosaic_gpu" in lower_product_chain("NVIDIA H200", case, implementation="mosaic_gpu")


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="Mosaic GPU kernels need JAX 0.11.2")
@pytest.mark.parametrize("tokens", [2, 16])
@pytest.mark.parametrize("name", ["to a delta net", "to attention", "to a convolution", "to the last norm"])
def test_chains_of_several_tokens_lower_by_mosaic_gpu(name, tokens):
    (case,) = (case for case in product_chain_cases.CASES if case.name == name)
    text = lower_product_chain("NVIDIA H200", case, implementation="mosaic_gpu", tokens=tokens)
    assert "product_chain_of_few_tokens" in text


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="Mosaic GPU kernels need JAX 0.11.2")
@pytest.mark.parametrize(
    ("steps", "inputs"),
    [((1024, "norm", 8), 2048), ((("sigmoid", 2), 512, "norm", 64), 256), (("norm", 4096, "norm"), 4096)],
    ids=str,
)
def test_programs_that_share_a_normed_result_lower_by_mosaic_gpu(steps, inputs):
    case = product_chain_cases.Case("splits", steps, inputs)
    assert "mosaic_gpu" in lower_product_chain("NVIDIA H200", case, implementation="mosaic_gpu")


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="Mosaic GPU kernels need JAX 0.11.2")
@pytest.mark.parametrize("tokens", [1, 16])
def test_one_launch_and_separate_ones_return_as_many_splits(monkeypatch, tokens):
    """A program for several platforms holds both."""
    monkeypatch.setattr(product_chain_api, "unavailable", lambda *arguments: None)
    (case,) = (case for case in product_chain_cases.CASES if case.name == "to the last norm")
    text = lower_product_chain("NVIDIA H200", case, implementation=None, tokens=tokens)
    assert "product_chain" in text
