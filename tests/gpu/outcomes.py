"""A plugin of pytest that appends each test's outcome to a file as it comes: a run that is cut off has told its failures.

Each line is an object. {"collected"} says how many tests there are, and {"started": test} that a test has begun. {"test",
"outcome", "seconds", "cpu_s", "compile_s", "peak_gb", "text"} says how it ended: how long it took, the processors' time and
that of compiling, and the most GPU memory that its process has held so far. The plugin is given as `-p outcomes
--outcomes=FILE`, where this folder is on PYTHONPATH.
"""

import json
import time
from pathlib import Path

import pytest

LONGEST_TEXT = 6000
ORDER = ("passed", "skipped", "failed")


def pytest_addoption(parser):
    parser.addoption("--outcomes", metavar="FILE", help="append each test's outcome to this file")


def pytest_configure(config):
    # xdist's workers measure, and the process that has started them writes.
    config.pluginmanager.register(Measures())
    if config.getoption("outcomes") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Writer(Path(config.getoption("outcomes"))))


class Measures:
    """Adds to a test's report how long its programs took to compile, and the most memory that its process has held."""

    def __init__(self):
        self.compiling = self.cpu = 0.0

    def pytest_sessionstart(self):
        import jax

        jax.monitoring.register_event_duration_secs_listener(self.heard)

    def heard(self, event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            self.compiling += seconds

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self):
        self.compiling, self.cpu = 0.0, time.process_time()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        if call.when == "teardown":
            import jax

            item.user_properties += [("cpu_s", round(time.process_time() - self.cpu, 2))]
            item.user_properties += [("compile_s", round(self.compiling, 2))]
            stats = jax.local_devices()[0].memory_stats()
            if stats:
                item.user_properties += [("peak_gb", round(stats["peak_bytes_in_use"] / 1e9, 2))]
        return (yield)


class Writer:
    """Writes the file."""

    def __init__(self, file):
        # Without a buffer a line is one write, and the lines of two runs do not mix.
        self.file, self.parts, self.is_counted = file.open("ab", buffering=0), {}, False

    def write(self, **line):
        self.file.write(json.dumps(line).encode() + b"\n")

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids):
        if not self.is_counted:
            self.is_counted = True
            self.write(collected=len(ids))

    def pytest_collectreport(self, report):
        if report.failed:
            self.write(test=report.nodeid, outcome="failed", seconds=0.0, text=str(report.longrepr)[-LONGEST_TEXT:])

    def pytest_runtest_logstart(self, nodeid):
        self.write(started=nodeid)

    def pytest_runtest_logreport(self, report):
        parts = self.parts.setdefault(report.nodeid, [])
        parts.append(report)
        # xdist says that a worker has died in a report that is of no phase.
        if report.when in ("setup", "call"):
            return
        worst = max(parts, key=lambda part: ORDER.index(part.outcome))
        text = str(worst.longrepr)[-LONGEST_TEXT:] if worst.outcome != "passed" else ""
        seconds = round(sum(part.duration for part in self.parts.pop(report.nodeid)), 2)
        measured = dict(report.user_properties)
        self.write(test=report.nodeid, outcome=worst.outcome, seconds=seconds, **measured, text=text)
