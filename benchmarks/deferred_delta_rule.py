"""Deferred states of the gated delta rule for `benchmarks.deferred`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.deferred_bench import Bench, exact
from benchmarks.kernel_benchmark import KernelBenchmark, itemsize
from benchmarks.update import delta_rule_benchmark
from benchmarks.workloads import gated_delta_rule as update_cases
from benchmarks.workloads.gated_delta_rule_deferred import Case
from pallas_kernels.gated_delta_rule.deferred import DeltaRuleEntries, gated_delta_rule_deferred
from pallas_kernels.gated_delta_rule.deferred.config import DeferredConfig, default_config

Variant = DeferredConfig | None  # None is the Mosaic GPU kernel, which has no configuration


def default(case: Case) -> DeferredConfig:
    """The Triton kernel's configuration that the op selects for a case."""
    return default_config(len(case.lengths), itemsize(case.state_dtype))


def variants(case: Case, every: bool) -> list[Variant]:
    """The Mosaic GPU kernel, if it can run the case, and the default of the Triton kernel; others if `every` is true."""
    found: list[Variant] = [None, default(case)]
    if every:
        make = functools.partial(DeferredConfig, pieces=3 if case.state_dtype == "float32" else 2)
        found += [make(128, 32, 128, 4), make(128, 32, 32, 4), make(128, 32, 128, 2), make(64, 32, 128, 4)]
        found += [make(32, 32, 128, 4), make(128, 64, 32, 4, values_first=True)]
    return list(dict.fromkeys(found))


def short(c: Variant) -> str:
    """A variant in few letters."""
    if c is None:
        return "mosaic_gpu"
    order = "vx" if c.values_first else "xv"
    return f"triton_b{c.block_value}_v{c.tile_value}_k{c.tile_key}_w{c.num_warps}_p{c.pieces}_{order}"


class DeltaRuleBench(Bench):
    """A case of the gated delta rule."""

    kernel = "gated_delta_rule_deferred"
    inexact = "ring_u"
    wide = "value_heads", "value_dim"
    op = gated_delta_rule_deferred
    entries = DeltaRuleEntries
    case: Case

    def draw_inputs(self, draw: Any, tokens: int) -> None:
        """Draws projections, raw gates, and the parameters of the gates."""
        heads = self.case.value_heads
        self.inputs = draw(tokens, self.case.channels), draw(tokens, heads), draw(tokens, heads)
        self.parameters = dict(A_log=draw(heads, dtype="float32"), dt_bias=draw(heads, dtype="float32"))

    def adjust(self, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Makes log decays negative and corrections as short as those of real states."""
        u = arrays["ring_u"]
        return arrays | dict(
            ring_g=-jnp.abs(arrays["ring_g"]), ring_u=u * jnp.asarray(self.case.key_dim**-0.5, u.dtype)
        )

    def reference(self, turn: int, row: int, head: int, part: dict[str, np.ndarray]) -> Any:
        """Runs the recurrence token by token: see `Bench`."""
        case, state, fold = self.case, part["pool"][head], None
        key_head = head // (case.value_heads // case.key_heads)
        base, position = (int(self.host[name][turn, row]) for name in ("base", "position"))
        end, keys = (base // case.group + 1) * case.group, case.key_heads * case.key_dim
        qkv, a, b = (exact(x[int(self.loc[row]) : int(self.loc[row + 1])]) for x in self.inputs)
        A_log, dt_bias = (exact(x)[head] for x in self.parameters.values())
        outs, corrections = [], []
        for n in range(base, position + len(qkv)):
            if n == end:
                fold = state
                state = exact(jnp.asarray(state, jnp.float32).astype(case.state_dtype))
            if n < position:
                place = n % (2 * case.group)
                k, u, g = part["ring_k"][key_head, place], part["ring_u"][head, place], part["ring_g"][head, place]
                state = np.exp(g) * state + np.outer(u, k)
                continue
            t = n - position
            q, k = (qkv[t, at : at + case.key_dim] for at in (key_head * case.key_dim, keys + key_head * case.key_dim))
            v = qkv[t, 2 * keys + head * case.value_dim :][: case.value_dim]
            factor, of_query = (1 / np.sqrt(x @ x + 1e-6) for x in (k, q))
            state = np.exp(-np.exp(A_log) * np.logaddexp(0, a[t, head] + dt_bias)) * state
            u = factor / (1 + np.exp(-b[t, head])) * (v - state @ k * factor)
            state = state + np.outer(u, k)
            corrections.append(u)
            outs.append(state @ q * of_query * case.key_dim**-0.5)
        return np.stack(outs), np.stack(corrections), fold

    def copy_free(self) -> KernelBenchmark:
        """The update op on rows of the same sizes."""
        names = "key_heads", "value_heads", "key_dim", "value_dim", "dtype", "state_dtype"
        sizes = {name: getattr(self.case, name) for name in names}
        return delta_rule_benchmark(update_cases.Case(self.case.name, self.case.lengths, **sizes))


_SIZES = dict(key_heads=1, value_heads=2, key_dim=16, value_dim=32)
TINY = [
    Case(f"gdn 4x{n} {dtype}", (n,) * 4, state_dtype=dtype, **_SIZES) for n, dtype in ((1, "float32"), (4, "bfloat16"))
]


def tiny_config(case: Case) -> DeferredConfig:
    """The configuration for a case of `TINY`."""
    return DeferredConfig(16, 16, 16, 1, 3 if "float32" in case.name else 2)
