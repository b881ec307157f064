"""Compares a process per GPU with one process over all: `python -m benchmarks.processes --devices 2 --json FILE`.

The model has random bfloat16 weights in the shapes of `--model`, split over all devices. `python -m benchmarks.processes`
starts first a process for each of them, which meet at a port of this machine, and then one process that has them all.
Process 0 reads the prompts of all rows (`prompt_tokens_per_s`), and times steps of the engine back to back, host included,
with asynchronous and with synchronous stepping (`engine_us`, the median). `sums` names what adds up what the devices have:
several processes leave it to "xla", and one does it by "kernels" of its own. One process is measured with both. `compile_s`
is how long an engine's programs took to compile: both kinds of stepping take the same ones. `agreement` is the share of
generated tokens that are those of the first row with the same stepping, which is that of several processes. It should be 1
if `sums` is "xla": both then run the same programs over the same devices.

Every process writes to stderr what it begins, with the seconds since it started. Those that still run after `--limit`
seconds write what their threads are at, and end; those that lose another process end, too. Rows are written as they come.
Most of the time goes into compiling, which `--compilation-cache` saves the next time.
"""

import argparse
import faulthandler
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from benchmarks.programs import compile_programs
from benchmarks.random_model import MODELS, random_model
from benchmarks.rows import Row, append, facts
from mamba_align_jax import Engine, EngineConfig, SamplingParams
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
        prefix_cache="align",
        block_size=_CHUNK,
        kv_page_size=16,
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


def _end_after(seconds: float) -> None:
    """Ends this process with status 1 after so many seconds. Before that it writes to stderr what its threads are at.

    A thread of Python does it, since only a thread that holds the interpreter's lock can safely read the others' frames:
    `faulthandler.dump_traceback_later` does not hold it and has crashed here. That one only follows 10 seconds later, for a
    process whose lock is never free.
    """

    def end() -> None:
        print(f"Timeout after {seconds} s", file=sys.stderr, flush=True)
        faulthandler.dump_traceback()
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(seconds + 10, exit=True)


def child(options: argparse.Namespace) -> None:
    """Runs as one of the processes. Process 0 prints a row and tokens for each stepping, as JSON."""
    _end_after(options.limit)
    number, count = options.child
    shape = MODELS[options.model]
    layers = options.layers or shape.num_hidden_layers
    shape = replace(shape, num_hidden_layers=layers, layer_types=shape.layer_types[:layers])
    if options.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", options.compilation_cache)
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
    for sums, is_async in itertools.product(("xla", "kernels") if is_alone else ("xla",), (True, False)):
        _say(options, f"makes an engine, async_stepping={is_async}, sums={sums}")
        engine = make_engine(_config(options, is_async))
        if sums == "xla":
            engine.runner.mailboxes = None
        if sums == "xla" or engine.runner.mailboxes is not None:
            compile_s = compile_programs(engine, (options.rows, 0), (0, _CHUNK), (options.rows, _CHUNK))
            _say(options, "measures")
            row, tokens = measure(engine, options)
            row = {"sums": sums} | row | {"compile_s": compile_s}
            print(json.dumps({"is_async": is_async, "row": row, "tokens": tokens, "machine": machine}), flush=True)
        free_pools(engine)


def run(count: int, options: argparse.Namespace, seconds: float) -> Iterator[dict[str, Any]]:
    """Starts `count` processes, which end after so many seconds, and yields what process 0 prints, as it comes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    own = ["--coordinator", coordinator, f"--limit={seconds}"]
    command = [sys.executable, "-m", "benchmarks.processes", *options.given, *own]
    started = [
        subprocess.Popen(
            [*command, "--child", str(number), str(count)],
            stdout=subprocess.DEVNULL if number else subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    try:
        assert started[0].stdout
        with started[0].stdout as said:
            yield from (json.loads(line) for line in said if line.startswith('{"is_async"'))
        statuses = [process.wait() for process in started]
    finally:
        for process in started:
            process.kill()
    if any(statuses):
        print(f"{count} process{'es' * (count > 1)} ended with {statuses}", flush=True)


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
    parser.add_argument("--compilation-cache", metavar="DIR", help="keep compiled programs in DIR for later processes")
    parser.add_argument("--json", help="append one JSON row for each case to this file")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--limit", type=float, default=550, help="seconds after which all processes end")
    parser.add_argument("--child", type=int, nargs=2, metavar=("I", "N"), help=argparse.SUPPRESS)
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.given = sys.argv[1:] if arguments is None else arguments
    if options.child:
        child(options)
        return []
    results: list[Row] = []
    wanted: dict[bool, Any] = {}
    end = time.perf_counter() + options.limit
    layers = options.layers or MODELS[options.model].num_hidden_layers
    shape = f"{options.model} {layers} layers {options.rows} rows {options.context} tokens"
    for count in (options.devices, 1):
        for found in run(count, options, max(end - time.perf_counter(), 1)):
            first = wanted.setdefault(found["is_async"], found["tokens"])
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
