"""Times deferred states of the gated delta rule: `python -m benchmarks.deferred --json benchmarks/results/deferred.jsonl`.

Every variant is first compared with float64 on a sample of rows and heads: outputs, corrections, and folds. Then `us` is the
mean duration of a call over the phases of the fold: rows start at random places of their groups, and each call accepts one
to all of its tokens. `copy_free_us` is the duration of `gated_delta_rule_update` on the same sizes, in the same run. The
variants are the Mosaic GPU kernel, if it can run the case, and the Triton kernel's default configuration, and with
`--every` other configurations. "gdn" cases have a decay per head and "kda" cases one per key channel.
`--tiny` tries the command on a machine without a GPU.
"""

import argparse
import functools
import itertools
import json
import math
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_benchmark import ROTATION_BYTES, itemsize, locations, normal_draws, random_pool
from benchmarks.kernels import time_ours
from benchmarks.timing import copy_bandwidth, kernel_times
from benchmarks.update import delta_rule_benchmark
from mamba_align_jax.load.rows import Row, append, facts
from pallas_kernels.gated_delta_rule import cases as update_cases
from pallas_kernels.gated_delta_rule.deferred import gated_delta_rule_deferred
from pallas_kernels.gated_delta_rule.deferred.cases import CASES, Case
from pallas_kernels.gated_delta_rule.deferred.config import DeferredConfig, default_config

KERNEL = "gated_delta_rule_deferred"
TURNS = 32
LAUNCHES = 3
WARM_UP = 100  # calls that are counted before the measured ones, so that rows are in any phase
# Limits of relative errors: outputs are rounded to bfloat16, folds and corrections to their dtypes.
LIMITS = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 6e-3}
SAMPLED_HEADS = 2
KEYS = ("query_start_loc", "slot", "base", "position", "read_block", "fold_block")


Variant = DeferredConfig | None  # None is the Mosaic GPU kernel, which has no configuration


def variants(case: Case) -> list[DeferredConfig]:
    """The configurations of the Triton kernels that `--every` tries for a case, the default first."""
    found = itertools.starmap(DeferredConfig, itertools.product((8, 16, 32), (32, 64), (1, 2)))
    return list(dict.fromkeys([default_config(itemsize(case.state_dtype)), *found, DeferredConfig(64, 32, 4)]))


def short(c: Variant) -> str:
    """A variant in few letters."""
    return f"triton_v{c.tile_value}_s{c.segment}_w{c.num_warps}" if c else "mosaic_gpu"


