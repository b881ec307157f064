"""Several processes run one engine as one process does, and when one is lost the others say so and end."""

import concurrent.futures
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import depth
import pytest

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

    def lines_until(self, stream, wanted):
        """Waits until process 0 writes a line that has a text, and returns all lines up to it."""
        lines = []
        for line in getattr(self.processes[0], stream):
            lines.append(line)
            if wanted in line:
                return lines
        pytest.fail(f"process 0 has ended: {[error for _, _, error in self.wait()]}")


def group(num_processes, *tasks, devices_each=1):
    port, ids = free_port(), range(num_processes)
    return Group(*(
        [*SCRIPT, f"127.0.0.1:{port}", str(num_processes), str(number), str(devices_each), *tasks] for number in ids
    ))  # fmt: skip


def found(ended):
    """What process 0 found, if all have ended well."""
    assert [status for status, *_ in ended] == [0] * len(ended), "\n".join(error for _, _, error in ended)
    return json.loads(ended[0][1].splitlines()[-1])


@functools.cache
def found_by_one(num_devices, *tasks):
    """What one process finds with as many devices."""
    with group(1, *tasks, devices_each=num_devices) as one:
        results = found(one.wait())
    assert all(each["stats"]["hit_requests"] >= 3 and each["stats"]["aborted_requests"] for each in results)
    assert results[0]["stats"]["preemptions"]
    assert all(each.get("moved") == (None if "quick" in tasks else [32, 32, True, True]) for each in results)
    return results


def outputs(results):
    return [each["outputs"] for each in results]


def test_two_processes_do_what_one_does():
    """Requests arrive between steps, share prefixes, are drawn, aborted and preempted; the cache is emptied meanwhile.

    In a quick run the one process has one device, so that two devices are compared with one as well.
    """
    devices, tasks = (2, ()) if depth.is_full() else (1, ("quick",))
    with group(2, *tasks) as two:
        assert found(two.wait()) == found_by_one(devices, *tasks)


def test_process_with_other_weights_is_refused():
    with group(2, "differ") as two:
        leader, follower = two.wait()
    assert leader[0] == follower[0] == 1
    assert "FieldError: the digest of the weights of process 0 must be that of process 1" in leader[2]
    assert "ProcessLostError: process 0 failed: FieldError" in follower[2]


@pytest.mark.deep
def test_four_processes_do_what_one_does_and_all_say_which_one_is_lost():
    """Those that are left are in a step, which never ends."""
    with group(4, "work") as four:
        *_, line, _ = four.lines_until("stdout", "working")
        assert json.loads(line) == found_by_one(4)
        four.processes[2].kill()
        ended = four.wait()
    assert ended[2][0] == -signal.SIGKILL
    for number in (0, 1, 3):
        status, _, error = ended[number]
        assert "process 2 is lost" in error, number
        assert status == EXIT_STATUS or (number and status == ENDED_BY_JAX)


@pytest.mark.deep
def test_interrupts_of_process_0_change_no_token_and_its_loss_ends_the_other():
    """Process 0 recovers from interrupts by itself: the other process has run what it has run."""
    with group(2, "interrupt", "work") as two:
        *_, line, _ = two.lines_until("stdout", "working")
        assert outputs(json.loads(line)) == outputs(found_by_one(2))
        two.processes[0].kill()
        _, (status, _, error) = two.wait()
    assert status in (EXIT_STATUS, ENDED_BY_JAX)
    assert "process 0 is lost, and process 1 ends with it" in error


@pytest.mark.deep
def test_exception_in_process_0_ends_the_other():
    with group(2, "fail") as two:
        leader, follower = two.wait()
    assert leader[0] == follower[0] == 1
    assert "LookupError: what process 0 raised" in leader[2]
    assert "ProcessLostError: process 0 failed: LookupError: what process 0 raised" in follower[2]


@pytest.mark.deep
def test_server_of_two_processes_streams_an_answer_and_stops_at_a_signal():
    port, coordinator = free_port(), f"127.0.0.1:{free_port()}"
    options = ["--warmup", "none", "--max-num-seqs", "1", "--max-prefill-rows", "1"]
    options += ["--max-num-batched-tokens", "32", "--max-model-len", "64", "--port", str(port)]
    command = ["-m", "mamba_align_jax", "serve", "--coordinator", coordinator, "--num-processes", "2", *options]
    with Group(*([*command, "--process-id", str(number)] for number in range(2))) as several:
        several.lines_until("stderr", "Uvicorn running on")
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


RETIRED = """
import jax

jax.config.update("jax_num_cpu_devices", 2)
from mamba_align_jax import EngineConfig, SamplingParams
from benchmarks.random_model import TINY, random_model
from mamba_align_jax.processes import Processes

sizes = dict(num_state_blocks=20, num_kv_pages=80, max_model_len=128, max_num_seqs=2, max_num_batched_tokens=64)
with Processes("127.0.0.1:{port}", 1, 0) as processes:
    engines = [processes.lead(random_model(TINY), EngineConfig(**sizes, async_stepping=True)) for _ in range(2)]
    print([engine.steps_in_flight for engine in engines])
    try:
        engines[0].generate([4, 5, 6])
    except RuntimeError as error:
        print(error)
    print(len(engines[1].generate([4, 5, 6], SamplingParams(max_tokens=2, ignore_eos=True))))
"""


@pytest.mark.deep
def test_one_process_with_several_devices_obeys_the_rules_of_several_processes():
    with Group(["-c", RETIRED.format(port=free_port())]) as only:
        ((status, said, error),) = only.wait()
    assert status == 0, error
    said = [line for line in said.splitlines() if line and not line.startswith("[Gloo]")]
    assert said == ["[1, 1]", "another engine has taken the place of this one: see Processes.lead", "1"]
