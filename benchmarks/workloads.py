"""The ops' named cases as something to run: buffers, indices, the bytes that must move, and what a peer is given.

Data is random. A turn's blocks rotate past five times the L2, as a server's would: either one turn alone touches more,
or the next turn takes other blocks.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import (
    causal_conv1d_update,
    gated_delta_rule_recurrent,
    gated_delta_rule_update,
    selective_state_update,
    state_copy,
)
from pallas_kernels.causal_conv1d import cases as causal_conv1d_cases
from pallas_kernels.causal_conv1d.config import default_config as conv_config
from pallas_kernels.gated_delta_rule import cases as gated_delta_rule_cases
from pallas_kernels.gated_delta_rule.config import default_config as delta_rule_config
from pallas_kernels.selective_state_update import cases as selective_state_update_cases
from pallas_kernels.selective_state_update.config import default_config as state_space_config
from pallas_kernels.state_copy import cases as state_copy_cases
from pallas_kernels.state_copy.config import default_config as copy_config

ROTATION_BYTES = 5 * 60 * 2**20  # of an H200


@dataclass(frozen=True)
class Workload:
    """One case. `step(turn, carry, implementation=..., config=...)` advances (pools..., outputs...) by a turn."""

    case: Any
    kernel: str  # what the names of the op's kernels start with
    bytes: int
    tolerance: float
    initial: Callable[[], tuple[jax.Array, ...]]
    step: Callable[..., tuple[jax.Array, ...]]
    given: dict[str, jax.Array]  # to a peer: inputs, and per set of blocks `read` and `write`
    config: Any  # what the op takes by default
    # The rest is of prefill. Inputs too large to be constants of a program, which `step` takes by name:
    draw: Callable[[], dict[str, Any]] = dict
    least: float = 1.0  # an array's differences are in units of its largest value, but of no less than this
    # outputs[part] in float64, from `inputs` and the initial pool:
    part: tuple[slice, ...] = ()
    reference: Callable[[dict[str, Any], jax.Array], np.ndarray] | None = None

    @functools.cached_property
    def inputs(self) -> dict[str, Any]:
        """Drawn once, on the device."""
        return jax.jit(self.draw)()

    def advance(self, turn: Any, carry: tuple[jax.Array, ...], inputs: dict[str, Any], **options: Any):
        """One turn, no part of which may be shared with another: not even what depends on the inputs alone."""
        if inputs:
            carry, inputs = jax.lax.optimization_barrier((carry, inputs))
        return self.step(turn, carry, **inputs, **options)

    def run(self, turns: int, inputs: dict[str, Any], **options: Any) -> tuple[jax.Array, ...]:
        """`turns` turns over fresh buffers: to be jitted, so that the buffers are donated from turn to turn."""
        step = lambda turn, carry: self.advance(turn, carry, inputs, **options)
        return jax.lax.fori_loop(0, turns, step, self.initial())

    @property
    def span_sets(self) -> int:
        """Sets of blocks of which a span is measured: few, since each is another launch in a program's text."""
        return min(4, len(self.given["write"]))

    def run_sets(self, rounds: int, inputs: dict[str, Any], **options: Any) -> tuple[jax.Array, ...]:
        """`rounds` turns over each of `span_sets`, the loop's body being nothing but calls of the op."""
        sets = self.span_sets

        def body(_, carry):
            pool, *outputs = carry
            for turn in range(sets):
                # An output of its own for each turn, lest it be dropped for the next one's.
                pool, outputs[turn] = self.advance(turn, (pool, outputs[turn]), inputs, **options)
            return pool, *outputs

        pool, output = self.initial()
        return jax.lax.fori_loop(0, rounds, body, (pool, *[output] * sets))

    @functools.cached_property
    def _first_turn(self) -> Callable[..., tuple[jax.Array, ...]]:
        static = ("implementation", "config", "interpret")
        return jax.jit(lambda inputs, **options: self.run(1, inputs, **options), static_argnames=static)

    def first_turn(self, **options: Any) -> tuple[jax.Array, ...]:
        """Pools and outputs after one turn."""
        return self._first_turn(self.inputs, **options)

    def error(self, **options: Any) -> jax.Array:
        """How far one turn is from "xla"."""
        return self.difference(self.first_turn(**options), self.first_turn(implementation="xla"))

    def difference(self, actual: tuple[jax.Array, ...], wanted: tuple[jax.Array, ...]) -> jax.Array:
        """The largest difference, in units of the largest value (or `least`)."""
        return _difference(actual, wanted, self.least)

    def accepts(self, *errors: float | None) -> bool:
        """Whether all of the errors that there are keep to the tolerance; NaN doesn't."""
        return all(error <= self.tolerance for error in errors if error is not None)

    @functools.cached_property
    def _wanted(self) -> np.ndarray:
        assert self.reference is not None
        return self.reference(self.inputs, jax.jit(self.initial)()[0])

    def rms_error(self, outputs: jax.Array) -> float | None:
        """||outputs - wanted|| / ||wanted|| of a first turn, wanted being float64's; None without a reference."""
        if self.reference is None:
            return None
        distance = np.asarray(outputs[self.part], np.float64) - self._wanted
        return float(np.linalg.norm(distance) / np.linalg.norm(self._wanted))


