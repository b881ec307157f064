"""Times chains of products and norms: `python -m benchmarks.chains --json benchmarks/results/chains.jsonl`.

A turn runs a chain several times, each time with weights of its own, so that no weight is in the L2. `us` is the time from
the beginning of a chain to that of the next one, with what lies between two launches, as a model's step feels it. Of that
time `kernel_us` are the kernels', and `of_copy` is the rate at which `us` reads the weights, as a fraction of the rate of a
copy. One launch stands beside separate ones, whose results it is compared with first. A chain of several tokens that one
launch does not take has no row for it.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cases import options_parser, run_cases
from benchmarks.linear import ROTATION_BYTES
from benchmarks.rows import Row
from benchmarks.timing import copy_bandwidth, kernel_times, span_per_turn
from benchmarks.workloads import product_chain as cases
from pallas_kernels import Run, UnsupportedError, product_chain
from pallas_kernels.product_chain import Experts, Product

TOKENS = (1, 2, 4, 8, 16)
LIMIT = 2e-2  # of the relative difference, after four roundings to bfloat16
ROUNDS = 4
RUNS = {"separate launches": Run(implementation="triton"), "one launch": Run(implementation="mosaic_gpu")}
Arguments = tuple[jax.Array, tuple[Any, ...], jax.Array | None]


@dataclass(frozen=True)
class ChainOfTokens:
    """A named chain, and its number of tokens."""

    case: cases.Case
    tokens: int

    @property
    def name(self) -> str:
        """The case's name and the number of tokens."""
        return f"{self.case.name}, {self.tokens} token{'s' if self.tokens > 1 else ''}"

    def draw(self, seed: int) -> Arguments:
        """Draws the arguments of the op."""
        keys = iter(jax.random.split(jax.random.key(seed), 64))

        def make(shape: tuple[int, ...], dtype: str, deviation: float) -> jax.Array:
            return (deviation * jax.random.normal(next(keys), shape)).astype(dtype)

        return self.case.arguments(make, self.tokens)

    def weight_bytes(self) -> int:
        """Returns the bytes of the weights that a token reads: of experts, those of the chosen ones."""
        shape = lambda shape, dtype, _: jax.ShapeDtypeStruct(shape, dtype)
        _, steps, _ = self.case.arguments(shape, self.tokens)
        total = 0.0
        for step in steps:
            if isinstance(step, Product):
                total += step.weight.size
            if isinstance(step, Experts):
                total += step.router.size + step.chosen / step.up.shape[0] * (step.up.size + step.down.size)
        return round(total * jnp.dtype(self.case.dtype).itemsize)


# A convolution's windows would be copied, because the same ones are used again and again. A whole step times it.
_NAMED = [case for case in cases.CASES if case.dtype == "bfloat16" and not case.is_convolved]
CASES = [ChainOfTokens(case, tokens) for case in _NAMED for tokens in TOKENS]


def turn(chains: list[Arguments], *, parts: tuple[int, ...] | None, run: Run) -> list[Any]:
    """Runs chains one after the other, as in a model."""
    outs: list[Any] = []
    for arguments in chains:
        arguments, outs = jax.lax.optimization_barrier((arguments, outs))
        outs = [*outs, product_chain(*arguments, parts=parts, run=run)]
    return outs


def difference(found: Any, wanted: Any) -> float:
    """Returns ||found - wanted|| / ||wanted|| of a chain's results: parts, or sums over shares."""

    def whole(out: Any) -> np.ndarray:
        parts = out if isinstance(out, tuple) else (out,)
        arrays = [np.asarray(part.astype(jnp.float32), np.float64) for part in parts]
        return np.concatenate([array.sum(axis=0) if array.ndim == 3 else array for array in arrays], axis=-1)

    return float(np.linalg.norm(whole(found) - whole(wanted)) / np.linalg.norm(whole(wanted)))


def measure(case: ChainOfTokens, rate: float) -> list[Row]:
    """Returns a row for each way of launching the chain."""
    size = case.weight_bytes()
    count = max(2, math.ceil(ROTATION_BYTES / size))
    chains = [jax.jit(case.draw)(seed) for seed in range(count)]
    rows, wanted = [], None
    for name, how in RUNS.items():
        run = jax.jit(functools.partial(turn, parts=case.case.parts, run=how))
        try:
            (found, _), *_ = jax.block_until_ready(run(chains))
        except UnsupportedError:
            continue
        row: Row = {"case": case.name, "candidate": name}
        rows.append(row)
        wanted = found if wanted is None else wanted
        row["rms_difference"] = difference(found, wanted)
        if not row["rms_difference"] <= LIMIT:
            row["failed"] = f"rms_difference is above {LIMIT}"
            continue

        def launch(rounds: int, run: Any = run) -> None:
            jax.block_until_ready([run(chains) for _ in range(rounds)])

        launches = kernel_times(functools.partial(launch, ROUNDS))
        row["launches"] = len(launches) / (ROUNDS * count)
        row["kernel_us"] = round(sum(us for _, us in launches) / (ROUNDS * count), 2)
        row["us"] = round(span_per_turn(launch, ROUNDS, count), 2)
        row["of_copy"] = round(size / row["us"] / rate, 3)
    return rows


def main() -> None:
    options = options_parser(__doc__, budget=280).parse_args()
    rate = copy_bandwidth()
    run_cases(options, CASES, lambda case: measure(case, rate), copy_rate=rate)


if __name__ == "__main__":
    main()
