"""How threads, warps, warpgroups and CTAs wait for each other."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mosaic

from pallas_kernels._warpgroup import THREADS
from pallas_kernels.hopper.control import assembly
from pallas_kernels.hopper.layouts import plgpu
from pallas_kernels.hopper.memory import address
from pallas_kernels.hopper.registers import Memory, Register

WARPGROUP = "warpgroup"  # the axis of a kernel with several warpgroups
Barrier = plgpu.Barrier  # an mbarrier in SMEM, at which copies and warpgroups arrive
barrier_wait = plgpu.barrier_wait
barrier_arrive = plgpu.barrier_arrive
warpgroup_barrier = mosaic.warpgroup_barrier  # for code of single threads


def warp_barrier() -> None:
    """Wait until all threads of the warp are here. Their stores to SMEM are then visible."""
    assembly("bar.warp.sync 0xffffffff;", "", None, [])


def barrier_of_warpgroups(count: int) -> None:
    """Wait until all threads of the first `count` warpgroups are here. Their stores to SMEM are then visible.

    The lowering itself has the named barriers 0 (the CTA's) and 1 to 4 (one for each warpgroup).
    """
    assembly(f"bar.sync 8, {THREADS * count};", "", None, [])


def semaphores(count: int) -> Any:
    """Return counters in GMEM that all CTAs of a launch see, 0 when it starts."""
    return pl.get_global(plgpu.SemaphoreType.REGULAR((count,)))


def semaphore_signal(semaphore: Any) -> None:
    """Add 1 to a semaphore, after all earlier memory accesses of the warpgroup."""
    plgpu.semaphore_signal(semaphore, memory_scope="gpu")


def semaphore_wait(semaphore: Any) -> None:
    """Wait until a semaphore is at least 1. The signalling CTA's stores before its signal are then visible."""
    plgpu.semaphore_wait(semaphore, decrement=False, memory_scope="gpu")


def fetch_and_increment(counter: Memory) -> Register:
    """Add 1 to a counter in GMEM, and return its value before, int32."""
    text = "atom.global.add.u32 $0, [$1], 1;"
    return assembly(text, "=r,l", jnp.int32, [address(counter, 0)])


def wait_for_last(count: Any, stages: int, *barriers: Any) -> None:
    """Wait for the last completions of arrays of `stages` barriers, of which each use in turn has one, after `count` uses.

    A barrier has one phase bit, so each of its completions must be waited for.
    """

    @pl.loop(jnp.maximum(count - stages, 0), count)
    def _(n: Any) -> None:
        for each in barriers:
            barrier_wait(each.at[jax.lax.rem(n, jnp.int32(stages))])


def run_by_warpgroup(bodies: Any, done: Any) -> None:
    """Run each of `bodies`, functions without arguments, in a warpgroup of its own, and then `finish_together`."""
    warpgroup = jax.lax.axis_index(WARPGROUP)
    for n, body in enumerate(bodies):
        pl.when(warpgroup == n)(body)
    finish_together(done)


def finish_together(done: Any) -> None:
    """Wait until all warpgroups are here. `done` is a barrier with as many arrivals.

    A warpgroup that ends while another one multiplies can make the GPU stop the CTA.
    """
    barrier_arrive(done)
    barrier_wait(done)