@jax.jit
def _difference(actual: tuple[jax.Array, ...], wanted: tuple[jax.Array, ...], least: float) -> jax.Array:
    pairs = [(x.astype(jnp.float32), y.astype(jnp.float32)) for x, y in zip(actual, wanted, strict=True)]
    return jnp.max(jnp.stack([jnp.max(jnp.abs(x - y)) / jnp.maximum(least, jnp.max(jnp.abs(y))) for x, y in pairs]))


def random_pool(shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Cheap pseudo-random values in [-0.5, 0.5): zeros would flatter the card."""
    index = jax.lax.broadcasted_iota(jnp.uint32, shape, 1) * jnp.uint32(2654435761)
    index = index ^ (jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1) * jnp.uint32(40503))
    return ((index & 0xFFFF).astype(jnp.float32) / 65536 - 0.5).astype(dtype)


def _draw(dtype: str = "float32") -> Callable[..., jax.Array]:
    rng = np.random.default_rng(0)
    return lambda *shape, dtype=dtype: jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype)


def tolerance(*dtypes: str) -> float:
    """Products of unit-scale numbers in another order, rounded to the narrowest type on the way."""
    return 8.0 * max(float(jnp.finfo(dtype).eps) for dtype in dtypes)


def itemsize(dtype: str) -> int:
    return jnp.dtype(dtype).itemsize


def rotate(rows: int, columns: int, bytes_per_turn: int) -> tuple[jax.Array, int]:
    """Blocks [sets, rows, columns], none of them NULL_BLOCK, and how many blocks the pool needs."""
    sets = max(1, math.ceil(ROTATION_BYTES / bytes_per_turn))
    blocks = 1 + np.arange(sets * rows * columns).reshape(sets, rows, columns)
    return jnp.asarray(blocks, jnp.int32), 1 + blocks.size


def locations(lengths: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)


def copy_workload(case: state_copy_cases.Case) -> Workload:
    """All layers of the crossing rows, read and written once."""
    state_bytes = [math.prod(state) * itemsize(dtype) for state, dtype in case.states]
    per_row = case.layers * sum(state_bytes)
    blocks, num_blocks = rotate(case.rows, 2, 2 * case.rows * per_row)
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
        config=tuple(copy_config(itemsize(dtype)) for _, dtype in case.states),
    )


def conv_workload(case: causal_conv1d_cases.Case) -> Workload:
    """Per row its old window (width - 1) and new one (width - 2 + tokens); per token an input and an output."""
    rows, tokens = len(case.lengths), sum(case.lengths)
    live = sum(length > 0 for length in case.lengths)
    window = case.width - 1 + case.num_speculative_tokens
    channel_rows = live * (2 * case.width - 3) + 3 * tokens
    moved = (channel_rows + case.width) * case.channels * itemsize(case.dtype)
    blocks, num_blocks = rotate(rows, 1, 2 * rows * window * case.channels * itemsize(case.dtype))
    draw = _draw(case.dtype)
    x, weight = draw(tokens, case.channels), draw(case.width, case.channels)
    loc, window_row = locations(case.lengths), jnp.zeros(rows, jnp.int32)

    def step(turn, carry, **options):
        block = blocks[turn % len(blocks), :, 0]
        y, pool = causal_conv1d_update(x, carry[0], 0, weight, None, loc, block, window_row, block, **options)
        return pool, y

    return Workload(
        case=case,
        kernel="causal_conv1d_update",
        bytes=moved,
        tolerance=tolerance(case.dtype),
        initial=lambda: (random_pool((1, num_blocks, window, case.channels), case.dtype), jnp.zeros_like(x)),
        step=step,
        given=dict(x=x, weight=weight, query_start_loc=loc, read=blocks[..., 0]),
        config=conv_config(),
    )


def delta_rule_workload(case: gated_delta_rule_cases.Case) -> Workload:
    """Per row its state, per token a state and the token's inputs and outputs."""
    rows, tokens, window = len(case.lengths), sum(case.lengths), max(case.lengths)
    live = sum(length > 0 for length in case.lengths)
    state = case.value_heads, case.value_dim, case.key_dim
    state_bytes = math.prod(state) * itemsize(case.state_dtype)
    blocks, num_blocks = rotate(rows, window, (live + tokens) * state_bytes)
    keys, values = case.key_heads * case.key_dim, case.value_heads * case.value_dim
    draw, loc = _draw(), locations(case.lengths)
    qkv = draw(tokens, 2 * keys + values, dtype=case.dtype)
    gates = case.value_heads, case.key_dim
    if case.packed:
        a, b = (draw(tokens, case.value_heads, dtype=case.dtype) for _ in range(2))
        inputs: dict[str, Any] = dict(qkv=qkv, a=a, b=b, A_log=draw(case.value_heads), dt_bias=draw(case.value_heads))
        op: Callable[..., Any] = gated_delta_rule_update
        gate_bytes = 2 * case.value_heads * itemsize(case.dtype)
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
        bytes=(live + tokens) * state_bytes + tokens * ((2 * keys + 2 * values) * itemsize(case.dtype) + gate_bytes),
        tolerance=tolerance(case.dtype, case.state_dtype),
        initial=lambda: (
            random_pool((1, num_blocks, *state), case.state_dtype),
            jnp.zeros((tokens, *state[:2]), case.dtype),
        ),
        step=step,
        given=inputs | dict(query_start_loc=loc, write=blocks),
        config=delta_rule_config(rows, window, itemsize(case.state_dtype)),
    )


def state_space_workload(case: selective_state_update_cases.Case) -> Workload:
    """Per row its state, per token a state and the token's inputs and outputs; read and written blocks are others."""
    rows, tokens, window = len(case.lengths), sum(case.lengths), max(case.lengths)
    live = sum(length > 0 for length in case.lengths)
    channel = case.heads, case.head_dim
    state_bytes = math.prod(channel) * case.state_dim * itemsize(case.state_dtype)
    blocks, num_blocks = rotate(rows, 1 + window, (live + tokens) * state_bytes)
    draw, loc = _draw(), locations(case.lengths)
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


# Per op: its cases, and what makes a workload of one.
OPS: dict[str, tuple[tuple[Any, ...], Callable[[Any], Workload]]] = {
    "state_copy": (state_copy_cases.CASES, copy_workload),
    "causal_conv1d_update": (causal_conv1d_cases.UPDATE_CASES, conv_workload),
    "gated_delta_rule_update": (gated_delta_rule_cases.UPDATE_CASES, delta_rule_workload),
    "selective_state_update": (selective_state_update_cases.CASES, state_space_workload),
}
