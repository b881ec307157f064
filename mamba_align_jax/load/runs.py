"""Measures one engine: a run of a cell's load, or how long the GPU waits between decode steps."""

import argparse
import gc
import statistics
import time
from pathlib import Path
from typing import Any

import jax

from mamba_align_jax.engine.config import SamplingParams
from mamba_align_jax.engine.engine import Engine
from mamba_align_jax.load import idle
from mamba_align_jax.load.cells import Cell
from mamba_align_jax.load.client import Run, serve
from mamba_align_jax.load.metrics import summary
from mamba_align_jax.load.rows import Row
from mamba_align_jax.load.workloads import Workload


def run_cell(engine: Engine, cell: Cell, options: argparse.Namespace) -> Row:
    """Serves a cell's load once, beginning with an empty prefix cache, and returns a row of what was measured."""
    engine.reset_prefix_cache()
    before = engine.stats
    sessions = cell.workload.sessions(engine.model_config.vocab_size, options.seed)
    run = serve(engine, sessions, cell.workload.output, cell.loop)
    return summary(run, options.block_size) | _counters(engine, before, run)


def _counters(engine: Engine, before: Any, run: Run) -> Row:
    """What the engine counted since its statistics were `before`."""
    after = engine.stats
    drafted, accepted = (
        [new - old for new, old in zip(getattr(after, name), getattr(before, name), strict=True)]
        for name in ("draft_tokens", "accepted_tokens")
    )
    return {
        "steps": after.steps - before.steps,
        "preemptions": after.preemptions - before.preemptions,
        "evicted_state_blocks": after.evicted_state_blocks - before.evicted_state_blocks,
        "null_reads": after.null_reads - before.null_reads,
        "state_bytes_copied": after.state_bytes_copied - before.state_bytes_copied,
        "prefill_tokens": after.prefill_tokens - before.prefill_tokens,
        "acceptance": [yes / max(number, 1) for number, yes in zip(drafted, accepted, strict=True)],
        "requests": len(run.requests),
    }


def medians(rows: list[Row]) -> Row:
    """Returns one row with the medians of a cell's runs, the number of runs, and each run's mean TTFT and TPOT."""
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


def _step(engine: Engine) -> None:
    for output in engine.step():
        if output.error is not None:
            raise output.error


def decode_idle(engine: Engine, workload: Workload, steps: int, directory: Path | None = None) -> Row | None:
    """Measures the GPU's idle share of decode steps in which every row is busy, at the workload's context length.

    `span_us` in the row is the wall-clock time of a step in as many steps just before the traced ones, because tracing slows
    the host down.

    Args:
        engine: An engine whose programs are compiled and that has no requests.
        workload: Gives the prompts and the length of the answers.
        steps: The number of decode steps to trace.
        directory: Where the trace is written; None means a new temporary directory.

    Returns:
        A row, or None if the trace cannot be read. Its path is printed, so `python -m benchmarks.idle` can try again.

    Raises:
        ValueError: The answers are too short for so many steps if all drafts were accepted.
    """
    max_steps = workload.output // (4 * (1 + engine.config.num_speculative_tokens))
    if steps > max_steps:
        raise ValueError(f"--idle must be at most {max_steps} for answers of {workload.output} tokens, got {steps}")
    engine.reset_prefix_cache()
    rows = engine.config.max_num_seqs
    sessions = workload.sessions(engine.model_config.vocab_size, 0)
    params = SamplingParams(max_tokens=workload.output, ignore_eos=True)
    ids = [engine.add_request(sessions[number % len(sessions)][0], params) for number in range(rows)]
    while engine.scheduler.waiting or any(not request.token_times for request in engine.scheduler.running):
        _step(engine)
    running = len(engine.scheduler.running)
    assert running == rows, f"{running} of {rows} requests run"

    def run() -> None:
        for _ in range(steps):
            _step(engine)
        jax.block_until_ready(engine.runner.device_state)

    run()
    begin = time.perf_counter()
    run()
    span = time.perf_counter() - begin
    trace = idle.record(run, directory)
    for request in ids:
        engine.abort(request)
    engine.step()
    print(f"  trace: {trace}", flush=True)
    try:
        row = idle.read(trace, steps)
    except RuntimeError as error:
        # The load is worth measuring even if this trace cannot be read.
        print(f"  {error}", flush=True)
        return None
    print(f"  idle {row['idle_share']:.4f} of a step of {row['step_us']:.0f} us: {row}", flush=True)
    return row | {"rows": rows, "span_us": 1e6 * span / steps}
