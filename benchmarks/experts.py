"""Times mixtures of experts: `python -m benchmarks.experts --json benchmarks/results/FILE.jsonl --commit COMMIT`.

Every case is compared with float32 first, on a sample of its tokens. `us` is the sum of the durations of a call's kernels,
and `floor_us` the larger of two times: that of reading the chosen experts' weights at the copy rate, and that of the
products at the rate of a large one. Beside it are the times of the "xla" implementation, of `jax.lax.ragged_dot` after a
sort, and of `choose_experts`. `--tune` times several configurations instead, with the time of each product, and prints the
fastest last.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cases import TUNE, add_weights_dtype, options_parser, run_cases, stored
from benchmarks.rows import Row
from benchmarks.timing import copy_bandwidth, kernel_times
from benchmarks.workloads.mixture_of_experts import QWEN_CASES, Case
from pallas_kernels import Routing, Run, choose_experts, mixture_of_experts
from pallas_kernels.mixture_of_experts.config import Config, Product
from pallas_kernels.quantized import dequantized

FLOPS_PER_US = 790e6  # of a large bfloat16 product on one H200
TURNS = 8  # calls, of which each has other experts
ROUNDS = 5
SAMPLES = 24  # tokens that are compared with float32
LIMIT = 1e-2  # of the relative error
RAGGED_TOKENS = 2048  # XLA multiplies every row by every expert

Arguments = dict[str, Any]
Candidate = Callable[[Arguments], jax.Array]


@dataclasses.dataclass(frozen=True)
class Setup:
    """A case's arrays, the routing of each turn, and the number of experts that a turn's tokens choose."""

    case: Case
    weights: Arguments
    turns: list[Arguments]
    chosen: float

    def floor_us(self, copy_rate: float) -> float:
        """The least time of a call, for a copy rate in bytes per microsecond."""
        case = self.case
        expert = case.hidden * (case.up_size + case.size)
        size = sum(self.weights[name].nbytes for name in ("up", "down")) / case.experts * self.chosen
        return max(size / copy_rate, 2 * case.tokens * case.top_k * expert / FLOPS_PER_US)


def prepare(case: Case, weights_dtype: str | None = None) -> Setup:
    """Draws a case's arrays on the device. The router's logits are random, and other ones in each turn."""

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def draw(key, shape, deviation):
        return (jax.random.normal(key, shape, jnp.bfloat16) * deviation).astype(case.dtype)

    keys = jax.random.split(jax.random.key(0), 3 + TURNS)
    weights = dict(
        up=stored(draw(keys[0], (case.experts, case.up_size, case.hidden), case.hidden**-0.5), weights_dtype),
        down=stored(draw(keys[1], (case.experts, case.hidden, case.size), case.size**-0.5), weights_dtype),
        x=draw(keys[2], (case.tokens, case.hidden), 1.0),
    )
    turns, distinct = [], []
    for key in keys[3:]:
        logits = draw(key, (case.tokens, case.experts), 1.0)
        chosen, factors = choose_experts(logits, Routing(top_k=case.top_k))
        turns.append(dict(logits=logits, chosen=chosen, weights=factors))
        distinct.append(np.unique(np.asarray(chosen)).size)
    return Setup(case, weights, turns, statistics.mean(distinct))


def call(case: Case, arguments: Arguments, run: Run) -> jax.Array:
    """One call of the op."""
    given = {name: array for name, array in arguments.items() if name != "logits"}
    return mixture_of_experts(**given, activation=case.activation, run=run)


def route(case: Case, arguments: Arguments, run: Run) -> jax.Array:
    """One call of the router's op, which returns the weights."""
    return choose_experts(arguments["logits"], Routing(top_k=case.top_k), run=run)[1]


