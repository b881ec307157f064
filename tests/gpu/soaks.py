"""Runs `tests/soak.py` in several processes on one GPU for some time: `python3 tests/gpu/soaks.py --seconds 450`.

Each process has its own seeds, and begins at another configuration of the soak. Another run goes on where the last row of
benchmarks/results/gpu_tests.jsonl ended, so that pieces add up to a long soak. The row says how many processes and seconds
there were, and how much memory the processes had when they ended their first and their last configuration.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import record
import run

SOAK = record.ROOT / "tests/soak.py"
LONGEST_DRAIN_S = 60  # after the last request is added


def start(number, options, first_seed):
    """Starts a process, which appends what it has done to a file."""
    share = 0.9 / options.processes
    env = os.environ | dict(
        XLA_PYTHON_CLIENT_PREALLOCATE="false",
        XLA_PYTHON_CLIENT_MEM_FRACTION=f"{share:.4f}",
        JAX_COMPILATION_CACHE_DIR=str(options.out / "compiled"),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
        PYTHONPATH=os.pathsep.join([str(record.ROOT), os.environ.get("PYTHONPATH", "")]),
    )
    file = options.out / f"soak_{number}.jsonl"
    file.unlink(missing_ok=True)
    command = [sys.executable, str(SOAK), f"--seed={first_seed + number}", f"--stride={options.processes}"]
    command += [f"--seconds={options.seconds}", f"--requests={options.requests}", f"--json={file}"]
    command += [f"--model-requests={options.requests // 10}"]
    with Path(options.out, f"soak_{number}.log").open("w") as log:
        streams = dict(stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        return file, subprocess.Popen(command, cwd=record.ROOT, env=env, start_new_session=True, **streams)


def row_of(done, statuses, options, first_seed, seconds):
    """Returns the row of a soak.

    Args:
        done: for each process, what its configurations have done, in order.
        statuses: of the processes; None for one that did not end in time.
        first_seed: of the first process.
        seconds: that the soak took.
    """
    every = [part for parts in done for part in parts]
    sums = {name: sum(part[name] for part in every) for name in ("requests", "steps", "wrong", "ties", "leaked")}
    gb = lambda values: round(max((value or 0 for value in values), default=0) / 1e9, 2)
    ends = [(parts[0], parts[-1]) for parts in done if parts]
    memory = {
        f"{where}_gb": [
            gb(first[f"{where}_bytes"] for first, _ in ends),
            gb(last[f"{where}_bytes"] for _, last in ends),
        ]
        for where in ("host", "device")
    }
    failures = [f"{part['name']}, seed {part['seed']}" for part in every if part["wrong"] or part["leaked"]]
    failures += [f"process {number} ended with {status}" for number, status in enumerate(statuses) if status != 0]
    last = max((part["seed"] for part in every), default=first_seed - 1)
    return (
        sums
        | memory
        | dict(
            configurations=len({part["name"] for part in every}),
            processes=options.processes,
            seconds=round(seconds),
            process_seconds=round(sum(part["seconds"] for part in every)),
            first_seed=first_seed,
            next_seed=last + 1,
            failures=failures,
        )
    )


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=450, help="after which no request is added")
    parser.add_argument("--processes", type=int, default=max(1, record.processors() - 2))
    parser.add_argument("--requests", type=int, default=20_000, help="of each seed, through the stub")
    parser.add_argument("--seed", type=int, help="the first one; default: where the last row ended")
    parser.add_argument("--commit", help="of this tree, where there is no git")
    parser.add_argument("--out", type=Path, default=run.OUT, metavar="FOLDER", help="for logs and compiled programs")
    parser.add_argument("--json", type=Path, default=record.RESULTS, metavar="FILE", help="of the rows")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    before = record.last("soak", record.RESULTS)
    seed = options.seed if options.seed is not None else before["next_seed"] if before else 0
    began = time.monotonic()
    processes = [start(number, options, seed) for number in range(options.processes)]
    statuses = []
    for _, process in processes:
        try:
            statuses.append(process.wait(max(1, began + options.seconds + LONGEST_DRAIN_S - time.monotonic())))
        except subprocess.TimeoutExpired:
            statuses.append(None)
    for _, process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    done = [
        [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else [] for file, _ in processes
    ]
    row = record.conditions("soak", options.commit)
    row |= row_of(done, statuses, options, seed, time.monotonic() - began)
    record.append(row, options.json)
    for number, status in enumerate(statuses):
        if status != 0:
            print(f"process {number}:\n{(options.out / f'soak_{number}.log').read_text()[-2000:]}")
    print(json.dumps(row))
    return int(bool(row["failures"]) or not row["requests"])


if __name__ == "__main__":
    sys.exit(main())
