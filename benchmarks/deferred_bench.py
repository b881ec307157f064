"""One case of an op of deferred states: its buffers and indices, its bytes, and float64's results for a sample of rows.

Rows start at random places of their groups, and each turn accepts one to all of a row's tokens. Each turn uses another set
of slots and blocks, so that no state is in the L2.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_benchmark import KernelBenchmark, itemsize, locations, normal_draws, random_pool
from pallas_kernels import Fold, Rows, Run

TURNS = 32
WARM_UP = 100  # calls that are counted before the measured ones, so that rows are in any phase
# Limits of relative errors: outputs are rounded to bfloat16, states and entries to their dtypes.
LIMITS = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 6e-3}
SAMPLED_HEADS = 2
KEYS = ("query_start_loc", "slot", "base", "position", "read_block", "fold_block")


def phases(rows: int, tokens: int, group: int, turns: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws rows that accept 1 to `tokens` tokens at each turn. Returns their base and position, int32 [turns, rows]."""
    rng = np.random.default_rng(0)
    base, position = np.zeros(rows, np.int32), rng.integers(0, group, rows)
    found = []
    for _ in range(WARM_UP + turns):
        found.append((base, position))
        end = (base // group + 1) * group
        base = np.where(position >= end, end, base)
        position = position + rng.integers(1, tokens + 1, rows)
    base, position = (np.stack(x[WARM_UP:]) for x in zip(*found, strict=True))
    return base.astype(np.int32), position.astype(np.int32)


def exact(x: Any) -> np.ndarray:
    """Returns an array in float64."""
    return np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64)


