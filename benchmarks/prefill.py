"""Benchmarks of the prefill ops: whole prompts, each from a state in the pool to the state that replaces it.

The inputs of the tokens are the same arrays in every turn, for peers as well. They are in the L2 cache, as the outputs
of the layer before would be. The blocks change from turn to turn. `bytes` counts every input, every output, and each
row's old and new state, once. No checkpoints are kept.

The difference from "xla", which computes in float32, is in units of the largest value. It may be as large as that of
products of bfloat16 numbers, which tensor cores multiply. The error relative to float64, over all values of the
reference's part, may be no larger.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import reference
from benchmarks.kernel_benchmark import KernelBenchmark, itemsize, locations, random_pool, rotate, tolerance
from benchmarks.workloads import causal_conv1d as causal_conv1d_cases
from benchmarks.workloads import gated_delta_rule as gated_delta_rule_cases
from benchmarks.workloads import selective_scan as selective_scan_cases
from benchmarks.workloads import ssd as ssd_cases
from pallas_kernels import Rows, Run, causal_conv1d_prefill, chunk_rows, gated_delta_rule_prefill, selective_scan, ssd
from pallas_kernels.causal_conv1d.config import default_prefill_config as conv_config
from pallas_kernels.gated_delta_rule.config import default_prefill_config as delta_rule_config
from pallas_kernels.selective_scan.config import default_config as scan_config
from pallas_kernels.ssd.config import default_config as ssd_config

# The reference computes only the first tokens of the longest row, and some channels. Outputs are causal, float64 is
# slow.
REFERENCE_TOKENS, REFERENCE_CHANNELS = 512, 64


def _normal() -> Callable[..., jax.Array]:
    """Returns a function that draws normal numbers on the device, different ones at each call."""
    keys = iter(jax.random.split(jax.random.key(0), 16))

    def draw(*shape, dtype="float32"):
        return jax.random.normal(next(keys), shape).astype(dtype)

    return draw


def _live(lengths: tuple[int, ...]) -> list[int]:
    """Returns the rows that have tokens."""
    return [row for row, length in enumerate(lengths) if length]


def _longest(lengths: tuple[int, ...]) -> tuple[int, slice]:
    """Returns the longest row and the slice of its first tokens."""
    row = int(np.argmax(lengths))
    return row, slice(sum(lengths[:row]), sum(lengths[:row]) + min(lengths[row], REFERENCE_TOKENS))


def _float64(*arrays: jax.Array) -> list[np.ndarray]:
    return [np.asarray(x, np.float64) for x in arrays]


def _given(lengths: tuple[int, ...], blocks: jax.Array) -> dict[str, jax.Array]:
    """Returns the row starts and blocks for peers. Rows without tokens are left out, as not every peer allows them."""
    live = _live(lengths)
    return dict(query_start_loc=locations(tuple(lengths[row] for row in live)), write=blocks[:, np.array(live)])


def conv_benchmark(case: causal_conv1d_cases.Case) -> KernelBenchmark:
    """Counts each row's old and new window of width - 1, each token's input and output, and the taps."""
    rows, tokens = len(case.lengths), sum(case.lengths)
    channel_rows = 2 * len(_live(case.lengths)) * (case.width - 1) + 2 * tokens + case.width
    moved = channel_rows * case.channels * itemsize(case.dtype)
    blocks, num_blocks = rotate(rows, 1, moved)
    blocks = blocks[..., 0]
    shape = 1, num_blocks, *case.block_shape
    row, first = _longest(case.lengths)
    channels = slice(REFERENCE_CHANNELS)

    def draw():
        normal = _normal()
        return dict(
            x=normal(tokens, case.channels, dtype=case.dtype),
            weight=normal(case.width, case.channels, dtype=case.dtype),
            query_start_loc=locations(case.lengths),
        )

    def step(turn, carry, x, weight, query_start_loc, **options):
        block = blocks[turn % len(blocks)]
        first_row = jnp.zeros(rows, jnp.int32)
        where = Rows(
            query_start_loc=query_start_loc, layer=0, window_read=block, window_row=first_row, write=block[:, None]
        )
        y, pool = causal_conv1d_prefill(x, carry[0], weight, None, where, layout=case.layout, run=Run(**options))
        return pool, y

    def wanted(inputs, pool):
        history = pool[0, int(blocks[0, row])]
        history = (history if case.layout == "SD" else history.T)[:, channels]
        return reference.causal_conv1d(*_float64(inputs["x"][first, channels], history, inputs["weight"][:, channels]))

    return KernelBenchmark(
        case=case,
        kernel="causal_conv1d_prefill",
        bytes=moved,
        tolerance=tolerance(case.dtype),
        initial=lambda: (random_pool(shape, case.dtype), jnp.zeros((tokens, case.channels), case.dtype)),
        step=step,
        given=_given(case.lengths, blocks),
        config=conv_config(case.layout),
        draw=draw,
        min_scale=1e-6,
        part=(first, channels),
        reference=wanted,
    )


def delta_rule_benchmark(case: gated_delta_rule_cases.Case) -> KernelBenchmark:
    """Counts each row's old and new state, and each token's q, k, v and output, and its g and beta in float32.

    q and k are not normalised, so that normalising them is part of the work of our kernels and of the peers'.
    """
    rows, tokens = len(case.lengths), sum(case.lengths)
    state = case.value_heads, case.value_dim, case.key_dim
    state_bytes = math.prod(state) * itemsize(case.state_dtype)
    keys, values = case.key_heads * case.key_dim, case.value_heads * case.value_dim
    gates = case.value_heads, case.key_dim
    gate_bytes = 4 * case.value_heads * (1 + case.key_dim**case.kda)
    token_bytes = (2 * keys + 2 * values) * itemsize(case.dtype) + gate_bytes
    moved = 2 * len(_live(case.lengths)) * state_bytes + tokens * token_bytes
    blocks, num_blocks = rotate(rows, 1, moved)
    blocks = blocks[..., 0]
    row, first = _longest(case.lengths)
    key_heads = slice(max(1, 4 * case.key_heads // case.value_heads))
    heads = slice(key_heads.stop * case.value_heads // case.key_heads)

    def draw():
        normal = _normal()
        loc = locations(case.lengths)
        return dict(
            q=normal(tokens, case.key_heads, case.key_dim, dtype=case.dtype),
            k=normal(tokens, case.key_heads, case.key_dim, dtype=case.dtype),
            v=normal(tokens, *state[:2], dtype=case.dtype),
            g=jax.nn.log_sigmoid(3 + normal(tokens, *gates[: 1 + case.kda])),  # a memory of about 15 tokens
            beta=(1 + case.allow_neg_eigval) * jax.nn.sigmoid(normal(tokens, case.value_heads)),
            query_start_loc=loc,
            chunks=chunk_rows(loc, jnp.zeros(rows, jnp.int32), tokens),
        )

    def step(turn, carry, q, k, v, g, beta, query_start_loc, chunks, **options):
        block = blocks[turn % len(blocks)]
        where = Rows(query_start_loc=query_start_loc, layer=0, read=block, write=block[:, None], chunks=chunks)
        run = Run(**options)
        out, pool = gated_delta_rule_prefill(q, k, v, g, beta, carry[0], where, layout=case.layout, run=run)
        return pool, out

    def wanted(inputs, pool):
        of_keys = [inputs[name][first, key_heads] for name in ("q", "k")]
        of_values = [inputs[name][first, heads] for name in ("v", "g", "beta")]
        states = pool[0, int(blocks[0, row]), heads]
        states = states if case.layout == "VK" else states.swapaxes(1, 2)
        return reference.gated_delta_rule(*_float64(*of_keys, *of_values, states))

    return KernelBenchmark(
        case=case,
        kernel="gated_delta_rule_prefill",
        bytes=moved,
        tolerance=tolerance(case.dtype, case.state_dtype),
        initial=lambda: (
            random_pool((1, num_blocks, *case.block_shape), case.state_dtype),
            jnp.zeros((tokens, *state[:2]), case.dtype),
        ),
        step=step,
        given=_given(case.lengths, blocks),
        config=delta_rule_config(rows * math.prod(state[:2]), case.key_dim, itemsize(case.dtype), case.kda),
        draw=draw,
        min_scale=1e-6,
        part=(first, heads),
        reference=wanted,
    )


def state_space_benchmark(
    case: Any, *, op: Callable[..., Any], config: Callable[[Any], Any], chunked: bool
) -> KernelBenchmark:
    """Counts each row's old and new state, each token's inputs and output, and A.

    Mamba-1 has one head, and dt, D and dt_bias per channel. `chunked` ops take chunks.
    """
    rows, tokens = len(case.lengths), sum(case.lengths)
    channel = case.heads, case.head_dim
    state_bytes = math.prod(channel) * case.state_dim * itemsize(case.state_dtype)
    is_mamba1 = case.heads == 1
    per = channel if is_mamba1 else (case.heads,)
    shape_of_a = (*channel, case.state_dim) if is_mamba1 else per
    token_values = (2 + case.gated) * math.prod(channel) + math.prod(per) + 2 * case.groups * case.state_dim
    moved = 2 * len(_live(case.lengths)) * state_bytes + tokens * token_values * itemsize(case.dtype)
    moved += 4 * math.prod(shape_of_a)
    blocks, num_blocks = rotate(rows, 1, moved)
    blocks = blocks[..., 0]
    row, first = _longest(case.lengths)
    heads, channels = slice(case.heads // case.groups), slice(REFERENCE_CHANNELS)

    def draw():
        normal = _normal()
        loc = locations(case.lengths)
        inputs = dict(
            x=normal(tokens, *channel, dtype=case.dtype),
            dt=normal(tokens, *per, dtype=case.dtype),
            A=-jnp.exp(normal(*shape_of_a)),
            B=normal(tokens, case.groups, case.state_dim, dtype=case.dtype),
            C=normal(tokens, case.groups, case.state_dim, dtype=case.dtype),
            D=normal(*per),
            dt_bias=normal(*per),
            query_start_loc=loc,
        )
        if case.gated:
            inputs |= dict(z=normal(tokens, *channel, dtype=case.dtype))
        if chunked:
            inputs |= dict(chunks=chunk_rows(loc, jnp.zeros(rows, jnp.int32), tokens, case.chunk_size))
        return inputs

    def step(turn, carry, x, dt, A, B, C, D, dt_bias, query_start_loc, z=None, chunks: Any = None, **options):
        block = blocks[turn % len(blocks)]
        rows = Rows(layer=0, query_start_loc=query_start_loc, read=block, write=block[:, None], chunks=chunks)
        out, pool = op(x, dt, A, B, C, carry[0], rows, D=D, z=z, dt_bias=dt_bias, run=Run(**options))
        return pool, out

    def wanted(inputs, pool):
        cut = (heads, channels)[: len(per)]
        named = {name: inputs[name][(first, heads, channels)] for name in ("x", "z") if name in inputs}
        named |= {name: inputs[name][:, :1][first] for name in ("B", "C")}
        named |= {name: inputs[name][cut] for name in ("A", "D", "dt_bias")}
        named |= dict(dt=inputs["dt"][(first, *cut)], state=pool[0, int(blocks[0, row]), heads, channels])
        return reference.state_space(**{name: np.asarray(x, np.float64) for name, x in named.items()})

    return KernelBenchmark(
        case=case,
        kernel=op.__name__,
        bytes=moved,
        tolerance=tolerance(case.dtype, case.state_dtype),
        initial=lambda: (
            random_pool((1, num_blocks, *channel, case.state_dim), case.state_dtype),
            jnp.zeros((tokens, *channel), case.dtype),
        ),
        step=step,
        given=_given(case.lengths, blocks),
        config=config(case),
        draw=draw,
        min_scale=1e-6,
        part=(first, heads, channels),
        reference=wanted,
    )


def _ssd_config(case: ssd_cases.Case) -> Any:
    channels = len(case.lengths) * case.heads * case.head_dim
    return ssd_config(channels, case.state_dim, case.chunk_size, 2 if case.dtype == "bfloat16" else 4)


def _scan_config(case: selective_scan_cases.Case) -> Any:
    return scan_config(case.state_dim, itemsize(case.state_dtype))


# For each op its cases, and the function that makes a benchmark of a case.
OPS: dict[str, tuple[tuple[Any, ...], Callable[[Any], KernelBenchmark]]] = {
    "causal_conv1d_prefill": (causal_conv1d_cases.PREFILL_CASES, conv_benchmark),
    "gated_delta_rule_prefill": (gated_delta_rule_cases.PREFILL_CASES, delta_rule_benchmark),
    "ssd": (
        ssd_cases.CASES,
        functools.partial(state_space_benchmark, op=ssd, config=_ssd_config, chunked=True),
    ),
    "selective_scan": (
        selective_scan_cases.CASES,
        functools.partial(state_space_benchmark, op=selective_scan, config=_scan_config, chunked=False),
    ),
}
