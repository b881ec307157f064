"""Runs an example of `examples/replicas` with two replicas of the bundled model: see `run.py`."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "replicas"
# Few programs.
OPTIONS = ("--max-num-seqs=2", "--max-num-batched-tokens=128", "--max-model-len=1024", "--warmup=none")
# In float32 rounding does not decide between tokens.
OPTIONS += ("--dtype=float32",)
MODEL = "byte_model"
PATIENCE_S = 400


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def opened(url, body=None):
    """Makes a call, and returns the answer, whose body is not read yet."""
    request = urllib.request.Request(url, body and json.dumps(body).encode(), {"content-type": "application/json"})
    return urllib.request.urlopen(request, timeout=PATIENCE_S)


def read(url, body=None):
    """Makes a call, and returns the body of the answer. Raises OSError or HTTPException if it doesn't come whole."""
    with opened(url, body) as answer:
        return answer.read().decode()


def wait_for(what, check):
    """Waits until `check` returns something true, and returns it."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            if found := check():
                return found
        time.sleep(0.1)
    raise SystemExit(f"replicas: waited {PATIENCE_S} s in vain for {what}")


def metric(text, name):
    """Returns the sum of a metric over its labels, 0 if it has none yet."""
    lines = [line for line in text.splitlines() if re.match(rf"{re.escape(name)}[{{ ]", line)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


class Fleet:
    """Replicas and the router in front of them, run by an example."""

    def __init__(self, python, script, arguments, log, environment):
        self.port, self.log = free_port(), log
        self.url = f"http://127.0.0.1:{self.port}"
        command = [python, EXAMPLES / script, f"--port={self.port}", *arguments]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"} | environment
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)

    def stop(self):
        """Tells the example to stop. It must end, and leave no process."""
        left = []
        with contextlib.suppress(OSError):
            left = self.replicas()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
        wait_for("the replicas' end", lambda: all(not Path(f"/proc/{process}").exists() for process in left))


class BehindVllmRouter(Fleet):
    """Servers behind vllm-router."""

    def __init__(self, python, log):
        router = Path(python).with_name("vllm-router")
        self.metrics_port = free_port()
        arguments = (f"--router={router}", f"--metrics-port={self.metrics_port}", "--", *OPTIONS)
        super().__init__(sys.executable, "behind_vllm_router.py", arguments, log, {})

    def replicas(self):
        """Returns the processes of the replicas that are ready, with their metrics."""
        found = {}
        # The newest process of each address is the last one that the log names.
        for address, process in dict(
            re.findall(r"^replica (\S+) is process (\d+)$", self.log.read_text(), re.M)
        ).items():
            with contextlib.suppress(OSError):
                read(f"{address}/ready")
                found[int(process)] = read(f"{address}/metrics")
        return found

    def is_whole(self):
        """Tells whether the router sends calls to both replicas."""
        text = read(f"http://127.0.0.1:{self.metrics_port}/metrics")
        return len(self.replicas()) == 2 and metric(text, "vllm_router_worker_health") == 2


class UnderRay(Fleet):
    """Replicas under Ray Serve."""

    def __init__(self, python, log):
        super().__init__(python, "ray_replicas.py", OPTIONS, log, {"RAY_USAGE_STATS_ENABLED": "0"})

    def replicas(self):
        """Returns the processes of the replicas that are ready, with their metrics."""
        return {one["process"]: one["metrics"] for one in json.loads(read(f"{self.url}/replicas"))}

    def is_whole(self):
        """Tells whether the router sends calls to both replicas."""
        return len(self.replicas()) == 2
