"""Times rotate_and_store: `python -m benchmarks.rotary --json benchmarks/results/rotary.jsonl`.

Every candidate is compared with float64 first, on a sample of its tokens. `us` is the duration of the kernels of a call,
`kernels` is their number, and `of_copy` is the rate at which a call moves its bytes, as a fraction of the rate of a copy. A
turn calls the op once for each of some layers. Beside the kernel stand XLA's own kernels. `--tune` times several
configurations.
"""

import functools
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cases import implementations, options_parser, run_cases
from benchmarks.rows import Row
from benchmarks.timing import copy_bandwidth, kernel_times
from benchmarks.workloads.rotary import CASES, Case
from pallas_kernels import HeadNorms, PageIndices, Run, rotate_and_store
from pallas_kernels.rotary.config import Config

LAYERS = 4
TURNS = 5
LIMIT = 1e-2  # of the relative error
SAMPLES = 16  # tokens that are compared with float64
EPSILON, OFFSET = 1e-6, 1.0
SHOWN = 6  # rows of a case that are printed

Arrays = dict[str, Any]


def moved_bytes(case: Case) -> int:
    """Counts what a call reads and writes, each once."""
    heads = 2 * case.heads + 4 * case.kv_heads
    return case.tokens * (heads * case.dim * jnp.dtype(case.dtype).itemsize + 2 * 4 * case.pairs)


