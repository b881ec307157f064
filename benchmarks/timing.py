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

from pallas_kernels import state_copy


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
    """Bytes per microsecond, read and written, of `state_copy` over blocks of 2 GiB: the card's streaming rate."""
    size = 2**29

    def run():
        pool = jnp.arange(3 * size, dtype=jnp.int32).astype(jnp.float32).reshape(1, 3, size // 1024, 1024)
        step = lambda i, pool: state_copy(pool, jnp.array([1]), jnp.array([2]), implementation="triton")
        return jax.lax.fori_loop(0, 12, step, pool)[0, 2, 0]

    return 8 * size / median_time(run, "state_copy")


def environment(commit: str) -> dict[str, str]:
    """GPU, driver, JAX version, commit and date of a row of results."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu, driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].split(", ")
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"gpu": gpu, "driver": driver, "jax": jax.__version__, "commit": commit, "date": date}
