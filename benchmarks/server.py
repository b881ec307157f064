"""Says what the server adds to the bare engine: `python -m benchmarks.server --streams 8`.

The same engine takes the same load in turn from a loop around `Engine.step` and through HTTP, from a client in another
process, always with an empty prefix cache. A row has the medians of both and their differences. The server's thread and the
engine's share Python's lock, so the row says what a user of the server pays for it.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.random_model import MODELS, random_model
from benchmarks.rows import Row, append, facts
from mamba_align_jax.data import BYTE_MODEL
from mamba_align_jax.engine.config import EngineConfig
from mamba_align_jax.engine.running.engine import Engine
from mamba_align_jax.load.client import serve
from mamba_align_jax.load.metrics import summary
from mamba_align_jax.load.runs import medians
from mamba_align_jax.load.workloads import ClosedLoop, PrefixRepetition
from mamba_align_jax.models import load_model
from mamba_align_jax.serve.app import create_app
from mamba_align_jax.serve.server import make_server
from mamba_align_jax.serve.settings import Settings

_TIMES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", choices=("byte_model", *MODELS), default="byte_model", help="default: the bundled one"
    )
    parser.add_argument("--streams", type=int, action="append", help="requests that run at once; default: 1 and 8")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=32, help="requests of a run")
    parser.add_argument("--prefix", type=int, default=256, help="tokens that all prompts share")
    parser.add_argument("--suffix", type=int, default=32, help="tokens that only one prompt has")
    parser.add_argument("--output", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--stepping", choices=("sync", "async"), default="sync")
    parser.add_argument("--json", metavar="FILE", help="append the rows to FILE")
    parser.add_argument("--commit", default="unknown", help="the commit that rows name")
    return parser


@contextlib.contextmanager
def served(engine: Engine) -> Iterator[str]:
    """Serves an engine from a thread. Yields the address."""
    settings = Settings(model_name="model", warmup="none")
    server = make_server(create_app(engine, settings), settings.limits, host="127.0.0.1", port=0)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the server has not started")
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def through_http(url: str, engine: Engine, streams: int, seed: int, options: argparse.Namespace) -> Row:
    """Runs the load by `benchmarks.http_client` in another process, and returns its row."""
    sizes = {name: getattr(options, name) for name in ("prompts", "prefix", "suffix", "output")}
    sizes |= {"concurrency": streams, "seed": seed}
    sizes |= {"vocab-size": engine.model_config.vocab_size}
    command = [sys.executable, "-m", "benchmarks.http_client", url, *(f"--{name}={n}" for name, n in sizes.items())]
    root = Path(__file__).parents[1]
    return json.loads(subprocess.run(command, check=True, cwd=root, stdout=subprocess.PIPE, text=True).stdout)


def measure(engine: Engine, url: str, streams: int, options: argparse.Namespace) -> Row:
    """Runs the load in turn through the engine and through the server, and returns a row of both."""
    workload = PrefixRepetition(
        prefix=options.prefix, suffix=options.suffix, output=options.output, prompts=options.prompts
    )
    bare, http = [], []
    for seed in range(options.runs):
        engine.reset_prefix_cache()
        sessions = workload.sessions(engine.model_config.vocab_size, seed)
        run = serve(engine, sessions, options.output, ClosedLoop(streams))
        bare.append(summary(run))
        engine.reset_prefix_cache()
        http.append(through_http(url, engine, streams, seed, options))
    names = [f"{name}_{part}" for name in _TIMES for part in ("mean", "p50", "p99")] + ["output_tokens_per_s"]
    row: dict[str, Any] = {"case": f"server x{streams} {options.model} {options.stepping}", "streams": streams}
    row |= {name: getattr(options, name) for name in ("runs", "prompts", "prefix", "suffix", "output")}
    for side, rows in (("engine", bare), ("server", http)):
        middle = medians([{name: each[name] for name in names} for each in rows])
        row |= {f"{side}_{name}": middle[name] for name in names}
    for name in _TIMES:
        row[f"overhead_{name}_p50"] = row[f"server_{name}_p50"] - row[f"engine_{name}_p50"]
    row["overhead_tpot_share"] = row["overhead_tpot_ms_p50"] / row["engine_tpot_ms_p50"]
    return row


def main(arguments: list[str] | None = None) -> list[Row]:
    """Measures each number of streams, and returns the rows."""
    options = parser().parse_args(arguments)
    chosen = options.streams or [1, 8]
    longest = options.prefix + options.suffix + options.output
    config = EngineConfig(
        block_size=options.block_size,
        max_num_seqs=max(chosen),
        max_model_len=longest,
        max_num_batched_tokens=options.max_num_batched_tokens,
        async_stepping=options.stepping == "async",
    )
    model = load_model(BYTE_MODEL) if options.model == "byte_model" else random_model(MODELS[options.model])
    engine, rows = Engine(model, config), []
    print(f"compiled in {engine.warmup(draws=False):.0f} s", flush=True)
    with served(engine) as url:
        for streams in chosen:
            row = measure(engine, url, streams, options) | facts(options.commit)
            append(options.json, row)
            rows.append(row)
            print(
                f"{row['case']}: TTFT p50 {row['engine_ttft_ms_p50']:.2f} -> {row['server_ttft_ms_p50']:.2f} ms, "
                f"TPOT p50 {row['engine_tpot_ms_p50']:.3f} -> {row['server_tpot_ms_p50']:.3f} ms "
                f"({row['overhead_tpot_share']:+.1%})",
                flush=True,
            )
    return rows


if __name__ == "__main__":
    main()
