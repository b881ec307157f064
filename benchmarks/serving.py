"""Times the engine under load: `python -m benchmarks.serving --json benchmarks/results/serving.jsonl`.

Modes are timed one beside the other, with random weights in the shapes of published models.

A cell is a workload, a loop that sends it, a mode, and a way of drafting. All cells share one copy of random weights. The
engines of cells that differ only in mode exist at the same time. They are compiled before anything is timed, and every run
begins with an empty prefix cache. Every cell has its first run before any cell has its second. After each run a row with the
medians so far is written. The newest row of a case is the one that counts, so modes compare fairly whenever time runs out.

Prompts are random tokens and answers have a fixed length, so the weights affect only how many drafts are accepted. With
random weights greedy answers soon repeat themselves, so prompt lookup drafts better than on real text. A random draft head
is almost never right. Rows with drafts therefore say what a step costs, and `acceptance` says how many drafts were accepted.
"""

import argparse
import itertools
import math
import time
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
from flax import nnx

from benchmarks.cells import COMPILE_S, Cell, cells, engine_config
from benchmarks.idle import decode_idle
from benchmarks.random_model import MODELS, random_model
from benchmarks.rows import Row, append, facts
from mamba_align_jax.engine.config import SPECULATIONS
from mamba_align_jax.engine.running.engine import Engine
from mamba_align_jax.load.bench import COMPARED_MODES, MODES
from mamba_align_jax.load.runs import free_pools, medians, run_load

# The smallest value that each option may have, of the options that take whole numbers.
_MINIMA = MappingProxyType(
    dict.fromkeys(("seed", "prefix", "suffix", "turn", "drafts", "reasoning"), 0)
    | dict.fromkeys(("runs", "concurrency", "prompts", "prefixes", "output"), 1)
    | dict.fromkeys(("conversations", "turns", "first", "turn_output"), 1)
    | dict.fromkeys(("agents", "agent_turns", "tools", "agent_turn", "answer"), 1)
    | dict.fromkeys(("idle", "block_size", "kv_page_size", "max_num_batched_tokens", "max_prefill_rows"), 1)
)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the benchmark's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    several = dict(action="append")
    parser.add_argument("--model", choices=MODELS, default="qwen3.5-4b", help="the shapes of the random weights")
    parser.add_argument(
        "--workload",
        choices=("prefix_repetition", "multi_turn", "agents"),
        **several,
        help="default: prefix_repetition",
    )
    parser.add_argument("--loop", choices=("closed", "open"), **several, help="default: closed")
    parser.add_argument("--mode", choices=MODES, **several, help=f"default: {', '.join(COMPARED_MODES)}")
    parser.add_argument("--drafts", type=int, **several, help="draft tokens in each step; default: 0")
    parser.add_argument("--speculation", choices=SPECULATIONS, **several, help="what drafts; default: prompt_lookup")
    parser.add_argument("--stepping", choices=("sync", "async"), default="sync")
    parser.add_argument("--runs", type=int, default=3, help="runs of each cell; their medians are written")
    parser.add_argument("--concurrency", type=int, default=16, help="requests that run at once")
    parser.add_argument("--rate", type=float, default=2.0, help="sessions per second of the open loop")
    parser.add_argument("--seed", type=int, default=13)
    sizes = parser.add_argument_group("prefix_repetition")
    sizes.add_argument(
        "--prompts", type=int, default=64, help="the published workload has 512, which take 8 times as long"
    )
    sizes.add_argument("--prefix", type=int, default=4096, help="tokens of a shared prefix")
    sizes.add_argument("--prefixes", type=int, default=1, help="different prefixes")
    sizes.add_argument("--suffix", type=int, default=128, help="tokens that only one prompt has")
    sizes.add_argument("--output", type=int, default=512, help="tokens of each answer")
    sizes = parser.add_argument_group("multi_turn")
    sizes.add_argument("--conversations", type=int, default=16)
    sizes.add_argument("--turns", type=int, default=8)
    sizes.add_argument("--first", type=int, default=1024, help="tokens of the first prompt")
    sizes.add_argument("--turn", type=int, default=128, help="new tokens of each later turn")
    sizes.add_argument("--turn-output", type=int, default=256, help="tokens of each answer")
    sizes = parser.add_argument_group("agents")
    sizes.add_argument("--agents", type=int, default=8, help="sessions that share their tools")
    sizes.add_argument("--agent-turns", type=int, default=20)
    sizes.add_argument("--tools", type=int, default=6000, help="tokens of the instructions and tools")
    sizes.add_argument("--agent-turn", type=int, default=200, help="new tokens of each turn")
    sizes.add_argument("--reasoning", type=int, default=500, help="tokens of each answer that later prompts leave out")
    sizes.add_argument("--answer", type=int, default=100, help="tokens of each answer that later prompts contain")
    sizes = parser.add_argument_group("engine")
    sizes.add_argument("--block-size", type=int, default=512)
    sizes.add_argument("--kv-page-size", type=int, default=16)
    sizes.add_argument("--max-num-batched-tokens", type=int, default=2048)
    sizes.add_argument("--max-prefill-rows", type=int, default=4)
    parser.add_argument("--idle", type=int, metavar="STEPS", help="trace so many decode steps for the GPU's idle share")
    parser.add_argument("--no-load", action="store_true", help="with --idle: measure nothing else")
    parser.add_argument("--trace-dir", type=Path, help="where --idle writes its traces")
    parser.add_argument(
        "--budget", type=float, default=math.inf, metavar="SECONDS", help="start no run that is expected to end later"
    )
    parser.add_argument("--compilation-cache", metavar="DIR", help="keep compiled programs in DIR for later processes")
    parser.add_argument("--json", metavar="FILE", help="append a JSON row to FILE after every run: the medians so far")
    parser.add_argument("--commit", default="unknown", help="the commit that rows name")
    return parser


