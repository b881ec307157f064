"""Times the engine under load, mode by mode: `python -m benchmarks.serving --json benchmarks/results/serving.jsonl`.

A cell is a workload, a loop, a mode, and who drafts how many tokens. All share one copy of random weights. Engines that
differ in their mode are there together, warm before they are timed, and every run starts with an empty cache. All cells
have their first run before any has its second; after each run a row is written of the medians so far, so that the newest
row of a case counts and modes compare fairly whenever time runs out.

Prompts are random tokens and answers as long as they are told, so the weights don't matter, but for how many drafts they
accept. With random weights greedy answers soon repeat themselves, and prompt lookup does better than on text; a random
draft head is right next to never. Rows with drafts say what a step costs, and `acceptance` how many tokens it came to.
"""

import argparse
import gc
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from benchmarks import idle, timing
from benchmarks.load import ClosedLoop, MultiTurn, OpenLoop, PrefixRepetition, Run, Workload, serve, summary
from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.demo import MODES
from mamba_align_jax.engine.sizing import align_config
from mamba_align_jax.models.qwen3_5 import FULL, LINEAR, Config, Model

Row = dict[str, Any]

_QWEN3_5_4B = Config(
    vocab_size=248320,
    hidden_size=2560,
    intermediate_size=9216,
    num_hidden_layers=32,
    layer_types=(LINEAR, LINEAR, LINEAR, FULL) * 8,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    max_position_embeddings=262144,
    tie_word_embeddings=True,
)
_TINY = replace(
    _QWEN3_5_4B,
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    layer_types=(LINEAR, FULL),
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    dtype="float32",
)
MODELS = {"qwen3.5-4b": _QWEN3_5_4B, "tiny": _TINY}
# By the rows' names, the engine's.
SPECULATIONS = {"prompt_lookup": "prompt_lookup", "mtp": "mtp"}
# Guesses for the large model on an H200, so that nobody starts hours of work unawares: a decode step of 16 rows for a token
# of each, what a prompt token adds, and compiling an engine's programs.
_STEP_S = {"none": 6.2e-3, "prompt_lookup": 3.5e-3, "mtp": 1e-2}
_PROMPT_TOKEN_S, _COMPILE_S = 2.3e-5, 40.0


def random_model(config: Config, seed: int = 0) -> Model:
    """The model with weights drawn on the device, in its own dtype, one period of layers after the other."""
    graph, shapes = nnx.split(nnx.eval_shape(lambda: Model(config, nnx.Rngs(0))))
    period = config.layer_types.index(FULL) + 1
    one = replace(config, num_hidden_layers=period, layer_types=config.layer_types[:period])
    # Compiled once for all periods; this generator takes one instruction per tensor.
    draw = jax.jit(lambda key: nnx.state(Model(one, nnx.Rngs(key))))
    weights = {}
    for first in range(0, config.num_hidden_layers, period):
        for place, variable in nnx.to_flat_state(draw(jax.random.key(seed + first, impl="rbg"))):
            if place[0] == "layers":
                place = (place[0], int(str(place[1])) + first, *place[2:])
            weights.setdefault(place, variable)
    state = nnx.from_flat_state(weights.items())
    assert jax.tree.structure(state) == jax.tree.structure(shapes)
    return nnx.merge(graph, state)


@dataclass(frozen=True)
class Cell:
    """What is timed at once."""

    workload: Workload
    loop: ClosedLoop | OpenLoop
    mode: str
    speculation: str
    drafts: int

    @property
    def engine(self) -> str:
        """What sets its engine apart from the others'."""
        return f"{self.mode} {self.speculation} K{self.drafts}" if self.drafts else f"{self.mode} K0"

    @property
    def name(self) -> str:
        """Of its rows of results, with how the engine steps."""
        return f"{self.workload.name} x{self.workload.num_requests} {self.loop.name} {self.engine}"

    @property
    def sizes(self) -> Row:
        """Of its workload and loop."""
        fields = vars(self.workload) | vars(self.loop)
        return {name: value for name, value in fields.items() if name not in ("name", "seed")}

    @property
    def guess_s(self) -> float:
        """About how long a run on an H200 takes, without compiling."""
        requests, turns, step = self.workload.num_requests, 1, _STEP_S[self.speculation]
        if isinstance(self.workload, PrefixRepetition):
            cached = 0 if self.mode == "none" else self.workload.prefix
            tokens = self.workload.prefix + self.workload.suffix - cached
        else:
            turns = self.workload.turns
            tokens = self.workload.longest / 2 if self.mode == "none" else self.workload.turn + self.workload.output
        busy = requests * (self.workload.output / 16 * step + tokens * _PROMPT_TOKEN_S)
        if isinstance(self.loop, ClosedLoop):
            return busy
        return max(busy, requests / turns / self.loop.rate + turns * self.workload.output * step)


