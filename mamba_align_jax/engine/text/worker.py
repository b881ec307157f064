"""A process for what must not stop its caller: it has limits of time and of memory, and the system ends it at them."""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

from mamba_align_jax.errors import WorkerLostError

# How a process ends at its own limits, or because a library has failed. Whoever stops it from outside sends another signal.
_OWN_ENDS = (signal.SIGPROF, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_START_S = 60.0  # for Python and its libraries, on a machine that is busy


class Worker:
    """A process that answers lines, each by a line of JSON. One thread may ask at a time.

    A process that someone else has ended or stopped, or that does not answer in time, is replaced, and the new one is asked
    once more.
    """

    def __init__(self, script: str | Path, time_limit: float, first: str) -> None:
        """Describes a process, which is started when it is first needed.

        Args:
            script: It takes the time limit as its argument, sets its own limits, and ends itself when it exceeds them.
            time_limit: Number of seconds of CPU time that a line may take.
            first: The first line of every process.
        """
        self._script, self._first, self._time_limit = script, first, time_limit
        # A process that gets no more than half of a CPU is late.
        self._patience = 2 * time_limit + 1
        self._process: subprocess.Popen[str] | None = None
        self._stop = lambda: None

    def start(self) -> Any:
        """Starts the process if there is none, and returns the answer to its first line; None if it exceeds the limits.

        Raises:
            WorkerLostError: The process was ended from outside.
        """
        for _ in range(2):
            with contextlib.suppress(WorkerLostError):
                return self._start()
        raise WorkerLostError(f"{Path(self._script).name} was ended, or did not start")

    def ask(self, line: str) -> Any:
        """Returns the answer to a line; None if the process has ended at one of its limits.

        Raises:
            WorkerLostError: The process was lost, and so was the one after it.
        """
        for _ in range(2):
            with contextlib.suppress(WorkerLostError):
                is_alive = self._process is not None and self._process.poll() is None
                if not is_alive and self._start() is None:
                    continue
                return self._exchange(line, self._patience)
        raise WorkerLostError(f"{Path(self._script).name} was ended, or did not answer in {self._patience:g} s")

    def _start(self) -> Any:
        self._stop()
        process = self._process = subprocess.Popen(
            [sys.executable, "-P", str(self._script), str(self._time_limit)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf8",
        )
        self._stop = weakref.finalize(self, _stop, process)
        return self._exchange(self._first, _START_S + self._patience)

    def _exchange(self, line: str, patience: float) -> Any:
        process = self._process
        assert process
        assert process.stdin
        assert process.stdout
        # Neither a line that a stopped process does not take, nor an answer that it does not give, is waited for.
        watch = threading.Timer(patience, process.kill)
        watch.daemon = True
        answer = ""
        try:
            watch.start()
            process.stdin.write(line + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            pass
        except BaseException:
            # The answer would be taken for that of the next question.
            self._stop()
            raise
        finally:
            watch.cancel()
        if answer.endswith("\n"):
            return json.loads(answer)
        with contextlib.suppress(subprocess.TimeoutExpired):
            # It has closed its output, so it is about to end.
            process.wait(1.0)
        status = process.poll()
        self._stop()
        if status is None or status == 0 or (status < 0 and -status not in _OWN_ENDS):
            raise WorkerLostError("the process was ended from outside")
        return None


def _stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            assert pipe
            pipe.close()
