"""Benchmarks of the ops that decode and verify steps run: state_copy and the update ops."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from benchmarks.kernel_benchmark import (
    KernelBenchmark,
    itemsize,
    locations,
    normal_draws,
    random_pool,
    rotate,
    tolerance,
)
from benchmarks.workloads import causal_conv1d as causal_conv1d_cases
from benchmarks.workloads import gated_delta_rule as gated_delta_rule_cases
from benchmarks.workloads import selective_state_update as selective_state_update_cases
from benchmarks.workloads import state_copy as state_copy_cases
from pallas_kernels import (
    NULL_BLOCK,
    BoundaryWindow,
    Rows,
    Run,
    causal_conv1d_update,
    gated_delta_rule_recurrent,
    gated_delta_rule_update,
    selective_state_update,
    state_copy,
)
from pallas_kernels.causal_conv1d.config import default_config as conv_config
from pallas_kernels.gated_delta_rule.config import default_config as delta_rule_config
from pallas_kernels.selective_state_update.config import default_config as state_space_config
from pallas_kernels.state_copy.config import default_config as copy_config


def copy_benchmark(case: state_copy_cases.Case) -> KernelBenchmark:
    """Counts the states of the rows that copy, in all layers, read and written once."""
    state_bytes = [math.prod(state) * itemsize(dtype) for state, dtype in case.states]
    per_row = case.layers * sum(state_bytes)
    blocks, num_blocks = rotate(case.rows, 2, 2 * case.rows * per_row)
    crossing = jnp.arange(case.rows) < case.crossing
    read, write = blocks[..., 0], jnp.where(crossing, blocks[..., 1], blocks[..., 0])
    offset = jnp.where(crossing, case.offset, 0)

    def step(turn, pools, *, implementation, config=None):
        plan = read[turn % len(read)], write[turn % len(read)]
        plans = [(*plan, offset) if len(state) == 2 else plan for state, _ in case.states]
        run = Run(implementation=implementation, config=config)
        return tuple(state_copy(pool, *plan, run=run) for pool, plan in zip(pools, plans, strict=True))

    return KernelBenchmark(
        case=case,
        kernel="state_copy",
        bytes=2 * case.crossing * per_row,
        tolerance=0.0,
        initial=lambda: tuple(random_pool((case.layers, num_blocks, *s), dtype) for s, dtype in case.states),
        step=step,
        given=dict(read=read, write=write),
        config=tuple(copy_config(itemsize(dtype)) for _, dtype in case.states),
    )


def conv_benchmark(case: causal_conv1d_cases.Case) -> KernelBenchmark:
    """Counts each row's old window (width - 1) and new one (width - 2 + tokens), and each token's input and output.

    The window of a boundary is read and written (2 * (width - 1)).
    """
    rows, tokens = len(case.lengths), sum(case.lengths)
    live = sum(length > 0 for length in case.lengths)
    window = case.width - 1 + case.num_speculative_tokens
    channel_rows = live * (2 * case.width - 3) + 3 * tokens + (case.boundaries or 0) * 2 * (case.width - 1)
    moved = (channel_rows + case.width) * case.channels * itemsize(case.dtype)
    columns = 1 if case.boundaries is None else 2
    blocks, num_blocks = rotate(rows, columns, 2 * rows * window * case.channels * itemsize(case.dtype))
    draw = normal_draws(case.dtype)
    x, weight = draw(tokens, case.channels), draw(case.width, case.channels)
    loc, window_row = locations(case.lengths), jnp.zeros(rows, jnp.int32)

    def step(turn, carry, **options):
        block = blocks[turn % len(blocks), :, 0]
        where = Rows(query_start_loc=loc, layer=0, window_read=block, window_row=window_row, write=block[:, None])
        if case.boundaries is not None:
            keeps = jnp.arange(rows) < case.boundaries
            kept = jnp.where(keeps, blocks[turn % len(blocks), :, 1], NULL_BLOCK)
            where = replace(where, boundary=BoundaryWindow(row=window_row, block=kept))
        y, pool = causal_conv1d_update(x, carry[0], weight, None, where, layout=case.layout, run=Run(**options))
        return pool, y

    return KernelBenchmark(
        case=case,
        kernel="causal_conv1d_update",
        bytes=moved,
        tolerance=tolerance(case.dtype),
        initial=lambda: (random_pool((1, num_blocks, *case.block_shape), case.dtype), jnp.zeros_like(x)),
        step=step,
        given=dict(x=x, weight=weight, query_start_loc=loc, read=blocks[..., 0]),
        config=conv_config(case.layout),
    )


def delta_rule_benchmark(case: gated_delta_rule_cases.Case) -> KernelBenchmark:
    """Counts each row's old state, and each token's new state, inputs and outputs."""
    rows, tokens, window = len(case.lengths), sum(case.lengths), max(case.lengths)
    live = sum(length > 0 for length in case.lengths)
    state = case.value_heads, case.value_dim, case.key_dim
    state_bytes = math.prod(state) * itemsize(case.state_dtype)
    blocks, num_blocks = rotate(rows, window, (live + tokens) * state_bytes)
    keys, values = case.key_heads * case.key_dim, case.value_heads * case.value_dim
    draw, loc = normal_draws(), locations(case.lengths)
    qkv = draw(tokens, 2 * keys + values, dtype=case.dtype)
    gates = case.value_heads, case.key_dim
    if case.packed:
        a, b = (draw(tokens, *shape, dtype=case.dtype) for shape in (gates[: 1 + case.kda], gates[:1]))
        of_head = dict(A_log=draw(case.value_heads), dt_bias=draw(*gates[: 1 + case.kda]))
        inputs: dict[str, Any] = dict(qkv=qkv, a=a, b=b) | of_head
        op: Callable[..., Any] = gated_delta_rule_update
        gate_bytes = case.value_heads * (1 + case.key_dim**case.kda) * itemsize(case.dtype)
    else:
        q, k, v = jnp.split(qkv, [keys, 2 * keys], axis=1)
        q, k = (x.reshape(tokens, -1, case.key_dim) for x in (q, k))
        inputs = dict(q=q, k=k, v=v.reshape(tokens, -1, case.value_dim))
        inputs |= dict(
            g=-jnp.abs(draw(tokens, *gates[: 1 + case.kda])), beta=jnp.abs(draw(tokens, case.value_heads)) % 1
        )
        op = gated_delta_rule_recurrent
        gate_bytes = 4 * case.value_heads * (1 + case.key_dim**case.kda)

    def step(turn, carry, **options):
        write = blocks[turn % len(blocks)]
        where = Rows(query_start_loc=loc, layer=0, read=write[:, 0], write=write)
        out, pool = op(**inputs, pool=carry[0], rows=where, layout=case.layout, run=Run(**options))
        return pool, out

    return KernelBenchmark(
        case=case,
        kernel="gated_delta_rule_update",
        bytes=(live + tokens) * state_bytes + tokens * ((2 * keys + 2 * values) * itemsize(case.dtype) + gate_bytes),
        tolerance=tolerance(case.dtype, case.state_dtype),
        initial=lambda: (
            random_pool((1, num_blocks, *case.block_shape), case.state_dtype),
            jnp.zeros((tokens, *state[:2]), case.dtype),
        ),
        step=step,
        given=inputs | dict(query_start_loc=loc, write=blocks),
        config=delta_rule_config(rows, window, itemsize(case.state_dtype), case.layout),
    )


def state_space_benchmark(case: selective_state_update_cases.Case) -> KernelBenchmark:
    """Counts each row's old state, and each token's new state, inputs and outputs.

    The blocks that are read and the blocks that are written are different ones.
    """
    rows, tokens, window = len(case.lengths), sum(case.lengths), max(case.lengths)
    live = sum(length > 0 for length in case.lengths)
    channel = case.heads, case.head_dim
    state_bytes = math.prod(channel) * case.state_dim * itemsize(case.state_dtype)
    blocks, num_blocks = rotate(rows, 1 + window, (live + tokens) * state_bytes)
    draw, loc = normal_draws(), locations(case.lengths)
    per = channel if case.is_mamba1 else (case.heads,)

    def token(*shape):
        return draw(tokens, *shape, dtype=case.dtype)

    inputs: dict[str, Any] = dict(x=token(*channel), dt=token(*per))
    inputs |= dict(A=-jnp.exp(draw(*channel, case.state_dim) if case.is_mamba1 else draw(*per)))
    inputs |= dict(B=token(case.groups, case.state_dim), C=token(case.groups, case.state_dim))
    inputs |= dict(D=draw(*per), dt_bias=draw(*per)) | (dict(z=token(*channel)) if case.gated else {})
    token_values = (2 + case.gated) * math.prod(channel) + math.prod(per) + 2 * case.groups * case.state_dim

    def step(turn, carry, **options):
        block = blocks[turn % len(blocks)]
        rows = Rows(layer=0, query_start_loc=loc, read=block[:, 0], write=block[:, 1:])
        out, pool = selective_state_update(**inputs, pool=carry[0], rows=rows, run=Run(**options))
        return pool, out

    return KernelBenchmark(
        case=case,
        kernel="selective_state_update",
        bytes=(live + tokens) * state_bytes + tokens * token_values * itemsize(case.dtype) + 4 * inputs["A"].size,
        tolerance=tolerance(case.dtype, case.state_dtype),
        initial=lambda: (
            random_pool((1, num_blocks, *channel, case.state_dim), case.state_dtype),
            jnp.zeros((tokens, *channel), case.dtype),
        ),
        step=step,
        given=inputs | dict(read=blocks[..., 0], write=blocks[..., 1:]),
        config=state_space_config(window, case.state_dim, itemsize(case.state_dtype)),
    )


# For each op its cases, and the function that makes a benchmark of a case.
OPS: dict[str, tuple[tuple[Any, ...], Callable[[Any], KernelBenchmark]]] = {
    "state_copy": (state_copy_cases.CASES, copy_benchmark),
    "causal_conv1d_update": (causal_conv1d_cases.UPDATE_CASES, conv_benchmark),
    "gated_delta_rule_update": (gated_delta_rule_cases.UPDATE_CASES, delta_rule_benchmark),
    "selective_state_update": (selective_state_update_cases.CASES, state_space_benchmark),
}
