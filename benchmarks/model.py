"""Times a whole model beside its floor: `python -m benchmarks.model --json benchmarks/results/model.jsonl`.

A decode or verify case keeps `rows` requests of `context` tokens running in an engine and times the engine's own steps, with
the host and asynchronously. A prompt case times a request from its arrival at an idle engine to its first token. The weights
are random, in the shapes of Qwen3.5-4B, and all cases share one engine configuration.

The floor of a step is arithmetic, in `floor_us`: every matrix product takes the larger of its bytes at the copy rate and its
operations at the rate of a large product, keys and values are read once, and recurrent states are read and written once.
"""

import argparse
import functools
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.timing import copy_bandwidth, kernel_times
from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.load.random_model import MODELS, random_model
from mamba_align_jax.load.rows import Row, append, facts
from mamba_align_jax.models.qwen3_5 import LINEAR, Config

FLOPS_PER_US = 790e6  # of a large bfloat16 product on one H200
CONFIGURATION: dict[str, Any] = dict(
    block_size=512, kv_page_size=16, max_num_batched_tokens=2048, max_num_seqs=256, max_model_len=140000,
    async_stepping=True,
)  # fmt: skip
STEPS = 32  # of which the median is taken
LONGEST = 15  # kernels that a row lists


@dataclass(frozen=True)
class Case:
    """What is timed.

    Attributes:
        kind: "decode", or "prompt" for the time to the first token.
        rows: Requests that run at once.
        context: Tokens of each prompt.
    """

    kind: str
    rows: int
    context: int

    @property
    def name(self) -> str:
        """The name in the rows of results."""
        return f"prompt {self.context}" if self.kind == "prompt" else f"{self.kind} {self.rows}x{self.context}"


CASES = (
    *(Case("decode", rows, 4096) for rows in (1, 5, 16, 20, 64, 65, 256)),
    *(Case("decode", rows, 32768) for rows in (1, 16)),
    *(Case("prompt", 1, context) for context in (512, 4096, 32768, 131072)),
)


def products(config: Config) -> Iterator[tuple[int, int]]:
    """The inputs and outputs of every matrix product of the layers, for each token."""
    c = config
    keys, values = c.linear_num_key_heads * c.linear_key_head_dim, c.linear_num_value_heads * c.linear_value_head_dim
    heads, kv_heads = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    for kind in c.layer_types:
        if kind == LINEAR:
            yield c.hidden_size, 2 * keys + 2 * values + 2 * c.linear_num_value_heads
            yield values, c.hidden_size
        else:
            yield c.hidden_size, 2 * heads + 2 * kv_heads
            yield heads, c.hidden_size
        yield c.hidden_size, 2 * c.intermediate_size
        yield c.intermediate_size, c.hidden_size


def floor_us(config: Config, case: Case, copy_rate: float, itemsize: int = 2) -> float:
    """The least time of a case.

    Args:
        config: The model.
        case: A decode case is one step after `context` tokens; a prompt case is a whole prompt.
        copy_rate: Bytes per microsecond that a copy moves, read and written.
        itemsize: Bytes of a weight, a key and a value.
    """
    c, tokens = config, case.context if case.kind == "prompt" else case.rows
    product = lambda m, k, n: max(itemsize * k * n / copy_rate, 2.0 * m * k * n / FLOPS_PER_US)
    total = sum(product(tokens, k, n) for k, n in products(c)) + product(case.rows, c.hidden_size, c.vocab_size)
    full = sum(kind != LINEAR for kind in c.layer_types)
    key_values = case.rows * case.context * full * 2 * c.num_key_value_heads * c.head_dim * itemsize
    state = (
        (c.num_hidden_layers - full) * c.linear_num_value_heads * c.linear_value_head_dim * c.linear_key_head_dim * 4
    )
    if case.kind == "prompt":
        # Two products of the queries with half of the positions each.
        return total + 2.0 * full * c.num_attention_heads * c.head_dim * case.context**2 / FLOPS_PER_US
    return total + (key_values + 2 * case.rows * state) / copy_rate


def prompts(config: Config, case: Case, seed: int = 0) -> list[list[int]]:
    """Random prompts that share nothing."""
    rng = np.random.default_rng([seed, case.rows, case.context])
    return rng.integers(0, config.vocab_size, (case.rows, case.context)).tolist()


def _check(outputs: Sequence[Any]) -> None:
    for output in outputs:
        if output.error is not None:
            raise output.error


