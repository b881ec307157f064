"""A process for what must not stop its caller: it has limits of time and of memory, and the system ends it at them."""

import contextlib
import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any


class Worker:
    """A process that answers lines, each by a line of JSON. One thread may ask at a time."""

    def __init__(self, script: str | Path, *arguments: str) -> None:
        """Starts a script, which sets its own limits and ends itself when it exceeds them."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf8",
        )
        self._stop = weakref.finalize(self, _stop, self._process)

    @property
    def is_alive(self) -> bool:
        """Whether the process can be asked."""
        return self._process.poll() is None

    def ask(self, line: str) -> Any:
        """Returns the answer to a line; None if the process has ended at one of its limits."""
        assert self._process.stdin
        assert self._process.stdout
        answer = ""
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            pass
        except BaseException:
            # The answer would be taken for that of the next question.
            self._stop()
            raise
        if not answer:
            self._stop()
            return None
        return json.loads(answer)


def _stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            assert pipe
            pipe.close()
