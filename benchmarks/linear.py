"""Times dense products of few tokens: `python -m benchmarks.linear --json benchmarks/results/linear.jsonl`.

Every product is compared with float64 first, on a sample of its outputs. `us` is the duration of the kernels of a call, and
`of_copy` is the rate at which the weights are read, as a fraction of the rate of a copy. Each call of a turn has weights of
its own, so that no weight is in the L2. Beside the kernel stands the product of XLA. `--tune` times several configurations.
"""

import functools
import itertools
import math
from concurrent.futures import ThreadPoolExecutor, wait

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cases import add_weights_dtype, options_parser, run_cases, stored
from benchmarks.rows import Row
from benchmarks.timing import copy_bandwidth, kernel_times
from benchmarks.workloads.linear import CASES, Case
from pallas_kernels import QuantizedWeight, Run, linear, linear_sums
from pallas_kernels.linear.config import Config, default_config

ROTATION_BYTES = 10 * 60 * 2**20  # ten times an H200's L2, which keeps some of what three times its size brings
LIMIT = 1e-2  # of the relative error
SAMPLES = 64  # outputs that are compared with float64
TURNS = 5
SHOWN = 4  # candidates of a case that are printed
SHARED_BYTES = 220 * 1024


def short(c: Config) -> str:
    """A configuration in few letters."""
    return f"t{c.tokens}_o{c.outputs}_i{c.inputs}_s{c.shares}_w{c.num_warps}_p{c.num_stages}"


# outputs, inputs, shares, warps, stages
TRIED = (
    *itertools.product((16,), (128, 256), (1,), (4,), (4, 6)),
    *itertools.product((32,), (128, 256), (1, 2, 4), (4,), (4,)),
    *((32, 128, 1, 4, 6), (32, 64, 1, 2, 6), (32, 512, 1, 8, 3), (32, 64, 4, 4, 6), (32, 128, 8, 4, 3)),
    *itertools.product((64,), (64,), (1, 4), (4,), (5, 6)),
    *itertools.product((64,), (128,), (1, 2, 4, 8), (4,), (4,)),
    *((64, 128, 1, 8, 4), (64, 64, 1, 2, 6), (64, 256, 1, 8, 3)),
    *itertools.product((128,), (64,), (1, 4, 8), (4, 8), (4,)),
    *((128, 64, 1, 8, 6), (128, 128, 1, 8, 3), (128, 128, 8, 8, 3), (256, 64, 1, 8, 3)),
)


# The same, of tiles with the 128 inputs of a block.
TRIED_IN_FP8 = (
    *itertools.product((16, 32), (128,), (1, 2, 4), (4,), (4, 6, 8)),
    *itertools.product((64,), (128,), (1, 2, 4), (4, 8), (4, 6)),
    *itertools.product((128,), (128,), (1, 4), (4, 8), (3, 5)),
)


