"""The ops' named cases as something to run: buffers, indices, the bytes that must move, and what a peer is given.

Data is random. A turn's blocks rotate past five times the L2, as a server's would: either one turn alone touches more,
or the next turn takes other blocks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import (
    causal_conv1d_prefill,
    causal_conv1d_update,
    gated_delta_rule_recurrent,
    gated_delta_rule_update,
    selective_scan,
    selective_state_update,
    state_copy,
)
from pallas_kernels.causal_conv1d import cases as causal_conv1d_cases
from pallas_kernels.causal_conv1d.config import default_config as conv_config
from pallas_kernels.causal_conv1d.config import default_prefill_config as conv_prefill_config
from pallas_kernels.gated_delta_rule import cases as gated_delta_rule_cases
from pallas_kernels.gated_delta_rule.config import default_config as delta_rule_config
from pallas_kernels.selective_scan import cases as selective_scan_cases
from pallas_kernels.selective_scan.config import default_config as scan_config
from pallas_kernels.selective_state_update import cases as selective_state_update_cases
from pallas_kernels.selective_state_update.config import default_config as state_space_config
from pallas_kernels.state_copy import cases as state_copy_cases
from pallas_kernels.state_copy.config import default_config as copy_config

ROTATION_BYTES = 5 * 60 * 2**20  # of an H200


@dataclass(frozen=True)
class Workload:
    """One case. `step(turn, carry, implementation=..., config=...)` advances (pools..., outputs...) by a turn."""

    case: Any
    kernel: str
    bytes: int
    tolerance: float
    initial: Callable[[], tuple[jax.Array, ...]]
    step: Callable[..., tuple[jax.Array, ...]]
    given: dict[str, jax.Array]  # to a peer: inputs, and per set of blocks `read` and `write`
    config: Any  # what the op takes by default

    def run(self, turns: int, **options: Any) -> tuple[jax.Array, ...]:
        """`turns` turns over fresh buffers: to be jitted, so that the buffers are donated from turn to turn."""
        step = lambda turn, carry: self.step(turn, carry, **options)
        return jax.lax.fori_loop(0, turns, step, self.initial())

    def error(self, **options: Any) -> jax.Array:
        """How far one turn is from "xla"."""
        return self.difference(
            *(jax.jit(lambda o=o: self.run(1, **o))() for o in (options, dict(implementation="xla")))
        )

    @staticmethod
    @jax.jit
    def difference(actual: tuple[jax.Array, ...], wanted: tuple[jax.Array, ...]) -> jax.Array:
        """The largest difference, in units of the largest value (or 1)."""
        pairs = [(x.astype(jnp.float32), y.astype(jnp.float32)) for x, y in zip(actual, wanted, strict=True)]
        return jnp.max(jnp.stack([jnp.max(jnp.abs(x - y)) / jnp.maximum(1.0, jnp.max(jnp.abs(y))) for x, y in pairs]))


def random_pool(shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Cheap pseudo-random values in [-0.5, 0.5): zeros would flatter the card."""
    index = jax.lax.broadcasted_iota(jnp.uint32, shape, 1) * jnp.uint32(2654435761)
    index = index ^ (jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1) * jnp.uint32(40503))
    return ((index & 0xFFFF).astype(jnp.float32) / 65536 - 0.5).astype(dtype)


def _draw(dtype: str = "float32") -> Callable[..., jax.Array]:
    rng = np.random.default_rng(0)
    return lambda *shape, dtype=dtype: jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype)


def _tolerance(*dtypes: str) -> float:
    """Products of unit-scale numbers in another order, rounded to the narrowest type on the way."""
    return 8.0 * max(float(jnp.finfo(dtype).eps) for dtype in dtypes)


def _itemsize(dtype: str) -> int:
    return jnp.dtype(dtype).itemsize


def _rotate(rows: int, columns: int, bytes_per_turn: int) -> tuple[jax.Array, int]:
    """Blocks [sets, rows, columns], none of them NULL_BLOCK, and how many blocks the pool needs."""
    sets = max(1, math.ceil(ROTATION_BYTES / bytes_per_turn))
    blocks = 1 + np.arange(sets * rows * columns).reshape(sets, rows, columns)
    return jnp.asarray(blocks, jnp.int32), 1 + blocks.size


