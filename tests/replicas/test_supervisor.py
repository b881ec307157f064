"""The supervisor of the example: what ends is started again, and in the end nothing runs."""

import os
import queue
import signal
import sys
import threading
from pathlib import Path

from examples.replicas.supervisor import Supervisor

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def test_a_killed_process_is_started_again_and_none_is_left():
    started = queue.Queue()
    supervisor = Supervisor([SLEEP, SLEEP], lambda place, process: started.put((place, process)))
    thread = threading.Thread(target=supervisor.run)
    thread.start()
    try:
        first = dict(started.get(timeout=60) for _ in range(2))
        os.kill(first[1], signal.SIGKILL)
        place, process = started.get(timeout=60)
        assert place == 1
        assert process not in first.values()
    finally:
        supervisor.stop()
        thread.join(60)
    assert not thread.is_alive()
    assert started.empty()
    assert not any(Path(f"/proc/{one}").exists() for one in (*first.values(), process))