def engine_config(options: argparse.Namespace, cell: Cell, model: Any, longest: int) -> EngineConfig:
    """Sizes that depend on the options alone, so that cells of one mode and number of drafts share their programs.

    State blocks: what running requests hold, and four more for each, of which it keeps two. KV pages: three times what
    running requests hold. What is shared stays, being used all the time; what nobody wants again is evicted.
    """
    how = dict(async_stepping=True) if options.stepping == "async" else {}
    fields: dict[str, Any] = MODES[cell.mode] | how | dict(
        block_size=options.block_size,
        kv_page_size=options.kv_page_size,
        max_model_len=longest,
        max_num_seqs=options.concurrency,
        max_num_batched_tokens=options.max_num_batched_tokens,
        num_speculative_tokens=cell.drafts,
        speculation=SPECULATIONS.get(cell.speculation, "prompt_lookup"),
        num_kv_pages=1 + 3 * options.concurrency * math.ceil(longest / options.kv_page_size),
    )  # fmt: skip
    config = EngineConfig(**fields)
    held = align_config(config, model).blocks_per_request(config.steps_in_flight)
    return EngineConfig(**fields, num_state_blocks=1 + options.concurrency * (held + 4))


def free(engine: Engine) -> None:
    """Deletes the pools: the engine is of no use afterwards."""
    for array in jax.tree.leaves(engine.runner.device_state):
        array.delete()
    gc.collect()


def _step(engine: Engine) -> None:
    for output in engine.step():
        if output.error is not None:
            raise output.error


def run_cell(engine: Engine, cell: Cell, options: argparse.Namespace) -> Row:
    """One run of a cell."""
    engine.reset_prefix_cache()
    before = engine.stats
    sessions = cell.workload.sessions(engine.model_config.vocab_size, options.seed)
    run = serve(engine, sessions, cell.workload.output, cell.loop)
    return summary(run, options.block_size) | _counters(engine, before, run)


def medians(rows: list[Row]) -> Row:
    """Of a cell's runs."""
    each = {f"{name}_runs": [row[f"{name}_mean"] for row in rows] for name in ("ttft_ms", "tpot_ms")}
    return {name: _median([row[name] for row in rows]) for name in rows[0]} | {"runs": len(rows)} | each


def _median(values: list[Any]) -> Any:
    """Of numbers, or place by place of lists of numbers."""
    if isinstance(values[0], list):
        return [statistics.median(place) for place in zip(*values, strict=True)]
    return statistics.median(values)


def _counters(engine: Engine, before: Any, run: Run) -> Row:
    """What the engine counted since `before`."""
    after = engine.stats
    drafted, accepted = (
        [new - old for new, old in zip(getattr(after, name), getattr(before, name), strict=True)]
        for name in ("draft_tokens", "accepted_tokens")
    )
    return {
        "steps": after.steps - before.steps,
        "preemptions": after.preemptions - before.preemptions,
        "evicted_state_blocks": after.evicted_state_blocks - before.evicted_state_blocks,
        "null_reads": after.null_reads - before.null_reads,
        "state_bytes_copied": after.state_bytes_copied - before.state_bytes_copied,
        "prefill_tokens": after.prefill_tokens - before.prefill_tokens,
        "acceptance": [yes / max(number, 1) for number, yes in zip(drafted, accepted, strict=True)],
        "requests": len(run.requests),
    }


def _short(row: Row) -> str:
    return (
        f"TTFT {row['ttft_ms_mean']:.1f} ms (p99 {row['ttft_ms_p99']:.1f}), TPOT {row['tpot_ms_mean']:.2f} ms, "
        f"ITL p99 {row['itl_ms_p99']:.2f} ms, {row['output_tokens_per_s']:.0f} tokens/s, "
        f"hits {row['hit_rate_of_attainable']:.3f} of attainable"
    )


