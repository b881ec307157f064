"""Deferred states of Mamba-2 for `benchmarks.deferred`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.deferred_bench import Bench, exact
from benchmarks.kernel_benchmark import KernelBenchmark, itemsize
from benchmarks.update import state_space_benchmark
from benchmarks.workloads import selective_state_update as update_cases
from benchmarks.workloads.selective_state_deferred import Case
from pallas_kernels.selective_state_update.deferred import Mamba2Entries, selective_state_deferred
from pallas_kernels.selective_state_update.deferred.config import DeferredConfig, default_config


class StateSpaceBench(Bench):
    """A case of Mamba-2."""

    kernel = "selective_state_deferred"
    inexact = "ring_dt"
    wide = "heads", "head_dim"
    op = selective_state_deferred
    entries = Mamba2Entries
    case: Case

    def draw_inputs(self, draw: Any, tokens: int) -> None:
        """Draws projections, raw step sizes, and the parameters of the heads."""
        heads = self.case.heads
        self.inputs = draw(tokens, self.case.channels), draw(tokens, heads)
        A, D, dt_bias = (draw(heads, dtype="float32") for _ in range(3))
        self.parameters = dict(A=-jnp.exp(A - 2), D=D, dt_bias=dt_bias)

    def adjust(self, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Makes step sizes positive, and log decays what follows from them."""
        dt = jnp.abs(arrays["ring_dt"])
        return arrays | dict(ring_dt=dt, ring_g=self.parameters["A"][:, None] * dt)

    def reference(self, turn: int, row: int, head: int, part: dict[str, np.ndarray]) -> Any:
        """Runs the recurrence token by token: see `Bench`."""
        case, state, fold = self.case, part["pool"][head], None
        group, inner = head // (case.heads // case.groups), case.heads * case.head_dim
        base, position = (int(self.host[name][turn, row]) for name in ("base", "position"))
        end = (base // case.group + 1) * case.group
        xBC, dt = (exact(x[int(self.loc[row]) : int(self.loc[row + 1])]) for x in self.inputs)
        A, D, dt_bias = (exact(self.parameters[name])[head] for name in ("A", "D", "dt_bias"))
        outs, steps = [], []
        for n in range(base, position + len(xBC)):
            if n == end:
                fold = state
                state = exact(jnp.asarray(state, jnp.float32).astype(case.state_dtype))
            if n < position:
                at = n % (2 * case.group)
                x, B, step = part["ring_x"][head, at], part["ring_B"][group, at], part["ring_dt"][head, at]
                state = np.exp(A * step) * state + step * np.outer(x, B)
                continue
            t = n - position
            x = xBC[t, head * case.head_dim :][: case.head_dim]
            B, C = (xBC[t, inner + (i * case.groups + group) * case.state_dim :][: case.state_dim] for i in (0, 1))
            step = np.logaddexp(0, dt[t, head] + dt_bias)
            state = np.exp(A * step) * state + step * np.outer(x, B)
            steps.append(step)
            outs.append(state @ C + D * x)
        return np.stack(outs), np.stack(steps), fold

    def copy_free(self) -> KernelBenchmark:
        """The update op on rows of the same sizes."""
        names = "heads", "head_dim", "state_dim", "groups", "dtype", "state_dtype"
        sizes = {name: getattr(self.case, name) for name in names}
        return state_space_benchmark(update_cases.Case(self.case.name, self.case.lengths, **sizes))


def default(case: Case) -> DeferredConfig:
    """The configuration that the op selects for a case."""
    return default_config(case.state_dim, itemsize(case.state_dtype))


Variant = DeferredConfig | None  # None is the Mosaic GPU kernel, which has no configuration


def variants(case: Case, every: bool) -> list[Variant]:
    """The Mosaic GPU kernel and the default configuration of the Triton kernel; others too if `every` is true."""
    if not every:
        return [None, default(case)]
    make = functools.partial(DeferredConfig, pieces=3 if case.state_dtype == "float32" else 2)
    blocks = ((64, 4), (64, 2), (64, 8), (32, 4), (32, 2), (32, 1), (16, 1), (16, 2))
    found: list[Variant] = [None, default(case), *(make(*block, dims_first=False) for block in blocks)]
    found += [make(*block, dims_first=True) for block in ((64, 4), (64, 8), (32, 2), (16, 1))]
    return list(dict.fromkeys(found))


def short(c: Variant) -> str:
    """A variant in few letters."""
    if c is None:
        return "mosaic_gpu"
    return f"triton_b{c.block_dim}_w{c.num_warps}_p{c.pieces}_{'dx' if c.dims_first else 'xd'}"


TINY = [
    Case(f"mamba2 4x{n} {dtype}", (n,) * 4, heads=4, head_dim=16, state_dim=16, groups=2, state_dtype=dtype)
    for n, dtype in ((1, "float32"), (4, "bfloat16"))
]


def tiny_config(case: Case) -> DeferredConfig:
    """The configuration for a case of `TINY`."""
    return DeferredConfig(case.head_dim, 1, 3, dims_first=False)
