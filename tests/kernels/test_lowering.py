"""Every Triton kernel lowers for GPUs, on a machine without one, for every case and every default configuration."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from benchmarks import deferred_delta_rule, deferred_mamba2, pipeline
from pallas_kernels import (
    Mailboxes,
    add_rms_norm,
    all_reduce,
    all_reduce_rms_norm,
    causal_conv1d_prefill,
    causal_conv1d_update,
    choose_experts,
    chunk_rows,
    gated_delta_rule_prefill,
    gated_delta_rule_recurrent,
    gated_delta_rule_update,
    least_kept,
    linear,
    linear_sums,
    mixture_of_experts,
    mixture_of_experts_sums,
    paged_attention,
    product_chain,
    rotate_and_store,
    routed_experts_sums,
    selective_scan,
    selective_state_update,
    ssd,
    state_copy,
)
from pallas_kernels.all_reduce import cases as all_reduce_cases
from pallas_kernels.causal_conv1d import cases as causal_conv1d_cases
from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.gated_delta_rule import cases as gated_delta_rule_cases
from pallas_kernels.gated_delta_rule.deferred import cases as deferred_cases
from pallas_kernels.gated_delta_rule.deferred import gated_delta_rule_deferred
from pallas_kernels.least_kept import cases as least_kept_cases
from pallas_kernels.linear import cases as linear_cases
from pallas_kernels.mixture_of_experts import cases as mixture_of_experts_cases
from pallas_kernels.paged_attention import cases as paged_attention_cases
from pallas_kernels.product_chain import api as product_chain_api
from pallas_kernels.product_chain import cases as product_chain_cases
from pallas_kernels.rms_norm import cases as rms_norm_cases
from pallas_kernels.rotary import cases as rotary_cases
from pallas_kernels.selective_scan import cases as selective_scan_cases
from pallas_kernels.selective_state_update import cases as selective_state_update_cases
from pallas_kernels.selective_state_update.deferred import cases as deferred_mamba2_cases
from pallas_kernels.selective_state_update.deferred import selective_state_deferred
from pallas_kernels.ssd import cases as ssd_cases
from pallas_kernels.state_copy import cases as state_copy_cases

CORES = {
    "NVIDIA H200": 132,
    "NVIDIA A100-SXM4-80GB": 108,
    "NVIDIA H100 80GB HBM3": 132,
    "NVIDIA B200": 148,
    "NVIDIA GeForce RTX 4090": 128,
}


def on(device):
    """Returns a context in which programs are lowered for that GPU."""
    abstract = AbstractDevice(device_kind=device, num_cores=CORES[device], platform="gpu")
    # The mesh only names the device. Nothing is sharded over it.
    return use_abstract_mesh(AbstractMesh((1,), ("_",), axis_types=(AxisType.Auto,), abstract_device=abstract))


def lower(device, function, *arguments, donated=(0,)):
    with on(device):
        return jax.jit(function, donate_argnums=donated).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def array(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


def rows(n):
    return array(jnp.int32, n)


def lower_state_copy(device, case, blocks=512, implementation="triton"):
    pools = tuple(array(dtype, case.layers, blocks, *state) for state, dtype in case.states)

    def run(pools, source, destination, offset):
        plans = [(source, destination, offset)[: 3 if len(state) == 2 else 2] for state, _ in case.states]
        return [state_copy(pool, *plan, implementation=implementation) for pool, plan in zip(pools, plans, strict=True)]

    return lower(device, run, pools, *[rows(case.rows)] * 3)


def lower_conv(device, case, layers=30, blocks=512, implementation="triton"):
    tokens, n = sum(case.lengths), len(case.lengths)
    pool = array(case.dtype, layers, blocks, *case.block_shape)
    x, weight = array(case.dtype, tokens, case.channels), array(case.dtype, case.width, case.channels)
    run = lambda pool, x, weight, layer, *indices: causal_conv1d_update(
        x, pool, layer, weight, None, *indices, layout=case.layout, implementation=implementation
    )
    indices = rows(n + 1), *[rows(n)] * (3 if case.boundaries is None else 5)
    return lower(device, run, pool, x, weight, array(jnp.int32), *indices)


def lower_conv_prefill(device, case, layers=30, blocks=512, implementation="triton"):
    tokens, n = sum(case.lengths), len(case.lengths)
    pool = array(case.dtype, layers, blocks, *case.block_shape)
    x, weight = array(case.dtype, tokens, case.channels), array(case.dtype, case.width, case.channels)
    run = lambda pool, x, weight, layer, *indices: causal_conv1d_prefill(
        *(x, pool, layer, weight, None, *indices),
        parts=(case.channels // 4, case.channels - case.channels // 4),
        layout=case.layout,
        implementation=implementation,
    )
    indices = rows(n + 1), rows(n), rows(n), rows(n), *[array(jnp.int32, n, 2)] * 2
    return lower(device, run, pool, x, weight, array(jnp.int32), *indices)


def lower_gated_delta_rule(device, case, layers=30, blocks=512, implementation="triton"):
    tokens, n, window = sum(case.lengths), len(case.lengths), max(case.lengths)
    pool = array(case.state_dtype, layers, blocks, *case.block_shape)
    head = array(jnp.float32, case.value_heads)
    indices = rows(n + 1), rows(n), array(jnp.int32, n, window)
    if case.packed:
        channels = 2 * case.key_heads * case.key_dim + case.value_heads * case.value_dim
        gate = array(case.dtype, tokens, case.value_heads)
        inputs = array(case.dtype, tokens, channels), gate, gate, head, head
        op = gated_delta_rule_update
    else:
        keys = array(case.dtype, tokens, case.key_heads, case.key_dim)
        beta = array(jnp.float32, tokens, case.value_heads)
        g = array(jnp.float32, tokens, case.value_heads, case.key_dim) if case.kda else beta
        inputs = keys, keys, array(case.dtype, tokens, case.value_heads, case.value_dim), g, beta
        op = gated_delta_rule_recurrent
    run = lambda pool, layer, inputs, indices: op(
        *inputs, pool, layer, *indices, layout=case.layout, implementation=implementation
    )
    return lower(device, run, pool, array(jnp.int32), inputs, indices)


def lower_gated_delta_rule_prefill(device, case, layers=30, blocks=512, implementation="triton", checkpoints=2):
    tokens, n = sum(case.lengths), len(case.lengths)
    pool = array(case.state_dtype, layers, blocks, *case.block_shape)
    keys, beta = array(case.dtype, tokens, case.key_heads, case.key_dim), array(jnp.float32, tokens, case.value_heads)
    g = array(jnp.float32, tokens, case.value_heads, case.key_dim) if case.kda else beta
    inputs = keys, keys, array(case.dtype, tokens, case.value_heads, case.value_dim), g, beta
    chunks = jax.eval_shape(lambda loc, at: chunk_rows(loc, at, tokens), rows(n + 1), rows(n))
    indices = rows(n + 1), chunks, rows(n), rows(n), *[array(jnp.int32, n, checkpoints)] * 2
    run = lambda pool, layer, inputs, indices: gated_delta_rule_prefill(
        *inputs, pool, layer, *indices, layout=case.layout, implementation=implementation
    )
    return lower(device, run, pool, array(jnp.int32), inputs, indices)


INDICES = ("query_start_loc", "slot", "base", "position", "read_block", "fold_block")


def lower_gated_delta_rule_deferred(device, case, layers=30, blocks=512, implementation="triton", config=None):
    tokens, n = sum(case.lengths), len(case.lengths)
    pools = {name: array(dtype, *shape) for name, (shape, dtype) in case.pool_shapes(layers, blocks, n).items()}
    gate, head = array(case.dtype, tokens, case.value_heads), array(jnp.float32, case.value_heads)
    inputs = array(case.dtype, tokens, case.channels), gate, gate, head, head
    options = dict(max_query_tokens=max(case.lengths), implementation=implementation, config=config)
    run = lambda pools, layer, inputs, *indices: gated_delta_rule_deferred(
        *inputs, **pools, layer=layer, **dict(zip(INDICES, indices, strict=True)), **options
    )
    return lower(device, run, pools, array(jnp.int32), inputs, rows(n + 1), *[rows(n)] * 5)


def lower_selective_state_deferred(device, case, layers=30, blocks=512, implementation="triton", config=None):
    tokens, n = sum(case.lengths), len(case.lengths)
    pools = {name: array(dtype, *shape) for name, (shape, dtype) in case.pool_shapes(layers, blocks, n).items()}
    head = array(jnp.float32, case.heads)
    inputs = array(case.dtype, tokens, case.channels), array(case.dtype, tokens, case.heads), head
    options = dict(max_query_tokens=max(case.lengths), implementation=implementation, config=config)
    run = lambda pools, layer, inputs, D, dt_bias, *indices: selective_state_deferred(
        *inputs, **pools, layer=layer, **dict(zip(INDICES, indices, strict=True)), D=D, dt_bias=dt_bias, **options
    )
    return lower(device, run, pools, array(jnp.int32), inputs, head, head, rows(n + 1), *[rows(n)] * 5)


def lower_selective_state_update(device, case, layers=30, blocks=512, implementation="triton"):
    tokens, n, window = sum(case.lengths), len(case.lengths), max(case.lengths)
    channel = case.heads, case.head_dim
    per = channel if case.is_mamba1 else (case.heads,)
    pool = array(case.state_dtype, layers, blocks, *channel, case.state_dim)
    A = array(jnp.float32, *(*channel, case.state_dim) if case.is_mamba1 else per)
    x, group = array(case.dtype, tokens, *channel), array(case.dtype, tokens, case.groups, case.state_dim)
    fixed = dict(D=array(jnp.float32, *per), dt_bias=array(jnp.float32, *per), z=x if case.gated else None)
    run = lambda pool, layer, inputs, fixed, *indices: selective_state_update(
        *inputs, pool, layer, *indices, **fixed, implementation=implementation
    )
    inputs = x, array(case.dtype, tokens, *per), A, group, group
    return lower(device, run, pool, array(jnp.int32), inputs, fixed, rows(n + 1), rows(n), array(jnp.int32, n, window))


def lower_ssd(device, case, layers=30, blocks=512, implementation="triton"):
    tokens, n = sum(case.lengths), len(case.lengths)
    channel, heads = (case.heads, case.head_dim), array(jnp.float32, case.heads)
    pool = array(case.state_dtype, layers, blocks, *channel, case.state_dim)
    x, group = array(case.dtype, tokens, *channel), array(case.dtype, tokens, case.groups, case.state_dim)
    fixed = dict(D=heads, dt_bias=heads, z=x if case.gated else None)
    chunks = jax.eval_shape(lambda loc, at: chunk_rows(loc, at, tokens, case.chunk_size), rows(n + 1), rows(n))
    plan = (array(jnp.int32, n, case.checkpoints),) * 2 if case.checkpoints else (None, None)
    run = lambda pool, layer, inputs, fixed, *indices: ssd(
        *inputs, pool, layer, *indices, **fixed, implementation=implementation
    )
    inputs = x, array(case.dtype, tokens, case.heads), heads, group, group
    return lower(device, run, pool, array(jnp.int32), inputs, fixed, rows(n + 1), chunks, rows(n), rows(n), *plan)


def lower_selective_scan(device, case, layers=30, blocks=512, implementation="triton"):
    tokens, n, channel = sum(case.lengths), len(case.lengths), (case.heads, case.head_dim)
    pool = array(case.state_dtype, layers, blocks, *channel, case.state_dim)
    x, group = array(case.dtype, tokens, *channel), array(case.dtype, tokens, case.groups, case.state_dim)
    per = array(jnp.float32, *channel)
    run = lambda pool, layer, inputs, fixed, *indices: selective_scan(
        *inputs, pool, layer, *indices, **fixed, implementation=implementation
    )
    inputs, fixed = (x, x, array(jnp.float32, *channel, case.state_dim), group, group), dict(D=per, dt_bias=per)
    indices = rows(n + 1), rows(n), rows(n), *[array(jnp.int32, n, 2)] * 2
    return lower(device, run, pool, array(jnp.int32), inputs, fixed | dict(z=x if case.gated else None), *indices)


def lower_linear(device, case, implementation="triton", outputs=None):
    x = array(case.dtype, case.tokens, case.inputs)
    weight = array(case.weight_dtype, outputs or case.outputs, case.inputs)
    op = linear_sums if case.is_summed else functools.partial(linear, is_gated=case.is_gated, out_dtype=case.out_dtype)
    return lower(device, lambda x, weight: op(x, weight, implementation=implementation), x, weight, donated=())


def lower_add_rms_norm(device, case, implementation="triton"):
    x, addend = (
        array(case.dtype, case.tokens, case.channels),
        array(case.addend_dtype, case.shares, case.tokens, case.channels),
    )
    run = lambda *arguments: add_rms_norm(*arguments, epsilon=1e-6, implementation=implementation)
    return lower(device, run, x, addend, array(jnp.float32, case.channels), donated=())


def lower_all_reduce(device, case, implementation="triton"):
    x, addend = (
        array(case.dtype, case.tokens, case.channels),
        array(case.addend_dtype, case.shares, case.tokens, case.channels),
    )
    memory = array(jnp.int32, 1, case.devices * 2 * 2 * 2**20)
    addresses = array(jnp.int32, 1, case.devices + 1, 2)
    # The axis of `on`.
    boxes = Mailboxes(memory=memory, addresses=addresses, capacity=2**20, axis="_")

    def run(x, addend, weight, boxes, turn):
        if case.is_normed:
            return all_reduce_rms_norm(x, addend, weight, boxes, turn, epsilon=1e-6, implementation=implementation)
        return all_reduce(addend, boxes, turn, implementation=implementation)

    def on_devices(*arguments):
        mesh = jax.sharding.get_abstract_mesh()
        every = jax.sharding.PartitionSpec()
        return jax.shard_map(run, mesh=mesh, in_specs=every, out_specs=every, check_vma=False)(*arguments)

    weight = array(jnp.float32, case.channels)
    return lower(device, on_devices, x, addend, weight, boxes, array(jnp.int32), donated=())


def lower_least_kept(device, case, implementation="triton"):
    arguments = (
        array(jnp.float32, case.rows, case.tokens),
        array(jnp.int32, case.rows),
        array(jnp.float32, case.rows),
    )
    run = lambda *arguments: least_kept(*arguments, implementation=implementation)
    return lower(device, run, *arguments, donated=())


def lower_paged_attention(device, case, layers=8, blocks=512, implementation="triton"):
    tokens, n = sum(case.lengths), len(case.lengths)
    pool = array(case.dtype, layers, blocks, case.page_size, case.kv_heads, case.key_dim)
    # The engine's call: the table has the pages of all slots.
    q, table = array(case.dtype, tokens, case.heads, case.key_dim), array(jnp.int32, 2 * n, 64)
    options = dict(max_query_tokens=case.window, value_dim=case.value_dim, implementation=implementation)
    run = lambda q, gates, *rest: paged_attention(q, *rest[:-1], slots=rest[-1], gates=gates, **options)
    values = None if case.value_dim else pool
    # A model with gates has heads of [query | gate].
    gates = None if case.value_dim else array(case.dtype, tokens, case.heads, 2 * case.key_dim)
    indices = array(jnp.int32), rows(n + 1), rows(n), table, rows(n)
    return lower(device, run, q, gates, pool, values, *indices, donated=())


def lower_rotate_and_store(device, case, layers=8, blocks=512, implementation="triton"):
    pool = array(case.dtype, layers, blocks, case.page_size, case.kv_heads, case.dim)
    head = lambda n, dim=case.dim: array(case.dtype, case.tokens, n, dim)
    angle = array(jnp.float32, case.tokens, case.pairs) if case.pairs else None
    weight = array(jnp.float32, case.dim) if case.is_normed else None
    run = lambda keys, values, q, k, v, angle, layer, place, weight: rotate_and_store(
        q, k, v, angle, angle, keys, values, layer, place, place, weight, weight, implementation=implementation
    )
    q = head(case.heads, (1 + case.is_gated) * case.dim)
    inputs = q, head(case.kv_heads), head(case.kv_heads), angle, array(jnp.int32), rows(case.tokens), weight
    return lower(device, run, pool, pool, *inputs, donated=(0, 1))


def lower_choose_experts(device, case, implementation="triton"):
    logits, bias = array(jnp.float32, 4, case.tokens, case.experts), array(jnp.float32, case.experts)
    options = dict(scores="sigmoid", logits_dtype=case.dtype, implementation=implementation)
    run = lambda logits, bias, valid: choose_experts(logits, case.top_k, bias=bias, valid=valid, **options)
    return lower(device, run, logits, bias, array(jnp.bool_, case.tokens), donated=())


def lower_mixture_of_experts(device, case, blocks=None, implementation="triton", op=mixture_of_experts):
    """`blocks` stands for the number of experts."""
    experts, pairs = blocks or case.experts, (case.tokens, case.top_k)
    up, down = array(case.dtype, experts, case.up_size, case.hidden), array(case.dtype, experts, case.hidden, case.size)
    run = functools.partial(op, activation=case.activation, implementation=implementation)
    x = array(case.dtype, case.tokens, case.hidden)
    return lower(device, run, x, up, down, array(jnp.int32, *pairs), array(jnp.float32, *pairs), donated=())


def lower_routed_experts_sums(device, case, implementation="triton"):
    up, down = (
        array(case.dtype, case.experts, case.up_size, case.hidden),
        array(case.dtype, case.experts, case.hidden, case.size),
    )
    options = dict(shared=1, shared_gate=True, logits_dtype=case.dtype, activation=case.activation)
    run = lambda *arrays: routed_experts_sums(*arrays, case.top_k, implementation=implementation, **options)
    logits = array(jnp.float32, 4, case.tokens, case.experts)
    return lower(device, run, array(case.dtype, case.tokens, case.hidden), logits, up, down, donated=())


# For each op: the function that lowers it, its cases, and a case whose pool has more than 2^31 elements with 4097 blocks.
OPS = {
    "state_copy": (lower_state_copy, state_copy_cases.CASES, state_copy_cases.CASES[1]),
    "causal_conv1d_update": (lower_conv, causal_conv1d_cases.UPDATE_CASES, causal_conv1d_cases.UPDATE_CASES[0]),
    "causal_conv1d_prefill": (
        lower_conv_prefill,
        causal_conv1d_cases.PREFILL_CASES,
        causal_conv1d_cases.PREFILL_CASES[0],
    ),
    "gated_delta_rule_update": (
        lower_gated_delta_rule,
        gated_delta_rule_cases.UPDATE_CASES,
        gated_delta_rule_cases.UPDATE_CASES[0],
    ),
    "gated_delta_rule_prefill": (
        lower_gated_delta_rule_prefill,
        gated_delta_rule_cases.PREFILL_CASES,
        gated_delta_rule_cases.PREFILL_CASES[0],
    ),
    "gated_delta_rule_deferred": (lower_gated_delta_rule_deferred, deferred_cases.CASES, deferred_cases.CASES[0]),
    "selective_state_deferred": (
        lower_selective_state_deferred,
        deferred_mamba2_cases.CASES,
        deferred_mamba2_cases.CASES[0],
    ),
    "mixture_of_experts": (
        lower_mixture_of_experts,
        mixture_of_experts_cases.CASES,
        mixture_of_experts_cases.CASES[0],
    ),
    "mixture_of_experts_sums": (
        functools.partial(lower_mixture_of_experts, op=mixture_of_experts_sums),
        mixture_of_experts_cases.CASES,
        mixture_of_experts_cases.CASES[0],
    ),
    "paged_attention": (lower_paged_attention, paged_attention_cases.CASES, paged_attention_cases.CASES[0]),
    "rotate_and_store": (lower_rotate_and_store, rotary_cases.CASES, rotary_cases.CASES[0]),
    "selective_state_update": (
        lower_selective_state_update,
        selective_state_update_cases.CASES,
        selective_state_update_cases.CASES[0],
    ),
    "ssd": (lower_ssd, ssd_cases.CASES, ssd_cases.CASES[0]),
    "selective_scan": (lower_selective_scan, selective_scan_cases.CASES, selective_scan_cases.CASES[0]),
}


def lower_product_chain(device, case, implementation="triton", tokens=1):
    x, steps, residual = case.arguments(lambda shape, dtype, _: array(dtype, *shape), tokens)
    run = functools.partial(product_chain, parts=case.parts, implementation=implementation)
    return lower(device, run, x, steps, residual, donated=())


# Ops without pools.
DENSE = {
    "product_chain": (lower_product_chain, product_chain_cases.CASES, product_chain_cases.CASES[-1]),
    "linear": (lower_linear, linear_cases.CASES, linear_cases.CASES[0]),
    "choose_experts": (
        lower_choose_experts,
        mixture_of_experts_cases.QWEN_CASES[:2],
        mixture_of_experts_cases.QWEN_CASES[0],
    ),
    "routed_experts_sums": (
        lower_routed_experts_sums,
        mixture_of_experts_cases.ONE_TOKEN_CASES,
        mixture_of_experts_cases.ONE_TOKEN_CASES[0],
    ),
    "add_rms_norm": (lower_add_rms_norm, rms_norm_cases.CASES, rms_norm_cases.CASES[0]),
    "all_reduce": (lower_all_reduce, all_reduce_cases.CASES, all_reduce_cases.CASES[0]),
    "least_kept": (lower_least_kept, least_kept_cases.CASES, least_kept_cases.CASES[0]),
}
EVERY = OPS | DENSE


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
    assert "__gpu$xla.gpu.triton" in text
    calls = lambda name: len(re.findall(rf"call @{name}(?:_\d+)?\(", text))
    assert (calls("_update"), calls("_state_copy")) == (2 * 30, 4)


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_step_of_deferred_states_lowers_to_two_ops_per_layer_and_no_copy(drafts):
    case = pipeline.Case("deferred", 8, drafts)
    with on("NVIDIA H200"):
        text = pipeline.trace(case, "triton").lower(lowering_platforms=("cuda",)).as_text()
    calls = lambda name: len(re.findall(rf"call @{name}(?:_\d+)?\(", text))
    assert (calls("_update"), calls("_deferred"), calls("_state_copy")) == (30, 30, 0)
    # The kernel that keeps windows of boundaries has two more inputs.
    (operands,) = set(re.findall(r"custom_call @__gpu\$xla.gpu.triton\(([^)]*)\).*causal_conv1d_update", text))
    assert operands.count("%") == (10 if drafts else 8)


def test_shift_of_windows_of_layout_ds_lowers_for_h200():
    run = lambda *arguments: state_copy(*arguments, layout="DS", implementation="triton")
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
        assert "selective_state_deferred_weights" in text


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
@pytest.mark.parametrize("options", [dict(scale=1, lower_bound=-5), dict(scale=np.float32(0.5))], ids=str)
@pytest.mark.parametrize("name", ["float32", "float8_e4m3fn"])
def test_the_update_takes_any_real_number_and_leaves_narrow_gates_to_triton(name, options):
    f32, heads = jnp.float32, array(name, 4)
    inputs = array(jnp.bfloat16, 8, 1024), array(f32, 8, 4), array(f32, 8, 4), heads, array(f32, 4)
    given = *inputs, array(f32, 2, 9, 4, 128, 128), array(jnp.int32), rows(5), rows(4), array(jnp.int32, 4, 3)
    run = lambda *x: gated_delta_rule_update(*x, **options, implementation="mosaic_gpu")
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


@pytest.mark.parametrize("device", [device for device in CORES if device != "NVIDIA H200"])
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
    case = product_chain_cases.Case("shares", steps, inputs)
    assert "mosaic_gpu" in lower_product_chain("NVIDIA H200", case, implementation="mosaic_gpu")


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="Mosaic GPU kernels need JAX 0.11.2")
@pytest.mark.parametrize("tokens", [1, 16])
def test_one_launch_and_separate_ones_return_as_many_shares(monkeypatch, tokens):
    """A program for several platforms holds both."""
    monkeypatch.setattr(product_chain_api, "unavailable", lambda *arguments: None)
    (case,) = (case for case in product_chain_cases.CASES if case.name == "to the last norm")
    text = lower_product_chain("NVIDIA H200", case, implementation=None, tokens=tokens)
    assert "product_chain" in text