def prepare(case: Case) -> tuple[Arrays, Arrays]:
    """Draws the pools, and everything else that a turn takes. `q`, `k` and `v` are lists with one array per layer."""
    keys = iter(jax.random.split(jax.random.key(0), 3 * LAYERS + 3))
    draw = jax.jit(lambda key, *shape: jax.random.normal(key, shape, case.dtype), static_argnums=(1, 2, 3))
    heads = dict(
        q=(case.heads, (1 + case.is_gated) * case.dim), k=(case.kv_heads, case.dim), v=(case.kv_heads, case.dim)
    )
    arrays: Arrays = {
        name: [draw(next(keys), case.tokens, *shape) for _ in range(LAYERS)] for name, shape in heads.items()
    }
    angle = jax.random.uniform(next(keys), (case.tokens, case.pairs), maxval=6.0)
    arrays |= dict(cos=jnp.cos(angle), sin=jnp.sin(angle)) if case.pairs else dict(cos=None, sin=None)
    weights = jax.random.normal(next(keys), (2, case.dim))
    arrays["norms"] = HeadNorms(epsilon=EPSILON, offset=OFFSET)
    if case.is_normed:
        arrays["norms"] = replace(arrays["norms"], q_weight=weights[0], k_weight=weights[1])
    # Tokens of a decode step lie in pages of their own, and those of a prompt fill one page after the other.
    place = np.arange(case.tokens) * (1 if case.tokens > 1024 else case.page_size)
    pages = 1 + int(place.max()) // case.page_size
    place = jnp.asarray(np.random.default_rng(0).permutation(pages)[place // case.page_size] + 1, jnp.int32)
    offset = jnp.arange(case.tokens, dtype=jnp.int32) % case.page_size
    arrays["indices"] = PageIndices(layer=0, page=place, offset=offset)
    shape = LAYERS, pages + 1, case.page_size, case.kv_heads, case.dim
    return dict(keys=jnp.zeros(shape, case.dtype), values=jnp.zeros(shape, case.dtype)), arrays


def turn(pools: Arrays, arrays: Arrays, run: Run) -> tuple[Arrays, list[jax.Array]]:
    """Calls the op once per layer. Returns the pools and the queries of each layer. `pools` is donated."""
    shared = {name: arrays[name] for name in ("cos", "sin", "norms")}
    queries = []
    for layer in range(LAYERS):
        inputs = {name: arrays[name][layer] for name in ("q", "k", "v")}
        indices = replace(arrays["indices"], layer=layer)
        out, *after = rotate_and_store(**inputs, **shared, **pools, indices=indices, run=run)
        # Calls run one after the other, as in a model.
        pools, out = jax.lax.optimization_barrier((dict(zip(pools, after, strict=True)), out))
        queries.append(out)
    return pools, queries


def exact(array: jax.Array) -> np.ndarray:
    """The array in float64."""
    return np.asarray(array.astype(jnp.float32), np.float64)


def sampled_error(case: Case, arrays: Arrays, pools: Arrays, queries: list[jax.Array]) -> float:
    """The largest of the relative errors of queries, keys and values of a sample of tokens in the last layer."""
    sample = np.unique(np.linspace(0, case.tokens - 1, SAMPLES).astype(int))
    place = LAYERS - 1, arrays["indices"].page[sample], arrays["indices"].offset[sample]

    def wanted(name: str) -> np.ndarray:
        x = exact(arrays[name][-1][sample])[..., : case.dim]
        if name != "v" and case.is_normed:
            scale = OFFSET + exact(getattr(arrays["norms"], f"{name}_weight"))
            x = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPSILON) * scale
        if name != "v" and case.pairs:
            cos, sin = (exact(arrays[angle][sample])[:, None] for angle in ("cos", "sin"))
            first, second, rest = np.split(x, [case.pairs, 2 * case.pairs], axis=-1)
            x = np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
        return x

    got = dict(q=queries[-1][sample], k=pools["keys"][place], v=pools["values"][place])
    errors = [np.linalg.norm(exact(got[name]) - wanted(name)) / np.linalg.norm(wanted(name)) for name in got]
    return float(np.max(errors))


def tuned(case: Case) -> dict[str, dict[str, Any]]:
    """The configurations that `--tune` tries, by name."""
    dim = 1 << (case.dim - 1).bit_length()
    return {
        f"h{heads}_w{warps}": dict(run=Run(implementation="triton", config=Config(heads, warps)))
        for heads in (1, 2, 4, 8, 16, 32)
        for warps in (1, 2, 4, 8)
        if heads <= case.heads and 2 <= heads * dim // (32 * warps) <= 64
    }


def measure(case: Case, candidates: Mapping[str, dict[str, Any]], rate: float | None) -> list[Row]:
    """One row per candidate, the fastest first. With `rate`, bytes per us of a copy, they are timed."""
    pools, arrays = prepare(case)
    rows = []
    with ThreadPoolExecutor(12) as pool:
        compile_ = lambda options: (
            jax.jit(functools.partial(turn, **options), donate_argnums=0).lower(pools, arrays).compile()
        )
        built = {name: pool.submit(compile_, options) for name, options in candidates.items()}
        # Compiling may run kernels, which would be counted.
        wait(built.values())
    for name, future in built.items():
        row: Row = {"case": case.name, "candidate": name}
        rows.append(row)
        try:
            run = future.result()
            after = {name: jnp.zeros_like(x) for name, x in pools.items()}
            after, queries = run(after, arrays)
            row["rms_error"] = sampled_error(case, arrays, after, queries)
            if not row["rms_error"] <= LIMIT:
                row["failed"] = f"rms_error is above {LIMIT}"
                continue
            if rate is None:
                continue

            def launch(run: Any = run, after: Arrays = after) -> None:
                for _ in range(TURNS):
                    after, queries = run(after, arrays)
                    jax.block_until_ready(queries)

            launches = kernel_times(launch)
            row["kernels"] = len(launches) / (TURNS * LAYERS)
            row["us"] = round(sum(us for _, us in launches) / (TURNS * LAYERS), 2)
            row["of_copy"] = round(moved_bytes(case) / row["us"] / rate, 3)
        except Exception as error:  # of any kind: a configuration may not compile
            row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return sorted(rows, key=lambda row: row.get("us", math.inf))


def main() -> None:
    options = options_parser(__doc__, budget=120).parse_args()
    rate = copy_bandwidth()

    def run(case: Case) -> list[Row]:
        return measure(case, implementations(tuned(case) if options.tune else None), rate)

    run_cases(options, CASES, run, copy_rate=rate, shown=SHOWN)


if __name__ == "__main__":
    main()
