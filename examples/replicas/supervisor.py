"""Keeps processes running: one that ends is started again."""

import subprocess
import threading
import time
from collections.abc import Callable, Sequence

# A process that ends sooner waits twice as long before its next start, up to the longest wait.
_STEADY_S, _SHORTEST_S, _LONGEST_S = 60.0, 0.5, 30.0


class Supervisor:
    """Runs commands as processes until it is stopped, and starts each process again when it ends."""

    def __init__(self, commands: Sequence[Sequence[str]], say: Callable[[int, int], None]) -> None:
        """Takes the commands. None is started yet.

        Args:
            commands: A command for each process, with its arguments.
            say: Called with a command's place and the process id after each start.
        """
        self._commands, self._say = commands, say
        self._stopping = threading.Event()

    def run(self) -> None:
        """Starts all processes, and starts those again that end. Returns after `stop`, when all have ended."""
        threads = [threading.Thread(target=self._keep, args=(place,)) for place in range(len(self._commands))]
        for thread in threads:
            thread.start()
        try:
            # A wait without a limit would not be interrupted by a signal.
            while not self._stopping.wait(1.0):
                pass
        finally:
            self.stop()
            for thread in threads:
                thread.join()

    def stop(self) -> None:
        """Makes `run` end all processes and return. Any thread and any signal handler may call this."""
        self._stopping.set()

    def _keep(self, place: int) -> None:
        pause = _SHORTEST_S
        while not self._stopping.is_set():
            began = time.monotonic()
            process = subprocess.Popen(self._commands[place])
            self._say(place, process.pid)
            while process.poll() is None and not self._stopping.wait(0.1):
                pass
            if self._stopping.is_set():
                _end(process)
                return
            pause = _SHORTEST_S if time.monotonic() - began > _STEADY_S else min(2 * pause, _LONGEST_S)
            self._stopping.wait(pause)


def _end(process: subprocess.Popen, patience_s: float = 30.0) -> None:
    """Tells a process to end, and kills it if it takes too long."""
    process.terminate()
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