def check(options: argparse.Namespace) -> None:
    """Checks the options of `parser`, all of them, also those that the chosen workloads and loops leave unused.

    Raises:
        ValueError: An option has a value that it can't have. The error names the option.
    """
    for name, minimum in _MINIMA.items():
        given = getattr(options, name)
        for number in given if isinstance(given, list) else [] if given is None else [given]:
            _require(number >= minimum, name.replace("_", "-"), f"at least {minimum}", number)
    _require(options.prefix + options.suffix > 0, "suffix", "at least 1 with --prefix 0", options.suffix)
    _require(0 < options.rate < math.inf, "rate", "finite and greater than 0", options.rate)
    _require(options.budget >= 0, "budget", "at least 0", options.budget)


def _require(is_good: bool, option: str, wanted: str, got: Any) -> None:
    if not is_good:
        raise ValueError(f"--{option} must be {wanted}, got {got}")


class Results:
    """Completes rows of results, writes them to `--json`, and keeps them in `rows`."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Reads the machine's facts. `options` are those of `parser`."""
        self.options = options
        self.facts = facts(options.commit)
        self.rows: list[Row] = []

    def keep(self, cell: Cell, engine: Engine, case: str, row: Row) -> None:
        """Adds to `row` what every row says of its cell, its engine and the machine, then writes and keeps it."""
        options, config = self.options, engine.config
        row = {
            "case": f"{case} {options.stepping}",
            "mode": cell.mode,
            "speculation": cell.speculation,
            "drafts": cell.num_drafts,
            "async_stepping": options.stepping == "async",
        } | row | {
            "model": options.model,
            "block_size": config.block_size,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "max_prefill_rows": config.max_prefill_rows,
            "max_num_seqs": config.max_num_seqs,
            "max_model_len": config.max_model_len,
            "num_state_blocks": config.num_state_blocks,
            "num_kv_pages": config.num_kv_pages,
        } | self.facts  # fmt: skip
        self.rows.append(row)
        append(options.json, row)