def phases(rows: int, tokens: int, group: int, turns: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws rows that accept 1 to `tokens` tokens at each turn. Returns their base and position, int32 [turns, rows]."""
    rng = np.random.default_rng(0)
    base, position = np.zeros(rows, np.int32), rng.integers(0, group, rows)
    found = []
    for _ in range(WARM_UP + turns):
        found.append((base, position))
        end = (base // group + 1) * group
        base = np.where(position >= end, end, base)
        position = position + rng.integers(1, tokens + 1, rows)
    base, position = (np.stack(x[WARM_UP:]) for x in zip(*found, strict=True))
    return base.astype(np.int32), position.astype(np.int32)


class Bench:
    """One case, ready to run. Each turn uses another set of slots and blocks, so that no state is in the L2."""

    def __init__(self, case: Case, rotation_bytes: int):
        self.case, draw = case, normal_draws(case.dtype)
        rows, tokens = len(case.lengths), sum(case.lengths)
        state_bytes = case.value_heads * case.value_dim * case.key_dim * itemsize(case.state_dtype)
        self.sets = max(1, math.ceil(rotation_bytes / (rows * state_bytes)))
        base, position = phases(rows, max(case.lengths), case.group, TURNS)
        end = (base // case.group + 1) * case.group
        slot = np.arange(TURNS)[:, None] % self.sets * rows + np.arange(rows)
        blocks = 1 + 2 * slot, 2 + 2 * slot
        indices = slot, base, position, *blocks
        self.indices = tuple(jnp.asarray(x, jnp.int32) for x in indices)
        self.host = dict(zip(KEYS[1:], indices, strict=True))
        self.folds = position >= end
        self.crossings = ~self.folds & (position + np.asarray(case.lengths) > end)
        heads = case.value_heads
        self.inputs = draw(tokens, case.channels), draw(tokens, *case.gate_shape), draw(tokens, heads)
        self.gates = draw(heads, dtype="float32"), draw(*case.gate_shape, dtype="float32")
        self.loc = locations(case.lengths)
        entry = case.key_heads * case.key_dim * itemsize(case.dtype)
        entry += heads * case.value_dim * itemsize(case.ring_dtype) + 4 * math.prod(case.gate_shape)
        # Of a group, half of the entries exist on average.
        self.bytes = rows * (state_bytes * (1 + self.folds.mean()) + entry * (case.group / 2 + max(case.lengths)))

    def initial(self) -> dict[str, jax.Array]:
        """The pool and the rings before the first turn."""
        shapes = self.case.pool_shapes(
            1, 1 + 2 * self.sets * len(self.case.lengths), self.sets * len(self.case.lengths)
        )
        made = {name: random_pool(shape, dtype) for name, (shape, dtype) in shapes.items() if name == "pool"}
        for n, (name, (shape, dtype)) in enumerate(list(shapes.items())[1:]):
            made[name] = jax.random.normal(jax.random.key(n), shape, jnp.float32).astype(dtype)
        made["ring_g"] = -jnp.abs(made["ring_g"])
        made["ring_u"] = made["ring_u"] * jnp.asarray(self.case.key_dim**-0.5, made["ring_u"].dtype)
        return made

    def call(self, turn: Any, arrays: dict[str, jax.Array], **options: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        """One call of the op."""
        named: dict[str, Any] = arrays | dict(zip(KEYS, (self.loc, *(x[turn] for x in self.indices)), strict=True))
        longest = max(self.case.lengths)
        out, *kept = gated_delta_rule_deferred(
            *self.inputs, *self.gates, **named, layer=0, max_query_tokens=longest, **options
        )
        return out, dict(zip(("pool", "ring_k", "ring_u", "ring_g"), kept, strict=True))

    @functools.cached_property
    def sample(self) -> tuple[int, list[int]]:
        """What is compared with float64: a turn, and one row of each kind in it.

        The kinds are rows that fold, rows that cross the end of a group, and others. A turn with all kinds is preferred.
        """
        turn = int(np.argmax(2 * self.folds.any(axis=1) + self.crossings.any(axis=1)))
        kinds = self.folds[turn], self.crossings[turn], ~(self.folds | self.crossings)[turn]
        return turn, sorted({int(np.argmax(kind)) for kind in kinds})

    def part(self, arrays: dict[str, jax.Array], block: str) -> dict[str, jax.Array]:
        """The sampled rows' parts of the pool and the rings, in some heads; of the pool, the blocks named `block`."""
        turn, rows = self.sample
        heads = slice(0, SAMPLED_HEADS)
        at = {name: self.host[name][turn, rows] for name in ("slot", block)}
        parts = {name: arrays[name][0, at["slot"], heads] for name in ("ring_k", "ring_u", "ring_g")}
        return parts | dict(pool=arrays["pool"][0, at[block], heads])

    def compile(self, config: Variant, **options: Any) -> Callable[[int, int], Any]:
        """Compiles a program of the turns `first` to `last` - 1. It returns the last outputs, and parts before and after."""
        options |= dict(implementation="triton" if config else "mosaic_gpu", config=config)

        def run(first, last):
            def step(turn, carry):
                return self.call(turn, carry[1], **options)

            out = jnp.zeros((sum(self.case.lengths), self.case.value_heads, self.case.value_dim), self.case.dtype)
            arrays = self.initial()
            before = self.part(arrays, "read_block")
            out, arrays = jax.lax.fori_loop(first, last, step, (out, arrays))
            return out, before, self.part(arrays, "fold_block")

        return jax.jit(run).lower(0, TURNS).compile()

    def errors(self, program: Callable[[int, int], Any]) -> dict[str, float]:
        """Relative errors of one call's outputs, corrections and folds against float64, on a sample of rows and heads."""
        turn, rows = self.sample
        out, before, after = program(turn, turn + 1)
        before, after = (jax.tree.map(_exact, x) for x in (before, after))
        wanted: dict[str, list[np.ndarray]] = dict(out=[], u=[], fold=[])
        found: dict[str, list[np.ndarray]] = dict(out=[], u=[], fold=[])
        for (n, row), head in itertools.product(enumerate(rows), range(SAMPLED_HEADS)):
            outs, corrections, fold = self._reference(turn, row, head, {name: x[n] for name, x in before.items()})
            start = int(self.loc[row])
            place = (self.host["position"][turn, row] + np.arange(len(outs))) % (2 * self.case.group)
            wanted["out"].append(outs)
            found["out"].append(_exact(out[start : start + len(outs), head]))
            wanted["u"].append(corrections)
            found["u"].append(after["ring_u"][n, head, place])
            if fold is not None and self.folds[turn, row]:
                wanted["fold"].append(fold)
                found["fold"].append(after["pool"][n, head])
        errors = {}
        for name, each in found.items():
            if each:
                got, truth = (np.concatenate([x.ravel() for x in y]) for y in (each, wanted[name]))
                errors[f"{name}_error"] = float(np.linalg.norm(got - truth) / np.linalg.norm(truth))
        return errors

    def _reference(self, turn: int, row: int, head: int, part: dict[str, np.ndarray]):
        """Outputs, corrections and the fold of one row and head, token by token in float64."""
        case, state, fold = self.case, part["pool"][head], None
        key_head = head // (case.value_heads // case.key_heads)
        base, position = (int(self.host[name][turn, row]) for name in ("base", "position"))
        end, keys = (base // case.group + 1) * case.group, case.key_heads * case.key_dim
        qkv, a, b = (_exact(x[int(self.loc[row]) : int(self.loc[row + 1])]) for x in self.inputs)
        A_log, dt_bias = (_exact(x)[head] for x in self.gates)
        outs, corrections = [], []
        for n in range(base, position + len(qkv)):
            if n == end:
                fold = state
                state = _exact(jnp.asarray(state, jnp.float32).astype(case.state_dtype))
            if n < position:
                place = n % (2 * case.group)
                k, u, g = part["ring_k"][key_head, place], part["ring_u"][head, place], part["ring_g"][head, place]
                state = np.exp(g) * state + np.outer(u, k)
                continue
            t = n - position
            q, k = (qkv[t, at : at + case.key_dim] for at in (key_head * case.key_dim, keys + key_head * case.key_dim))
            v = qkv[t, 2 * keys + head * case.value_dim :][: case.value_dim]
            factor, of_query = (1 / np.sqrt(x @ x + 1e-6) for x in (k, q))
            state = np.exp(-np.exp(A_log) * np.logaddexp(0, a[t, head] + dt_bias)) * state  # per head or key channel
            u = factor / (1 + np.exp(-b[t, head])) * (v - state @ k * factor)
            state = state + np.outer(u, k)
            corrections.append(u)
            outs.append(state @ q * of_query * case.key_dim**-0.5)
        return np.stack(outs), np.stack(corrections), fold


def _exact(x: Any) -> np.ndarray:
    return np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64)


def time_calls(program: Callable[[int, int], Any]) -> tuple[list[float], dict[str, float]]:
    """The durations of all calls of a program, and the mean duration of each of its launches, in microseconds."""
    jax.block_until_ready(program(0, TURNS))
    launches = kernel_times(lambda: [jax.block_until_ready(program(0, TURNS)) for _ in range(LAUNCHES)])
    launches = [(name, us) for name, us in launches if name.startswith(KERNEL)]
    each, rest = divmod(len(launches), TURNS * LAUNCHES)
    if rest or not each:
        raise RuntimeError(f"{len(launches)} launches must divide into {TURNS * LAUNCHES} calls")
    times = [us for _, us in launches]
    parts = {name: float(np.mean(times[n::each])) for n, (name, _) in enumerate(launches[:each])}
    return [sum(times[i : i + each]) for i in range(0, len(times), each)], parts


def time_calls_by_the_clock(program: Callable[[int, int], Any]) -> tuple[list[float], dict[str, float]]:
    """What `--tiny` measures, to try the command: one number for all calls."""
    begin = time.perf_counter()
    jax.block_until_ready(program(0, TURNS))
    return [1e6 * (time.perf_counter() - begin) / TURNS], {}


def limits(case: Case) -> dict[str, float]:
    """Returns the largest relative errors of outputs, corrections and folds that are accepted."""
    fold = max(LIMITS[case.state_dtype], LIMITS[case.ring_dtype])
    return dict(out_error=max(LIMITS["bfloat16"], fold), u_error=fold, fold_error=fold)


def measure(case: Case, tried: list[Variant], tiny: bool, threads: int) -> list[Row]:
    """One row per variant, the fastest first."""
    bench, rows = Bench(case, 0 if tiny else ROTATION_BYTES), []
    options: dict[str, Any] = dict(interpret=True) if tiny else {}
    with ThreadPoolExecutor(threads) as pool:
        built = [pool.submit(bench.compile, config, **options) for config in tried]
    # Nothing is compiled while kernels are timed.
    for config, future in zip(tried, built, strict=True):
        row: Row = {"case": case.name, "policy": "deferred", "config": str(config), "candidate": short(config)}
        if config == variants(case)[0]:
            row["candidate"] = "triton"
        rows.append(row)
        try:
            program = future.result()
            row |= bench.errors(program)
            wrong = [name for name, limit in limits(case).items() if name in row and not row[name] <= limit]
            if wrong:
                row["failed"] = f"{', '.join(wrong)} above {limits(case)}"
                continue
            times, parts = (time_calls_by_the_clock if tiny else time_calls)(program)
            row |= {"us": float(np.mean(times)), "us_min": min(times), "us_max": max(times), "us_of_launches": parts}
            row |= {"folds": float(bench.folds.mean()), "crossings": float(bench.crossings.mean())}
            row["bytes"] = int(bench.bytes)
        except Exception as error:  # of any kind: a configuration may not compile
            row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return sorted(rows, key=lambda row: row.get("us", math.inf))


def time_today(case: Case) -> float:
    """Microseconds of `gated_delta_rule_update` for rows of the same sizes, which writes a state per token."""
    sizes = {name: getattr(case, name) for name in ("key_heads", "value_heads", "key_dim", "value_dim", "dtype")}
    today = update_cases.Case(case.name, case.lengths, **sizes, state_dtype=case.state_dtype, kda=case.kda)
    timed = time_ours(delta_rule_benchmark(today))
    return min(timed() for _ in range(LAUNCHES))


def plan(tiny: bool, pattern: str) -> list[Case]:
    """The cases to time, those of 64 rows first."""
    if tiny:
        sizes = dict(group=16, key_heads=1, value_heads=2, key_dim=16, value_dim=32)
        return [
            Case(f"{name} 4x{n} {dtype}", (n,) * 4, state_dtype=dtype, kda=name == "kda", **sizes)
            for name, n, dtype in TINY
        ]
    names = r"(gdn|kda) \d+x\d \w+(, groups of 8)?"
    cases = [case for case in CASES if re.fullmatch(names, case.name) and re.search(pattern, case.name)]
    cases = [case for case in cases if case.state_dtype != "float16"]
    return sorted(cases, key=lambda case: len(case.lengths) != 64)


TINY = (("gdn", 1, "float32"), ("gdn", 4, "bfloat16"), ("kda", 4, "float32"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="", help="regular expression of case names; default: all")
    parser.add_argument("--tiny", action="store_true", help="small cases in interpret mode, to try the command")
    parser.add_argument("--every", action="store_true", help="time other configurations of the Triton kernel too")
    parser.add_argument("--budget", type=float, default=170, help="seconds after which no case is started")
    parser.add_argument("--threads", type=int, default=14, help="variants that are compiled at the same time")
    parser.add_argument("--json", help="append one JSON row per measurement to this file")
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    header, begin = facts(options.commit), time.perf_counter()
    rate = None if options.tiny else copy_bandwidth()
    print(header, "" if rate is None else f"copy {rate / 1e6:.2f} TB/s", flush=True)
    for case in plan(options.tiny, options.case):
        if time.perf_counter() - begin > options.budget:
            print(f"{case.name}: no time left", flush=True)
            continue
        tried: list[Variant] = [*[None] * (not case.kda), *variants(case)[: None if options.every else 1]]
        if options.tiny:
            tried = [DeferredConfig(16, 16, 1)]
        rows = measure(case, tried, options.tiny, options.threads)
        today = None if options.tiny else time_today(case)
        for row in rows:
            if rate is not None and "us" in row:
                row |= {"copy_free_us": today, "gain": today / row["us"], "of_copy": row["bytes"] / row["us"] / rate}
            append(options.json, row | header)
            print(
                json.dumps({name: value for name, value in row.items() if name not in ("config", "policy")}), flush=True
            )


if __name__ == "__main__":
    main()