def decode_idle(engine: Engine, workload: Workload, steps: int, directory: Path | None = None) -> Row | None:
    """The GPU's idle share of decode steps with every row busy, at the workload's context; None if the trace is unreadable.

    `span_us` is the wall-clock time of as many steps just before, untraced: tracing slows the host down.

    Raises:
        ValueError: answers are too short for so many steps, if all drafts were accepted.
    """
    most = workload.output // (4 * (1 + engine.config.num_speculative_tokens))
    if steps > most:
        raise ValueError(f"--idle must be at most {most} for answers of {workload.output} tokens, got {steps}")
    engine.reset_prefix_cache()
    rows = engine.config.max_num_seqs
    sessions = workload.sessions(engine.model_config.vocab_size, 0)
    params = SamplingParams(max_tokens=workload.output, ignore_eos=True)
    ids = [engine.add_request(sessions[number % len(sessions)][0], params) for number in range(rows)]
    while engine.scheduler.waiting or any(not request.token_times for request in engine.scheduler.running):
        _step(engine)
    running = len(engine.scheduler.running)
    assert running == rows, f"{running} of {rows} requests run"

    def run() -> None:
        for _ in range(steps):
            _step(engine)
        jax.block_until_ready(engine.runner.device_state)

    run()
    begin = time.perf_counter()
    run()
    span = time.perf_counter() - begin
    trace = idle.record(run, directory)
    for request in ids:
        engine.abort(request)
    engine.step()
    print(f"  trace: {trace}", flush=True)
    try:
        row = idle.read(trace, steps)
    except RuntimeError as error:
        # It can be read again, by `benchmarks.idle`, and the load is worth having meanwhile.
        print(f"  {error}", flush=True)
        return None
    print(f"  idle {row['idle_share']:.4f} of a step of {row['step_us']:.0f} us: {row}", flush=True)
    return row | {"rows": rows, "span_us": 1e6 * span / steps}


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """Of the options; those of one speculation follow each other, and differ first in their mode."""
    workloads: dict[str, Workload] = {
        "prefix_repetition": PrefixRepetition(
            prefix=options.prefix, suffix=options.suffix, output=options.output, prefixes=options.prefixes,
            prompts=options.prompts,
        ),
        "multi_turn": MultiTurn(
            conversations=options.conversations, turns=options.turns, first=options.first, turn=options.turn,
            output=options.turn_output,
        ),
    }  # fmt: skip
    loops = {"closed": ClosedLoop(options.concurrency), "open": OpenLoop(options.rate, options.seed)}
    modes = options.mode or list(MODES)
    loads = [
        (workload, loop)
        for workload in options.workload or ["prefix_repetition"]
        for loop in options.loop or ["closed"]
    ]
    for drafts in options.drafts or [0]:
        for speculation in (options.speculation or ["prompt_lookup"]) if drafts else ["none"]:
            for workload, loop in loads:
                yield from (Cell(workloads[workload], loops[loop], mode, speculation, drafts) for mode in modes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    several = dict(action="append")
    parser.add_argument("--model", choices=MODELS, default="qwen3.5-4b", help="shapes of the random weights")
    parser.add_argument("--workload", choices=("prefix_repetition", "multi_turn"), **several, help="default: the first")
    parser.add_argument("--loop", choices=("closed", "open"), **several, help="default: closed")
    parser.add_argument("--mode", choices=MODES, **several, help="default: all")
    parser.add_argument("--drafts", type=int, **several, help="draft tokens of a step; default: 0")
    parser.add_argument("--speculation", choices=SPECULATIONS, **several, help="who drafts; default: prompt_lookup")
    parser.add_argument("--stepping", choices=("sync", "async"), default="sync")
    parser.add_argument("--runs", type=int, default=3, help="of which the medians are kept")
    parser.add_argument("--concurrency", type=int, default=16, help="requests that run at once")
    parser.add_argument("--rate", type=float, default=2.0, help="sessions per second of the open loop")
    parser.add_argument("--seed", type=int, default=13)
    sizes = parser.add_argument_group("prefix_repetition")
    sizes.add_argument("--prompts", type=int, default=64, help="the workload's own 512 take eight times as long")
    sizes.add_argument("--prefix", type=int, default=4096)
    sizes.add_argument("--prefixes", type=int, default=1)
    sizes.add_argument("--suffix", type=int, default=128)
    sizes.add_argument("--output", type=int, default=512)
    sizes = parser.add_argument_group("multi_turn")
    sizes.add_argument("--conversations", type=int, default=16)
    sizes.add_argument("--turns", type=int, default=8)
    sizes.add_argument("--first", type=int, default=1024, help="tokens of the first prompt")
    sizes.add_argument("--turn", type=int, default=128, help="new tokens of each later one")
    sizes.add_argument("--turn-output", type=int, default=256)
    sizes = parser.add_argument_group("engine")
    sizes.add_argument("--block-size", type=int, default=512)
    sizes.add_argument("--kv-page-size", type=int, default=16)
    sizes.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument(
        "--idle", type=int, metavar="STEPS", help="measure the GPU's idle share of so many decode steps"
    )
    parser.add_argument("--no-load", action="store_true", help="with --idle: nothing else")
    parser.add_argument("--trace-dir", type=Path, help="where --idle leaves its traces")
    parser.add_argument(
        "--budget", type=float, default=math.inf, metavar="SECONDS", help="start nothing that should end later"
    )
    parser.add_argument("--compilation-cache", metavar="DIR", help="keep compiled programs there for the next process")
    parser.add_argument("--json", help="append a JSON row per run to this file: the medians so far")
    parser.add_argument("--commit", default="unknown")
    return parser


class Results:
    """Rows as they are written and returned."""

    def __init__(self, options: argparse.Namespace) -> None:
        """`options` say where rows go."""
        self.options, self.facts, self.rows = options, timing.facts(options.commit), []

    def keep(self, cell: Cell, engine: Engine, case: str, row: Row) -> None:
        """Adds what a row must say of a cell and its engine."""
        options, config = self.options, engine.config
        row = {
            "case": f"{case} {options.stepping}",
            "mode": cell.mode,
            "speculation": cell.speculation,
            "drafts": cell.drafts,
            "async_stepping": options.stepping == "async",
        } | row | {
            "model": options.model,
            "block_size": config.block_size,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "max_num_seqs": config.max_num_seqs,
            "max_model_len": config.max_model_len,
            "num_state_blocks": config.num_state_blocks,
            "num_kv_pages": config.num_kv_pages,
        } | self.facts  # fmt: skip
        self.rows.append(row)
        if options.json:
            with open(options.json, "a") as file:
                file.write(json.dumps(row) + "\n")


def run_group(model: Any, group: list[Cell], longest: int, results: Results, deadline: float) -> None:
    """Runs cells of one speculation, whose engines are there together: run after run, each time all cells."""
    options, engines = results.options, {}
    runs: dict[Cell, list[Row]] = {cell: [] for cell in group}
    for number in range(options.runs):
        for cell, rows in runs.items():
            expected = rows[-1]["seconds"] if rows else 0.0 if options.model == "tiny" else cell.guess_s
            expected = 0.0 if options.no_load else expected
            if cell.engine not in engines and options.model != "tiny":
                expected += _COMPILE_S
            if time.perf_counter() + expected > deadline:
                print(f"{cell.name}: no time left for run {number + 1} of {options.runs}", flush=True)
                continue
            if cell.engine not in engines:
                engines[cell.engine] = _start(model, cell, longest, results)
            if options.no_load:
                continue
            print(f"{cell.name}: run {number + 1}, about {expected:.0f} s", flush=True)
            rows.append(run_cell(engines[cell.engine], cell, options))
            print(f"  {rows[-1]['seconds']:.1f} s, {_short(rows[-1])}", flush=True)
            row = {"workload": cell.workload.name, "loop": cell.loop.name} | cell.sizes | medians(rows)
            results.keep(cell, engines[cell.engine], cell.name, row)
    for engine in engines.values():
        free(engine)


def _start(model: Any, cell: Cell, longest: int, results: Results) -> Engine:
    """A cell's engine, warm; with --idle, its decode steps are traced first."""
    options = results.options
    engine = Engine(model, engine_config(options, cell, model, longest))
    print(f"{cell.engine}: {engine.num_programs} programs, {engine.sizes}", flush=True)
    print(f"  compiled in {engine.warmup():.1f} s", flush=True)
    row = decode_idle(engine, cell.workload, options.idle, options.trace_dir) if options.idle else None
    if row is not None:
        row = {"workload": "decode_idle", "context": cell.workload.name} | row
        results.keep(cell, engine, f"decode_idle {cell.engine}", row)
    return engine


def main(arguments: list[str] | None = None) -> list[Row]:
    """Runs the cells and returns their rows."""
    begin = time.perf_counter()
    options = _parser().parse_args(arguments)
    if options.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", options.compilation_cache)
    chosen, results = list(cells(options)), Results(options)
    longest = max(cell.workload.longest for cell in chosen)
    guess = 0.0 if options.no_load else options.runs * sum(cell.guess_s for cell in chosen)
    print(f"{results.facts}\n{len(chosen)} cells; on an H200 about {guess:.0f} s and what compiling takes", flush=True)
    head = any(cell.speculation == "mtp" for cell in chosen)
    model = random_model(replace(MODELS[options.model], mtp_num_hidden_layers=int(head)))
    jax.block_until_ready(nnx.state(model))
    print(f"weights: {time.perf_counter() - begin:.1f} s", flush=True)
    for _, group in itertools.groupby(chosen, key=lambda cell: (cell.drafts, cell.speculation)):
        run_group(model, list(group), longest, results, begin + options.budget)
    return results.rows


if __name__ == "__main__":
    main()
