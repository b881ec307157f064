"""Device time of kernels by name (CUPTI), and what a measurement ran on."""

import datetime
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler


def kernel_times(run: Callable[[], Any]) -> dict[str, list[float]]:
    """Microseconds of every launch inside `run`, by kernel name. Buffers belong inside: a donated one can't run twice."""
    _, launches = profiler.measure(jax.jit(run), aggregate=False)(*())
    times = defaultdict(list)
    for name, milliseconds in launches or []:
        times[name].append(1e3 * milliseconds)
    return dict(times)


def median_time(run: Callable[[], Any], name: str) -> float:
    """Median microseconds of the launches whose name starts with `name`, the first (cold) one aside.

    Raises:
        RuntimeError: there were none.
    """
    times = [t for kernel, ts in kernel_times(run).items() if kernel.startswith(name) for t in ts]
    if len(times) < 2:
        raise RuntimeError(f"no launches of {name!r} were measured")
    return statistics.median(times[1:])


def copy_bandwidth() -> float:
    """Bytes per microsecond, read and written, of an elementwise pass over 4 GiB: the card's streaming rate."""
    size = 2**30

    def run():
        step = lambda i, x: -x
        return jax.lax.fori_loop(0, 12, step, jnp.arange(size, dtype=jnp.float32))[0]

    times = [t for ts in kernel_times(run).values() for t in ts]
    # Twelve equal launches are the bulk of the list, so the median is one of them.
    return 8 * size / statistics.median(times)


def environment(commit: str) -> dict[str, str]:
    """GPU, driver, JAX version, commit and date of a row of results."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu, driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].split(", ")
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"gpu": gpu, "driver": driver, "jax": jax.__version__, "commit": commit, "date": date}
