"""A named case of an op as something to run and time: its buffers, its indices, the bytes that it must move.

The data is random. Each turn uses another set of blocks, as a server's requests would. All sets together have at least five
times the size of the L2 cache, so that no turn finds its states there.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROTATION_BYTES = 5 * 60 * 2**20  # of an H200


@dataclass(frozen=True)
class KernelBenchmark:
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
    min_scale: float = 1.0  # an array's differences are in units of its largest value, but of no less than this
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
        return _difference(actual, wanted, self.min_scale)

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
def _difference(actual: tuple[jax.Array, ...], wanted: tuple[jax.Array, ...], min_scale: float) -> jax.Array:
    pairs = [(x.astype(jnp.float32), y.astype(jnp.float32)) for x, y in zip(actual, wanted, strict=True)]
    return jnp.max(jnp.stack([jnp.max(jnp.abs(x - y)) / jnp.maximum(min_scale, jnp.max(jnp.abs(y))) for x, y in pairs]))


def random_pool(shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Cheap pseudo-random values in [-0.5, 0.5): zeros would flatter the card."""
    index = jax.lax.broadcasted_iota(jnp.uint32, shape, 1) * jnp.uint32(2654435761)
    index = index ^ (jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1) * jnp.uint32(40503))
    return ((index & 0xFFFF).astype(jnp.float32) / 65536 - 0.5).astype(dtype)


def draw_normal(dtype: str = "float32") -> Callable[..., jax.Array]:
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