def measure_decode(engine: Engine, config: Config, case: Case, steps: int) -> Row:
    """The median time of the engine's own steps while every row decodes, and the kernels of a step."""
    params = SamplingParams(max_tokens=8 * steps, ignore_eos=True)
    ids = [engine.add_request(prompt, params) for prompt in prompts(config, case)]
    while engine.scheduler.waiting or any(not request.token_times for request in engine.scheduler.running):
        _check(engine.step())
    for _ in range(4):
        engine.step()
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        engine.step()
        times.append(1e6 * (time.perf_counter() - begin))

    def run() -> None:
        for _ in range(8):
            engine.step()
        jax.block_until_ready(engine.runner.device_state)

    launches = kernel_times(run) if jax.default_backend() == "gpu" else []
    for request in ids:
        engine.abort(request)
    while engine.has_unfinished:
        engine.step()
    row = {"step_us": statistics.median(times), "step_us_min": min(times), "step_us_max": max(times)}
    return row | _kernels(launches, 8)


def _kernels(launches: Sequence[tuple[str, float]], steps: int) -> Row:
    """Busy time and launches of a step, and its longest kernels: (name, launches, microseconds), all per step."""
    if not launches:
        return {}
    each: dict[str, list[float]] = {}
    for name, us in launches:
        each.setdefault(name, []).append(us)
    total = {name: sum(times) / steps for name, times in each.items()}
    names = sorted(total, key=lambda name: total[name], reverse=True)
    longest = [(name, len(each[name]) / steps, total[name]) for name in names[:LONGEST]]
    return {"busy_us": sum(total.values()), "kernels": len(launches) / steps, "longest": longest}


def measure_prompt(engine: Engine, config: Config, case: Case, repetitions: int) -> Row:
    """The median time from the arrival of a prompt at an idle engine to its first token."""
    times = []
    for repetition in range(repetitions):
        (prompt,) = prompts(config, case, seed=1 + repetition)
        (output,) = engine.generate(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
        assert output.ttft_s is not None
        times.append(1e3 * output.ttft_s)
    return {"ttft_ms": statistics.median(times), "ttft_ms_runs": times}


def main(arguments: list[str] | None = None) -> list[Row]:
    """Runs the cases and returns their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", help="names of cases; default: all")
    parser.add_argument("--model", choices=MODELS, default="qwen3.5-4b", help="shapes of the random weights")
    parser.add_argument("--max-model-len", type=int, default=CONFIGURATION["max_model_len"])
    parser.add_argument("--max-num-seqs", type=int, default=CONFIGURATION["max_num_seqs"])
    parser.add_argument("--max-num-batched-tokens", type=int, default=CONFIGURATION["max_num_batched_tokens"])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--budget", type=float, default=math.inf, help="start no case after so many seconds")
    parser.add_argument("--json", help="append a row per case to this JSON Lines file")
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args(arguments)
    begin, header, rows = time.perf_counter(), facts(options.commit), []
    rate = copy_bandwidth() if jax.default_backend() == "gpu" else 4.27e6
    config = MODELS[options.model]
    model = random_model(config)
    jax.block_until_ready(nnx.state(model))
    fields = CONFIGURATION | {
        name: getattr(options, name) for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens")
    }
    engine = Engine(model, EngineConfig(**fields))
    print(f"{header}\n{engine.sizes}; {time.perf_counter() - begin:.0f} s", flush=True)
    for case in CASES:
        if options.case and case.name not in options.case:
            continue
        if time.perf_counter() - begin > options.budget:
            print(f"{case.name}: no time left", flush=True)
            continue
        engine.reset_prefix_cache()
        measure = functools.partial(measure_prompt, repetitions=4) if case.kind == "prompt" else functools.partial(
            measure_decode, steps=options.steps
        )  # fmt: skip
        row: Row = {"case": case.name, "devices": 1, "model": options.model} | measure(engine, config, case)
        row["floor_us"] = floor_us(config, case, rate, jnp.dtype(config.dtype).itemsize)
        measured_us = 1e3 * row["ttft_ms"] if case.kind == "prompt" else row["step_us"]
        row["ratio"] = measured_us / row["floor_us"]
        row |= fields | {"copy_bandwidth_tb_s": rate / 1e6} | header
        rows.append(row)
        append(options.json, row)
        print({name: value for name, value in row.items() if name not in header}, flush=True)
    return rows


if __name__ == "__main__":
    main()
