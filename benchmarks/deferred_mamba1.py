"""Deferred states of Mamba-1 for `benchmarks.deferred`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.deferred_bench import Bench, exact
from benchmarks.kernel_benchmark import KernelBenchmark, itemsize
from benchmarks.update import state_space_benchmark
from pallas_kernels.selective_scan.deferred import selective_scan_deferred
from pallas_kernels.selective_scan.deferred.cases import Case
from pallas_kernels.selective_scan.deferred.config import DeferredConfig, default_config
from pallas_kernels.selective_state_update import cases as update_cases


class SelectiveScanBench(Bench):
    """A case of Mamba-1."""

    kernel = "selective_scan_deferred"
    inexact = "ring_dt"
    wide = "heads", "head_dim"
    op = selective_scan_deferred
    case: Case

    def draw_inputs(self, draw: Any, tokens: int) -> None:
        """Draws projections, raw step sizes, and the parameters of the channels."""
        channel, vector = (self.case.heads, self.case.head_dim), (self.case.groups, self.case.state_dim)
        x, dt, z = (draw(tokens, *channel) for _ in range(3))
        B, C = (draw(tokens, *vector) for _ in range(2))
        A = -jnp.exp(draw(*channel, self.case.state_dim, dtype="float32") - 2)
        self.inputs = x, dt, A, B, C
        D, dt_bias = (draw(*channel, dtype="float32") for _ in range(2))
        self.parameters = dict(D=D, dt_bias=dt_bias) | (dict(z=z) if self.case.gated else {})

    def adjust(self, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Entries are inputs, which may be any numbers."""
        return arrays

    def reference(self, turn: int, row: int, head: int, part: dict[str, np.ndarray]) -> Any:
        """Runs the recurrence token by token: see `Bench`."""
        case, state, fold = self.case, part["pool"][head], None
        group = head // (case.heads // case.groups)
        base, position = (int(self.host[name][turn, row]) for name in ("base", "position"))
        end = (base // case.group + 1) * case.group
        tokens = slice(int(self.loc[row]), int(self.loc[row + 1]))
        x, dt, A, B, C = self.inputs
        xs, dts = (exact(v[tokens, head]) for v in (x, dt))
        Bs, Cs = (exact(v[tokens, group]) for v in (B, C))
        rates, D, dt_bias = exact(A[head]), *(exact(self.parameters[name][head]) for name in ("D", "dt_bias"))
        outs = []
        for n in range(base, position + len(xs)):
            if n == end:
                fold = state
                state = exact(jnp.asarray(state, jnp.float32).astype(case.state_dtype))
            at, t = n % (2 * case.group), n - position
            old = part["ring_x"][head, at], part["ring_dt"][head, at], part["ring_B"][group, at]
            x_n, dt_n, B_n = old if t < 0 else (xs[t], dts[t], Bs[t])
            step = np.logaddexp(0, dt_n + dt_bias)[:, None]
            state = np.exp(rates * step) * state + step * np.outer(x_n, B_n)
            if t >= 0:
                outs.append(state @ Cs[t] + D * x_n)
        out = np.stack(outs)
        if case.gated:
            z = exact(self.parameters["z"][tokens, head])
            out = out * z / (1 + np.exp(-z))
        return out, dts, fold

    def copy_free(self) -> KernelBenchmark:
        """The update op on rows of the same sizes."""
        names = "heads", "head_dim", "state_dim", "groups", "dtype", "state_dtype", "gated"
        sizes = {name: getattr(self.case, name) for name in names}
        return state_space_benchmark(update_cases.Case(self.case.name, self.case.lengths, **sizes))


def default(case: Case) -> DeferredConfig:
    """The configuration that the op selects for a case."""
    return default_config(case.state_dim, itemsize(case.state_dtype))


def variants(case: Case, every: bool) -> list[DeferredConfig]:
    """The default configuration of the Triton kernel; others too if `every` is true."""
    blocks = ((16, 1), (32, 1), (64, 1), (64, 2), (128, 2), (128, 4)) if every else ()
    segments = {default(case).segment, case.state_dim}
    found = [DeferredConfig(block, segment, warps) for block, warps in blocks for segment in sorted(segments)]
    return list(dict.fromkeys([default(case), *found]))


def short(c: DeferredConfig) -> str:
    """A configuration in few letters."""
    return f"triton_b{c.block_dim}_s{c.segment}_w{c.num_warps}"


TINY = [
    Case(f"mamba1 4x{n} {dtype}", (n,) * 4, head_dim=24, state_dim=16, state_dtype=dtype, gated=n > 1)
    for n, dtype in ((1, "float32"), (4, "bfloat16"))
]


def tiny_config(case: Case) -> DeferredConfig:
    """The configuration for a case of `TINY`."""
    return default(case)
