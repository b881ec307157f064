"""Device time of kernels (CUPTI), the span of turns, the card's copy rate, and what a measurement ran on.

One clock for JAX and for peers: the sum of kernel durations per turn, launches of other work left out; and where asked
for, the span, which counts the gaps between kernels too, and all other work of a turn.
"""

import datetime
import importlib.util
import itertools
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import state_copy


def kernel_times(launch: Callable[[], Any]) -> list[tuple[str, float]]:
    """(name, microseconds) of every kernel that the process starts while `launch` runs and waits, in order."""
    # What jax.experimental.mosaic.gpu.profiler is made of; its own functions take nothing but jitted functions.
    from jax._src.lib import mosaic_gpu

    cupti = mosaic_gpu._mosaic_gpu_ext
    cupti._cupti_init()
    try:
        launch()
    finally:
        launches = cupti._cupti_get_timings(True)
    return [(name, 1e3 * milliseconds) for name, milliseconds in launches]


def time_per_turn(launch: Callable[[], Any], turns: int, kernel: str = "") -> float:
    """Median microseconds per turn of the kernels whose name starts with `kernel`, the first (cold) turn left out.

    Raises:
        RuntimeError: the launches don't divide into turns.
    """
    times = [t for name, t in kernel_times(launch) if name.startswith(kernel)]
    each, rest = divmod(len(times), turns)
    if each == 0 or rest:
        raise RuntimeError(f"{len(times)} launches of {kernel or 'any kernel'!r} in {turns} turns")
    return statistics.median(sum(times[i : i + each]) for i in range(each, len(times), each))


def span_per_turn(launch: Callable[[int], Any], rounds: int, turns: int, repetitions: int = 5) -> float:
    """Median microseconds per turn from one turn's start to the next one's, back to back on the device.

    CUPTI's binding has durations but no starts, so this is wall-clock: `launch(n)` runs n rounds of `turns` turns and waits,
    and the time of `rounds` of them is subtracted from that of twice as many.
    """

    def seconds(n: int) -> float:
        start = time.perf_counter()
        launch(n)
        return time.perf_counter() - start

    for n in (rounds, 2 * rounds):
        launch(n)
    each = statistics.median(seconds(2 * rounds) - seconds(rounds) for _ in range(repetitions))
    return 1e6 * each / (rounds * turns)


def _pallas_copy_bandwidth(turns: int = 12) -> float:
    size = 2**29

    def run():
        pool = jnp.arange(3 * size, dtype=jnp.int32).astype(jnp.float32).reshape(1, 3, size // 1024, 1024)
        step = lambda i, pool: state_copy(pool, jnp.array([1]), jnp.array([2]), implementation="triton")
        return jax.lax.fori_loop(0, turns, step, pool)[0, 2, 0]

    run = jax.jit(run)
    run().block_until_ready()
    return 8 * size / time_per_turn(lambda: run().block_until_ready(), turns, "state_copy")


def _memcpy_bandwidth(turns: int = 12) -> float:
    """The driver's device-to-device copy, by CUDA events: it is no kernel. 0 without torch."""
    if importlib.util.find_spec("torch") is None:
        return 0.0
    import torch

    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(turns + 1)]
    for event in events:
        event.record()
        target.copy_(source)
    torch.cuda.synchronize()
    milliseconds = statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events[1:]))
    return 8 * source.numel() / (1e3 * milliseconds)


def copy_bandwidth() -> float:
    """Bytes per microsecond, read and written, of 2 GiB: the better of a memcpy and of `state_copy`."""
    return max(_pallas_copy_bandwidth(), _memcpy_bandwidth())


def environment(commit: str) -> dict[str, str]:
    """GPU, driver, JAX version, commit and date of a row of results."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu, driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].split(", ")
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"gpu": gpu, "driver": driver, "jax": jax.__version__, "commit": commit, "date": date}


def facts(commit: str) -> dict[str, str]:
    """`environment`, or on a CPU, which is for tests, what there is of it."""
    if jax.default_backend() == "gpu":
        return environment(commit)
    return {"gpu": "none", "driver": "none", "jax": jax.__version__, "commit": commit}
