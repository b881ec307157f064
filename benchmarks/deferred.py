"""Times deferred states: `python -m benchmarks.deferred --json benchmarks/results/deferred.jsonl`.

Every variant is first compared with float64 on a sample of rows and heads: outputs, entries, and folds. Then `us` is the
mean duration of a call over the phases of the fold: rows start at random places of their groups, and each call accepts one
to all of its tokens. `copy_free_us` is the duration of the op that writes a state per token on the same sizes, in the same
run. The variants are the Mosaic GPU kernel, if the op has one, and the Triton kernel's default configuration, and with
`--every` other configurations. "gdn" cases are those of the gated delta rule, "mamba2" cases those of Mamba-2. `--tiny`
tries the command on a machine without a GPU.
"""

import argparse
import json
import math
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from benchmarks import deferred_delta_rule, deferred_mamba2
from benchmarks.cases import cases_matching
from benchmarks.deferred_bench import TURNS, Bench
from benchmarks.kernel_benchmark import ROTATION_BYTES
from benchmarks.kernels import time_ours
from benchmarks.rows import Row, append, facts
from benchmarks.timing import copy_bandwidth, kernel_times
from benchmarks.workloads import gated_delta_rule_deferred as delta_rule_cases
from benchmarks.workloads import selective_state_deferred as mamba2_cases

LAUNCHES = 3


def family(case: Any) -> tuple[Any, type[Bench]]:
    """Returns the module that knows a case's op, and the class that runs it."""
    if isinstance(case, mamba2_cases.Case):
        return deferred_mamba2, deferred_mamba2.StateSpaceBench
    return deferred_delta_rule, deferred_delta_rule.DeltaRuleBench


def time_calls(program: Callable[[int, int], Any], kernel: str) -> tuple[list[float], dict[str, float]]:
    """Returns the durations of all calls of a program, and the mean of each of its launches, in microseconds.

    The names of the launches begin with `kernel`.
    """
    jax.block_until_ready(program(0, TURNS))
    launches = kernel_times(lambda: [jax.block_until_ready(program(0, TURNS)) for _ in range(LAUNCHES)])
    launches = [(name, us) for name, us in launches if name.startswith(kernel)]
    each, rest = divmod(len(launches), TURNS * LAUNCHES)
    if rest or not each:
        raise RuntimeError(f"{len(launches)} launches must divide into {TURNS * LAUNCHES} calls")
    times = [us for _, us in launches]
    parts = {name: float(np.mean(times[n::each])) for n, (name, _) in enumerate(launches[:each])}
    return [sum(times[i : i + each]) for i in range(0, len(times), each)], parts


def time_calls_by_the_clock(program: Callable[[int, int], Any], kernel: str) -> tuple[list[float], dict[str, float]]:
    """What `--tiny` measures, to try the command: one number for all calls."""
    begin = time.perf_counter()
    jax.block_until_ready(program(0, TURNS))
    return [1e6 * (time.perf_counter() - begin) / TURNS], {}


def measure(bench: Bench, module: Any, tried: list[Any], tiny: bool, threads: int) -> list[Row]:
    """One row per variant, the fastest first."""
    case, limits, rows = bench.case, bench.limits(), []
    options: dict[str, Any] = dict(interpret=True) if tiny else {}
    with ThreadPoolExecutor(threads) as pool:
        built = [pool.submit(bench.compile, config, **options) for config in tried]
    # Nothing is compiled while kernels are timed.
    for config, future in zip(tried, built, strict=True):
        row: Row = {"case": case.name, "policy": "deferred", "config": str(config), "candidate": module.short(config)}
        if config == module.default(case):
            row["candidate"] = "triton"
        rows.append(row)
        try:
            program = future.result()
            row |= bench.errors(program)
            wrong = [name for name, limit in limits.items() if name in row and not row[name] <= limit]
            if wrong:
                row["failed"] = f"{', '.join(wrong)} above {limits}"
                continue
            times, parts = (time_calls_by_the_clock if tiny else time_calls)(program, bench.kernel)
            row |= {"us": float(np.mean(times)), "us_min": min(times), "us_max": max(times), "us_of_launches": parts}
            row |= {"folds": float(bench.folds.mean()), "crossings": float(bench.crossings.mean())}
            row["bytes"] = int(bench.bytes)
        except Exception as error:  # of any kind: a configuration may not compile
            row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return sorted(rows, key=lambda row: row.get("us", math.inf))


def time_copy_free(bench: Bench) -> float:
    """Microseconds of the op that writes a state per token, for rows of the same sizes."""
    timed = time_ours(bench.copy_free())
    return min(timed() for _ in range(LAUNCHES))


def plan(tiny: bool, pattern: str) -> list[Any]:
    """The cases to time, those of 64 rows first."""
    cases: list[Any] = [*delta_rule_cases.CASES, *mamba2_cases.CASES]
    if tiny:
        return [case for module in (deferred_delta_rule, deferred_mamba2) for case in module.TINY]
    cases = [case for case in cases if re.fullmatch(r"\w+ \d+x\d \w+(, groups of 8)?", case.name)]
    cases = cases_matching([case for case in cases if case.state_dtype != "float16"], pattern)
    return sorted(cases, key=lambda case: len(case.lengths) != 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="", help="regular expression of case names; default: all")
    parser.add_argument("--tiny", action="store_true", help="small cases in interpret mode, to try the command")
    parser.add_argument("--every", action="store_true", help="time other configurations of the Triton kernel too")
    parser.add_argument("--budget", type=float, default=170, help="seconds after which no case is started")
    parser.add_argument("--threads", type=int, default=14, help="variants that are compiled at the same time")
    parser.add_argument("--json", help="append one JSON row per measurement to this file")
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    cases = plan(options.tiny, options.case)
    header, begin = facts(options.commit), time.perf_counter()
    rate = None if options.tiny else copy_bandwidth()
    print(header, "" if rate is None else f"copy {rate / 1e6:.2f} TB/s", flush=True)
    for case in cases:
        if time.perf_counter() - begin > options.budget:
            print(f"{case.name}: no time left", flush=True)
            continue
        module, kind = family(case)
        tried = [module.tiny_config(case)] if options.tiny else module.variants(case, options.every)
        bench = kind(case, 0 if options.tiny else ROTATION_BYTES)
        rows = measure(bench, module, tried, options.tiny, options.threads)
        today = None if options.tiny else time_copy_free(bench)
        for row in rows:
            if rate is not None and "us" in row:
                row |= {"copy_free_us": today, "gain": today / row["us"], "of_copy": row["bytes"] / row["us"] / rate}
            append(options.json, row | header)
            print(
                json.dumps({name: value for name, value in row.items() if name not in ("config", "policy")}), flush=True
            )


if __name__ == "__main__":
    main()
