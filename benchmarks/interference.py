"""Times requests that decode while long prompts arrive: `python -m benchmarks.interference --json FILE`.

`rows` requests decode without a pause, and a prompt arrives every `interval` seconds. A row has the time between tokens of
the requests that decode, and the time from a prompt's arrival to its first token. The weights are random, in the shapes of
a published model.
"""

import argparse
import itertools
import time
from collections import deque
from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx

from benchmarks.model import CONFIGURATION
from benchmarks.random_model import MODELS, random_model
from benchmarks.rows import Row, append, facts
from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.load.runs import free_pools

ROWS, CONTEXT, PROMPT, INTERVAL_S, COUNT = 15, 4096, 4096, 1.0, 20


def measure(
    engine: Engine,
    *,
    rows: int = ROWS,
    context: int = CONTEXT,
    prompt: int = PROMPT,
    interval: float = INTERVAL_S,
    count: int = COUNT,
) -> Row:
    """Serves `count` prompts beside `rows` requests that decode, and returns the times of both, in ms.

    Args:
        engine: An engine that has no requests and has compiled its programs.
        rows: Number of requests that decode.
        context: Number of tokens of their prompts.
        prompt: Number of tokens of each prompt that arrives.
        interval: Seconds between arrivals.
        count: Number of prompts that arrive.
    """
    rng = np.random.default_rng(0)
    draw = lambda size: rng.integers(0, engine.model_config.vocab_size, size).tolist()
    engine.reset_prefix_cache()
    endless = SamplingParams(max_tokens=engine.longest_sequence - context, ignore_eos=True)
    decoding = [engine.add_request(draw(context), endless) for _ in range(rows)]
    while engine.scheduler.waiting or any(request.is_prefilling for request in engine.scheduler.running):
        engine.step()
    prompts, begin = [draw(prompt) for _ in range(count)], time.perf_counter()
    due, late = deque(interval * (1 + number) for number in range(count)), {}
    ttft: list[float] = []
    while len(ttft) < count:
        now = time.perf_counter() - begin
        while due and due[0] <= now:
            request = engine.add_request(prompts.pop(), SamplingParams(max_tokens=1, ignore_eos=True))
            late[request] = time.perf_counter() - begin - due.popleft()
        ttft += [late[output.request_id] + output.token_times[0] for output in engine.step()]
    seconds, gaps = time.perf_counter() - begin, []
    for request in decoding:
        ended = engine.abort(request)
        assert ended is not None
        later = [at for at in ended.token_times if at >= ended.token_times[-1] - seconds]
        gaps += [after - before for before, after in itertools.pairwise(later)]
    return {
        "itl_ms_p50": _percentile(gaps, 50),
        "itl_ms_p99": _percentile(gaps, 99),
        "itl_ms_max": 1e3 * max(gaps),
        "ttft_ms_mean": 1e3 * float(np.mean(ttft)),
        "ttft_ms_p99": _percentile(ttft, 99),
        "prompts": count,
    }


def _percentile(seconds: Sequence[float], percent: int) -> float:
    return 1e3 * float(np.percentile(seconds, percent))


def main(arguments: list[str] | None = None) -> list[Row]:
    """Times an engine with the configuration of the benchmarks, and one that chooses its own, and returns their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen3.5-4b", help="shapes of the random weights")
    parser.add_argument("--configuration", choices=("benchmark", "defaults"), action="append", help="default: both")
    parser.add_argument("--rows", type=int, default=ROWS, help="requests that decode")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens of their prompts")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of the prompts that arrive")
    parser.add_argument("--interval", type=float, default=INTERVAL_S, help="seconds between them")
    parser.add_argument("--count", type=int, default=COUNT, help="how many arrive")
    parser.add_argument("--json", metavar="FILE", help="append the rows to FILE")
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args(arguments)
    model, header, rows = random_model(MODELS[options.model]), facts(options.commit), []
    jax.block_until_ready(nnx.state(model))
    sizes = dict(rows=options.rows, context=options.context, prompt=options.prompt, interval=options.interval)
    for configuration in options.configuration or ("benchmark", "defaults"):
        engine = Engine(model, EngineConfig(**CONFIGURATION) if configuration == "benchmark" else None)
        measure(engine, **sizes, count=2)  # compiles
        row: Row = {"case": "interference", "model": options.model, "devices": 1} | sizes
        row |= {"configuration": "defaults"} if configuration == "defaults" else {}
        row |= measure(engine, **sizes, count=options.count)
        row |= {name: getattr(engine.config, name) for name in (*CONFIGURATION, "max_mixed_tokens")} | header
        rows.append(row)
        append(options.json, row)
        print(row, flush=True)
        free_pools(engine)
    return rows


if __name__ == "__main__":
    main()