class Bench:
    """One case, ready to run. A class for each op says what its inputs are and computes them in float64.

    Attributes:
        kernel: The name of the op, with which the names of its kernels begin.
        inexact: The array of the ring whose new entries are compared with float64.
        wide: The axes of the outputs of one token, by the names of fields of the case.
        op: The op.
        entries: The class of its rings.
        inputs: Its inputs per token.
        parameters: Its inputs per head.
    """

    kernel: str
    inexact: str
    wide: tuple[str, str]
    op: Callable[..., Any]
    entries: type[Any]
    inputs: tuple[jax.Array, ...]
    parameters: dict[str, jax.Array]

    def __init__(self, case: Any, rotation_bytes: int):
        self.case, rows = case, len(case.lengths)
        shapes = case.pool_shapes(1, 1, 1)
        state_bytes, *entry_bytes = (math.prod(shape) * itemsize(dtype) for shape, dtype in shapes.values())
        self.rings = list(shapes)[1:]
        self.sets = max(1, math.ceil(rotation_bytes / (rows * state_bytes)))
        base, position = phases(rows, max(case.lengths), case.group, TURNS)
        end = (base // case.group + 1) * case.group
        slot = np.arange(TURNS)[:, None] % self.sets * rows + np.arange(rows)
        indices = slot, base, position, 1 + 2 * slot, 2 + 2 * slot
        self.indices = tuple(jnp.asarray(x, jnp.int32) for x in indices)
        self.host = dict(zip(KEYS[1:], indices, strict=True))
        self.folds = position >= end
        self.crossings = ~self.folds & (position + np.asarray(case.lengths) > end)
        self.loc = locations(case.lengths)
        # Of a group, half of the entries exist on average.
        entries = sum(entry_bytes) / (2 * case.group) * (case.group / 2 + max(case.lengths))
        self.bytes = rows * (state_bytes * (1 + self.folds.mean()) + entries)
        self.draw_inputs(normal_draws(case.dtype), sum(case.lengths))

    def draw_inputs(self, draw: Callable[..., jax.Array], tokens: int) -> None:
        """Sets `inputs` and `parameters`."""
        raise NotImplementedError

    def adjust(self, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Gives the rings, which hold normal numbers, the values of entries."""
        raise NotImplementedError

    def reference(
        self, turn: int, row: int, head: int, part: dict[str, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Outputs, entries and the fold of one row and head, token by token in float64.

        `part` has the row's part of each array before the turn, by `part`.
        """
        raise NotImplementedError

    def copy_free(self) -> KernelBenchmark:
        """The op that writes a state per token, on rows of the same sizes."""
        raise NotImplementedError

    def initial(self) -> dict[str, jax.Array]:
        """The pool and the rings before the first turn."""
        slots = self.sets * len(self.case.lengths)
        shapes = self.case.pool_shapes(1, 1 + 2 * slots, slots)
        made = dict(pool=random_pool(*shapes["pool"]))
        for n, name in enumerate(self.rings):
            shape, dtype = shapes[name]
            made[name] = jax.random.normal(jax.random.key(n), shape, jnp.float32).astype(dtype)
        return self.adjust(made)

    def call(self, turn: Any, arrays: dict[str, jax.Array], **options: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        """One call of the op."""
        slot, base, position, read, block = (x[turn] for x in self.indices)
        rows = Rows(
            query_start_loc=self.loc,
            layer=0,
            num_computed_tokens=position,
            read=read,
            fold=Fold(slot=slot, base=base, block=block),
            max_query_tokens=max(self.case.lengths),
        )
        ring = self.entries.of(arrays)
        given = dict(pool=arrays["pool"], ring=ring, rows=rows, run=Run(**options))
        out, pool, ring = type(self).op(*self.inputs, **self.parameters, **given)
        return out, dict(pool=pool) | ring.by_name

    @functools.cached_property
    def sample(self) -> tuple[int, list[int]]:
        """Chooses what is compared with float64: a turn, and one row of each kind in it.

        The kinds are rows that fold, rows that cross the end of a group, and others. A turn with all kinds is preferred.
        """
        turn = int(np.argmax(2 * self.folds.any(axis=1) + self.crossings.any(axis=1)))
        kinds = self.folds[turn], self.crossings[turn], ~(self.folds | self.crossings)[turn]
        return turn, sorted({int(np.argmax(kind)) for kind in kinds})

    def part(self, arrays: dict[str, jax.Array], block: str) -> dict[str, jax.Array]:
        """The sampled rows' parts of the pool and the rings, in some heads; of the pool, the blocks named `block`."""
        turn, rows = self.sample
        heads = slice(0, SAMPLED_HEADS)
        at = {name: self.host[name][turn, rows] for name in ("slot", block)}
        parts = {name: arrays[name][0, at["slot"], heads] for name in self.rings}
        return parts | dict(pool=arrays["pool"][0, at[block], heads])

    def compile(self, config: Any, **options: Any) -> Callable[[int, int], Any]:
        """Compiles a program of the turns `first` to `last` - 1. It returns the last outputs, and parts before and after.

        Without a configuration the kernel is the one by Mosaic GPU.
        """
        options |= dict(implementation="triton" if config else "mosaic_gpu", config=config)

        def run(first, last):
            def step(turn, carry):
                return self.call(turn, carry[1], **options)

            wide = (getattr(self.case, name) for name in self.wide)
            out = jnp.zeros((sum(self.case.lengths), *wide), self.case.dtype)
            arrays = self.initial()
            before = self.part(arrays, "read_block")
            out, arrays = jax.lax.fori_loop(first, last, step, (out, arrays))
            return out, before, self.part(arrays, "fold_block")

        return jax.jit(run).lower(0, TURNS).compile()

    def errors(self, program: Callable[[int, int], Any]) -> dict[str, float]:
        """Relative errors of one call's outputs, entries and folds against float64, on a sample of rows and heads."""
        turn, rows = self.sample
        out, before, after = program(turn, turn + 1)
        before, after = (jax.tree.map(exact, x) for x in (before, after))
        entry = self.inexact.removeprefix("ring_")
        wanted: dict[str, list[np.ndarray]] = {"out": [], entry: [], "fold": []}
        found: dict[str, list[np.ndarray]] = {"out": [], entry: [], "fold": []}
        for (n, row), head in itertools.product(enumerate(rows), range(before["pool"].shape[1])):
            outs, entries, fold = self.reference(turn, row, head, {name: x[n] for name, x in before.items()})
            start = int(self.loc[row])
            place = (self.host["position"][turn, row] + np.arange(len(outs))) % (2 * self.case.group)
            wanted["out"].append(outs)
            found["out"].append(exact(out[start : start + len(outs), head]))
            wanted[entry].append(entries)
            found[entry].append(after[self.inexact][n, head, place])
            if fold is not None and self.folds[turn, row]:
                wanted["fold"].append(fold)
                found["fold"].append(after["pool"][n, head])
        errors = {}
        for name, each in found.items():
            if each:
                got, truth = (np.concatenate([x.ravel() for x in y]) for y in (each, wanted[name]))
                errors[f"{name}_error"] = float(np.linalg.norm(got - truth) / np.linalg.norm(truth))
        return errors

    def limits(self) -> dict[str, float]:
        """Returns the largest relative errors of outputs, entries and folds that are accepted."""
        ring = getattr(self.case, "ring_dtype", "float32")
        fold = max(LIMITS[self.case.state_dtype], LIMITS[ring])
        entry = self.inexact.removeprefix("ring_")
        return {"out_error": max(LIMITS["bfloat16"], fold), f"{entry}_error": fold, "fold_error": fold}
