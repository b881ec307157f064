"""Rows of benchmarks/results/gpu_tests.jsonl: what has run on which GPU, of which commit, and what failed.

`python3 tests/gpu/record.py` says which commit the last run of the tests was of, and how many files of kernels have changed
since. It needs no GPU.
"""

import datetime
import importlib.metadata
import json
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/gpu_tests.jsonl"
KERNELS = "pallas_kernels"
# More would make rows that nobody reads.
MOST_FAILURES = 50


def output_of(*command):
    """Returns what a command prints, or None if it fails or is not there."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def commit_of_tree():
    """Returns the commit of this tree, with "+" if tracked files differ from it, or "unknown" where there is no git."""
    commit = output_of("git", "rev-parse", "--short", "HEAD")
    return "unknown" if commit is None else commit + "+" * bool(output_of("git", "status", "--porcelain", "-uno"))


def gpu_says(field):
    """Returns what nvidia-smi says of the first GPU, or "none"."""
    lines = output_of("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits")
    return lines.splitlines()[0].strip() if lines else "none"


def conditions(kind, commit=None):
    """Returns the beginning of a row: what runs, when, of which commit and on what.

    Args:
        kind: "tests", "memcheck", "racecheck" or "soak".
        commit: of the tree; None asks git.
    """
    try:
        jax = importlib.metadata.version("jax")
    except importlib.metadata.PackageNotFoundError:
        jax = "none"
    return dict(
        kind=kind,
        date=datetime.date.today().isoformat(),
        gpu=gpu_says("name"),
        driver=gpu_says("driver_version"),
        jax=jax,
        commit=commit or commit_of_tree(),
    )


def append(row, file=RESULTS):
    """Appends a row, whose failures are cut to the first `MOST_FAILURES`, in one write."""
    row = row | dict(failures=row["failures"][:MOST_FAILURES])
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as rows:
        rows.write(json.dumps(row) + "\n")


def last(kind, file=RESULTS):
    """Returns the last row of a kind, or None."""
    lines = file.read_text().splitlines() if file.exists() else []
    rows = [row for row in map(json.loads, lines) if row["kind"] == kind]
    return rows[-1] if rows else None


def changed_since(commit):
    """Returns the files of kernels that differ from those of a commit, or None if this clone lacks the commit."""
    found = output_of("git", "diff", "--name-only", commit.rstrip("+"), "--", KERNELS)
    return None if found is None else found.splitlines()


def summary(file=RESULTS):
    """Says in one line what the last run of the tests on a GPU was of, and what has changed since."""
    row = last("tests", file)
    if row is None:
        return "GPU: no row says that the tests have run on one"
    counts = f"{row['passed']} passed, {row['failed']} failed" + ", cut off" * row["cut_off"]
    changed = changed_since(row["commit"])
    if changed is None:
        since = "which is not in this clone, so what has changed since is unknown"
    else:
        since = f"{len(changed)} files of kernels have changed since"
    return f"GPU: {row['gpu']}, {row['date']}: {counts}; commit {row['commit']}, {since}"


def processors():
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    print(summary())