def _locations(lengths: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)


def copy_workload(case: state_copy_cases.Case) -> Workload:
    """All layers of the crossing rows, read and written once."""
    state_bytes = [math.prod(state) * _itemsize(dtype) for state, dtype in case.states]
    per_row = case.layers * sum(state_bytes)
    blocks, num_blocks = _rotate(case.rows, 2, 2 * case.rows * per_row)
    crossing = jnp.arange(case.rows) < case.crossing
    read, write = blocks[..., 0], jnp.where(crossing, blocks[..., 1], blocks[..., 0])
    offset = jnp.where(crossing, case.offset, 0)

    def step(turn, pools, *, implementation, config=None):
        plan = read[turn % len(read)], write[turn % len(read)]
        plans = [(*plan, offset) if len(state) == 2 else plan for state, _ in case.states]
        options = dict(implementation=implementation, config=config)
        return tuple(state_copy(pool, *plan, **options) for pool, plan in zip(pools, plans, strict=True))

    return Workload(
        case=case,
        kernel="state_copy",
        bytes=2 * case.crossing * per_row,
        tolerance=0.0,
        initial=lambda: tuple(random_pool((case.layers, num_blocks, *s), dtype) for s, dtype in case.states),
        step=step,
        given=dict(read=read, write=write),
        config=tuple(copy_config(_itemsize(dtype)) for _, dtype in case.states),
    )


def conv_workload(case: causal_conv1d_cases.Case) -> Workload:
    """Per row its old window (width - 1) and new one (width - 2 + tokens); per token an input and an output."""
    rows, tokens = len(case.lengths), sum(case.lengths)
    live = sum(length > 0 for length in case.lengths)
    window = case.width - 1 + case.num_speculative_tokens
    channel_rows = live * (2 * case.width - 3) + 3 * tokens
    moved = (channel_rows + case.width) * case.channels * _itemsize(case.dtype)
    blocks, num_blocks = _rotate(rows, 1, 2 * rows * window * case.channels * _itemsize(case.dtype))
    draw = _draw(case.dtype)
    x, weight = draw(tokens, case.channels), draw(case.width, case.channels)
    loc, read_row = _locations(case.lengths), jnp.zeros(rows, jnp.int32)

    def step(turn, carry, **options):
        block = blocks[turn % len(blocks), :, 0]
        y, pool = causal_conv1d_update(x, carry[0], 0, weight, None, loc, block, read_row, block, **options)
        return pool, y

    return Workload(
        case=case,
        kernel="causal_conv1d_update",
        bytes=moved,
        tolerance=_tolerance(case.dtype),
        initial=lambda: (random_pool((1, num_blocks, window, case.channels), case.dtype), jnp.zeros_like(x)),
        step=step,
        given=dict(x=x, weight=weight, query_start_loc=loc, read=blocks[..., 0]),
        config=conv_config(),
    )


def conv_prefill_workload(case: causal_conv1d_cases.Case) -> Workload:
    """Per row an old window and a new one; per token an input and an output."""
    rows, tokens, window = len(case.lengths), sum(case.lengths), case.width - 1
    channel_rows = sum(length > 0 for length in case.lengths) * 2 * window + 2 * tokens
    blocks, num_blocks = _rotate(rows, 1, 2 * rows * window * case.channels * _itemsize(case.dtype))
    draw = _draw(case.dtype)
    x, weight = draw(tokens, case.channels), draw(case.width, case.channels)
    loc, read_row = _locations(case.lengths), jnp.zeros(rows, jnp.int32)

    def step(turn, carry, **options):
        block = blocks[turn % len(blocks), :, 0]
        y, pool = causal_conv1d_prefill(x, carry[0], 0, weight, None, loc, block, read_row, block, **options)
        return pool, y

    return Workload(
        case=case,
        kernel="causal_conv1d_prefill",
        bytes=(channel_rows + case.width) * case.channels * _itemsize(case.dtype),
        tolerance=_tolerance(case.dtype),
        initial=lambda: (random_pool((1, num_blocks, window, case.channels), case.dtype), jnp.zeros_like(x)),
        step=step,
        given=dict(x=x, weight=weight, query_start_loc=loc, read=blocks[..., 0]),
        config=conv_prefill_config(),
    )


