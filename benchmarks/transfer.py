"""Times moving prefixes between engines: `python -m benchmarks.transfer --json benchmarks/results/transfer.jsonl`.

The model has random bfloat16 weights in the shapes of Qwen3.5-4B. One engine reads a prompt, exports it, and another one
imports it; the cache as a whole is saved to a file and loaded again. Every state and page has passed the host, with its
checksum: `export_gb_per_s` and the others are bytes of the bundle by the seconds of the call, the median of several. The
first call also reads the weights for their digest, which is `digest_ms`. `prompt_ms` is how long the prompt takes to
compute instead. With several numbers of devices a prefix moves from each number to the next one, and from the last to the
first. The row says so by `devices` and `to_devices`. The second engine's answer must be that of the first if both have as
many devices. Otherwise sums are rounded differently, and `same_answer` says whether the tokens are equal nevertheless.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from benchmarks.programs import compile_programs
from benchmarks.random_model import MODELS, random_model
from benchmarks.rows import Row, append, facts
from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.engine.device.identity import weights_digest
from mamba_align_jax.engine.scheduling.buckets import prefill_sizes
from mamba_align_jax.models.qwen3_5 import FULL
from mamba_align_jax.sharding import AXIS

_PAGE, _BLOCK = 16, 64


def _engine(model: Any, devices: int, options: argparse.Namespace) -> Engine:
    length = max(options.tokens) + 2 * _BLOCK
    config = EngineConfig(
        prefix_cache="align",
        block_size=_BLOCK,
        kv_page_size=_PAGE,
        checkpoint_interval=options.interval,
        max_num_seqs=1,
        max_prefill_rows=1,
        max_num_batched_tokens=min(2048, length),
        max_model_len=length,
        num_state_blocks=16 + (length // options.interval if options.interval else 0),
        num_kv_pages=2 * length // _PAGE,
    )
    mesh = Mesh(np.array(jax.devices()[:devices]), (AXIS,)) if devices > 1 else None
    return Engine(model, config, mesh=mesh)


def _seconds(call: Callable[[], Any], before: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Returns the median seconds of a call, and the last result. `before` is called before each, and not timed."""
    times, result = [], None
    for _ in range(repeats + 1):
        before()
        begin = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - begin)
    # The first call compiles.
    return statistics.median(times[1:]), result


def move(first: Engine, second: Engine, prompt: list[int], repeats: int, *, must_agree: bool = True) -> Row:
    """Moves a prompt's prefix from one engine to another, in memory and by a file, and returns the rates.

    `must_agree` says that both engines round alike.

    Raises:
        AssertionError: The second engine found another number of tokens, or answers otherwise although it must agree.
    """
    params = SamplingParams(max_tokens=2, ignore_eos=True)

    def forget() -> None:
        second.reset_prefix_cache()
        # A reset has the weights read again by the next call.
        second.export_prefix([0])
        jax.block_until_ready(second.runner.device_state)

    def waited(result: Any) -> Any:
        jax.block_until_ready(second.runner.device_state)
        return result

    prompt_s, _ = _seconds(lambda: first.generate(prompt, params), first.reset_prefix_cache, 1)
    nothing = lambda: None
    # With the prefix cached, both engines run the same programs on the rest of the prompt, so their tokens are the same.
    (wanted,) = first.generate(prompt, params)
    export_s, data = _seconds(lambda: first.export_prefix(prompt), nothing, repeats)
    import_s, length = _seconds(lambda: waited(second.import_prefix(data)), forget, repeats)
    (got,) = second.generate(prompt, params)
    found, hoped = ((output.token_ids, output.num_cached_tokens) for output in (got, wanted))
    is_same = found == hoped
    if must_agree or got.num_cached_tokens != wanted.num_cached_tokens:
        assert is_same, f"the prefix did not move whole: {found} after {hoped}"
    # The last token of a prompt always runs, so a prompt of whole blocks does not take its last one from the cache.
    assert 0 < got.num_cached_tokens <= length, (length, got.num_cached_tokens)
    with tempfile.TemporaryDirectory() as directory:
        save_s, _ = _seconds(lambda: first.save_cache(directory), nothing, repeats)
        size = sum(path.stat().st_size for path in Path(directory).iterdir())
        load_s, _ = _seconds(lambda: waited(second.load_cache(directory)), forget, repeats)
    rate = lambda size, seconds: round(size / seconds / 1e9, 3)
    return {
        "bytes": len(data), "cached_tokens": length, "same_answer": is_same,
        "states": len(first.cached_prefix(prompt).boundaries),
        "prompt_ms": round(1e3 * prompt_s, 2), "export_ms": round(1e3 * export_s, 2),
        "import_ms": round(1e3 * import_s, 2),
        "export_gb_per_s": rate(len(data), export_s), "import_gb_per_s": rate(len(data), import_s),
        "save_gb_per_s": rate(size, save_s), "load_gb_per_s": rate(size, load_s),
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> list[Row]:
    """Measures, writes the rows, and returns them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[1])
    parser.add_argument("--model", choices=MODELS, default="qwen3.5-4b", help="shapes of the random weights")
    parser.add_argument("--layers", type=int, help="use only the first LAYERS layers")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 32768], help="tokens of a prompt")
    parser.add_argument("--interval", type=int, help="a state is kept every so many tokens; default: few states")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="append one JSON row for each case to this file")
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args(arguments)
    machine, shape = facts(options.commit), MODELS[options.model]
    print(machine, flush=True)
    layers = options.layers or shape.num_hidden_layers
    period = shape.layer_types.index(FULL) + 1
    if layers % period or not 0 < layers <= shape.num_hidden_layers:
        parser.error(f"--layers must be a multiple of {period}, at most {shape.num_hidden_layers}, got {layers}")
    shape = replace(shape, num_hidden_layers=layers, layer_types=shape.layer_types[:layers])
    model = random_model(shape)
    # With one number of devices a prefix moves to another engine of the same number.
    numbers = options.devices if len(options.devices) > 1 else 2 * options.devices
    engines = [_engine(model, number, options) for number in numbers]
    for engine in engines:
        # A prompt's chunks, what is left of it after a hit, and the token after it. Equal engines share their programs.
        sizes = prefill_sizes(engine.config.max_num_batched_tokens)
        seconds = compile_programs(engine, (1, 0), (0, sizes[0]), (0, sizes[-1]))
        print(f"{engine.sizes}, compiled in {seconds:.1f} s", flush=True)
    results: list[Row] = []
    for place, engine in enumerate(engines[: len(options.devices)]):
        digest = lambda engine=engine: weights_digest(engine.runner.params, engine.runner.layout)
        digest_s, _ = _seconds(digest, lambda: None, options.repeats)
        following = (place + 1) % len(engines)
        for tokens in options.tokens:
            prompt = np.random.default_rng(tokens).integers(1, shape.vocab_size, tokens).tolist()
            must_agree = numbers[place] == numbers[following]
            row = move(engine, engines[following], prompt, options.repeats, must_agree=must_agree)
            row |= {"devices": numbers[place], "to_devices": numbers[following], "layers": layers}
            case = f"transfer {options.model} {layers} layers {tokens} tokens"
            row = {"case": case, "digest_ms": round(1e3 * digest_s, 2)} | row | machine
            print(row, flush=True)
            append(options.json, row)
            results.append(row)
    return results


if __name__ == "__main__":
    main()
