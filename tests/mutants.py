"""Makes one-line mistakes in the bookkeeping and checks that the fast tests notice each of them: `make mutants`.

Each mistake is made in a copy of the tree, two at a time. With arguments, only the mistakes whose names contain one of them
are made. With `--minutes`, mistakes are made in an order that differs from day to day, and none is begun later than that.
"""

import argparse
import datetime
import math
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("mamba_align_jax", "pallas_kernels", "tests", "pyproject.toml")
# The tests that neither compile kernels nor look at a compiled step.
GENERAL = (
    "tests/align/test_worked_examples.py",
    "tests/align/test_columns.py",
    "tests/align/test_interior.py",
    "tests/vllm_compat/test_mode_all.py",
    "tests/vllm_compat/test_mamba_utils.py",
    "tests/vllm_compat/test_staging.py",
    "tests/align/test_step.py",
    "tests/align/test_machine.py::test_every_step_reads_its_own_past",
)
DEFERRED = (
    "tests/align/test_machine.py::test_every_step_reads_its_own_past_from_deferred_states",
    "tests/align/test_deferred.py",
    "tests/align/test_boundary_windows.py",
    "tests/align/test_deferred_machine.py",
)
OPTIONS = (
    *("-x", "-q", "--tb=no", "-p", "no:cacheprovider"),
    *("--depth=cases", "--hypothesis-seed=0", "--hypothesis-profile=no_shrinking"),
)
AT_ONCE = 2
LONGEST_S = 600


class Mutant(NamedTuple):
    """A mistake: `new` in place of `old` in `file`, a path below mamba_align_jax. `first` are the tests to try first."""

    file: str
    old: str
    new: str
    name: str
    first: tuple[str, ...]


def read_table():
    """Reads mutants.txt. Exits with an error unless each old text occurs exactly once in its file."""
    mutants, file = [], ""
    for entry in (ROOT / "tests/mutants.txt").read_text().split("\n\n")[1:]:
        name, *texts = entry.rstrip("\n").split("\n")
        if not texts:
            file = name.removeprefix("file ")
            continue
        first = tuple(text.removeprefix("> ") for text in texts if text.startswith("> "))
        old, new = (text.removeprefix(sign) for text, sign in zip(texts[len(first) :], ("- ", "+ "), strict=True))
        count = (ROOT / "mamba_align_jax" / file).read_text().count(old)
        if count != 1:
            sys.exit(f"mutants.txt: {name!r}: its text must occur once in {file}, occurs {count} times: {old}")
        mutants.append(Mutant(file, old, new, name, first))
    return mutants


def copy_tree(to):
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, to / name)


def run_tests(tree, tests, *options):
    """Runs tests in `tree`. Returns the exit status and the first test that failed."""
    env = os.environ | {
        "PYTHONPATH": str(tree),
        # Python would keep old bytecode, because a mutant may have the size and the time of the original.
        "PYTHONDONTWRITEBYTECODE": "1",
        # Programs that a mistake does not change are compiled once.
        "JAX_COMPILATION_CACHE_DIR": str(tree / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    command = [sys.executable, "-m", "pytest", *OPTIONS, *options, *tests]
    run = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=LONGEST_S)
    failed = re.search(r"^FAILED \S*/(\S+)", run.stdout, re.MULTILINE)
    return run.returncode, failed.group(1) if failed else run.stdout[-2000:] + run.stderr[-2000:]


def mutate(tree, mutant):
    """Makes the mistake. Returns the path of the file and its former text."""
    path = tree / "mamba_align_jax" / mutant.file
    text = path.read_text()
    path.write_text(text.replace(mutant.old, mutant.new))
    return path, text


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="a part of the names of mistakes; default: all")
    parser.add_argument("--minutes", type=float, help="begin no mistake after so many minutes")
    options = parser.parse_args(arguments)
    parts, end = options.parts, math.inf
    mutants = [mutant for mutant in read_table() if not parts or any(part in mutant.name for part in parts)]
    if options.minutes is not None:
        end = time.monotonic() + 60 * options.minutes
        random.Random(datetime.date.today().toordinal()).shuffle(mutants)
    with tempfile.TemporaryDirectory() as folder:
        trees = queue.SimpleQueue()
        for number in range(AT_ONCE):
            copy_tree(Path(folder, str(number)))
            trees.put(Path(folder, str(number)))

        def attempt(mutant):
            """Returns True if the tests failed with a mutant, or passed without one, and None if no time was left."""
            if mutant and time.monotonic() > end:
                return None
            tree, began = trees.get(), time.monotonic()
            path, text = mutate(tree, mutant) if mutant else (None, None)
            # Where time is short, the tree as it is has the tests without their long searches.
            depth = "--depth=full" if mutant or end == math.inf else "--depth=quick"
            runs = [(GENERAL, depth), (DEFERRED, depth)]
            if mutant:
                # The tests that will notice it come first, without their long searches.
                of_deferred = mutant.name.startswith("deferred: ")
                first = mutant.first or (DEFERRED if of_deferred else GENERAL)
                runs = [(first,), *(reversed(runs) if of_deferred else runs)]
            try:
                for run in runs:
                    status, test = run_tests(tree, *run)
                    if status:
                        break
            except subprocess.TimeoutExpired:
                status, test = -1, f"not done within {LONGEST_S} s"
            finally:
                if path:
                    path.write_text(text)
                trees.put(tree)
            good = status == (1 if mutant else 0)
            # Only a failed test proves something. An import error or a usage error does not.
            said = {0: "survived" if mutant else "passes", 1: "caught" if mutant else "fails"}.get(status, "broken")
            name = mutant.name if mutant else "the tree as it is"
            where = "" if good and not mutant else f": {test}"
            print(f"{said:8} {time.monotonic() - began:4.0f} s  {name}{where}", flush=True)
            return good

        with ThreadPoolExecutor(AT_ONCE) as pool:
            fine, *results = pool.map(attempt, [None, *mutants])
    caught = [result for result in results if result is not None]
    print(f"{sum(caught)}/{len(caught)} caught")
    if len(caught) < len(mutants):
        print(f"{len(mutants) - len(caught)} were not made, because {options.minutes:g} minutes had passed")
    if not fine:
        sys.exit("but the tests also fail without a mistake")
    sys.exit(not all(caught))


if __name__ == "__main__":
    main()
