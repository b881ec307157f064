"""Every op's cases, and how each is lowered for a GPU on a machine without one."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from benchmarks.workloads import all_reduce as all_reduce_cases
from benchmarks.workloads import causal_conv1d as causal_conv1d_cases
from benchmarks.workloads import gated_delta_rule as gated_delta_rule_cases
from benchmarks.workloads import gated_delta_rule_deferred as deferred_cases
from benchmarks.workloads import least_kept as least_kept_cases
from benchmarks.workloads import linear as linear_cases
from benchmarks.workloads import mixture_of_experts as mixture_of_experts_cases
from benchmarks.workloads import paged_attention as paged_attention_cases
from benchmarks.workloads import product_chain as product_chain_cases
from benchmarks.workloads import rms_norm as rms_norm_cases
from benchmarks.workloads import rotary as rotary_cases
from benchmarks.workloads import selective_scan as selective_scan_cases
from benchmarks.workloads import selective_state_deferred as deferred_mamba2_cases
from benchmarks.workloads import selective_state_update as selective_state_update_cases
from benchmarks.workloads import ssd as ssd_cases
from benchmarks.workloads import state_copy as state_copy_cases
from pallas_kernels import (
    BoundaryWindow,
    DeltaRuleEntries,
    Fold,
    HeadNorms,
    Mailboxes,
    Mamba2Entries,
    PageIndices,
    Routing,
    RowCheckpoints,
    Rows,
    Run,
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
from pallas_kernels.gated_delta_rule.deferred import gated_delta_rule_deferred
from pallas_kernels.selective_state_update.deferred import selective_state_deferred

SMS = {
    "NVIDIA H200": 132,
    "NVIDIA A100-SXM4-80GB": 108,
    "NVIDIA H100 80GB HBM3": 132,
    "NVIDIA B200": 148,
    "NVIDIA GeForce RTX 4090": 128,
}


def on(device):
    """Returns a context in which programs are lowered for that GPU."""
    abstract = AbstractDevice(device_kind=device, num_cores=SMS[device], platform="gpu")
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
        how = Run(implementation=implementation)
        return [state_copy(pool, *plan, run=how) for pool, plan in zip(pools, plans, strict=True)]

    return lower(device, run, pools, *[rows(case.rows)] * 3)


def kept(n, number=2):
    """Checkpoints of n rows."""
    return RowCheckpoints(offset=array(jnp.int32, n, number), block=array(jnp.int32, n, number))


def state_rows(n, writes=1, **more):
    """n rows that read and write states."""
    write = array(jnp.int32, n, writes)
    return Rows(query_start_loc=rows(n + 1), layer=array(jnp.int32), read=rows(n), write=write, **more)


def window_rows(n, **more):
    """n rows that read and write windows."""
    where = dict(window_read=rows(n), window_row=rows(n), write=array(jnp.int32, n, 1))
    return Rows(query_start_loc=rows(n + 1), layer=array(jnp.int32), **where, **more)


def lower_conv(device, case, layers=30, blocks=512, implementation="triton"):
    tokens, n = sum(case.lengths), len(case.lengths)
    pool = array(case.dtype, layers, blocks, *case.block_shape)
    x, weight = array(case.dtype, tokens, case.channels), array(case.dtype, case.width, case.channels)
    run = lambda pool, x, weight, rows: causal_conv1d_update(
        x, pool, weight, None, rows, layout=case.layout, run=Run(implementation=implementation)
    )
    boundary = None if case.boundaries is None else BoundaryWindow(row=rows(n), block=rows(n))
    return lower(device, run, pool, x, weight, window_rows(n, boundary=boundary))


def lower_conv_prefill(device, case, layers=30, blocks=512, implementation="triton"):
    tokens, n = sum(case.lengths), len(case.lengths)
    pool = array(case.dtype, layers, blocks, *case.block_shape)
    x, weight = array(case.dtype, tokens, case.channels), array(case.dtype, case.width, case.channels)
    run = lambda pool, x, weight, rows: causal_conv1d_prefill(
        *(x, pool, weight, None, rows),
        parts=(case.channels // 4, case.channels - case.channels // 4),
        layout=case.layout,
        run=Run(implementation=implementation),
    )
    return lower(device, run, pool, x, weight, window_rows(n, checkpoints=kept(n)))


def lower_gated_delta_rule(device, case, layers=30, blocks=512, implementation="triton"):
    tokens, n, window = sum(case.lengths), len(case.lengths), max(case.lengths)
    pool = array(case.state_dtype, layers, blocks, *case.block_shape)
    head = array(jnp.float32, case.value_heads)
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
    run = lambda pool, inputs, rows: op(*inputs, pool, rows, layout=case.layout, run=Run(implementation=implementation))
    return lower(device, run, pool, inputs, state_rows(n, window))


def lower_gated_delta_rule_prefill(device, case, layers=30, blocks=512, implementation="triton", checkpoints=2):
    tokens, n = sum(case.lengths), len(case.lengths)
    pool = array(case.state_dtype, layers, blocks, *case.block_shape)
    keys, beta = array(case.dtype, tokens, case.key_heads, case.key_dim), array(jnp.float32, tokens, case.value_heads)
    g = array(jnp.float32, tokens, case.value_heads, case.key_dim) if case.kda else beta
    inputs = keys, keys, array(case.dtype, tokens, case.value_heads, case.value_dim), g, beta
    chunks = jax.eval_shape(lambda loc, at: chunk_rows(loc, at, tokens), rows(n + 1), rows(n))
    run = lambda pool, inputs, rows: gated_delta_rule_prefill(
        *inputs, pool, rows, layout=case.layout, run=Run(implementation=implementation)
    )
    return lower(device, run, pool, inputs, state_rows(n, chunks=chunks, checkpoints=kept(n, checkpoints)))


def lower_gated_delta_rule_deferred(device, case, layers=30, blocks=512, implementation="triton", config=None):
    tokens, n = sum(case.lengths), len(case.lengths)
    pools = {name: array(dtype, *shape) for name, (shape, dtype) in case.pool_shapes(layers, blocks, n).items()}
    gate, head = array(case.dtype, tokens, case.value_heads), array(jnp.float32, case.value_heads)
    inputs = array(case.dtype, tokens, case.channels), gate, gate, head, head
    here = state_rows(
        n,
        num_computed_tokens=rows(n),
        fold=Fold(slot=rows(n), base=rows(n), block=rows(n)),
        max_query_tokens=max(case.lengths),
    )
    how = Run(implementation=implementation, config=config)

    def run(pools, inputs, rows):
        entries = DeltaRuleEntries.of(pools)
        return gated_delta_rule_deferred(*inputs, pools["pool"], entries, rows, run=how)

    return lower(device, run, pools, inputs, here)


def lower_selective_state_deferred(device, case, layers=30, blocks=512, implementation="triton", config=None):
    tokens, n = sum(case.lengths), len(case.lengths)
    pools = {name: array(dtype, *shape) for name, (shape, dtype) in case.pool_shapes(layers, blocks, n).items()}
    pools = pools.pop("pool"), Mamba2Entries.of(pools)
    head = array(jnp.float32, case.heads)
    inputs = array(case.dtype, tokens, case.channels), array(case.dtype, tokens, case.heads), head
    options = dict(run=Run(implementation=implementation, config=config))
    run = lambda pools, inputs, D, dt_bias, rows: selective_state_deferred(
        *inputs, *pools, rows, D=D, dt_bias=dt_bias, **options
    )
    fold = Fold(slot=rows(n), base=rows(n), block=rows(n))
    of_rows = state_rows(n, num_computed_tokens=rows(n), fold=fold, max_query_tokens=max(case.lengths))
    return lower(device, run, pools, inputs, head, head, of_rows)


def lower_selective_state_update(device, case, layers=30, blocks=512, implementation="triton"):
    tokens, n, window = sum(case.lengths), len(case.lengths), max(case.lengths)
    channel = case.heads, case.head_dim
    per = channel if case.is_mamba1 else (case.heads,)
    pool = array(case.state_dtype, layers, blocks, *channel, case.state_dim)
    A = array(jnp.float32, *(*channel, case.state_dim) if case.is_mamba1 else per)
    x, group = array(case.dtype, tokens, *channel), array(case.dtype, tokens, case.groups, case.state_dim)
    fixed = dict(D=array(jnp.float32, *per), dt_bias=array(jnp.float32, *per), z=x if case.gated else None)
    run = lambda pool, inputs, fixed, rows: selective_state_update(
        *inputs, pool, rows, **fixed, run=Run(implementation=implementation)
    )
    inputs = x, array(case.dtype, tokens, *per), A, group, group
    return lower(device, run, pool, inputs, fixed, state_rows(n, window))


def lower_ssd(device, case, layers=30, blocks=512, implementation="triton"):
    tokens, n = sum(case.lengths), len(case.lengths)
    channel, heads = (case.heads, case.head_dim), array(jnp.float32, case.heads)
    pool = array(case.state_dtype, layers, blocks, *channel, case.state_dim)
    x, group = array(case.dtype, tokens, *channel), array(case.dtype, tokens, case.groups, case.state_dim)
    fixed = dict(D=heads, dt_bias=heads, z=x if case.gated else None)
    chunks = jax.eval_shape(lambda loc, at: chunk_rows(loc, at, tokens, case.chunk_size), rows(n + 1), rows(n))
    run = lambda pool, inputs, fixed, rows: ssd(*inputs, pool, rows, **fixed, run=Run(implementation=implementation))
    inputs = x, array(case.dtype, tokens, case.heads), heads, group, group
    points = kept(n, case.checkpoints) if case.checkpoints else None
    return lower(device, run, pool, inputs, fixed, state_rows(n, chunks=chunks, checkpoints=points))


def lower_selective_scan(device, case, layers=30, blocks=512, implementation="triton"):
    tokens, n, channel = sum(case.lengths), len(case.lengths), (case.heads, case.head_dim)
    pool = array(case.state_dtype, layers, blocks, *channel, case.state_dim)
    x, group = array(case.dtype, tokens, *channel), array(case.dtype, tokens, case.groups, case.state_dim)
    per = array(jnp.float32, *channel)
    run = lambda pool, inputs, fixed, rows: selective_scan(
        *inputs, pool, rows, **fixed, run=Run(implementation=implementation)
    )
    inputs = x, x, array(jnp.float32, *channel, case.state_dim), group, group
    fixed = dict(D=per, dt_bias=per, z=x if case.gated else None)
    return lower(device, run, pool, inputs, fixed, state_rows(n, checkpoints=kept(n)))


def lower_linear(device, case, implementation="triton", outputs=None):
    x = array(case.dtype, case.tokens, case.inputs)
    weight = array(case.weight_dtype, outputs or case.outputs, case.inputs)
    op = linear_sums if case.is_summed else functools.partial(linear, is_gated=case.is_gated, out_dtype=case.out_dtype)
    return lower(device, lambda x, weight: op(x, weight, run=Run(implementation=implementation)), x, weight, donated=())


def lower_add_rms_norm(device, case, implementation="triton"):
    x, addend = (
        array(case.dtype, case.tokens, case.channels),
        array(case.addend_dtype, case.splits, case.tokens, case.channels),
    )
    run = lambda *arguments: add_rms_norm(*arguments, epsilon=1e-6, run=Run(implementation=implementation))
    return lower(device, run, x, addend, array(jnp.float32, case.channels), donated=())


def lower_all_reduce(device, case, implementation="triton"):
    x, addend = (
        array(case.dtype, case.tokens, case.channels),
        array(case.addend_dtype, case.splits, case.tokens, case.channels),
    )
    memory = array(jnp.int32, 1, case.devices * 2 * 2 * 2**20)
    addresses = array(jnp.int32, 1, case.devices + 1, 2)
    # The axis of `on`.
    boxes = Mailboxes(memory=memory, addresses=addresses, capacity=2**20, axis="_")

    def run(x, addend, weight, boxes, epoch):
        how = Run(implementation=implementation)
        if case.is_normed:
            return all_reduce_rms_norm(x, addend, weight, boxes, epoch, epsilon=1e-6, run=how)
        return all_reduce(addend, boxes, epoch, run=how)

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
    run = lambda *arguments: least_kept(*arguments, run=Run(implementation=implementation))
    return lower(device, run, *arguments, donated=())


def lower_paged_attention(device, case, layers=8, blocks=512, implementation="triton"):
    tokens, n = sum(case.lengths), len(case.lengths)
    pool = array(case.dtype, layers, blocks, case.page_size, case.kv_heads, case.key_dim)
    # The engine's call: the table has the pages of all slots.
    q, table = array(case.dtype, tokens, case.heads, case.key_dim), array(jnp.int32, 2 * n, 64)
    options = dict(value_dim=case.value_dim, run=Run(implementation=implementation))
    run = lambda q, gates, *rest: paged_attention(q, *rest[:-1], slots=rest[-1], gates=gates, **options)
    values = None if case.value_dim else pool
    # A model with gates has heads of [query | gate].
    gates = None if case.value_dim else array(case.dtype, tokens, case.heads, 2 * case.key_dim)
    here = Rows(
        query_start_loc=rows(n + 1), layer=array(jnp.int32), num_computed_tokens=rows(n), max_query_tokens=case.window
    )
    return lower(device, run, q, gates, pool, values, here, table, rows(n), donated=())


def lower_rotate_and_store(device, case, layers=8, blocks=512, implementation="triton"):
    pool = array(case.dtype, layers, blocks, case.page_size, case.kv_heads, case.dim)
    head = lambda n, dim=case.dim: array(case.dtype, case.tokens, n, dim)
    angle = array(jnp.float32, case.tokens, case.pairs) if case.pairs else None
    weight = array(jnp.float32, case.dim) if case.is_normed else None

    def run(keys, values, q, k, v, angle, layer, place, weight):
        indices = PageIndices(layer=layer, page=place, offset=place)
        norms, how = HeadNorms(q_weight=weight, k_weight=weight), Run(implementation=implementation)
        return rotate_and_store(q, k, v, angle, angle, keys, values, indices, norms, run=how)

    q = head(case.heads, (1 + case.is_gated) * case.dim)
    inputs = q, head(case.kv_heads), head(case.kv_heads), angle, array(jnp.int32), rows(case.tokens), weight
    return lower(device, run, pool, pool, *inputs, donated=(0, 1))


def lower_choose_experts(device, case, implementation="triton"):
    logits, bias = array(jnp.float32, 4, case.tokens, case.experts), array(jnp.float32, case.experts)
    routing = Routing(top_k=case.top_k, scores="sigmoid", logits_dtype=case.dtype)
    how = Run(implementation=implementation)
    run = lambda logits, bias, valid: choose_experts(logits, routing, bias=bias, valid=valid, run=how)
    return lower(device, run, logits, bias, array(jnp.bool_, case.tokens), donated=())


def lower_mixture_of_experts(device, case, blocks=None, implementation="triton", op=mixture_of_experts):
    """`blocks` stands for the number of experts."""
    experts, pairs = blocks or case.experts, (case.tokens, case.top_k)
    up, down = array(case.dtype, experts, case.up_size, case.hidden), array(case.dtype, experts, case.hidden, case.size)
    run = functools.partial(op, activation=case.activation, run=Run(implementation=implementation))
    x = array(case.dtype, case.tokens, case.hidden)
    return lower(device, run, x, up, down, array(jnp.int32, *pairs), array(jnp.float32, *pairs), donated=())


def lower_routed_experts_sums(device, case, implementation="triton"):
    up, down = (
        array(case.dtype, case.experts, case.up_size, case.hidden),
        array(case.dtype, case.experts, case.hidden, case.size),
    )
    routing = Routing(top_k=case.top_k, shared=1, shared_gate=True, logits_dtype=case.dtype)
    options = dict(activation=case.activation, run=Run(implementation=implementation))
    run = lambda *arrays: routed_experts_sums(*arrays, routing, **options)
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
    run = functools.partial(product_chain, parts=case.parts, run=Run(implementation=implementation))
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