def ragged(case: Case, arguments: Arguments) -> jax.Array:
    """Sorts the pairs and multiplies them by `jax.lax.ragged_dot`."""
    assert case.activation == "swiglu"
    chosen, x = arguments["chosen"].reshape(-1), arguments["x"]
    order = jnp.argsort(chosen)
    sizes = jnp.sum(chosen == jnp.arange(case.experts, dtype=jnp.int32)[:, None], axis=1, dtype=jnp.int32)
    dimensions = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
    times = lambda rows, weights: jax.lax.ragged_dot_general(rows, weights, sizes, dimensions)
    gate, up = jnp.split(times(x[order // case.top_k], arguments["up"]), 2, axis=1)
    out = times(jax.nn.silu(gate) * up, arguments["down"])
    out = jnp.zeros_like(out).at[order].set(out, unique_indices=True).reshape(*arguments["chosen"].shape, -1)
    return jnp.sum(out.astype(jnp.float32) * arguments["weights"][..., None], axis=1).astype(x.dtype)


def sampled_error(setup: Setup, out: jax.Array) -> float:
    """||out - wanted|| / ||wanted|| of a sample of the last turn's tokens, wanted being float32's."""
    case = setup.case
    sample = np.unique(np.linspace(0, case.tokens - 1, SAMPLES).astype(np.int32))

    @jax.jit
    def wanted(arguments, sample):
        product = functools.partial(jnp.einsum, "knh,kh->kn", precision="highest")

        def of_token(token):
            chosen = arguments["chosen"][token]
            wide = lambda array: dequantized(array).astype(jnp.float32)
            x = jnp.broadcast_to(wide(arguments["x"][token]), (case.top_k, case.hidden))
            middle = product(wide(arguments["up"][chosen]), x)
            if case.activation == "swiglu":
                gate, up = jnp.split(middle, 2, axis=1)
                middle = jax.nn.silu(gate) * up
            else:
                middle = jnp.square(jax.nn.relu(middle))
            each = product(wide(arguments["down"][chosen]), middle)
            return jnp.sum(each * arguments["weights"][token][:, None], axis=0)

        return jax.lax.map(of_token, sample)

    want = np.asarray(wanted(setup.weights | setup.turns[-1], sample), np.float64)
    got = np.asarray(out[sample].astype(jnp.float32), np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def compile_turns(setup: Setup, run: Candidate) -> Callable[[], jax.Array]:
    """Returns a function that runs all turns, and returns the result of the last one."""

    def loop(weights, turns):
        outs = []
        for turn in turns:
            # A turn begins after the one before it. All results are returned, so that XLA leaves no turn out.
            x, turn, _ = jax.lax.optimization_barrier((weights["x"], turn, outs[-1:]))
            outs.append(run(weights | turn | dict(x=x)))
        return outs

    compiled = jax.jit(loop).lower(setup.weights, setup.turns).compile()
    return lambda: jax.block_until_ready(compiled(setup.weights, setup.turns))[-1]


def microseconds(launch: Callable[[], Any]) -> Row:
    """Median microseconds of a call: of all kernels, of each product, and the number of kernels."""
    launch()
    rounds = []
    for _ in range(ROUNDS):
        times = kernel_times(launch)
        of = lambda name, times=times: sum(us for kernel, us in times if kernel.startswith(name)) / TURNS
        rounds.append({
            "us": of(""), "up_us": of("mixture_of_experts_up"), "down_us": of("mixture_of_experts_down"),
            "kernels": len(times) / TURNS,
        })  # fmt: skip
    return {key: round(statistics.median(each[key] for each in rounds), 2) for key in rounds[0]}


def tuned(case: Case, weights_dtype: str | None = None) -> list[Config]:
    """The configurations that `--tune` tries. Each has the same sizes for both products, whose times are apart."""
    if weights_dtype is not None:
        few = case.tokens * case.top_k <= 8 * case.experts
        columns, stages = (16, 32, 64, 128), (3, 4, 6)
        tries = [(16, each, 4, stage) for each in columns for stage in stages] if few else []
        tries += [(16, 64, 8, 5), (16, 128, 8, 4)] if few else []
        tries += [(rows, each, warps, 3) for rows in (64, 128) for each in (64, 128) for warps in (4, 8) if not few]
        products = [(rows, Product(each, 128, warps, stage)) for rows, each, warps, stage in tries]
        return [Config(rows, product, product) for rows, product in products]
    if case.tokens * case.top_k <= 8 * case.experts:
        products = [
            (16, 256, 4, 4),
            (16, 256, 4, 3),
            (16, 128, 4, 5),
            (16, 512, 4, 2),
            (16, 256, 2, 4),
            (32, 256, 4, 3),
        ]
        products += [(32, 128, 4, 4), (32, 128, 4, 6), (32, 64, 4, 6), (64, 128, 4, 4), (64, 64, 4, 6), (64, 128, 8, 4)]
        products += [(128, 64, 4, 4), (128, 64, 8, 5)]
        return [Config(16, Product(*sizes), Product(*sizes)) for sizes in products]
    tries = [(64, 64, 64, 4, 4), (64, 64, 128, 4, 3), (64, 128, 64, 4, 3), (64, 128, 64, 4, 4), (64, 128, 64, 8, 4)]
    tries += [
        (128, 64, 64, 4, 4),
        (128, 64, 64, 8, 4),
        (128, 128, 64, 8, 3),
        (128, 128, 64, 8, 4),
        (128, 64, 128, 8, 3),
    ]
    tries += [(32, 64, 64, 4, 4), (32, 128, 64, 4, 4), (64, 256, 64, 8, 3), (128, 256, 64, 8, 3)]
    return [Config(rows, Product(*sizes), Product(*sizes)) for rows, *sizes in tries]


def short(config: Config) -> str:
    """A configuration in few letters: rows, and for each product columns, depth, warps and stages."""
    of = lambda p: f"n{p.columns}_k{p.depth}_w{p.num_warps}_p{p.num_stages}"
    down = "" if config.down == config.up else f"_{of(config.down)}"
    return f"m{config.rows}_{of(config.up)}{down}"


def candidates_of(
    case: Case, tune: bool, interpret: bool = False, weights_dtype: str | None = None
) -> dict[str, Candidate]:
    """Named functions that compute a case, or choose its experts."""
    xla, triton = Run(implementation="xla"), Run(implementation="triton", interpret=interpret)
    by = lambda run: functools.partial(call, case, run=run)
    found: dict[str, Candidate] = {"triton": by(triton)}
    if tune:
        return found | {short(c): by(dataclasses.replace(triton, config=c)) for c in tuned(case, weights_dtype)}
    found["router triton"] = functools.partial(route, case, run=triton)
    found["router xla"] = functools.partial(route, case, run=xla)
    found["xla"] = by(xla)
    if case.tokens <= RAGGED_TOKENS and case.activation == "swiglu" and weights_dtype is None:
        found["ragged_dot"] = functools.partial(ragged, case)
    return found


def measure(
    case: Case,
    candidates: dict[str, Candidate],
    time_it: bool,
    copy_rate: float = 4.27e6,
    weights_dtype: str | None = None,
) -> list[Row]:
    """One row per candidate: its error, whether its bits are the first one's, and its times if it is right."""
    setup = prepare(case, weights_dtype)
    rows: list[Row] = []
    first = None
    with ThreadPoolExecutor(8 if time_it else 1) as pool:
        built = {name: pool.submit(compile_turns, setup, run) for name, run in candidates.items()}
        # Compiling XLA's programs may run kernels, which would be counted.
        wait(built.values())
        for name, future in built.items():
            row: Row = {"case": case.name, "candidate": name, "experts": setup.chosen}
            row |= {} if weights_dtype is None else {"weights_dtype": weights_dtype}
            rows.append(row)
            try:
                launch = future.result()
                out = launch()
                if name.startswith("router"):
                    error = float(jnp.max(jnp.abs(out - setup.turns[-1]["weights"])))
                else:
                    first = out if first is None else first
                    row["same_bits"] = bool(jnp.array_equal(out, first))
                    error = sampled_error(setup, out)
                row["error"] = error
                if not error <= LIMIT:
                    row["failed"] = f"the error is above {LIMIT}"
                elif time_it:
                    row |= microseconds(launch)
                    if not name.startswith("router"):
                        row["floor_us"] = round(setup.floor_us(copy_rate), 2)
                        row["ratio"] = round(row["us"] / row["floor_us"], 3)
            except Exception as error:  # of any kind: a configuration may not compile
                row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return rows


def main() -> None:
    parser = options_parser(__doc__, budget=280, tune=f"{TUNE} instead of the other paths")
    options = add_weights_dtype(parser).parse_args()
    rate = copy_bandwidth()

    def run(case: Case) -> list[Row]:
        candidates = candidates_of(case, options.tune, weights_dtype=options.weights_dtype)
        rows = measure(case, candidates, time_it=True, copy_rate=rate, weights_dtype=options.weights_dtype)
        return sorted(rows, key=lambda row: row.get("us", math.inf), reverse=options.tune)

    run_cases(options, QWEN_CASES, run)


if __name__ == "__main__":
    main()
