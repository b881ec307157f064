"""A named case of an op as something to run and time: its buffers, its indices, the bytes that it must move.

The data is random. Each turn uses another set of blocks, as a server's requests would. All sets together have at least
five times the size of the L2 cache, so that no turn finds its states there.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROTATION_BYTES = 5 * 60 * 2**20  # five times an H200's L2 cache of 60 MiB


@dataclass(frozen=True)
class KernelBenchmark:
    """One case of an op, ready to run. A turn is one call of the op on one set of blocks.

    Attributes:
        case: The op's case.
        kernel: The prefix of the names of the op's kernels in a profile.
        bytes: The number of bytes that a turn must read and write.
        tolerance: The largest error that is accepted.
        initial: Makes the pools and the outputs before the first turn.
        step: Runs one turn: step(turn, carry, **inputs, implementation=..., config=...) takes and returns the pools and
            outputs.
        given: Arrays for peers, by name: inputs, and the blocks of each set as `read` and `write`.
        config: The launch configuration of Triton that the op selects by default.
        draw: Draws the inputs that are too large to be constants of a program. `step` takes them by name. Only prefill
            ops have such inputs.
        min_scale: Differences between two arrays are in units of the largest value, or of `min_scale` if that is
            larger.
        part: The part of the outputs that `reference` computes.
        reference: Computes outputs[part] in float64, given `inputs` and the initial pool. Only prefill ops have one.
    """

    case: Any
    kernel: str
    bytes: int
    tolerance: float
    initial: Callable[[], tuple[jax.Array, ...]]
    step: Callable[..., tuple[jax.Array, ...]]
    given: dict[str, jax.Array]
    config: Any
    draw: Callable[[], dict[str, Any]] = dict
    min_scale: float = 1.0
    part: tuple[slice, ...] = ()
    reference: Callable[[dict[str, Any], jax.Array], np.ndarray] | None = None

    @functools.cached_property
    def inputs(self) -> dict[str, Any]:
        """The inputs, drawn once, on the device."""
        return jax.jit(self.draw)()

    @functools.cached_property
    def implementation(self) -> str:
        """The name of the implementation that the op selects for the case on the default device, if that is a GPU."""
        program = jax.jit(lambda inputs: self.run(1, inputs, implementation=None)).lower(self.inputs).as_text()
        return "mosaic_gpu" if "mosaic_gpu" in program else "triton"

    def advance(self, turn: Any, carry: tuple[jax.Array, ...], inputs: dict[str, Any], **options: Any):
        """Runs one turn. The compiler cannot share any part of it with another turn, not even what is the same."""
        if inputs:
            carry, inputs = jax.lax.optimization_barrier((carry, inputs))
        return self.step(turn, carry, **inputs, **options)

    def run(self, turns: int, inputs: dict[str, Any], **options: Any) -> tuple[jax.Array, ...]:
        """Runs `turns` turns over new buffers. It must be jitted, so that each turn updates the buffers in place."""

        def step(turn, carry):
            return self.advance(turn, carry, inputs, **options)

        return jax.lax.fori_loop(0, turns, step, self.initial())

    @property
    def span_sets(self) -> int:
        """The number of sets over which a span is measured. Each set is a call in a program, so there are few."""
        return min(4, len(self.given["write"]))

    def run_sets(self, rounds: int, inputs: dict[str, Any], **options: Any) -> tuple[jax.Array, ...]:
        """Runs `rounds` turns over each of the `span_sets` sets. The loop's body contains only calls of the op."""
        sets = self.span_sets

        def body(_, carry):
            pool, *outputs = carry
            for turn in range(sets):
                # Each turn has its own output. Otherwise the compiler could drop an output that the next turn replaces.
                pool, outputs[turn] = self.advance(turn, (pool, outputs[turn]), inputs, **options)
            return pool, *outputs

        pool, output = self.initial()
        return jax.lax.fori_loop(0, rounds, body, (pool, *[output] * sets))

    @functools.cached_property
    def _first_turn(self) -> Callable[..., tuple[jax.Array, ...]]:
        static = ("implementation", "config", "interpret")
        return jax.jit(lambda inputs, **options: self.run(1, inputs, **options), static_argnames=static)

    def first_turn(self, **options: Any) -> tuple[jax.Array, ...]:
        """Returns pools and outputs after one turn."""
        return self._first_turn(self.inputs, **options)

    def error(self, **options: Any) -> jax.Array:
        """Returns the largest difference between one turn with `options` and one turn of "xla"."""
        return self.difference(self.first_turn(**options), self.first_turn(implementation="xla"))

    def difference(self, actual: tuple[jax.Array, ...], wanted: tuple[jax.Array, ...]) -> jax.Array:
        """Returns the largest difference of any pair of arrays, in units of the largest value or of `min_scale`."""
        return _difference(actual, wanted, self.min_scale)

    def accepts(self, *errors: float | None) -> bool:
        """Returns whether all errors are within the tolerance. None counts as no error, NaN is never accepted."""
        return all(error <= self.tolerance for error in errors if error is not None)

    @functools.cached_property
    def _wanted(self) -> np.ndarray:
        assert self.reference is not None
        return self.reference(self.inputs, jax.jit(self.initial)()[0])

    def rms_error(self, outputs: jax.Array) -> float | None:
        """Returns ||outputs - wanted|| / ||wanted|| for a first turn, or None if there is no reference."""
        if self.reference is None:
            return None
        distance = np.asarray(outputs[self.part], np.float64) - self._wanted
        return float(np.linalg.norm(distance) / np.linalg.norm(self._wanted))