def tuned(case: Case, weights_dtype: str | None = None) -> list[Config]:
    """The configurations that `--tune` tries: those that fit into shared memory and have enough programs."""
    if case.tokens == 1 and weights_dtype is None:
        return tuned_for_one(case)
    tried, size = (TRIED, 2) if weights_dtype is None else (TRIED_IN_FP8, 1)
    tile, found = max(16, case.tokens), []
    for outputs, inputs, shares, warps, stages in tried:
        programs = -(-case.outputs // (1 + case.is_gated) // outputs) * shares
        shared = stages * inputs * (2 * tile + size * outputs * (1 + case.is_gated))
        if (shares == 1 or case.is_summed) and shared <= SHARED_BYTES and 72 <= programs <= 4000:
            found.append(Config(tile, outputs, inputs, shares, warps, stages))
    return found


def tuned_for_one(case: Case) -> list[Config]:
    """Those that `--tune` tries for a single token: a tile of 16, and programs whose threads have 10 to 40 loads each."""
    size = jnp.dtype(case.weight_dtype).itemsize
    x, weight = (
        jax.ShapeDtypeStruct(shape, case.weight_dtype) for shape in ((2, case.inputs), (case.outputs, case.inputs))
    )
    found = [default_config(x, weight, is_gated=case.is_gated, is_summed=case.is_summed)]
    for outputs, shares, warps in itertools.product((1, 2, 4), (1, 2, 4), (1, 2)):
        bytes_per_warp = case.inputs * size * (1 + case.is_gated) * outputs // (shares * warps)
        if 5120 <= bytes_per_warp <= 20480 and (case.is_summed or shares == warps == 1) and (shares == 1 or warps == 1):
            found.append(Config(1, outputs, warps * 512 // size, shares, warps, 1))
    return found


def call(case: Case, x: jax.Array, weight: jax.Array, run: Run) -> jax.Array:
    """One call of the op."""
    if case.is_summed:
        return linear_sums(x, weight, run=run)
    return linear(x, weight, is_gated=case.is_gated, out_dtype=case.out_dtype, run=run)[0]


def sampled_error(case: Case, x: jax.Array, weight: jax.Array | QuantizedWeight, out: jax.Array) -> float:
    """||out - wanted|| / ||wanted|| of a sample of the outputs, wanted being float64's."""
    width = case.outputs // (1 + case.is_gated)
    sample = np.unique(np.linspace(0, width - 1, SAMPLES).astype(int))
    weight = weight.dequantize("float32") if isinstance(weight, QuantizedWeight) else weight
    exact = lambda array: np.asarray(array.astype(jnp.float32), np.float64)
    got = exact(out)[..., sample]
    got = got.sum(axis=0) if case.is_summed else got
    wanted = exact(x) @ exact(weight[sample]).T
    if case.is_gated:
        wanted = wanted / (1 + np.exp(-wanted)) * (exact(x) @ exact(weight[width + sample]).T)
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def measure(case: Case, tune: bool, rate: float, weights_dtype: str | None = None) -> list[Row]:
    """One row per candidate, the fastest first."""
    bytes_each = 1 if weights_dtype == "fp8" else jnp.dtype(case.weight_dtype).itemsize
    size = bytes_each * case.inputs * case.outputs
    count = max(2, math.ceil(ROTATION_BYTES / size))
    keys = jax.random.split(jax.random.key(0), count + 1)
    x = jax.random.normal(keys[0], (case.tokens, case.inputs), case.dtype)
    draw = jax.jit(lambda key: jax.random.normal(key, (case.outputs, case.inputs), case.weight_dtype))
    scaled = lambda key: draw(key) * jnp.asarray(case.inputs**-0.5, case.weight_dtype)
    weights = [stored(scaled(key), weights_dtype) for key in keys[1:]]

    def turn(x: jax.Array, weights: list[jax.Array], run: Run) -> list[jax.Array]:
        outs = []
        for weight in weights:
            # Calls run one after the other, as in a model.
            x, out = jax.lax.optimization_barrier((x, call(case, x, weight, run)))
            outs.append(out)
        return outs

    candidates = {"xla": Run(implementation="xla"), "triton": Run(implementation="triton")}
    if tune:
        candidates |= {
            short(config): Run(implementation="triton", config=config) for config in tuned(case, weights_dtype)
        }
    rows = []
    with ThreadPoolExecutor(12) as pool:
        build = lambda run: jax.jit(functools.partial(turn, run=run)).lower(x, weights).compile()
        built = {name: pool.submit(build, run) for name, run in candidates.items()}
        # Compiling XLA's products may run kernels, which would be counted.
        wait(built.values())
        for name, future in built.items():
            row: Row = {"case": case.name, "candidate": name}
            row |= {} if weights_dtype is None else {"weights_dtype": weights_dtype}
            rows.append(row)
            try:
                run = functools.partial(future.result(), x, weights)
                row["rms_error"] = sampled_error(case, x, weights[0], run()[0])
                if not row["rms_error"] <= LIMIT:
                    row["failed"] = f"rms_error is above {LIMIT}"
                    continue
                launches = kernel_times(lambda run=run: [jax.block_until_ready(run()) for _ in range(TURNS)])
                row["kernels"] = len(launches) / (TURNS * count)
                row["us"] = round(sum(us for _, us in launches) / (TURNS * count), 2)
                row["of_copy"] = round(size / row["us"] / rate, 3)
            except Exception as error:  # of any kind: a configuration may not compile
                row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return sorted(rows, key=lambda row: row.get("us", math.inf))


def main() -> None:
    options = add_weights_dtype(options_parser(__doc__, budget=280)).parse_args()
    rate = copy_bandwidth()
    cases = [case for case in CASES if case.dtype == "bfloat16"]
    run = lambda case: measure(case, options.tune, rate, options.weights_dtype)
    run_cases(options, cases, run, copy_rate=rate, shown=SHOWN)


if __name__ == "__main__":
    main()
