"""A follower that obeys a leader's commands has the leader's bits on its device, whatever the leader's callers do.

Both are in this process, over one device each, so that every array can be compared.
"""

import contextlib
import json
import signal
import socket
import threading
import types

import depth
import jax
import numpy as np
import pytest
from fakes.letters import Letters
from fakes.raising import Calls
from fakes.spelling_engine import DRAFTS, FULL, SIZES, SPELLER

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.cli import commands as cli
from mamba_align_jax.engine.device.model_worker import ModelWorker
from mamba_align_jax.engine.device.runner import StepRunner
from mamba_align_jax.engine.scheduling.buckets import Bucket
from mamba_align_jax.engine.scheduling.levels import Level
from mamba_align_jax.processes import EXIT_STATUS, Processes, group
from mamba_align_jax.processes.connection import Connection, Message
from mamba_align_jax.processes.group import _patient
from mamba_align_jax.processes.runner import Follower, LeadingRunner

STEPPING = {
    "sync": dict(DRAFTS, checked=True),
    "async": dict(DRAFTS, async_stepping=True),
    "pre_copy": dict(policy="pre_copy"),
}

NO_WORDS = np.zeros(0, np.int32)


class Mirror:
    """Hands a leader's commands to a follower in this process, as they would come over a network."""

    def __init__(self, runner):
        self.runner, self.follower, self.names, self.failed = runner, Follower(runner), [], []

    def tell(self, name, *values, words=NO_WORDS):
        self.names.append(name)
        self.follower.obey(Message(name, json.loads(json.dumps(values)), words.copy()))

    def fail(self, reason):
        self.failed.append(reason)


class Mirrored:
    """An engine whose commands a follower obeys."""

    def __init__(self, config, tokenizer=None):
        worker = ModelWorker(SPELLER, config, make_runner=self.make_runner)
        self.engine = Engine.over(worker, tokenizer)

    def make_runner(self, *arguments, **keywords):
        self.mirror = Mirror(StepRunner(*arguments, **keywords))
        return LeadingRunner(self.mirror, *arguments, **keywords)

    def assert_equal(self):
        for mine, other in zip(
            *(
                [np.asarray(array) for array in jax.tree.leaves((each.device_state, each.sampler))]
                for each in (self.engine.runner, self.mirror.runner)
            ),
            strict=True,
        ):
            np.testing.assert_array_equal(mine, other)
        assert not self.mirror.failed


@pytest.mark.parametrize("stepping", ["sync", "async", pytest.param("pre_copy", marks=pytest.mark.deep)])
@pytest.mark.usefixtures("one_program")
def test_follower_has_the_bits_of_the_leader(stepping):
    """Requests share prefixes, are preempted, aborted, interrupted and change logits; drafters are on host and device."""
    rng = np.random.default_rng(len(stepping))
    both = Mirrored(EngineConfig(**SIZES, **STEPPING[stepping]), Letters())
    engine = both.engine
    engine.warmup()
    calls = Calls(engine, rng)
    calls.generate()
    names = "step", "generate", "abort", "add"
    interrupted = calls.interrupt_often(depth.examples(6, 25), 200, names, after=both.assert_equal)
    assert interrupted
    assert engine.stats.hit_requests > 0
    wanted = {"compile", "do_step", "do_store_pages", "do_make_sampler", "do_store_request"}
    assert set(both.mirror.names) >= wanted | ({"do_store_tokens"} if stepping == "async" else set())


@pytest.mark.usefixtures("one_program")
def test_follower_folds_where_the_leader_folds():
    config = EngineConfig(**SIZES | dict(policy="deferred", block_size=16, fold_length=8, num_speculative_tokens=0))
    both = Mirrored(config)
    engine = both.engine
    # The last token that has a state is the last one of a block.
    engine.generate(list(range(10)), SamplingParams(max_tokens=7, ignore_eos=True))
    assert both.mirror.names.count("do_fold") == 1
    both.assert_equal()


def test_follower_copies_the_blocks_that_the_leader_copies():
    both = Mirrored(EngineConfig(**SIZES))
    runner = both.engine.runner
    runner.put_entries("states", [1], np.arange(runner.align.bytes_per_block, dtype=np.uint8)[None])
    runner.run_command(runner.do_copy_states, [(1, 3)])
    assert both.mirror.names.count("do_copy_states") == 1
    both.assert_equal()


