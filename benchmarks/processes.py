"""Compares a process per GPU with one process over all: `python -m benchmarks.processes --devices 2 --json FILE`.

The model has random bfloat16 weights in the shapes of `--model`, split over all devices. `python -m benchmarks.processes`
starts first one process that has them all, and then a process for each, which meet at a port of this machine. Process 0
reads the prompts of all rows (`prompt_tokens_per_s`), and times steps of the engine back to back, host included, with
asynchronous and with synchronous stepping (`engine_us`, the median). `sums` names what adds up what the devices have:
devices of one process do it by "kernels" of their own, and those of several leave it to "xla". One process is measured with
both. `agreement` is the share of generated tokens that are those of one process with the same sums. It should be 1: both run
the same programs over the same devices. `compile_s` is how long the programs of an engine took to compile, all at a time.

Every process writes to stderr what it begins, with the seconds since it started. After `--budget` seconds it makes no other
engine. If it is not done after `--limit` seconds, it writes what each of its threads is at, and ends.
"""

import argparse
import faulthandler
import itertools
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.engine.levels import Level
from mamba_align_jax.load.random_model import MODELS, random_model
from mamba_align_jax.load.rows import Row, append, facts
from mamba_align_jax.load.runs import free_pools
from mamba_align_jax.processes import Processes
from mamba_align_jax.sharding import AXIS

_CHUNK = 512
_BEGIN = time.perf_counter()


def _say(options: argparse.Namespace, what: str) -> None:
    number, count = options.child
    print(f"process {number} of {count}, {time.perf_counter() - _BEGIN:.1f} s: {what}", file=sys.stderr, flush=True)


