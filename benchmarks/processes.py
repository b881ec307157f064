"""Compares a process per GPU with one process over all: `python -m benchmarks.processes --devices 8 --json FILE`.

The model has random bfloat16 weights in the shapes of `--model`, split over all devices. `python -m benchmarks.processes`
starts first one process that has them all, and then a process for each, which meet at a port of this machine. Process 0
reads the prompts of all rows (`prompt_tokens_per_s`), and times steps of the engine back to back, host included, with
synchronous and with asynchronous stepping (`engine_us`, the median). `agreement` is the share of generated tokens that
are those of one process. It should be 1: both run the same programs over the same devices. Most of the time goes into compiling:
with `--compilation-cache` the second kind of stepping takes the programs of the first.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.load.random_model import MODELS, random_model
from mamba_align_jax.load.rows import Row, append, facts
from mamba_align_jax.processes import Processes
from mamba_align_jax.sharding import AXIS

_CHUNK = 512


def _config(options: argparse.Namespace, is_async: bool) -> EngineConfig:
    length = _length(options)
    return EngineConfig(
        block_size=_CHUNK,
        max_num_batched_tokens=_CHUNK,
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
    vocab, params = engine.model_config.vocab_size, SamplingParams(max_tokens=10**6, ignore_eos=True)
    params = replace(params, max_tokens=_length(options) - options.context)
    prompts = np.random.default_rng(13).integers(1, vocab, (options.rows + 1, options.context)).tolist()
    # The first prompt compiles what the others run.
    engine.generate(prompts.pop(), replace(params, max_tokens=4))
    begin = time.perf_counter()
    for prompt in prompts:
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
        model = random_model(shape)
        _report(lambda config: Engine(model, config, mesh=mesh), options)
        return
    local = None if options.cpu else [number]
    with Processes(options.coordinator, count, number, local_device_ids=local) as processes:
        model = random_model(shape)
        if processes.is_leader:
            _report(lambda config: processes.lead(model, config), options)
        else:
            processes.follow(model)


def _report(make_engine: Callable[[EngineConfig], Engine], options: argparse.Namespace) -> None:
    machine = facts(options.commit)
    for is_async in (False, True):
        begin = time.perf_counter()
        row, tokens = measure(make_engine(_config(options, is_async)), options)
        print(f"measured in {time.perf_counter() - begin:.0f} s, is_async={is_async}", file=sys.stderr, flush=True)
        print(json.dumps({"is_async": is_async, "row": row, "tokens": tokens, "machine": machine}), flush=True)


def run(count: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Starts `count` processes and returns what process 0 printed.

    Raises:
        subprocess.CalledProcessError: One of them failed.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "benchmarks.processes", *options.given, "--coordinator", coordinator]
    started = [
        subprocess.Popen([*command, "--child", str(number), str(count)], stdout=subprocess.PIPE, text=True)
        for number in range(count)
    ]
    try:
        said = started[0].communicate()[0]
        for process in started:
            if process.wait():
                raise subprocess.CalledProcessError(process.returncode, process.args)
    finally:
        for process in started:
            process.kill()
    return [json.loads(line) for line in said.splitlines() if line.startswith('{"is_async"')]


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
    parser.add_argument("--child", type=int, nargs=2, metavar=("I", "N"), help=argparse.SUPPRESS)
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.given = sys.argv[1:] if arguments is None else arguments
    if options.child:
        child(options)
        return []
    results: list[Row] = []
    wanted: dict[bool, Any] = {}
    for count in (1, options.devices):
        for found in run(count, options):
            first = wanted.setdefault(found["is_async"], found["tokens"])
            pairs = [pair for mine, one in zip(found["tokens"], first, strict=True) for pair in zip(mine, one)]  # noqa: B905
            layers = options.layers or MODELS[options.model].num_hidden_layers
            stepping = "async" if found["is_async"] else "sync"
            results.append({
                "case": f"{stepping} decode {options.model} {layers} layers {options.rows} rows {options.context} tokens "
                f"{count} processes",
                "devices": options.devices, "processes": count, **found["row"],
                "agreement": sum(mine == one for mine, one in pairs) / len(pairs), **found["machine"],
            })  # fmt: skip
            print(results[-1], flush=True)
            append(options.json, results[-1])
    return results


if __name__ == "__main__":
    main()