def delta_rule_workload(case: gated_delta_rule_cases.Case) -> Workload:
    """Per row its state, per token a state and the token's inputs and outputs."""
    rows, tokens, window = len(case.lengths), sum(case.lengths), max(case.lengths)
    live = sum(length > 0 for length in case.lengths)
    state = case.value_heads, case.value_dim, case.key_dim
    state_bytes = math.prod(state) * _itemsize(case.state_dtype)
    blocks, num_blocks = _rotate(rows, window, (live + tokens) * state_bytes)
    keys, values = case.key_heads * case.key_dim, case.value_heads * case.value_dim
    draw, loc = _draw(), _locations(case.lengths)
    qkv = draw(tokens, 2 * keys + values, dtype=case.dtype)
    gates = case.value_heads, case.key_dim
    if case.packed:
        a, b = (draw(tokens, case.value_heads, dtype=case.dtype) for _ in range(2))
        inputs: dict[str, Any] = dict(qkv=qkv, a=a, b=b, A_log=draw(case.value_heads), dt_bias=draw(case.value_heads))
        op: Callable[..., Any] = gated_delta_rule_update
        gate_bytes = 2 * case.value_heads * _itemsize(case.dtype)
    else:
        q, k, v = jnp.split(qkv, [keys, 2 * keys], axis=1)
        heads = lambda x, dim: x.reshape(tokens, -1, dim)
        inputs = dict(q=heads(q, case.key_dim), k=heads(k, case.key_dim), v=heads(v, case.value_dim))
        inputs |= dict(
            g=-jnp.abs(draw(tokens, *gates[: 1 + case.kda])), beta=jnp.abs(draw(tokens, case.value_heads)) % 1
        )
        op = gated_delta_rule_recurrent
        gate_bytes = 4 * case.value_heads * (1 + case.key_dim**case.kda)

    def step(turn, carry, **options):
        write = blocks[turn % len(blocks)]
        indices = dict(query_start_loc=loc, read_block=write[:, 0], write_blocks=write)
        out, pool = op(**inputs, pool=carry[0], layer=0, **indices, **options)
        return pool, out

    return Workload(
        case=case,
        kernel="gated_delta_rule_update",
        bytes=(live + tokens) * state_bytes + tokens * ((2 * keys + 2 * values) * _itemsize(case.dtype) + gate_bytes),
        tolerance=_tolerance(case.dtype, case.state_dtype),
        initial=lambda: (
            random_pool((1, num_blocks, *state), case.state_dtype),
            jnp.zeros((tokens, *state[:2]), case.dtype),
        ),
        step=step,
        given=inputs | dict(query_start_loc=loc, write=blocks),
        config=delta_rule_config(rows, window, _itemsize(case.state_dtype)),
    )