@pytest.mark.usefixtures("one_program")
def test_lost_pools_are_made_again_everywhere():
    both = Mirrored(EngineConfig(**SIZES))
    engine = both.engine
    (first,) = engine.generate([1, 2, 3], FULL)
    jax.tree.map(lambda array: array.delete(), engine.runner.device_state.pool)
    engine.core.changing.is_torn = True
    (again,) = engine.generate([1, 2, 3], FULL)
    assert again.token_ids == first.token_ids
    assert both.mirror.names.count("do_reset") == 1
    both.assert_equal()


@pytest.mark.usefixtures("one_program")
def test_exception_before_a_command_ends_its_request_alone(monkeypatch):
    """Followers never learn of it. One inside a command ends all processes, because others may have run it."""
    both = Mirrored(EngineConfig(**SIZES))
    engine = both.engine
    engine.generate([1, 2, 3], FULL)
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.packer, "pack", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.generate([1, 2, 3], FULL)
    engine.generate([1, 2, 3], FULL)
    both.assert_equal()
    monkeypatch.setattr(engine.runner, "do_step", lambda *_: 1 / 0)
    engine.runner.do_step.__name__ = "do_step"
    both.mirror.follower.obey = lambda message: None
    with pytest.raises(ZeroDivisionError):
        engine.generate([1, 2, 3], FULL)
    assert both.mirror.failed == ["process 0 failed in do_step: ZeroDivisionError: division by zero"]


@pytest.mark.usefixtures("one_program")
def test_programs_that_do_not_compile_in_process_0_end_all_processes(monkeypatch):
    both = Mirrored(EngineConfig(**SIZES))
    engine = both.engine
    both.mirror.follower.obey = lambda message: None
    monkeypatch.setattr(StepRunner, "compile", lambda *_: iter([0 / 0]))
    with pytest.raises(ZeroDivisionError):
        engine.warmup()
    assert both.mirror.failed == ["process 0 failed in compile: ZeroDivisionError: division by zero"]


def test_follower_compiles_nothing_more_when_the_leader_has_ended():
    compiled, buckets = [], [Bucket(rows, 0, 0) for rows in range(1, 5)]
    runner = types.SimpleNamespace(compile=lambda buckets: (compiled.append(bucket) for bucket in buckets))
    message = Message("compile", [list(bucket) for bucket in buckets], NO_WORDS)
    Follower(runner).obey(message)
    assert compiled == buckets
    compiled.clear()
    Follower(runner, lambda: len(compiled) == 2).obey(message)
    assert compiled == buckets[:2]


@pytest.mark.usefixtures("one_program")
@pytest.mark.parametrize("async_stepping", [False, True])
def test_engine_whose_place_is_taken_runs_no_more(async_stepping):
    both = Mirrored(EngineConfig(**SIZES, async_stepping=async_stepping))
    engine = both.engine
    engine.runner.retire()
    with pytest.raises(RuntimeError, match="another engine has taken the place"):
        engine.generate([1, 2, 3], FULL)
    with pytest.raises(RuntimeError, match="another engine has taken the place"):
        engine.warmup()
    assert both.mirror.names == []


@pytest.mark.usefixtures("one_program")
def test_follower_refuses_what_is_no_command():
    both = Mirrored(EngineConfig(**SIZES))
    follower, bucket = both.mirror.follower, Bucket(3, 4, 20, Level.DRAW)
    with pytest.raises(ValueError, match="must send a command, got 'read'"):
        follower.obey(Message("read", [], NO_WORDS))
    with pytest.raises(ValueError, match=r"must send \d+ words for Bucket"):
        follower.obey(Message("do_step", [list(bucket)], np.zeros(3, np.int32)))
    both.engine.generate([1, 2, 3], FULL)
    both.assert_equal()


