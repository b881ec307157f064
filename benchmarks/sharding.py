"""Times decode steps on one GPU and on several: `python -m benchmarks.sharding --json benchmarks/results/sharding.jsonl`.

The model has random bfloat16 weights in the shapes of Qwen3.5-4B. The engine reads the prompt of every row. Then one decode
step of all rows is dispatched back to back over the same inputs, so that the host's time does not count: that is `step_us`.
`engine_us` is a step of the engine with asynchronous stepping, the host included. With `--drafts` a random head drafts that
many tokens in both, and each step verifies them. `agreement` is the share of tokens that equal those of the first number of
devices. It can be below 1 because bfloat16 rounding decides between nearly equal logits. A small float32 model therefore
generates tokens as well, with prompt lookup. There every token should be equal, and the float32 reference judges each
sequence that differs. A row is written as soon as it is measured.
"""

import argparse
import statistics
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.random_model import MODELS, random_model
from benchmarks.rows import Row, append, facts
from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.engine.reference import Reference
from mamba_align_jax.engine.scheduling.buckets import Bucket
from mamba_align_jax.engine.scheduling.levels import Level
from mamba_align_jax.load.runs import free_pools
from mamba_align_jax.models.qwen3_5 import FULL
from mamba_align_jax.sharding import AXIS

# The small float32 model. Two devices each hold a copy of its one head of keys and values.
SMALL = replace(
    MODELS["qwen3.5-4b"],
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=4,
    layer_types=MODELS["qwen3.5-4b"].layer_types[:4],
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=128,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    dtype="float32",
)
_CHUNK = 512


def _mesh(devices: int) -> Mesh | None:
    return Mesh(np.array(jax.devices()[:devices]), (AXIS,)) if devices > 1 else None


def _prompts(rows: int, length: int, vocab: int) -> list[list[int]]:
    return np.random.default_rng(13).integers(1, vocab, (rows, length)).tolist()


def _config(rows: int, length: int, drafts: int, speculation: str) -> EngineConfig:
    return EngineConfig(
        prefix_cache="align",
        block_size=_CHUNK,
        kv_page_size=16,
        max_num_batched_tokens=_CHUNK,
        max_num_seqs=rows,
        max_model_len=length,
        num_state_blocks=1 + rows * (drafts + 6),
        num_kv_pages=1 + rows * -(-length // 16),
        num_speculative_tokens=drafts,
        speculation=speculation,
        async_stepping=True,
    )


def _bytes(tree: Any) -> int:
    """The bytes of all arrays on the first device."""
    return sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(tree))


def compile_all(engines: list[Engine]) -> None:
    """Compiles the programs that this benchmark's prompts need, for all engines at once."""
    begin = time.perf_counter()
    # XLA's compiler for CPUs has crashed when several threads compile.
    with ThreadPoolExecutor(1 if jax.default_backend() == "cpu" else None) as pool:
        compiling = [
            pool.submit(engine.runner.trace(bucket).lower().compile)
            for engine in engines
            for bucket in engine.runner.buckets
            if bucket.decode_rows in (0, engine.config.max_num_seqs)
            and bucket.prefill_tokens in (0, _CHUNK)
            and bucket.level == Level.MOST_LIKELY
        ]
        print(f"{len(compiling)} programs traced: {time.perf_counter() - begin:.1f} s", flush=True)
        for number, program in enumerate(as_completed(compiling), 1):
            program.result()
            print(f"{number} compiled: {time.perf_counter() - begin:.1f} s", flush=True)


def _longest(options: argparse.Namespace) -> int:
    """The number of tokens of a sequence that still decodes when all rows have been timed."""
    steps = 3 * (options.context // _CHUNK) * options.rows + 8 * options.steps
    return options.context + (1 + options.drafts) * steps


def decode_steps(engine: Engine, devices: int, options: argparse.Namespace) -> tuple[Row, np.ndarray]:
    """Times decode steps and frees the engine's pools.

    Returns:
        A row of results, and the tokens that were generated meanwhile, int [rows, steps].
    """
    rows, steps, mesh = options.rows, options.steps, _mesh(devices)
    params = SamplingParams(max_tokens=_longest(options) - options.context, ignore_eos=True)
    print(f"{devices} devices: reads {rows} prompts of {options.context} tokens", flush=True)
    begin = time.perf_counter()
    for prompt in _prompts(rows, options.context, engine.model_config.vocab_size):
        engine.add_request(prompt, params)
    while engine.scheduler.waiting or any(len(r.tokens) == len(r.prompt) for r in engine.scheduler.running):
        engine.step()
    print(f"  read in {time.perf_counter() - begin:.1f} s; steps of the engine", flush=True)
    for _ in range(3):
        engine.step()
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begin)
    generated = [request.tokens[options.context :][:steps] for request in engine.scheduler.running]
    print("  steps back to back", flush=True)
    # The host's inputs are the same in every step; the counts that the device keeps advance.
    runner, bucket = engine.runner, Bucket(rows, 0, 0, Level.MOST_LIKELY)
    places = engine.unread_steps[-1].places
    assert len(places) == rows
    assert all(places)
    inputs = jax.device_put(runner.packer.packed(bucket, places), mesh and NamedSharding(mesh, PartitionSpec()))
    # This is the program that the engine runs. Calling the jitted step instead would compile another one, because here
    # the inputs are already on the device.
    program = runner.trace(bucket).lower().compile()
    spans = []
    for _ in range(5):
        jax.block_until_ready(runner.device_state)
        begin = time.perf_counter()
        for _ in range(steps):
            _, runner.device_state = program(runner.params, inputs, runner.device_state, None, runner.mailboxes)
        jax.block_until_ready(runner.device_state)
        spans.append((time.perf_counter() - begin) / steps)
    row = {
        "step_us": 1e6 * statistics.median(spans),
        "engine_us": 1e6 * statistics.median(times),
        "weight_bytes_per_device": _bytes(runner.params),
        "pool_bytes_per_device": _bytes(runner.device_state),
    }
    print(f"  {row}", flush=True)
    free_pools(engine)
    return row, np.array(generated)


