"""Times attention over pages: `python -m benchmarks.attention --json benchmarks/results/FILE.jsonl --commit COMMIT`.

Every case is compared with float32 first, on a sample of its tokens, with NaN in the pages after each row's end. `us` is the
sum of the durations of a call's kernels. Beside it are the times of the "xla" implementation and of gathering all pages
of every row, which the models did before. `--tune` times several configurations instead, and prints the fastest last.
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

from benchmarks.cases import TUNE, options_parser, run_cases
from benchmarks.rows import Row
from benchmarks.timing import kernel_times
from benchmarks.workloads.paged_attention import DECODE_CASES, PROMPT_CASES, Case
from pallas_kernels import Rows, Run, paged_attention, token_rows
from pallas_kernels.paged_attention.config import Config

ROTATION_BYTES = 5 * 60 * 2**20  # five times an H200's L2
ROUNDS = 5
SAMPLES = 24  # tokens that are compared with float32
GATHER_BYTES = 8 * 2**30  # of what the old path gathers at most
LIMIT = 1e-2  # of the relative error

Arguments = dict[str, Any]
Attend = Callable[[Arguments, Any], jax.Array]  # (arguments, layer) -> out


@dataclasses.dataclass(frozen=True)
class Setup:
    """A case's arrays, and what a call of it must read and multiply."""

    case: Case
    layers: int
    arguments: Arguments

    @property
    def bytes(self) -> int:
        """Keys and values that a call reads, each once."""
        case = self.case
        dims = case.key_dim + (0 if case.value_dim else case.key_dim)
        keys = sum(n + c for n, c in zip(case.lengths, case.computed, strict=True) if n)
        return keys * case.kv_heads * dims * jnp.dtype(case.dtype).itemsize

    @property
    def flops(self) -> int:
        """Operations of the products of every token with the keys that it sees."""
        case = self.case
        seen = sum(n * c + n * (n + 1) // 2 for n, c in zip(case.lengths, case.computed, strict=True))
        return 2 * seen * case.heads * (case.key_dim + case.out_dim)


def prepare(case: Case) -> Setup:
    """Draws a case's arrays on the device. There are enough layers that a call finds nothing of the last one in the L2."""
    ends = np.array([n + c if n else 0 for n, c in zip(case.lengths, case.computed, strict=True)])
    counts = -(-ends // case.page_size)
    num_pages = 1 + int(counts.sum())
    table = np.zeros((len(ends), -(-case.max_model_len // case.page_size)), np.int32)
    filled = np.zeros(num_pages, np.int32)  # of each page
    pages = 1 + np.random.default_rng(0).permutation(num_pages - 1)
    for row, (end, count) in enumerate(zip(ends, counts, strict=True)):
        table[row, :count], pages = pages[:count], pages[count:]
        filled[table[row, :count]] = np.minimum(end - case.page_size * np.arange(count), case.page_size)
    setup = Setup(case, 1, {})
    layers = min(16, math.ceil(ROTATION_BYTES / setup.bytes))

    @functools.partial(jax.jit, static_argnums=1)
    def pool(key, dim, filled):
        def layer(key):
            shape = (num_pages, case.page_size, case.kv_heads, dim)
            values = jax.random.normal(key, shape, jnp.bfloat16).astype(case.dtype)
            exists = jnp.arange(case.page_size) < filled[:, None]
            return jnp.where(exists[:, :, None, None], values, jnp.nan)

        return jax.lax.map(layer, jax.random.split(key, layers))

    keys = jax.random.split(jax.random.key(0), 3)
    # Scores spread as those of a trained model, whose largest weights are not all alike.
    q = 2 * jax.random.normal(keys[2], (sum(case.lengths), case.heads, case.key_dim))
    arguments = dict(
        q=q.astype(case.dtype),
        keys=pool(keys[0], case.key_dim, filled),
        values=None if case.value_dim else pool(keys[1], case.key_dim, filled),
        query_start_loc=jnp.asarray(np.cumsum([0, *case.lengths]), jnp.int32),
        num_computed_tokens=jnp.asarray(case.computed, jnp.int32),
        page_table=jnp.asarray(table),
    )
    return Setup(case, layers, arguments)


def call(case: Case, arguments: Arguments, layer: Any, **options: Any) -> jax.Array:
    """One call of the op."""
    given = dict(arguments)
    fields = {name: given.pop(name) for name in ("query_start_loc", "num_computed_tokens")}
    fields |= {} if case.window is None else dict(max_query_tokens=case.window)
    rows = Rows(**fields, layer=layer)
    return paged_attention(**given, rows=rows, value_dim=case.value_dim, run=Run(**options))


def gather(case: Case, arguments: Arguments, layer: Any) -> jax.Array:
    """Attends as the models did before: it gathers all pages of a row, for 64 tokens of a prompt at a time."""
    table, keys, values = (arguments[name] for name in ("page_table", "keys", "values"))
    width = -(-max(n + c for n, c in zip(case.lengths, case.computed, strict=True)) // case.page_size)
    step = case.window or 64
    group = case.heads // case.kv_heads

    def piece(row, start):
        take = lambda pool: pool[layer, table[row, :width]].reshape(-1, *pool.shape[3:])
        k = take(keys)
        v = k[..., : case.value_dim] if values is None else take(values)
        loc = arguments["query_start_loc"]
        first = arguments["num_computed_tokens"][row] + start - loc[row]
        position, token = jnp.arange(k.shape[0], dtype=jnp.int32), jnp.arange(step, dtype=jnp.int32)
        end = arguments["num_computed_tokens"][row] + loc[row + 1] - loc[row]
        k, v = (jnp.where((position < end)[:, None, None], x, 0) for x in (k, v))
        q = arguments["q"][jnp.minimum(start + token, arguments["q"].shape[0] - 1)]
        q = q.reshape(step, case.kv_heads, group, -1)
        s = jnp.einsum("thgd,lhd->hgtl", q, k, preferred_element_type=jnp.float32) * case.key_dim**-0.5
        w = jax.nn.softmax(jnp.where(position <= first + token[:, None], s, -1e30), axis=-1).astype(v.dtype)
        return jnp.einsum("hgtl,lhd->thgd", w, v, preferred_element_type=jnp.float32).astype(v.dtype)

    loc = np.cumsum([0, *case.lengths])
    starts = [(r, s) for r in range(len(case.lengths)) for s in range(loc[r], loc[r + 1], step)]
    row, start = (jnp.asarray(x, jnp.int32) for x in zip(*starts, strict=True))
    if len(starts) * gathered_bytes(case) / len(case.lengths) <= GATHER_BYTES / 4:
        out = jax.vmap(piece)(row, start)
    else:
        out = jax.lax.map(lambda x: piece(*x), (row, start), batch_size=8)
    place = [n * step + t for n, (r, s) in enumerate(starts) for t in range(min(step, loc[r + 1] - s))]
    return out.reshape(-1, case.heads, case.out_dim)[np.array(place)]


def gathered_bytes(case: Case) -> int:
    """What `gather` takes out of the pages for all rows, in float32."""
    longest = max(n + c for n, c in zip(case.lengths, case.computed, strict=True))
    return 4 * len(case.lengths) * longest * case.kv_heads * (case.key_dim + case.out_dim)


def sampled_error(setup: Setup, out: jax.Array) -> float:
    """||out - wanted|| / ||wanted|| of a sample of the tokens in layer 0, wanted being float32's."""
    case, arguments = setup.case, setup.arguments
    total = sum(case.lengths)
    edges = np.cumsum(case.lengths)
    sample = np.unique([*(edges[edges > 0] - 1)[:8], *np.linspace(0, total - 1, SAMPLES).astype(int)])
    rows = token_rows(arguments["query_start_loc"], total)
    width = -(-max(n + c for n, c in zip(case.lengths, case.computed, strict=True)) // case.page_size)

    @jax.jit
    def wanted(arguments, sample):
        def of_token(token):
            row = rows.row[token]
            seen = arguments["num_computed_tokens"][row] + rows.offset[token] + 1
            take = lambda pool: pool[0, arguments["page_table"][row, :width]].reshape(-1, *pool.shape[3:])
            k = take(arguments["keys"])
            v = k[..., : case.value_dim] if case.value_dim else take(arguments["values"])
            position = jnp.arange(k.shape[0], dtype=jnp.int32)
            k, v = (jnp.where((position < seen)[:, None, None], x, 0).astype(jnp.float32) for x in (k, v))
            q = arguments["q"][token].astype(jnp.float32).reshape(case.kv_heads, -1, case.key_dim)
            s = jnp.einsum("hgd,lhd->hgl", q, k, precision="highest") * case.key_dim**-0.5
            w = jax.nn.softmax(jnp.where(position < seen, s, -jnp.inf), axis=-1)
            return jnp.einsum("hgl,lhd->hgd", w, v, precision="highest").reshape(case.heads, -1)

        return jax.lax.map(of_token, sample)

    want = np.asarray(wanted(arguments, jnp.asarray(sample, jnp.int32)), np.float64)
    got = np.asarray(out[sample].astype(jnp.float32), np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def compile_turns(setup: Setup, run: Attend) -> Callable[[int], jax.Array]:
    """Returns a function that runs some calls, each on the next layer, and returns the result of the last one."""
    case = setup.case

    def loop(arguments, turns):
        def body(turn, carry):
            q, _ = carry
            out = run(arguments | dict(q=q), jax.lax.rem(turn, jnp.int32(setup.layers)))
            return jax.lax.optimization_barrier((q, out))

        out = jnp.zeros((*arguments["q"].shape[:2], case.out_dim), case.dtype)
        return jax.lax.fori_loop(jnp.int32(0), turns, body, (arguments["q"], out))[1]

    compiled = jax.jit(loop).lower(setup.arguments, jnp.int32(1)).compile()
    return lambda turns: jax.block_until_ready(compiled(setup.arguments, jnp.int32(turns)))


def microseconds(launch: Callable[[int], Any], turns: int) -> dict[str, float]:
    """Median microseconds of a call: of all kernels, and of the op's two kernels.

    `us` is the op's kernels if there are any. The others are those of the loop, and indices that a model's layers share.
    """
    launch(turns)
    rounds = []
    for _ in range(ROUNDS):
        each = {"us": 0.0, "all_us": 0.0, "attend_us": 0.0, "merge_us": 0.0}
        for name, us in kernel_times(lambda: launch(turns)):
            each["all_us"] += us / turns
            if name.startswith("paged_attention"):
                each["merge_us" if name.startswith("paged_attention_merge") else "attend_us"] += us / turns
        each["us"] = each["attend_us"] + each["merge_us"] or each["all_us"]
        rounds.append(each)
    return {key: round(statistics.median(each[key] for each in rounds), 2) for key in rounds[0]}


def tuned(case: Case) -> list[Config]:
    """The configurations that `--tune` tries."""
    if case.window is None:
        if case.value_dim:
            tries = [
                (64, 32, 4096, 4, (), 8, 2),
                (64, 64, 4096, 4, (), 8, 1),
                (64, 64, 4096, 4, (), 8, 2),
            ]
        else:
            tries = [
                (128, 64, 4096, 4, (), 8, 2),
                (64, 64, 4096, 4, (), 8, 2),
                (64, 64, 4096, 4, (), 4, 2),
                (128, 32, 4096, 4, (), 8, 3),
            ]
            tries += [(64, 32, 4096, 4, (), 4, 2), (128, 64, 2048, 8, (), 8, 2)]
        return [Config(*values) for values in tries]
    if case.value_dim:
        tries = [(32, 32, 512, 32, (2,), 8, 2), (32, 32, 512, 32, (2,), 8, 3), (32, 64, 512, 32, (2,), 8, 2)]
        tries += [(32, 32, 256, 32, (2, 4), 8, 3), (16, 32, 512, 32, (2,), 4, 3), (64, 32, 512, 32, (2,), 8, 2)]
    else:
        tries = [(32, 64, 128, 128, (4, 8), 4, 3), (32, 64, 128, 128, (4, 8), 4, 2), (32, 32, 128, 128, (4, 8), 4, 3)]
        tries += [(32, 32, 128, 128, (4, 8), 4, 2), (32, 32, 128, 128, (4, 8), 4, 4), (32, 64, 512, 32, (2,), 4, 3)]
        tries += [(32, 64, 256, 64, (2, 4), 4, 3), (16, 32, 128, 128, (4, 8), 4, 3), (16, 32, 128, 128, (4, 8), 2, 3)]
    return [
        *(Config(*values) for values in tries),
        *(Config(*tries[0], programs=programs, unit=unit) for programs in (4, 8, 32) for unit in (1, tries[0][4][-1])),
    ]


def measure(case: Case, candidates: dict[str, Attend], time_it: bool) -> list[Row]:
    """One row per candidate: its error, whether its bits are the first one's, and its times if it is right."""
    setup = prepare(case)
    turns = max(4, min(16, round(4000 / (setup.bytes / 4e6 + setup.flops / 3e8))))

    rows: list[Row] = []
    first = None
    with ThreadPoolExecutor(8) as pool:
        built = {name: pool.submit(compile_turns, setup, run) for name, run in candidates.items()}
        # Compiling XLA's programs may run kernels, which would be counted.
        wait(built.values())
        for name, future in built.items():
            row: Row = {"case": case.name, "candidate": name}
            rows.append(row)
            try:
                launch = future.result()
                out = launch(1)
                first = out if first is None else first
                row["rms_error"] = sampled_error(setup, out)
                row["same_bits"] = bool(jnp.array_equal(out, first))
                if not row["rms_error"] <= LIMIT:
                    row["failed"] = f"rms_error is above {LIMIT}"
                elif time_it:
                    row |= microseconds(launch, turns)
                    row |= {"tb_s": round(setup.bytes / row["us"] / 1e6, 3)}
                    row |= {"tflop_s": round(setup.flops / row["us"] / 1e6, 1)}
            except Exception as error:  # of any kind: a configuration may not compile
                row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return rows


def short(config: Config) -> str:
    """A configuration in few letters: queries, block, split, shares, warps, stages, joined groups, programs, unit."""
    text = f"q{config.queries}_n{config.block}_s{config.split}x{config.shares}_w{config.num_warps}_p{config.num_stages}"
    text += f"_j{'-'.join(map(str, config.groups))}" if config.groups else ""
    return text + "".join(f"_{name}{n}" for name, n in (("g", config.programs), ("u", config.unit)) if n)


def candidates_of(case: Case, tune: bool, **options: Any) -> dict[str, Attend]:
    """Named functions that compute a case."""
    run = lambda **how: functools.partial(call, case, **how)
    found: dict[str, Attend] = {"triton": run(implementation="triton", **options)}
    if tune:
        return found | {short(c): run(implementation="triton", config=c, **options) for c in tuned(case)}
    if case.window is None and not case.value_dim:
        found["mosaic_gpu"] = run(implementation="mosaic_gpu")
    found["xla"] = run(implementation="xla")
    if gathered_bytes(case) <= GATHER_BYTES:
        found["gather"] = functools.partial(gather, case)
    return found


def main() -> None:
    options = options_parser(__doc__, budget=280, tune=f"{TUNE} instead of the other paths").parse_args()

    def run(case: Case) -> list[Row]:
        rows = measure(case, candidates_of(case, options.tune), time_it=True)
        return sorted(rows, key=lambda row: row.get("us", math.inf), reverse=options.tune)

    run_cases(options, (*DECODE_CASES, *PROMPT_CASES), run)


if __name__ == "__main__":
    main()
