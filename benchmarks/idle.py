"""How long the GPU waits between steps, from a profiler's trace: `python -m benchmarks.idle FILE.xplane.pb --steps N`.

Of a trace that holds N equal steps and nothing before or after them, kernels in order of their starts divide into N parts.
The gap behind a step runs from the end of its last kernel to the start of the next step's first.
"""

import argparse
import itertools
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax


class Kernel(NamedTuple):
    """Microseconds."""

    start: float
    end: float
    name: str


def record(run: Callable[[], Any], directory: Path | None = None) -> Path:
    """Traces `run`, which must wait for the device at its end; returns the trace, in `directory` or a temporary one."""
    directory = directory or Path(tempfile.mkdtemp())
    options = jax.profiler.ProfileOptions()
    # What the host does is not asked for, and recording it would slow it down.
    options.python_tracer_level = options.host_tracer_level = 0
    before = set(directory.rglob("*.xplane.pb"))
    with jax.profiler.trace(str(directory), profiler_options=options):
        run()
    (trace,) = set(directory.rglob("*.xplane.pb")) - before
    return trace


def kernels(profile: Any) -> list[Kernel]:
    """Kernels of the first GPU of a `jax.profiler.ProfileData`, by their starts; copies and fills by the driver are none.

    Raises:
        RuntimeError: there are none; says what there is.
    """
    planes = sorted((plane for plane in profile.planes if "device:gpu" in plane.name.lower()), key=lambda p: p.name)
    found = [
        Kernel(event.start_ns / 1e3, (event.start_ns + event.duration_ns) / 1e3, event.name)
        for line in (planes[0].lines if planes else ())
        # Other lines repeat the streams' events by module, operation or source line.
        if line.name.lower().startswith("stream")
        for event in line.events
        if event.duration_ns > 0 and not event.name.lower().startswith(("memcpy", "memset"))
    ]
    if not found:
        raise RuntimeError(f"no kernels in the trace, which has {_contents(profile)}")
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
    """The kernels of each step.

    Kernels whose number isn't a multiple of `steps` belong to no step, and are left out.

    Raises:
        RuntimeError: the rest doesn't divide into steps with equal kernels.
    """
    counts = Counter(kernel.name for kernel in found)
    regular = [kernel for kernel in found if counts[kernel.name] % steps == 0]
    each = len(regular) // steps
    parts = [regular[start : start + each] for start in range(0, len(regular), each)] if each else []
    if not parts or any(Counter(k.name for k in part) != Counter(k.name for k in parts[0]) for part in parts):
        odd = {name: number for name, number in counts.most_common() if number % steps}
        raise RuntimeError(
            f"{len(found)} kernels don't divide into {steps} equal steps; not a multiple of {steps}: "
            f"{dict(list(odd.items())[:8])}"
        )
    return parts


def measure(found: list[Kernel], steps: int) -> dict[str, Any]:
    """Medians over the steps: of the gap behind a step, of a step with its gap, and of the gap's share of it.

    `busy_share` is the share of the time in which some kernel runs; besides the gaps, it lacks the pauses inside steps.

    Raises:
        RuntimeError: the kernels don't divide into steps, or there is only one.
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
    """Time in which at least one of the kernels, rising by start, runs."""
    total, end = 0.0, float("-inf")
    for kernel in found:
        last = min(kernel.end, until)
        total += max(0.0, last - max(kernel.start, end))
        end = max(end, last)
    return total


def read(trace: Path, steps: int) -> dict[str, Any]:
    """`measure` of a trace's file."""
    return measure(kernels(jax.profiler.ProfileData.from_file(str(trace))), steps)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    print(read(options.trace, options.steps))