def same_tokens(model: Any, engines: list[Engine], options: argparse.Namespace) -> list[Row]:
    """Generates greedy tokens with drafts on each number of devices and compares them; returns a row for each number.

    Every prompt is sent twice, so that the second answer starts from the prefix cache. The engines' pools are freed.
    """
    prompts, tokens = _prompts(options.rows // 2, 2 * _CHUNK, SMALL.vocab_size), options.tokens
    found, params = [], SamplingParams(max_tokens=tokens, ignore_eos=True)
    for devices, engine in zip(options.devices, engines, strict=True):
        print(f"{devices} devices: tokens of the small model", flush=True)
        outputs = engine.generate(prompts, params) + engine.generate(prompts, params)
        stats = engine.stats
        assert stats.null_reads == 0
        assert stats.hit_requests == len(prompts)
        found.append(([output.token_ids for output in outputs], sum(stats.accepted_tokens)))
        free_pools(engine)
    reference, results = Reference(model), []
    for number, (generated, accepted) in zip(options.devices, found, strict=True):
        differ = [
            (mine, n) for n, (mine, first) in enumerate(zip(generated, found[0][0], strict=True)) if mine != first
        ]
        verdicts = [reference.judge(prompts[n % len(prompts)], mine) for mine, n in differ]
        results.append({
            "case": f"tokens float32 {SMALL.num_hidden_layers} layers K3", "devices": number,
            "sequences": len(generated), "tokens_each": tokens, "accepted_drafts": accepted,
            "sequences_that_differ": len(differ), "of_these_wrong": sum(not verdict.right for verdict in verdicts),
        })  # fmt: skip
        print(f"  {results[-1]}", flush=True)
    return results


def main(arguments: list[str] | None = None) -> list[Row]:
    """Measures, writes the rows, and returns them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--model", choices=MODELS, default="qwen3.5-4b", help="shapes of the random weights")
    parser.add_argument("--layers", type=int, help="use only the first LAYERS layers; fewer compile faster")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--context", type=int, default=4096, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=32, help="decode steps that are timed together")
    parser.add_argument("--drafts", type=int, default=0, help="draft tokens of an MTP head in the steps that are timed")
    parser.add_argument("--tokens", type=int, default=64, help="tokens that the small model generates; 0 leaves it out")
    parser.add_argument("--cpu", type=int, metavar="DEVICES", help="simulate so many devices, to try the command")
    parser.add_argument("--json", help="append one JSON row for each case to this file")
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args(arguments)
    if options.cpu:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.cpu)
        jax.config.update("jax_disable_most_optimizations", True)
    machine = facts(options.commit)
    print(machine, flush=True)
    results: list[Row] = []

    def keep(rows: list[Row]) -> None:
        for row in rows:
            results.append(row | machine)
            append(options.json, results[-1])

    shape = MODELS[options.model]
    layers = options.layers or shape.num_hidden_layers
    period = shape.layer_types.index(FULL) + 1
    if layers % period or not 0 < layers <= shape.num_hidden_layers:
        parser.error(f"--layers must be a multiple of {period}, at most {shape.num_hidden_layers}, got {layers}")
    shape = replace(shape, num_hidden_layers=layers, layer_types=shape.layer_types[:layers])
    model = random_model(replace(shape, mtp_num_hidden_layers=int(options.drafts > 0)))
    config = _config(options.rows, _longest(options), options.drafts, "mtp")
    timed = [Engine(model, config, mesh=_mesh(devices)) for devices in options.devices]
    small, engines = None, []
    if options.tokens:
        small = random_model(SMALL)
        # With as many rows as prompts there is one size of decode steps.
        config = _config(options.rows // 2, 2 * _CHUNK + options.tokens + 8, 3, "prompt_lookup")
        engines = [Engine(small, config, mesh=_mesh(devices)) for devices in options.devices]
    print(f"compiles for {len(timed + engines)} engines", flush=True)
    compile_all(timed + engines)
    case = f"decode {options.model} {layers} layers {options.rows} rows {options.context} tokens K{options.drafts}"
    first = None
    for devices, engine in zip(options.devices, timed, strict=True):
        row, generated = decode_steps(engine, devices, options)
        first = generated if first is None else first
        agreement = float(np.mean(generated == first))
        keep([{"case": case, "devices": devices, "layers": layers, **row, "agreement": agreement}])
    if engines:
        keep(same_tokens(small, engines, options))
    return results


if __name__ == "__main__":
    main()
