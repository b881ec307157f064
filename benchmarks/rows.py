"""Rows of results: what each row says about the machine, and how rows are written."""

import datetime
import json
import subprocess
from pathlib import Path

import jax

from benchmarks.reading import Row


def environment(commit: str) -> dict[str, str]:
    """The GPU, its driver, JAX's version, the commit and the date (UTC).

    Raises:
        OSError: `nvidia-smi` is not installed.
        subprocess.CalledProcessError: `nvidia-smi` failed.
    """
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu, driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].split(", ")
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"gpu": gpu, "driver": driver, "jax": jax.__version__, "commit": commit, "date": date}


def facts(commit: str) -> dict[str, str]:
    """Returns `environment(commit)` on a GPU. On a CPU, where only tests run, there is no GPU, driver or date to name."""
    if jax.default_backend() == "gpu":
        return environment(commit)
    return {"gpu": "none", "driver": "none", "jax": jax.__version__, "commit": commit}


def append(file: str | Path | None, row: Row) -> None:
    """Appends a row to a JSON Lines file; without a file it does nothing."""
    if file is not None:
        with open(file, "a") as lines:
            lines.write(json.dumps(row) + "\n")
