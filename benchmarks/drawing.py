"""Times least_kept, by which tokens are drawn: `python -m benchmarks.drawing --json FILE --commit COMMIT`.

Every candidate is compared with sorting first. `us` is the sum of the durations of a call's kernels, and `kernels` is their
number. `span_us` is the time from one call to the next. The weights are as warm as the step leaves them: they were written
just before. `--tune` times several configurations.
"""

import functools
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cases import implementations, options_parser, run_cases
from benchmarks.rows import Row
from benchmarks.timing import kernel_times, span_per_turn
from benchmarks.workloads.least_kept import CASES, Case
from pallas_kernels import Run, least_kept
from pallas_kernels.least_kept.config import Config

TURNS = 16
TOP_K, TOP_P = 20, 0.8  # how Qwen's models are meant to be sampled
LIMIT = 1e-3  # of the difference between the numbers of tokens that are kept


def prepare(case: Case) -> jax.Array:
    """Draws the logits. float32 [rows, tokens]."""
    return 3 * jax.random.normal(jax.random.key(0), (case.rows, case.tokens), jnp.float32)


def weights_of(logits: jax.Array) -> jax.Array:
    """Returns the probabilities of each row, divided by the largest of them."""
    return jnp.exp(logits - jnp.max(logits, axis=1, keepdims=True))


def kept_difference(weights: jax.Array, least: jax.Array, top_k: int, top_p: float) -> float:
    """The largest difference, over the rows, between the numbers of kept tokens and those that sorting keeps, relatively."""
    worst = 0.0
    for row, own in zip(np.asarray(weights, np.float64), np.asarray(least, np.float64), strict=True):
        left = np.sort(row)[::-1]
        left = left[left >= left[(top_k or len(row)) - 1]]  # tokens of equal weight are kept together
        before = np.cumsum(left) - left
        wanted = (row >= left[before < top_p * left.sum()][-1]).sum()
        worst = max(worst, abs((row >= own).sum() - wanted) / wanted)
    return float(worst)


def turn(logits: jax.Array, **options: Any) -> tuple[jax.Array, jax.Array]:
    """Calls the op once. Returns the weights and the least one that is kept."""
    rows, weights = logits.shape[0], weights_of(logits)
    least = least_kept(weights, jnp.full((rows,), TOP_K, jnp.int32), jnp.full((rows,), TOP_P, jnp.float32), **options)
    return weights, least


def tuned(case: Case) -> dict[str, dict[str, Any]]:
    """The configurations that `--tune` tries, by name."""
    found = {}
    for bits in (3, 5):
        for chunk in (1024, 2048, 4096, 8192, 16384):
            programs = case.rows * -(-case.tokens // chunk)
            for lanes, warps in ((128, 4), (256, 4), (512, 4), (256, 8), (512, 8), (1024, 8)):
                in_registers = lanes * 2**bits <= 32 * 32 * warps
                if lanes <= chunk and in_registers and 100 <= programs <= 4096:
                    config = Config(bits, chunk, lanes, warps)
                    found[f"b{bits}_c{chunk}_l{lanes}_w{warps}"] = dict(run=Run(implementation="triton", config=config))
    return found


def measure(case: Case, candidates: Mapping[str, dict[str, Any]], *, time_it: bool) -> list[Row]:
    """One row per candidate, the fastest first."""
    logits = prepare(case)
    with ThreadPoolExecutor(12) as pool:
        compile_ = lambda options: jax.jit(functools.partial(turn, **options)).lower(logits).compile()
        built = {name: pool.submit(compile_, options) for name, options in candidates.items()}
        # Compiling may run kernels, which would be counted.
        wait(built.values())
    rows = []
    for name, future in built.items():
        row: Row = {"case": case.name, "candidate": name}
        rows.append(row)
        try:
            run = future.result()
            weights, least = run(logits)
            row["difference"] = kept_difference(weights, least, TOP_K, TOP_P)
            if not row["difference"] <= LIMIT:
                row["failed"] = f"the difference is above {LIMIT}"
                continue
            if not time_it:
                continue

            def launch(turns: int, run: Any = run) -> None:
                results = [run(logits) for _ in range(turns)]
                jax.block_until_ready(results)

            launches = kernel_times(lambda: launch(TURNS))
            row["kernels"] = len(launches) / TURNS
            row["us"] = round(sum(us for _, us in launches) / TURNS, 2)
            row["span_us"] = round(span_per_turn(lambda rounds: launch(rounds * TURNS), 1, TURNS), 2)
        except Exception as error:  # of any kind: a configuration may not compile
            row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return sorted(rows, key=lambda row: row.get("us", math.inf))


def main() -> None:
    options = options_parser(__doc__, budget=120).parse_args()

    def run(case: Case) -> list[Row]:
        return measure(case, implementations(tuned(case) if options.tune else None), time_it=True)

    run_cases(options, CASES, run)


if __name__ == "__main__":
    main()
