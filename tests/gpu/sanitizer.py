"""Runs a case of every kernel under compute-sanitizer: `python3 tests/gpu/sanitizer.py memcheck`, or `racecheck`.

First the tool has to find a planted fault (`planted.cu`), because some machines let it run and find nothing. Each array is
an allocation of its own, so that memcheck sees a step over its end. Several processes take one file of tests each, of which
`one_each.py` chooses the cases. A process that dies is started again without the test that it died in, and that test is
tried once more alone. The row in gpu_tests.jsonl names what was found, what failed and where processes died. Where the tool
itself dies by a signal, and not the program that it checks, the test counts as not checked (`tool_died`).
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import files
import record
import run

HERE = Path(__file__).parent
FOUND = 9  # the exit status of the tool if it finds something
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
FINDING = re.compile(
    r"^=+ (?:Invalid .*|Error: Race .*|Warning: Race .*|.*Potential .* hazard .*)\n=+ +(.*)", re.MULTILINE
)


class Job(NamedTuple):
    """What one process runs: a file, without these tests, or one test alone."""

    file: str
    without: tuple[str, ...] = ()
    is_retry: bool = False


def finds_planted_fault(tool):
    """Returns whether the tool finds the planted fault, and what it says."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "planted")
        built = subprocess.run(
            ["nvcc", "-arch=native", "-o", program, HERE / "planted.cu"], capture_output=True, text=True, check=False
        )
        if built.returncode:
            return False, built.stdout + built.stderr
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(FOUND), program, tool]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode == FOUND, done.stdout + done.stderr


def tests_of(names):
    """Returns the files and tests that are named, and the files in folders that may have GPU tests, the longest first."""
    found = [file for name in names if ".py" not in name for file in files.in_folder(record.ROOT / name)]
    return [name for name in names if ".py" in name] + [str(file.relative_to(record.ROOT)) for file in found]


def command_of(tool, job, outcomes, preload, keyword):
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(FOUND)]
    # pytest's own handler of faults would take the place of the library's.
    command += ["--preload-library", preload] if preload else []
    command += [sys.executable, "-m", "pytest", "-v", *(["-p", "no:faulthandler"] if preload else [])]
    command += [
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-p",
        "one_each",
        "-p",
        "outcomes",
        f"--outcomes={outcomes}",
    ]
    command += ["-k", keyword] if keyword else []
    return [*command, "-m", "gpu", *(f"--deselect={name}" for name in job.without), job.file]


