"""Runs a load on one engine, and takes the medians of runs."""

import gc
import statistics
from typing import Any

import jax

from mamba_align_jax.engine.running.engine import Engine
from mamba_align_jax.load.client import Run, serve
from mamba_align_jax.load.metrics import Row, summary
from mamba_align_jax.load.workloads import Agents, Loop, Workload


def run_load(engine: Engine, workload: Workload, loop: Loop, seed: int) -> Row:
    """Serves a workload once, beginning with an empty prefix cache, and returns a row of what was measured."""
    engine.reset_prefix_cache()
    before = engine.stats
    sessions = workload.sessions(engine.model_config.vocab_size, seed)
    run = serve(engine, sessions, workload.output, loop, agents=workload if isinstance(workload, Agents) else None)
    return summary(run) | _counters(engine, before, run)


def _counters(engine: Engine, before: Any, run: Run) -> Row:
    """What the engine counted since its statistics were `before`."""
    after = engine.stats
    drafted, accepted = (
        [new - old for new, old in zip(getattr(after, name), getattr(before, name), strict=True)]
        for name in ("draft_tokens", "accepted_tokens")
    )
    names = ("steps", "preemptions", "evicted_state_blocks", "null_reads", "state_bytes_copied", "prefill_tokens")
    acceptance = [yes / max(number, 1) for number, yes in zip(drafted, accepted, strict=True)]
    counts = {name: getattr(after, name) - getattr(before, name) for name in names}
    return counts | {"acceptance": acceptance, "requests": len(run.requests)}


def medians(rows: list[Row]) -> Row:
    """Returns one row with the medians of a load's runs, the number of runs, and each run's mean TTFT and TPOT."""
    each = {f"{name}_runs": [row[f"{name}_mean"] for row in rows] for name in ("ttft_ms", "tpot_ms")}
    return {name: _median([row[name] for row in rows]) for name in rows[0]} | {"runs": len(rows)} | each


def _median(values: list[Any]) -> Any:
    """The median of numbers; for lists of numbers, the median at each index."""
    if isinstance(values[0], list):
        return [statistics.median(place) for place in zip(*values, strict=True)]
    return statistics.median(values)


def free_pools(engine: Engine) -> None:
    """Deletes the engine's pools on the device. The engine cannot be used afterwards."""
    for array in jax.tree.leaves(engine.runner.device_state):
        array.delete()
    gc.collect()
