"""Times the kernels over their named cases: `python -m benchmarks.kernels --json benchmarks/results/FILE.jsonl`.

Every case is compared with the "xla" implementation first, and isn't timed if they differ. Decode runs in place (read
block == write block) over blocks that rotate past five times the L2, as a server's would.
"""

import argparse
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import copy_bandwidth, environment, median_time
from pallas_kernels import gated_delta_rule_update, state_copy
from pallas_kernels.gated_delta_rule import cases as gated_delta_rule_cases
from pallas_kernels.state_copy import cases as state_copy_cases

TURNS = 40
ROTATION_BYTES = 5 * 60 * 2**20


def random_pool(shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Cheap pseudo-random values in [-0.5, 0.5): zeros would flatter the card."""
    index = jax.lax.broadcasted_iota(jnp.uint32, shape, 1) * jnp.uint32(2654435761)
    index = index ^ (jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1) * jnp.uint32(40503))
    return ((index & 0xFFFF).astype(jnp.float32) / 65536 - 0.5).astype(dtype)


def time_state_copy(case: state_copy_cases.Case, config: Any = None) -> dict:
    """Rows cross with offset 1 (conv) from one half of the pool's blocks to the other."""
    state_bytes = math.prod(case.state) * jnp.dtype(case.dtype).itemsize
    blocks = 1 + 2 * max(case.rows, ROTATION_BYTES // (2 * case.layers * state_bytes))
    half = blocks // 2
    crossing = (jnp.arange(case.rows) < case.crossing).astype(jnp.int32)

    def plan(i):
        row = (i * case.rows + jnp.arange(case.rows, dtype=jnp.int32)) % half
        return 1 + row, (1 + half + row) * crossing, *((crossing,) if case.shift else ())

    def run(turns, implementation):
        step = lambda i, pool: state_copy(pool, *plan(i), implementation=implementation, config=config)
        return jax.lax.fori_loop(0, turns, step, random_pool((case.layers, blocks, *case.state), case.dtype))

    small = jax.jit(lambda: (run(2, "triton") != run(2, "xla")).sum())
    moved = case.layers * case.crossing * state_bytes * ((case.state[0] - 1) / case.state[0] if case.shift else 1)
    name = "state_copy_shift" if case.shift else "state_copy"
    return {
        "max_error": float(small()),
        "us": median_time(lambda: run(TURNS, "triton").reshape(-1)[:1], name),
        "bytes": int(2 * moved),
    }


def time_update(case: gated_delta_rule_cases.Case, config: Any = None) -> dict:
    """One layer's decode or verify step."""
    rows, tokens, window = len(case.lengths), sum(case.lengths), max(case.lengths)
    state_bytes = case.value_heads * case.value_dim * case.key_dim * jnp.dtype(case.state_dtype).itemsize
    sets = max(2, ROTATION_BYTES // (rows * window * state_bytes))
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    channels = 2 * case.key_heads * case.key_dim + case.value_heads * case.value_dim
    qkv, a, b = (draw(tokens, n).astype(case.dtype) for n in (channels, case.value_heads, case.value_heads))
    A_log, dt_bias = draw(case.value_heads), draw(case.value_heads)
    loc = jnp.asarray(np.cumsum([0, *case.lengths]), jnp.int32)

    def run(turns, implementation):
        def step(i, carry):
            pool, out = carry
            write = 1 + (i % sets) * rows * window + jnp.arange(rows * window, dtype=jnp.int32).reshape(rows, window)
            out, pool = gated_delta_rule_update(
                qkv,
                a,
                b,
                A_log,
                dt_bias,
                pool,
                0,
                loc,
                write[:, 0],
                write,
                implementation=implementation,
                config=config,
            )
            return pool, out

        pool = random_pool(
            (1, 1 + sets * rows * window, case.value_heads, case.value_dim, case.key_dim), case.state_dtype
        )
        out = jnp.zeros((tokens, case.value_heads, case.value_dim), case.dtype)
        return jax.lax.fori_loop(0, turns, step, (pool, out))

    def error():
        (pool, out), (pool_, out_) = run(1, "triton"), run(1, "xla")
        difference = lambda x, y: jnp.max(jnp.abs(x.astype(jnp.float32) - y.astype(jnp.float32)))
        return jnp.maximum(difference(pool, pool_), difference(out, out_))

    live = sum(length > 0 for length in case.lengths)
    return {
        "max_error": float(jax.jit(error)()),
        "us": median_time(lambda: [x.reshape(-1)[:1] for x in run(TURNS, "triton")], "gated_delta_rule_update"),
        "bytes": (live + tokens) * state_bytes + tokens * (channels + case.value_heads * case.value_dim) * 2,
    }


OPS: dict[str, tuple[Any, Any, Any]] = {
    "state_copy": (state_copy_cases.CASES, time_state_copy, lambda case: 0.0),
    # Products of unit-scale numbers in another order, rounded to the narrowest type on the way.
    "gated_delta_rule_update": (
        gated_delta_rule_cases.UPDATE_CASES,
        time_update,
        lambda case: 8.0 * max(float(jnp.finfo(t).eps) for t in (case.dtype, case.state_dtype)),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=sorted(OPS), action="append", help="default: all")
    parser.add_argument("--json", help="append one JSON row per case to this file")
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    rate, header = copy_bandwidth(), environment(options.commit)
    print(f"{header}\ncopy bandwidth {rate / 1e6:.2f} TB/s")
    for op in options.op or OPS:
        cases, measure, limit = OPS[op]
        for case in cases:
            row: dict[str, Any] = {"case": case.name, "implementation": "triton", **measure(case)}
            if not row["max_error"] <= limit(case):
                print(f"{case.name:40} WRONG: max error {row['max_error']}, limit {limit(case)}")
                continue
            row |= {"bandwidth_fraction": round(row["bytes"] / row["us"] / rate, 4), "copy_bandwidth_tb_s": rate / 1e6}
            row |= header
            print(
                f"{case.name:40} {row['us']:9.2f} us {row['bandwidth_fraction']:6.2f} of the copy bandwidth", flush=True
            )
            if options.json:
                with open(options.json, "a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
