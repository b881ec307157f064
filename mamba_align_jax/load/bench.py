"""`mamba-align bench`: times a model's engine under load in several modes, one after the other.

The command line reads the options of this file, so JAX is imported only to run them.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

from mamba_align_jax import _values as values
from mamba_align_jax.engine.config import EngineConfig
from mamba_align_jax.load.workloads import ClosedLoop, Loop, MultiTurn, OpenLoop, PrefixRepetition, Workload

# The fields of EngineConfig that make each mode. Every model serves these.
COMPARED_MODES: dict[str, dict[str, Any]] = {
    "none": dict(prefix_cache="none"),
    "align/pre_copy": dict(prefix_cache="align", policy="pre_copy"),
    "align/copy_free": dict(prefix_cache="align", policy="copy_free"),
}
# Those that the benchmark can measure besides, with models that serve them.
MODES = COMPARED_MODES | {
    "align/deferred": dict(prefix_cache="align", policy="deferred"),
    "all": dict(prefix_cache="all"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `mamba-align bench`, except its model."""
    number = dict(type=int, metavar="N")
    several = f"may be given several times; default: {', '.join(COMPARED_MODES)}"
    parser.add_argument("--mode", action="append", choices=MODES, help=several)
    parser.add_argument("--runs", **number, default=3, help="runs of each mode, of which the medians count")
    parser.add_argument("--concurrency", **number, default=4, help="sessions that are open at once")
    parser.add_argument("--rate", type=float, metavar="R", help="begin R sessions a second, however many are open")
    parser.add_argument("--prompts", **number, default=16, help="prompts, or conversations with --turns")
    parser.add_argument("--prefix", **number, default=512, help="tokens that all prompts share")
    parser.add_argument("--suffix", **number, default=64, help="tokens that one prompt has, or one turn adds")
    parser.add_argument("--output", **number, default=64, help="tokens of each answer")
    parser.add_argument("--turns", **number, default=1, help="turns of each conversation, which share no prefix")
    parser.add_argument("--seed", **number, default=13, help="draws the prompts' tokens (default: %(default)s)")
    text = "tokens per state block; default: chosen"
    parser.add_argument("--mamba-block-size", dest="block_size", **number, help=text)
    parser.add_argument("--max-num-batched-tokens", **number, help="tokens of a step; default: chosen")
    parser.add_argument("--json", metavar="FILE", help="write the table's numbers to FILE, a JSON object in each line")


def _plan(options: argparse.Namespace) -> tuple[Workload, Loop, dict[str, Any]]:
    """Checks the options, and returns the load and the fields of the engine's configuration that they ask for."""
    output, suffix, seed = options.output, options.suffix, values.integer("--seed", options.seed, 0)
    for name in ("runs", "turns", "concurrency"):
        values.integer(f"--{name}", getattr(options, name), 1)
    if options.turns > 1:
        sizes: dict[str, int] = dict(first=options.prefix + suffix, turn=suffix, turns=options.turns)
        workload: Workload = MultiTurn(conversations=options.prompts, output=output, **sizes)
    else:
        workload = PrefixRepetition(prompts=options.prompts, prefix=options.prefix, suffix=suffix, output=output)
    loop = ClosedLoop(options.concurrency) if options.rate is None else OpenLoop(options.rate, seed)
    fields: dict[str, Any] = dict(
        block_size=options.block_size,
        max_num_seqs=options.concurrency,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=workload.longest,
    )
    return workload, loop, fields


def bench(model: Any, options: argparse.Namespace, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """Times each mode that the options name, and returns a row for each: the medians of its runs.

    Prompts are random tokens, and no end token ends an answer early. Every run begins with an empty prefix cache.

    Args:
        model: A loaded model.
        options: Those of `add_options`.
        report: Is called with the name of each mode before it is compiled.

    Raises:
        ValueError: An option has a value that it can't have. The error names it.
    """
    from mamba_align_jax.engine.running.engine import Engine
    from mamba_align_jax.load.runs import free_pools, medians, run_load

    (workload, loop, fields), rows = _plan(options), []
    for mode in options.mode or COMPARED_MODES:
        report(mode)
        engine = Engine(model, EngineConfig(**fields, **MODES[mode]))
        engine.warmup(draws=False)
        runs = [run_load(engine, workload, loop, options.seed) for _ in range(options.runs)]
        free_pools(engine)
        rows.append({"mode": mode, "workload": workload.name, "loop": loop.name} | medians(runs))
    if options.json is not None:
        with open(options.json, "w") as lines:
            lines.writelines(json.dumps(row) + "\n" for row in rows)
    return rows