def environment(out):
    """Returns the environment of the processes, which share their compiled programs."""
    path = os.pathsep.join([str(HERE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    compiled = dict(
        JAX_COMPILATION_CACHE_DIR=str(out / "compiled"),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
    )
    return os.environ | compiled | dict(XLA_PYTHON_CLIENT_ALLOCATOR="platform", PYTHONPATH=path, PYTHONUNBUFFERED="1")


class Check:
    """A run of the tool over jobs."""

    def __init__(self, tool, out, end, preload, keyword):
        self.tool, self.out, self.end, self.preload, self.keyword = tool, out, end, preload, keyword
        self.outcomes, self.findings, self.died, self.tool_died, self.not_run, self.errors = {}, [], [], [], [], 0

    def do(self, number, job):
        """Runs a job until its tests have ended, have died twice or there is no time. Its log is kept."""
        name = f"{self.tool}_{number}_{Path(job.file.partition('::')[0]).stem}"
        for attempt in range(100):
            left = self.end - time.monotonic()
            if left < 1:
                self.not_run.append(job.file)
                return
            log, file = (self.out / f"{name}_{attempt}.{kind}" for kind in ("log", "jsonl"))
            file.unlink(missing_ok=True)
            file.touch()
            status = self.process(command_of(self.tool, job, file, self.preload, self.keyword), log, left)
            outcomes, running, _ = run.read(file)
            self.read(job, log.read_text(errors="replace"))
            self.outcomes |= outcomes
            if status is None:
                self.not_run.append(f"{job.file}: stopped in {', '.join(running)}")
                return
            if not running:
                # The tool may die before a test begins. 5: the file has no GPU test.
                if status < 0 and not outcomes and attempt < 3:
                    continue
                # What runs nothing must not pass for clean.
                if status != 5 and not outcomes:
                    self.died.append(f"{job.file}: no test ran, status {status}")
                return
            print(f"{job.file}: the process died in {running[0]} with status {status}, see {log}", flush=True)
            if job.is_retry:
                # A status below 0 is the tool's own end. It reports that of the program by another one.
                (self.tool_died if status < 0 else self.died).extend(running)
                return
            self.do(f"{number}r{attempt}", Job(running[0], is_retry=True))
            job = job._replace(without=(*job.without, *outcomes, running[0]))

    def process(self, command, log, seconds):
        """Runs a command in a process group of its own. Returns its exit status, or None if its time ran out."""
        with log.open("w") as file:
            streams = dict(stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
            began = subprocess.Popen(
                command, cwd=record.ROOT, env=environment(self.out), start_new_session=True, **streams
            )
            try:
                return began.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(began.pid, signal.SIGKILL)
                began.wait()
                return None

    def read(self, job, text):
        """Takes what the tool has found from a log."""
        self.errors += sum(int(a or b) for a, b in SUMMARY.findall(text))
        found = [f"{job.file}: {' '.join(match.group(0).split())}" for match in FINDING.finditer(text)]
        for finding in dict.fromkeys(found):
            print(finding, flush=True)
        self.findings += dict.fromkeys(found)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=("memcheck", "racecheck"))
    parser.add_argument("tests", nargs="*", default=["tests/kernels"], help="folders, files and tests")
    parser.add_argument("-k", dest="keyword", metavar="EXPRESSION", help="run the tests that match, as for pytest")
    parser.add_argument("--commit", help="of this tree, where there is no git")
    parser.add_argument("--limit", type=float, default=3600, metavar="S", help="stop after so many seconds")
    parser.add_argument("--processes", type=int, default=max(1, record.processors() - 2))
    parser.add_argument(
        "--preload", metavar="FILE", help="a library to load first, as one that says where a process dies"
    )
    parser.add_argument("--out", type=Path, default=run.OUT, metavar="FOLDER", help="for logs and compiled programs")
    parser.add_argument("--json", type=Path, default=record.RESULTS, metavar="FILE", help="for the row")
    options = parser.parse_args(arguments)
    began, end = time.monotonic(), time.monotonic() + options.limit
    for program in ("nvcc", "compute-sanitizer"):
        if shutil.which(program) is None:
            sys.exit(f"{program} was not found")
    is_found, text = finds_planted_fault(options.tool)
    if not is_found:
        sys.exit(f"{options.tool} does not find the planted fault on this machine, so it would find no other:\n{text}")
    options.out.mkdir(parents=True, exist_ok=True)
    check = Check(options.tool, options.out, end, options.preload, options.keyword)
    with ThreadPoolExecutor(options.processes) as pool:
        list(pool.map(check.do, *zip(*enumerate(map(Job, tests_of(options.tests))), strict=True)))
    counts = Counter(line["outcome"] for line in check.outcomes.values())
    failed = [name for name, line in check.outcomes.items() if line["outcome"] == "failed"]
    for name in failed:
        print(f"FAILED {name}\n{check.outcomes[name]['text'][-1500:]}")
    for text in check.not_run:
        print(f"NOT RUN {text}")
    for name in check.tool_died:
        print(f"NOT CHECKED, because {options.tool} itself died of a signal: {name}")
    failures = [*check.findings, *(f"failed: {name}" for name in failed), *(f"died: {name}" for name in check.died)]
    row = record.conditions(options.tool, options.commit)
    row |= {key: counts[key] for key in ("passed", "failed", "skipped")}
    row |= dict(errors=check.errors, not_run=len(check.not_run), tool_died=sorted(check.tool_died))
    row |= dict(keyword=options.keyword) if options.keyword else {}
    row |= dict(processes=options.processes, seconds=round(time.monotonic() - began), failures=failures)
    record.append(row, options.json)
    print(json.dumps(row))
    return int(bool(failures or check.errors or check.not_run or not counts["passed"]))


if __name__ == "__main__":
    sys.exit(main())
