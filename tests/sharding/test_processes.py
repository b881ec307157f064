"""Several processes run one engine as one process does, and when one is lost the others say so and end."""

import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import jax
import pytest

from mamba_align_jax.data import BYTE_MODEL
from mamba_align_jax.processes import EXIT_STATUS

ROOT = Path(__file__).parents[2]
SCRIPT = [str(Path(__file__).with_name("process.py"))]
# Seconds until a test fails; many times what it takes.
LIMIT = 400
# JAX ends a process by itself when process 0, where its own service runs, is gone. It may be quicker than the message.
ENDED_BY_JAX = -signal.SIGABRT


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Group:
    """Processes that a test has started. At the end of the `with` none is left."""

    def __init__(self, *commands):
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        environment = {**os.environ, "PYTHONPATH": path, "NPROC": "16", "PYTHONUNBUFFERED": "1"}
        environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
        self.processes = [
            subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, env=environment, text=True, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
            for command in commands
        ]  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes:
            process.kill()
            process.communicate()

    def wait(self):
        """Waits for all, and returns the status, the output and the messages of each."""
        # All at once, because one that is not read could wait for its reader.
        with concurrent.futures.ThreadPoolExecutor() as pool:
            said = [*pool.map(lambda process: process.communicate(timeout=LIMIT), self.processes)]
        return [(process.returncode, *texts) for process, texts in zip(self.processes, said, strict=True)]

    def wait_until_ready(self):
        """Waits until process 0 says that its engine has run."""
        with contextlib.suppress(StopIteration):
            assert next(line for line in self.processes[0].stdout if not line.startswith("[Gloo]")) == "ready\n"
            return
        pytest.fail(f"process 0 ended: {self.processes[0].stderr.read()}")


def group(num_processes, task, devices_each=1):
    ids = range(num_processes)
    port = free_port()
    return Group(*(
        [*SCRIPT, f"127.0.0.1:{port}", str(num_processes), str(number), str(devices_each), task] for number in ids
    ))  # fmt: skip


def found(ended):
    """What process 0 found, if all have ended well."""
    assert [status for status, *_ in ended] == [0] * len(ended), "\n".join(error for _, _, error in ended)
    return json.loads(ended[0][1].splitlines()[-1])


@pytest.mark.parametrize(
    ("num_processes", "devices_each", "task"),
    [
        (2, 1, "plain"),
        pytest.param(2, 2, "drafts", marks=pytest.mark.deep),
        pytest.param(4, 1, "drafts", marks=pytest.mark.deep),
    ],
)
def test_several_processes_do_what_one_does(num_processes, devices_each, task):
    """Requests arrive between steps, share prefixes, are drawn, aborted and preempted; the cache is emptied meanwhile."""
    with group(1, task, num_processes * devices_each) as one:
        wanted = found(one.wait())
    with group(num_processes, task, devices_each) as several:
        assert found(several.wait()) == wanted
    stats = [each["stats"] for each in wanted]
    assert all(each["hit_requests"] >= 3 and each["aborted_requests"] == 1 for each in stats)
    assert any(each["preemptions"] for each in stats)
    assert any(sum(each["draft_tokens"]) for each in stats) == (task == "drafts")


@pytest.mark.deep
def test_interrupts_of_process_0_change_no_token():
    """Process 0 recovers by itself: the other processes have run what it has run."""
    with group(2, "interrupts") as several:
        got = found(several.wait())
    with group(1, "interrupts", 2) as one:
        assert found(one.wait()) == got


@pytest.mark.parametrize("killed", [1, pytest.param(0, marks=pytest.mark.deep)])
@pytest.mark.parametrize("task", ["wait", pytest.param("work", marks=pytest.mark.deep)])
def test_lost_process_ends_the_others(killed, task):
    """The others may be in a step, which never ends, or wait for work."""
    with group(2, task) as several:
        several.wait_until_ready()
        several.processes[killed].kill()
        ended = several.wait()
    (status, _, error) = ended[1 - killed]
    assert status in ([EXIT_STATUS] if killed else [EXIT_STATUS, ENDED_BY_JAX])
    assert f"process {killed} is lost, and process {1 - killed} ends with it" in error
    assert ended[killed][0] == -signal.SIGKILL


@pytest.mark.deep
def test_lost_process_is_named_by_all_others():
    with group(4, "work") as several:
        several.wait_until_ready()
        several.processes[2].kill()
        ended = several.wait()
    for number in (0, 1, 3):
        status, _, error = ended[number]
        assert status in (EXIT_STATUS, ENDED_BY_JAX)
        assert "process 2 is lost" in error, number


@pytest.mark.deep
def test_exception_in_process_0_ends_the_others():
    with group(2, "fail") as several:
        leader, follower = several.wait()
    assert leader[0] == follower[0] == 1
    assert "LookupError: what process 0 raised" in leader[2]
    assert "ProcessLostError: process 0 failed: LookupError: what process 0 raised" in follower[2]


@pytest.mark.deep
def test_processes_with_other_weights_are_refused():
    with group(2, "other") as several:
        ended = several.wait()
    assert all(status for status, *_ in ended)
    assert "not the same on each process" in "".join(error for _, _, error in ended)


@pytest.mark.deep
def test_server_of_two_processes_streams_an_answer_and_stops_at_a_signal():
    port, coordinator = free_port(), f"127.0.0.1:{free_port()}"
    options = ["--warmup", "none", "--max-num-seqs", "1", "--max-prefill-rows", "1"]
    options += ["--max-num-batched-tokens", "32", "--max-model-len", "64", "--port", str(port)]
    command = ["-m", "mamba_align_jax", "serve", "--coordinator", coordinator, "--num-processes", "2", *options]
    with Group(*([*command, "--process-id", str(number)] for number in range(2))) as several:
        error = several.processes[0].stderr
        for line in error:
            if "Uvicorn running on" in line:
                break
        else:
            pytest.fail("the server has not started")
        body = json.dumps({"model": "byte_model", "prompt": "Once upon", "max_tokens": 5, "stream": True}).encode()
        call = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(call, timeout=LIMIT) as answer:
            events = [line for line in answer.read().decode().splitlines() if line]
        assert events[-1] == "data: [DONE]"
        assert len(events) >= 3
        assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        # A terminal sends Ctrl-C to all.
        for process in reversed(several.processes):
            process.send_signal(signal.SIGINT)
        ended = several.wait()
    assert [status for status, *_ in ended] == [0, 0], ended
    assert "this process ends when process 0 does" in ended[1][2]
    assert BYTE_MODEL.name == "byte_model"