def run_group(model: Any, group: list[Cell], longest: int, results: Results, deadline: float) -> None:
    """Measures cells that draft in the same way. Their engines exist together; each round runs every cell once.

    Args:
        model: The model that all engines serve.
        group: The cells.
        longest: The number of tokens of the longest sequence of any cell.
        results: Takes the rows.
        deadline: Starts no run that is expected to end after this time of `time.perf_counter`.
    """
    options, engines = results.options, {}
    runs: dict[Cell, list[Row]] = {cell: [] for cell in group}
    for number in range(options.runs):
        for cell, rows in runs.items():
            expected = rows[-1]["seconds"] if rows else 0.0 if options.model == "tiny" else cell.guess_s
            expected = 0.0 if options.no_load else expected
            if cell.engine not in engines and options.model != "tiny":
                expected += COMPILE_S
            if time.perf_counter() + expected > deadline:
                print(f"{cell.name}: no time left for run {number + 1} of {options.runs}", flush=True)
                continue
            if cell.engine not in engines:
                engines[cell.engine] = start_engine(model, cell, longest, results)
            if options.no_load:
                continue
            print(f"{cell.name}: run {number + 1}, about {expected:.0f} s", flush=True)
            rows.append(run_load(engines[cell.engine], cell.workload, cell.loop, options.seed))
            print(f"  {rows[-1]['seconds']:.1f} s, {_short(rows[-1])}", flush=True)
            row = {"workload": cell.workload.name, "loop": cell.loop.name} | cell.sizes | medians(rows)
            results.keep(cell, engines[cell.engine], cell.name, row)
    for engine in engines.values():
        free_pools(engine)


def start_engine(model: Any, cell: Cell, longest: int, results: Results) -> Engine:
    """Makes and compiles a cell's engine. With `--idle`, it then traces the engine's decode steps and keeps a row."""
    options = results.options
    engine = Engine(model, engine_config(options, cell, model, longest))
    print(f"{cell.engine}: {engine.sizes}", flush=True)
    print(f"  compiled in {engine.warmup(draws=False):.1f} s", flush=True)
    row = decode_idle(engine, cell.workload, options.idle, options.trace_dir) if options.idle else None
    if row is not None:
        row = {"workload": "decode_idle", "context": cell.workload.name} | row
        results.keep(cell, engine, f"decode_idle {cell.engine}", row)
    return engine


def _short(row: Row) -> str:
    return (
        f"TTFT {row['ttft_ms_mean']:.1f} ms (p99 {row['ttft_ms_p99']:.1f}), TPOT {row['tpot_ms_mean']:.2f} ms, "
        f"ITL p99 {row['itl_ms_p99']:.2f} ms, {row['output_tokens_per_s']:.0f} tokens/s, "
        f"hits {row['hit_rate_of_attainable']:.3f} of attainable"
    )


def main(arguments: list[str] | None = None) -> list[Row]:
    """Runs the cells that the options ask for, and returns the rows in the order in which they were written.

    Raises:
        ValueError: See `check`.
    """
    begin = time.perf_counter()
    options = parser().parse_args(arguments)
    check(options)
    if options.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", options.compilation_cache)
    chosen, results = list(cells(options)), Results(options)
    longest = max(cell.workload.longest for cell in chosen)
    guess = 0.0 if options.no_load else options.runs * sum(cell.guess_s for cell in chosen)
    print(results.facts, flush=True)
    print(f"{len(chosen)} cells; about {guess:.0f} s on an H200, and the time to compile", flush=True)
    head = any(cell.speculation == "mtp" for cell in chosen)
    model = random_model(replace(MODELS[options.model], mtp_num_hidden_layers=int(head)))
    jax.block_until_ready(nnx.state(model))
    print(f"weights: {time.perf_counter() - begin:.1f} s", flush=True)
    for _, group in itertools.groupby(chosen, key=lambda cell: (cell.num_drafts, cell.speculation)):
        run_group(model, list(group), longest, results, begin + options.budget)
    return results.rows


if __name__ == "__main__":
    main()
