"""Measures how long the GPU waits between steps, from a trace of JAX's profiler.

`python -m benchmarks.idle FILE.xplane.pb --steps N` prints it for a trace that `--idle` of the serving benchmark wrote.

The trace must hold N equal steps and nothing else. Its kernels, ordered by their starts, then divide into N equal parts. The
gap after a step runs from the end of the step's last kernel to the start of the next step's first kernel.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks.rows import Row
from mamba_align_jax.engine.config import SamplingParams
from mamba_align_jax.engine.running.engine import Engine
from mamba_align_jax.load.workloads import Workload


class Kernel(NamedTuple):
    """One kernel of a trace. `start` and `end` are in microseconds."""

    start: float
    end: float
    name: str


def record(run: Callable[[], Any], directory: Path | None = None) -> Path:
    """Calls `run` under the profiler and returns the path of the trace.

    Args:
        run: What to trace. It must wait for the device before it returns.
        directory: Where the trace is written; None means a new temporary directory.
    """
    directory = directory or Path(tempfile.mkdtemp())
    options = jax.profiler.ProfileOptions()
    # Only the device's kernels are needed, and recording the host would slow it down.
    options.python_tracer_level = options.host_tracer_level = 0
    before = set(directory.rglob("*.xplane.pb"))
    with jax.profiler.trace(str(directory), profiler_options=options):
        run()
    (trace,) = set(directory.rglob("*.xplane.pb")) - before
    return trace


def kernels(profile: Any) -> list[Kernel]:
    """Returns the kernels of the first GPU in a `jax.profiler.ProfileData`, ordered by start.

    Copies and fills by the driver are not kernels.

    Raises:
        RuntimeError: The trace has no kernels. The message lists what it has.
    """
    planes = sorted((plane for plane in profile.planes if "device:gpu" in plane.name.lower()), key=lambda p: p.name)
    found = [
        Kernel(event.start_ns / 1e3, (event.start_ns + event.duration_ns) / 1e3, event.name)
        for line in (planes[0].lines if planes else ())
        # The other lines repeat the events of the streams, grouped by module, operation or source line.
        if line.name.lower().startswith("stream")
        for event in line.events
        if event.duration_ns > 0 and not event.name.lower().startswith(("memcpy", "memset"))
    ]
    if not found:
        raise RuntimeError(f"the trace has no kernels; it has {_contents(profile)}")
    return sorted(found)


def _contents(profile: Any) -> str:
    lines = [
        f"{plane.name}/{line.name} ({len(events)} events, the first {events[0].name!r})"
        for plane in profile.planes
        for line in plane.lines
        if (events := list(line.events))
    ]
    return "; ".join(lines[:20]) or "no events"


def split(found: list[Kernel], steps: int) -> list[list[Kernel]]:
    """Divides kernels into those of each step.

    A kernel name whose count is not a multiple of `steps` belongs to no step. Those kernels are left out.

    Raises:
        RuntimeError: The remaining kernels do not divide into `steps` parts with equal names.
    """
    counts = Counter(kernel.name for kernel in found)
    regular = [kernel for kernel in found if counts[kernel.name] % steps == 0]
    each = len(regular) // steps
    parts = [regular[start : start + each] for start in range(0, len(regular), each)] if each else []
    if not parts or any(Counter(k.name for k in part) != Counter(k.name for k in parts[0]) for part in parts):
        odd = {name: number for name, number in counts.most_common() if number % steps}
        raise RuntimeError(
            f"the {len(found)} kernels of the trace do not divide into {steps} equal steps; these counts are not a multiple "
            f"of {steps}: {dict(list(odd.items())[:8])}"
        )
    return parts


def measure(found: list[Kernel], steps: int) -> dict[str, Any]:
    """Returns a row of medians over the steps.

    `gap_us` is the gap after a step, `step_us` a step with its gap, and `idle_share` the gap's share of it. `busy_share` is
    the share of the time in which at least one kernel runs, so pauses inside a step lower it as well.

    Raises:
        RuntimeError: The kernels do not divide into steps, or there is only one step.
    """
    parts = split(found, steps)
    if len(parts) < 2:
        raise RuntimeError(f"steps must be at least 2, got {steps}")
    starts, ends = [part[0].start for part in parts], [max(kernel.end for kernel in part) for part in parts]
    gaps = [max(0.0, start - end) for start, end in zip(starts[1:], ends[:-1], strict=True)]
    periods = [later - earlier for earlier, later in itertools.pairwise(starts)]
    whole = [kernel for kernel in found if starts[0] <= kernel.start < starts[-1]]
    return {
        "steps": steps,
        "kernels": len(parts[0]),
        "idle_share": statistics.median(gap / period for gap, period in zip(gaps, periods, strict=True)),
        "idle_share_mean": sum(gaps) / sum(periods),
        "gap_us": statistics.median(gaps),
        "step_us": statistics.median(periods),
        "busy_share": _union(whole, starts[-1]) / (starts[-1] - starts[0]),
    }


def _union(found: Iterable[Kernel], until: float) -> float:
    """The time before `until` in which at least one of the kernels, ordered by start, runs."""
    total, end = 0.0, float("-inf")
    for kernel in found:
        last = min(kernel.end, until)
        total += max(0.0, last - max(kernel.start, end))
        end = max(end, last)
    return total


def read(trace: Path, steps: int) -> dict[str, Any]:
    """Measures the trace in a `.xplane.pb` file; see `measure`."""
    return measure(kernels(jax.profiler.ProfileData.from_file(str(trace))), steps)


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
    trace = record(run, directory)
    for request in ids:
        engine.abort(request)
    engine.step()
    print(f"  trace: {trace}", flush=True)
    try:
        row = read(trace, steps)
    except RuntimeError as error:
        # The load is worth measuring even if this trace cannot be read.
        print(f"  {error}", flush=True)
        return None
    print(f"  idle {row['idle_share']:.4f} of a step of {row['step_us']:.0f} us: {row}", flush=True)
    return row | {"rows": rows, "span_us": 1e6 * span / steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="a trace of JAX's profiler that holds N equal steps and nothing else")
    parser.add_argument("--steps", type=int, required=True, help="the number of steps in the trace")
    options = parser.parse_args()
    print(read(options.trace, options.steps))


if __name__ == "__main__":
    main()
