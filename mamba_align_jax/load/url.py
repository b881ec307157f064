"""Times a server under load, through its own door, and writes the same rows as for an engine."""

import argparse
import datetime
import time

from mamba_align_jax.load.cells import load_sizes, loads
from mamba_align_jax.load.http_client import Server, serve_url
from mamba_align_jax.load.metrics import summary
from mamba_align_jax.load.rows import Row, append
from mamba_align_jax.load.runs import medians


def run_url(options: argparse.Namespace) -> list[Row]:
    """Sends each workload in each loop to the server at `options.url`, and returns a row of results for each run.

    A server's cache can't be emptied from outside, so each run draws prompts of its own. What attainable tokens are
    depends on `options.block_size`, which should be the server's.

    Args:
        options: Those of `mamba-align bench`.

    Raises:
        ValueError: The URL is not one of HTTP, or the server names no model.
        OSError: The server can't be reached, or refuses a request.
    """
    models = [options.served_model] if options.served_model else Server(options.url, api_key=options.api_key).models()
    if not models:
        raise ValueError(f"--served-model must be given, because {options.url} names no model")
    name = models[0]
    server = Server(options.url, name, options.api_key)
    begin, written = time.perf_counter(), []
    runs: dict[int, list[Row]] = {}
    chosen = list(loads(options))
    for number in range(options.runs):
        for place, (workload, loop) in enumerate(chosen):
            rows = runs.setdefault(place, [])
            case = f"{workload.name} x{workload.num_requests} {loop.name} {name}"
            expected = rows[-1]["seconds"] if rows else 0.0
            if time.perf_counter() - begin + expected > options.budget:
                print(f"{case}: no time left for run {number + 1} of {options.runs}", flush=True)
                continue
            print(f"{case}: run {number + 1} of {options.runs}", flush=True)
            sessions = workload.sessions(options.vocab_size, options.seed + number)
            run = serve_url(server, sessions, workload.output, loop)
            rows.append(summary(run, options.block_size) | {"requests": len(run.requests)})
            about = {"case": case, "workload": workload.name, "loop": loop.name, "mode": "server", "model": name}
            date = datetime.datetime.now(datetime.UTC).date().isoformat()
            row = (
                about
                | load_sizes(workload, loop)
                | medians(rows)
                | {"url": options.url, "commit": options.commit, "date": date}
            )
            append(options.json, row)
            written.append(row)
    return written