@jax.jit
def _difference(actual: tuple[jax.Array, ...], wanted: tuple[jax.Array, ...], min_scale: float) -> jax.Array:
    pairs = [(x.astype(jnp.float32), y.astype(jnp.float32)) for x, y in zip(actual, wanted, strict=True)]
    return jnp.max(jnp.stack([jnp.max(jnp.abs(x - y)) / jnp.maximum(min_scale, jnp.max(jnp.abs(y))) for x, y in pairs]))


def random_pool(shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Makes a pool of cheap pseudo-random values in [-0.5, 0.5). A pool of zeros could run faster than real data."""
    index = jax.lax.broadcasted_iota(jnp.uint32, shape, 1) * jnp.uint32(2654435761)
    index = index ^ (jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1) * jnp.uint32(40503))
    return ((index & 0xFFFF).astype(jnp.float32) / 65536 - 0.5).astype(dtype)


def normal_draws(dtype: str = "float32") -> Callable[..., jax.Array]:
    """Returns a function that draws normal numbers on the host: draw(*shape, dtype=dtype)."""
    rng = np.random.default_rng(0)

    def draw(*shape, dtype=dtype):
        return jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype)

    return draw


def tolerance(*dtypes: str) -> float:
    """Bounds the error of sums of unit-scale products in another order, rounded to the narrowest of the dtypes."""
    return 8.0 * max(float(jnp.finfo(dtype).eps) for dtype in dtypes)


def itemsize(dtype: str) -> int:
    """Returns the number of bytes of one element."""
    return jnp.dtype(dtype).itemsize


def rotate(rows: int, columns: int, bytes_per_turn: int) -> tuple[jax.Array, int]:
    """Chooses blocks for as many turns as it takes to move `ROTATION_BYTES`.

    Returns:
        The blocks, int32 [sets, rows, columns], none of which is NULL_BLOCK, and the number of blocks that the pool
        needs.
    """
    sets = max(1, math.ceil(ROTATION_BYTES / bytes_per_turn))
    blocks = 1 + np.arange(sets * rows * columns).reshape(sets, rows, columns)
    return jnp.asarray(blocks, jnp.int32), 1 + blocks.size


def locations(lengths: tuple[int, ...]) -> jax.Array:
    """Returns query_start_loc, int32 [rows + 1], of rows of these lengths."""
    return jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)
