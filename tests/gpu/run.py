"""Runs the tests that need a GPU: `python3 tests/gpu/run.py`, or `make gpu`.

Of each test it runs the cases that `cases.py` keeps; with `--depth=full`, all of them.

It appends a row to benchmarks/results/gpu_tests.jsonl and prints what failed. Each outcome is in build/gpu/tests.jsonl as
soon as it is known: a run that is stopped, by `--limit` or by SIGTERM, still names its failures and the tests that were
running, and what a killed one has left is summed up when the next one starts.

Processes share the GPU's memory by fixed shares, so that no test takes what another one needs. Tests of pools of more than
2^31 elements, which are marked `large_pool`, have processes of their own. What is left of the memory and of the
processors is for all others. Needs jax, flax, numpy, pytest, pytest-xdist, chex, hypothesis, jaxtyping and safetensors, and
no installation.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import files
import record

OUT = record.ROOT / "build/gpu"
# GB of GPU memory. A process keeps what it has once used, in regions that small arrays may divide: with 24 GB, two pools of
# 9 GB did not fit after other tests. Small tests had 1.2 GB at most on an H200.
LARGE_GB, SMALL_GB = 36.0, 3.0
# Programs, and what is no array, of one process.
OUTSIDE_GB = 0.6
LARGE_PROCESSES = 2


def read(file):
    """Returns the outcomes of a file by test, the tests that have begun and not ended, and how many have not ended.

    A torn last line is left out.
    """
    outcomes, running, collected = {}, set(), 0
    for text in file.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            line = json.loads(text)
            if "started" in line:
                running.add(line["started"])
            elif "test" in line:
                outcomes[line["test"]] = line
                running.discard(line["test"])
            collected += line.get("collected", 0)
    return outcomes, sorted(running), max(collected - len(outcomes), 0)


def row_of(file, seconds=None):
    """Returns the row of a file of outcomes, whose first line is how the row begins, and prints what failed."""
    begin, *_ = (json.loads(line) for line in file.read_text().splitlines()[:1])
    outcomes, running, missing = read(file)
    counts = Counter(line["outcome"] for line in outcomes.values())
    failed = sorted(name for name, line in outcomes.items() if line["outcome"] == "failed")
    for name in failed:
        print(f"\n=== {name}\n{outcomes[name]['text']}")
    for name in failed:
        print(f"FAILED {name}")
    ended = any('"ended"' in line for line in file.read_text().splitlines()[-1:])
    if not ended:
        print(f"It was cut off, and {missing} tests had not ended. These were running:", *running, sep="\n  ")
    began = begin.pop("began")
    seconds = file.stat().st_mtime - began if seconds is None else seconds
    row = begin | {key: counts[key] for key in ("passed", "failed", "skipped")} | dict(seconds=round(seconds))
    return row | dict(not_run=missing, cut_off=not ended, failures=failed)


def shares(total_gb, processors):
    """Returns how many processes the small tests get, and the share of the memory of a large and of a small process."""
    room = total_gb - LARGE_PROCESSES * (LARGE_GB + OUTSIDE_GB)
    small = max(1, min(processors, int(room / (SMALL_GB + OUTSIDE_GB))))
    return small, min(LARGE_GB / total_gb, 0.9), min(SMALL_GB / total_gb, 0.9)


def start(name, processes, share, marks, depth, file, arguments):
    """Starts pytest in its own process group, with its output in a file."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    env = os.environ | dict(XLA_PYTHON_CLIENT_MEM_FRACTION=f"{share:.4f}", PYTHONPATH=path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks]
    command += ["--depth=full"] if depth == "full" else []
    command += arguments or [str(file.relative_to(record.ROOT)) for file in files.in_folder(record.ROOT / "tests")]
    # pytest would look for its settings beside a file that is an argument of its own.
    command += ["-p", "outcomes", f"--outcomes={file}", "-n", str(processes), "--maxschedchunk=1"]
    with Path(file.parent, f"{name}.log").open("w") as log:
        streams = dict(stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        return subprocess.Popen(command, cwd=record.ROOT, env=env, start_new_session=True, **streams)


def stop(runs):
    """Ends process groups, first by SIGTERM."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for run in runs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, sign)
        end = time.monotonic() + 3
        while time.monotonic() < end and any(run.poll() is None for run in runs):
            time.sleep(0.1)


def watch(runs, file, limit):
    """Waits for the runs, saying now and then how far they are. Returns whether all ended by themselves."""
    began = said = time.monotonic()
    while any(run.poll() is None for run in runs):
        time.sleep(0.2)
        if time.monotonic() - began > limit:
            return False
        if time.monotonic() - said > 20:
            said = time.monotonic()
            counts = Counter(line["outcome"] for line in read(file)[0].values())
            print(f"{said - began:.0f} s: {dict(counts)}", flush=True)
    return True


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", help="of this tree, where there is no git")
    parser.add_argument("--limit", type=float, default=float("inf"), metavar="S", help="stop after so many seconds")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FOLDER", help="for outcomes and logs")
    parser.add_argument(
        "--depth", choices=("quick", "full"), default="quick", help="full: also what cases.py leaves out"
    )
    parser.add_argument("--json", type=Path, default=record.RESULTS, metavar="FILE", help="for the row")
    parser.add_argument("arguments", nargs="*", help="of pytest, after --: for example tests/kernels")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "tests.jsonl"
    if file.exists():
        print("An earlier run was killed before it could say this:")
        record.append(row_of(file), options.json)
        file.rename(file.with_suffix(".old.jsonl"))

    def end(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    began, runs, ended = time.time(), [], False
    begin = record.conditions("tests", options.commit) | dict(depth=options.depth, began=began)
    file.write_text(json.dumps(begin) + "\n")
    memory = record.gpu_says("memory.total")
    small, *fractions = shares(float(memory) * 2**20 / 1e9 if memory != "none" else 100.0, record.processors())
    try:
        for name, processes, share, marks in (
            ("large", LARGE_PROCESSES, fractions[0], "gpu and large_pool"),
            ("small", small, fractions[1], "gpu and not large_pool"),
        ):
            runs.append(start(name, processes, share, marks, options.depth, file, options.arguments))
        ended = watch(runs, file, options.limit)
    except KeyboardInterrupt:
        print("stopped")
    finally:
        stop(runs)
        signal.signal(signal.SIGTERM, before)
    # 5: no test was collected, which is right for a part of the tests.
    broken = [name for name, run in zip(("large", "small"), runs, strict=False) if run.returncode not in (0, 1, 5)]
    for name in broken if ended else ():
        print(f"pytest did not end well:\n{(options.out / f'{name}.log').read_text()[-4000:]}")
    if ended and not broken:
        with file.open("a") as outcomes:
            outcomes.write(json.dumps({"ended": True}) + "\n")
    row = row_of(file, time.time() - began)
    record.append(row, options.json)
    file.rename(file.with_suffix(".last.jsonl"))
    print(json.dumps(row))
    return int(row["failed"] > 0 or row["cut_off"] or row["passed"] == 0)


if __name__ == "__main__":
    sys.exit(main())
