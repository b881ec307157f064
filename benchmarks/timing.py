"""Measures kernels on a GPU: their durations (CUPTI), the span of a turn, and the rate at which the GPU copies memory.

A turn is one repetition of what is measured. JAX and its peers are measured by one clock. The time of a turn is the sum of
its kernels' durations, without other launches. The span of a turn also counts the gaps between kernels and all other work.
"""

import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import Run, state_copy


def kernel_times(launch: Callable[[], Any]) -> list[tuple[str, float]]:
    """Returns (name, microseconds) of every kernel that the process starts during `launch`, in order.

    `launch` must wait for the device before it returns.
    """
    # jax.experimental.mosaic.gpu.profiler uses this module too, but its functions take only jitted functions.
    from jax._src.lib import mosaic_gpu

    cupti = mosaic_gpu._mosaic_gpu_ext
    cupti._cupti_init()
    try:
        launch()
    finally:
        launches = cupti._cupti_get_timings(True)
    return [(name, 1e3 * milliseconds) for name, milliseconds in launches]


def time_per_turn(launch: Callable[[], Any], turns: int, kernel: str = "") -> float:
    """Returns the median microseconds per turn of the kernels whose name starts with `kernel`, without the first turn.

    Raises:
        RuntimeError: The number of launches is not a multiple of `turns`.
    """
    times = [t for name, t in kernel_times(launch) if name.startswith(kernel)]
    each, rest = divmod(len(times), turns)
    if each == 0 or rest:
        name = repr(kernel) if kernel else "any kernel"
        raise RuntimeError(f"the launches of {name} must divide into {turns} turns, got {len(times)} launches")
    return statistics.median(sum(times[i : i + each]) for i in range(each, len(times), each))


def span_per_turn(launch: Callable[[int], Any], rounds: int, turns: int, repetitions: int = 5) -> float:
    """Returns the median microseconds from the start of a turn to the start of the next, with turns back to back.

    CUPTI's binding reports durations but no starts, so this is wall-clock time. The time of `rounds` rounds is subtracted
    from the time of twice as many, which removes what launching and waiting cost.

    Args:
        launch: `launch(n)` runs n rounds of `turns` turns each and waits for the device.
        rounds: The number of rounds.
        turns: The number of turns in a round.
        repetitions: How often both are timed.
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
        triton = Run(implementation="triton")
        step = lambda i, pool: state_copy(pool, jnp.array([1]), jnp.array([2]), run=triton)
        return jax.lax.fori_loop(0, turns, step, pool)[0, 2, 0]

    run = jax.jit(run)
    run().block_until_ready()
    return 8 * size / time_per_turn(lambda: run().block_until_ready(), turns, "state_copy")


def _memcpy_bandwidth(turns: int = 12) -> float:
    """The rate of the driver's device-to-device copy, timed by CUDA events because it is no kernel; 0 without torch."""
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
    """Copies 2 GiB with the driver and with `state_copy`; returns the better rate, bytes read and written per us."""
    return max(_pallas_copy_bandwidth(), _memcpy_bandwidth())