def state_space_workload(case: selective_state_update_cases.Case) -> Workload:
    """Per row its state, per token a state and the token's inputs and outputs; read and written blocks are others."""
    rows, tokens, window = len(case.lengths), sum(case.lengths), max(case.lengths)
    live = sum(length > 0 for length in case.lengths)
    channel = case.heads, case.head_dim
    state_bytes = math.prod(channel) * case.state_dim * _itemsize(case.state_dtype)
    blocks, num_blocks = _rotate(rows, 1 + window, (live + tokens) * state_bytes)
    draw, loc = _draw(), _locations(case.lengths)
    per = channel if case.is_mamba1 else (case.heads,)
    token = lambda *shape: draw(tokens, *shape, dtype=case.dtype)
    inputs: dict[str, Any] = dict(x=token(*channel), dt=token(*per))
    inputs |= dict(A=-jnp.exp(draw(*channel, case.state_dim) if case.is_mamba1 else draw(*per)))
    inputs |= dict(B=token(case.groups, case.state_dim), C=token(case.groups, case.state_dim))
    inputs |= dict(D=draw(*per), dt_bias=draw(*per)) | (dict(z=token(*channel)) if case.gated else {})
    token_values = (2 + case.gated) * math.prod(channel) + math.prod(per) + 2 * case.groups * case.state_dim

    def step(turn, carry, **options):
        block = blocks[turn % len(blocks)]
        indices = dict(query_start_loc=loc, read_block=block[:, 0], write_blocks=block[:, 1:])
        out, pool = selective_state_update(**inputs, pool=carry[0], layer=0, **indices, **options)
        return pool, out

    return Workload(
        case=case,
        kernel="selective_state_update",
        bytes=(live + tokens) * state_bytes + tokens * token_values * _itemsize(case.dtype) + 4 * inputs["A"].size,
        tolerance=_tolerance(case.dtype, case.state_dtype),
        initial=lambda: (
            random_pool((1, num_blocks, *channel, case.state_dim), case.state_dtype),
            jnp.zeros((tokens, *channel), case.dtype),
        ),
        step=step,
        given=inputs | dict(read=blocks[..., 0], write=blocks[..., 1:]),
        config=state_space_config(window, case.state_dim, _itemsize(case.state_dtype)),
    )


def scan_workload(case: selective_scan_cases.Case) -> Workload:
    """Per row an old state and a new one; per token its inputs and outputs."""
    rows, tokens, channel = len(case.lengths), sum(case.lengths), (case.heads, case.head_dim)
    state_bytes = math.prod(channel) * case.state_dim * _itemsize(case.state_dtype)
    states = 2 * state_bytes * sum(length > 0 for length in case.lengths)
    blocks, num_blocks = _rotate(rows, 2, states)
    draw, loc = _draw(), _locations(case.lengths)
    token = lambda *shape: draw(tokens, *shape, dtype=case.dtype)
    inputs: dict[str, Any] = dict(x=token(*channel), dt=token(*channel), A=-jnp.exp(draw(*channel, case.state_dim)))
    inputs |= dict(B=token(case.groups, case.state_dim), C=token(case.groups, case.state_dim))
    inputs |= dict(D=draw(*channel), dt_bias=draw(*channel)) | (dict(z=token(*channel)) if case.gated else {})
    token_values = (3 + case.gated) * math.prod(channel) + 2 * case.groups * case.state_dim

    def step(turn, carry, **options):
        block = blocks[turn % len(blocks)]
        indices = dict(query_start_loc=loc, read_block=block[:, 0], write_block=block[:, 1])
        out, pool = selective_scan(**inputs, pool=carry[0], layer=0, **indices, **options)
        return pool, out

    return Workload(
        case=case,
        kernel="selective_scan",
        bytes=states + tokens * token_values * _itemsize(case.dtype) + 4 * inputs["A"].size,
        tolerance=_tolerance(case.dtype, case.state_dtype),
        initial=lambda: (
            random_pool((1, num_blocks, *channel, case.state_dim), case.state_dtype),
            jnp.zeros((tokens, *channel), case.dtype),
        ),
        step=step,
        given=inputs | dict(query_start_loc=loc, read=blocks[..., 0], write=blocks[..., 1]),
        config=scan_config(case.state_dim, _itemsize(case.state_dtype)),
    )


# Per op: its cases, and what makes a workload of one.
OPS: dict[str, tuple[tuple[Any, ...], Callable[[Any], Workload]]] = {
    "state_copy": (state_copy_cases.CASES, copy_workload),
    "causal_conv1d_update": (causal_conv1d_cases.UPDATE_CASES, conv_workload),
    "causal_conv1d_prefill": (causal_conv1d_cases.PREFILL_CASES, conv_prefill_workload),
    "gated_delta_rule_update": (gated_delta_rule_cases.UPDATE_CASES, delta_rule_workload),
    "selective_state_update": (selective_state_update_cases.CASES, state_space_workload),
    "selective_scan": (selective_scan_cases.CASES, scan_workload),
}