def _config(options: argparse.Namespace, is_async: bool) -> EngineConfig:
    length = _length(options)
    return EngineConfig(
        block_size=_CHUNK,
        max_num_batched_tokens=_CHUNK,
        max_prefill_rows=1,
        max_num_seqs=options.rows,
        max_model_len=length,
        num_state_blocks=1 + 6 * options.rows,
        num_kv_pages=1 + options.rows * -(-length // 16),
        async_stepping=is_async,
    )


def _length(options: argparse.Namespace) -> int:
    """The number of tokens of a sequence that still decodes when all rows have been read and timed."""
    return options.context + options.rows * (options.context // _CHUNK + 1) + options.steps + 16


def warm(engine: Engine) -> float:
    """Compiles the programs that `measure` needs, and no others, and returns the seconds.

    They decode all rows, or read a chunk of a prompt, before or while rows decode.
    """
    begin = time.perf_counter()
    rows = engine.config.max_num_seqs
    needed = [
        bucket
        for bucket in engine.runner.buckets
        if bucket.level == Level.MOST_LIKELY
        and (bucket[:3] == (rows, 0, 0) or (bucket.prefill_tokens == _CHUNK and bucket.decode_rows in (0, rows)))
    ]
    for _ in engine.runner.compile(needed):
        pass
    compiled = time.perf_counter()
    for bucket in needed:
        engine.runner.warm(bucket)
    return compiled - begin


def measure(engine: Engine, options: argparse.Namespace) -> tuple[Row, list[list[int]]]:
    """Times an engine, and returns a row of results and the tokens that each row generated."""
    vocab, length = engine.model_config.vocab_size, _length(options) - options.context
    params = SamplingParams(max_tokens=length, ignore_eos=True)
    begin = time.perf_counter()
    for prompt in np.random.default_rng(13).integers(1, vocab, (options.rows, options.context)).tolist():
        engine.add_request(prompt, params)
    while engine.scheduler.waiting or any(len(r.tokens) == len(r.prompt) for r in engine.scheduler.running):
        engine.step()
    reading = time.perf_counter() - begin
    for _ in range(4):
        engine.step()
    times = []
    for _ in range(options.steps):
        begin = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begin)
    requests = sorted(engine.scheduler.running, key=lambda request: request.id)
    row = {
        "prompt_tokens_per_s": options.rows * options.context / reading,
        "engine_us": 1e6 * statistics.median(times),
        "engine_us_p90": 1e6 * statistics.quantiles(times, n=10)[-1],
    }
    return row, [list(request.tokens[options.context :]) for request in requests]


def child(options: argparse.Namespace) -> None:
    """Runs as one of the processes. Process 0 prints a row and tokens for each stepping, as JSON."""
    faulthandler.dump_traceback_later(options.limit, exit=True)
    number, count = options.child
    shape = MODELS[options.model]
    layers = options.layers or shape.num_hidden_layers
    shape = replace(shape, num_hidden_layers=layers, layer_types=shape.layer_types[:layers])
    if options.cpu:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.devices // count)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.config.update("jax_disable_most_optimizations", True)
    if count == 1:
        mesh = jax.make_mesh((options.devices,), (AXIS,), devices=jax.devices()[: options.devices])
        _say(options, "makes the weights")
        model = random_model(shape)
        _report(lambda config: Engine(model, config, mesh=mesh), options)
        return
    local = None if options.cpu else [number]
    _say(options, "connects")
    with Processes(options.coordinator, count, number, local_device_ids=local) as processes:
        _say(options, f"makes the weights on {jax.local_devices()}")
        model = random_model(shape)
        if processes.is_leader:
            _report(lambda config: processes.lead(model, config), options)
        else:
            _say(options, "follows")
            processes.follow(model)
    _say(options, "is done")


def _report(make_engine: Callable[[EngineConfig], Engine], options: argparse.Namespace) -> None:
    machine, is_alone = facts(options.commit), options.child[1] == 1
    for is_async, sums in itertools.product((True, False), ("kernels", "xla") if is_alone else ("xla",)):
        if time.perf_counter() - _BEGIN > options.budget:
            _say(options, "no time is left for the other engines")
            return
        _say(options, f"makes an engine, async_stepping={is_async}, sums={sums}")
        engine = make_engine(_config(options, is_async))
        if sums == "xla":
            engine.runner.mailboxes = None
        elif engine.runner.mailboxes is None:
            continue
        compile_s = warm(engine)
        _say(options, "measures")
        row, tokens = measure(engine, options)
        row = {"sums": sums} | row | {"compile_s": compile_s}
        print(json.dumps({"is_async": is_async, "row": row, "tokens": tokens, "machine": machine}), flush=True)
        free_pools(engine)


def run(count: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Starts `count` processes and yields what process 0 prints, as it comes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "benchmarks.processes", *options.given, "--coordinator", coordinator]
    started = [
        subprocess.Popen([*command, "--child", str(number), str(count)], stdout=subprocess.PIPE, text=True)
        for number in range(count)
    ]
    try:
        assert started[0].stdout
        yield from (json.loads(line) for line in started[0].stdout if line.startswith('{"is_async"'))
        statuses = [process.wait() for process in started]
    finally:
        for process in started:
            process.kill()
    if any(statuses):
        print(f"{count} processes ended with {statuses}", flush=True)


def main(arguments: list[str] | None = None) -> list[Row]:
    """Measures, writes the rows, and returns them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, help="so many devices of this machine, from the first on")
    parser.add_argument("--model", choices=MODELS, default="qwen3.5-4b", help="shapes of the random weights")
    parser.add_argument("--layers", type=int, help="use only the first LAYERS layers; fewer compile faster")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--context", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=64, help="decode steps that are timed")
    parser.add_argument("--cpu", action="store_true", help="simulate the devices, to try the command")
    parser.add_argument("--json", help="append one JSON row for each case to this file")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--budget", type=float, default=150, help="seconds after which a process makes no other engine")
    parser.add_argument("--limit", type=float, default=250, help="seconds after which a process ends, whatever it does")
    parser.add_argument("--child", type=int, nargs=2, metavar=("I", "N"), help=argparse.SUPPRESS)
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.given = sys.argv[1:] if arguments is None else arguments
    if options.child:
        child(options)
        return []
    results: list[Row] = []
    wanted: dict[tuple[bool, str], Any] = {}
    layers = options.layers or MODELS[options.model].num_hidden_layers
    shape = f"{options.model} {layers} layers {options.rows} rows {options.context} tokens"
    for count in (1, options.devices):
        for found in run(count, options):
            first = wanted.setdefault((found["is_async"], found["row"]["sums"]), found["tokens"])
            pairs = [pair for mine, one in zip(found["tokens"], first, strict=True) for pair in zip(mine, one)]  # noqa: B905
            agreement = sum(mine == one for mine, one in pairs) / len(pairs)
            stepping, number = "async" if found["is_async"] else "sync", f"{count} process{'es' * (count > 1)}"
            case = f"{stepping} decode {shape} {number}, sums by {found['row']['sums']}"
            row = {"case": case, "devices": options.devices, "processes": count, "agreement": agreement}
            results.append(row | found["row"] | found["machine"])
            print(results[-1], flush=True)
            append(options.json, results[-1])
    return results


if __name__ == "__main__":
    main()