def connected():
    """Two ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = socket.create_connection(listener.getsockname())
        return Connection(listener.accept()[0]), Connection(far)


def test_message_arrives_as_it_was_sent():
    near, far = connected()
    words = np.random.default_rng(0).integers(-(2**31), 2**31, 200_000).astype(np.int32)
    said = [1, "é", None, {"bias": [[3, -1.5]]}]
    sender = threading.Thread(target=lambda: [near.send("do_step", *said, words=words) for _ in range(5)])
    sender.start()
    for _ in range(5):
        name, values, got = far.receive()
        assert (name, values) == ("do_step", said)
        np.testing.assert_array_equal(got, words)
    sender.join()
    near.finish()
    with pytest.raises(ConnectionResetError, match="closed the connection"):
        far.receive()
    near.close()
    far.close()


@pytest.mark.parametrize(
    "sent",
    [
        *(b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\2\0\0\0\0{}", b"\0\0\0\3\0\0\0\0[1]", b"\xff" * 64),
        b"\0\0\3\xe8\0\0\0\0" + b"[" * 1000,  # more than Python 3.11 can read
    ],
)
def test_what_is_no_message_is_refused(sent):
    near, far = connected()
    near._socket.sendall(sent)
    near.finish()
    with pytest.raises(ValueError, match="a message must"):
        far.receive(1024)
    near.close()
    far.close()


def test_message_that_comes_byte_by_byte_has_one_deadline():
    near, far = connected()
    sent = threading.Event()

    def drip():
        with contextlib.suppress(OSError):
            for byte in b"\0\0\3\x84\0\0\0\0" + b"x" * 900:
                near._socket.sendall(bytes([byte]))
                if sent.wait(0.05):
                    break

    thread = threading.Thread(target=drip)
    thread.start()
    with pytest.raises(TimeoutError):
        far.receive(1024, 0.3)
    # The message would be whole after 45 seconds, if each byte had 0.3 seconds of its own.
    assert thread.is_alive()
    sent.set()
    thread.join()
    near.close()
    far.close()


def test_processes_that_do_not_come_are_named(monkeypatch):
    """A stranger, and process 2 of three, are there."""
    monkeypatch.setattr(group, "_MEET_S", 5.0)
    come = []

    def shared(port, token):
        for secret in (bytes(16), token):
            come.append(Connection(socket.create_connection(("127.0.0.1", port))))
            come[-1].send("hello", secret.hex(), 2)
        return port, token

    monkeypatch.setattr(group, "_shared", shared)
    with pytest.raises(RuntimeError, match=r"process 0 at 127.0.0.1 was not reached in 5 s by the processes 1, 3$"):
        group._gather("127.0.0.1", 4)
    for connection in come:
        with pytest.raises(ConnectionResetError):
            connection.receive()
        connection.close()


def test_first_signal_waits_for_process_0_and_the_second_does_not(capsys):
    before = signal.getsignal(signal.SIGTERM)
    # A shell starts what it runs in the background with SIGINT ignored, and a second signal would do that.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with _patient():
            signal.raise_signal(signal.SIGINT)
            assert "ends when process 0 does" in capsys.readouterr().err
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("host", 2, 0), "coordinator must be HOST:PORT, got 'host'"),
        ((":12", 2, 0), "coordinator must be HOST:PORT, got ':12'"),
        (("host:1", 0, 0), "num_processes must be at least 1, got 0"),
        (("host:1", 2, 2), r"process_id must be at most 1|process_id must be in \[0, 2\), got 2"),
        (("host:1", 2, None), "process_id must be a whole number"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_connected(arguments, message):
    with pytest.raises(ValueError, match=message):
        Processes(*arguments)
    assert not jax.distributed.is_initialized()


@pytest.mark.parametrize(
    ("number", "bound"), [(0, {"coordinator_bind_address": "10.0.0.1:12"}), (1, {"coordinator_bind_address": None})]
)
def test_the_coordinator_listens_at_its_own_address_alone(monkeypatch, number, bound):
    """JAX would listen on all networks of the host."""
    given = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: given.append((args, kwargs)))
    with pytest.raises(ValueError, match="num_processes and process_id"):
        Processes("10.0.0.1:12", 2, number)
    assert given == [(("10.0.0.1:12", 2, number, None), bound)]


def test_command_refuses_options_that_do_not_go_together(capsys):
    assert cli.main(["serve", "--num-processes", "2"]) == 2
    assert "num_processes must be left out without --coordinator, got 2" in capsys.readouterr().err
    assert cli.main(["serve", "--coordinator", "host:1", "--tensor-parallel-size", "2"]) == 2
    assert "tensor_parallel_size must be left out with --coordinator" in capsys.readouterr().err
    for size in (0, 100):
        assert cli.main(["serve", "--tensor-parallel-size", str(size)]) == 2
        assert "the number of this host's devices, got" in capsys.readouterr().err
    assert cli.main(["serve", "--coordinator", "host:1", "--num-processes", "2"]) == 2
    assert "process_id must be a whole number" in capsys.readouterr().err


def test_command_ends_if_the_processes_do_not_meet(capsys, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("process 0 was not reached")

    monkeypatch.setattr("mamba_align_jax.processes.Processes", fail)
    assert cli.main(["serve", "--coordinator", "host:1", "--num-processes", "2", "--process-id", "0"]) == EXIT_STATUS
    assert capsys.readouterr().err == "mamba-align: process 0 was not reached\n"
