"""The processes that run one engine together: how they meet, what they agree on, and how they end."""

import contextlib
import functools
import hashlib
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

import jax
import jaxlib
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from mamba_align_jax import _values as values
from mamba_align_jax.engine.config import EngineConfig
from mamba_align_jax.engine.device.identity import weights_digest
from mamba_align_jax.engine.device.model_worker import ModelWorker
from mamba_align_jax.engine.device.runner import StepRunner
from mamba_align_jax.engine.device.sizing import PoolSizes
from mamba_align_jax.engine.drafting.protocols import DeviceDrafter, Drafter
from mamba_align_jax.engine.running.engine import Engine
from mamba_align_jax.engine.text.tokenizer import Tokenizer
from mamba_align_jax.errors import ProcessLostError
from mamba_align_jax.processes.connection import FIRST_MESSAGE, NO_WORDS, Connection, Message
from mamba_align_jax.processes.runner import Follower, LeadingRunner
from mamba_align_jax.sharding import AXIS

# The exit status of a process that ends because another one is lost: a supervisor starts all of them again.
EXIT_STATUS = os.EX_TEMPFAIL
# Seconds in which every process must have connected after JAX has connected them, and one has said who it is.
_MEET_S, _HELLO_S = 60.0, 5.0
# Seconds in which a process must notice that process 0 has failed, if it is not in a program that never ends.
_LEAVE_S = 5.0


class Processes:
    """The processes that run one engine over the devices of all of them.

    Every process runs the same script. Process 0 leads, and the others follow::

        with Processes("host0:12345", num_processes=2, process_id=int(sys.argv[1])) as processes:
            model = load_model("MODEL")
            if processes.is_leader:
                engine = processes.lead(model, EngineConfig(max_model_len=8192))
                print(engine.generate([1, 2, 3]))
            else:
                processes.follow(model)

    The engine of process 0 is like any other one. It alone has requests, a queue, a scheduler and a cache. The other
    processes have their shares of the model and of the pools, and run the programs that process 0 tells them, over the
    inputs that it sends. If a process is lost, each of the others says which one and ends at once with `EXIT_STATUS`.

    Attributes:
        process_id: The number of this process.
        is_leader: Whether it is process 0.
    """

    def __init__(
        self,
        coordinator: str,
        num_processes: int,
        process_id: int,
        *,
        local_device_ids: Sequence[int] | None = None,
    ) -> None:
        """Waits for all processes and connects them, first by `jax.distributed` unless that was done before.

        Args:
            coordinator: The address of process 0 as HOST:PORT, with a port that is free there.
            num_processes: Number of processes.
            process_id: The number of this process, from 0 on.
            local_device_ids: The host's devices that this process uses; None for all that it sees.

        Raises:
            ValueError: An argument has a wrong value, or JAX was connected in another way.
            OSError: Process 0 can't be reached.
            RuntimeError: A process did not come in time, or JAX has used its devices already.
        """
        host, _, port = values.text("coordinator", coordinator).rpartition(":")
        values.require(bool(host) and port.isdecimal(), "coordinator", "HOST:PORT", coordinator)
        values.integer("num_processes", num_processes, 1)
        values.integer("process_id", process_id, 0, num_processes - 1)
        if not jax.distributed.is_initialized():
            # Process 0 would otherwise listen on all networks, and whoever reaches its service can end all processes.
            address = coordinator if process_id == 0 else None
            jax.distributed.initialize(
                coordinator, num_processes, process_id, local_device_ids, coordinator_bind_address=address
            )
        found = jax.process_count(), jax.process_index()
        given, wanted = (num_processes, process_id), f"those that JAX was given, {found}"
        values.require(found == given, "num_processes and process_id", wanted, given)
        self.process_id, self.is_leader = process_id, process_id == 0
        self._messages: SimpleQueue[tuple[int, Message]] = SimpleQueue()
        # Whether the end is near, so that the others may go; and whether `follow` has seen it.
        self._is_ending, self._has_ended = False, False
        self._leading: Any = None
        self._losing = threading.Lock()
        host = host.strip("[]")
        self._others = _gather(host, num_processes) if self.is_leader else {0: _join(host, process_id)}
        for number, connection in self._others.items():
            thread = threading.Thread(target=self._listen, args=(number, connection), daemon=True)
            thread.name = f"mamba-align process {number}"
            thread.start()

    def lead(
        self,
        model: Any,
        config: EngineConfig | None = None,
        *,
        drafter: Drafter | DeviceDrafter | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> Engine:
        """Makes the engine, in process 0, while the others are in `follow`. It lasts until the `with` ends.

        The pools have the sizes that fit on every device. A second call makes another engine, which takes the place of
        the first: that one can't run any more.

        Args:
            model: As for `Engine`, as are the other arguments.
            config: The engine's configuration, for all processes.
            drafter: All processes need an equal one if it runs on the device.
            tokenizer: Turns text into tokens and back.

        Raises:
            ValueError: This is not process 0, or another process has another model or other versions; and whatever
                `Engine` refuses.
        """
        values.require(self.is_leader, "lead", "called by process 0", f"process {self.process_id}")
        config = EngineConfig() if config is None else config
        values.require(isinstance(config, EngineConfig), "config", "EngineConfig or None", config)
        if self._leading:
            self._leading.retire()
        self.tell("begin", asdict(config))
        worker, facts = self._make_worker(model, config, drafter)
        engine = Engine.over(worker, tokenizer)
        self._leading = engine.runner
        for number, (theirs,) in sorted(self._all_next("ready").items()):
            for name, mine in facts.items():
                wanted = f"that of process {number}, {theirs.get(name)}"
                values.require(theirs.get(name) == mine, f"the {name} of process 0", wanted, mine)
        return engine

    def follow(self, model: Any, *, drafter: DeviceDrafter | None = None) -> None:
        """Runs what process 0 tells, in all other processes, until process 0 ends its `with`.

        A first SIGINT or SIGTERM is noted and changes nothing, because process 0 decides when all end. A second one
        ends this process, and with it all others.

        Args:
            model: The model that process 0 has, loaded here.
            drafter: The drafter that process 0 gives to `lead`, if it runs on the device.

        Raises:
            ValueError: This is process 0, or `Engine` refuses the model. The other processes then end, too.
        """
        values.require(not self.is_leader, "follow", "called by another process than 0", "process 0")
        follower = None
        with _patient():
            while (message := self._take()).name != "end":
                if message.name == "begin":
                    # The old engine's pools go first.
                    follower = None
                    worker, facts = self._make_worker(model, EngineConfig(**message.values[0]), drafter)
                    self.tell("ready", facts)
                    follower = Follower(worker.runner, lambda: self._is_ending)
                    del worker
                elif follower:
                    follower.obey(message)

    def _make_worker(
        self, model: Any, config: EngineConfig, drafter: Drafter | DeviceDrafter | None
    ) -> tuple[ModelWorker, dict[str, str]]:
        """Puts this process's share of a model on its devices, while all other processes do, and returns its facts, too."""
        digest = weights_digest(jax.tree.leaves(nnx.state(model)))
        worker = ModelWorker(
            model,
            config,
            drafter,
            jax.make_mesh((jax.device_count(),), (AXIS,)),
            agree=self.smallest,
            make_runner=functools.partial(LeadingRunner, self) if self.is_leader else StepRunner,
            # `LeadingRunner` tells a command and runs it before the next one.
            may_launch_ahead=False,
        )
        return worker, _facts(worker, digest)

    def tell(self, name: str, *said: Any, words: np.ndarray = NO_WORDS) -> None:
        """Sends a message: process 0 to all others, and each other one to process 0. If that fails, the process ends."""
        for number, connection in self._others.items():
            try:
                connection.send(name, *said, words=words)
            except OSError as error:
                self._lose(number, error)

    def fail(self, reason: str) -> None:
        """Says why, and ends all others and then this process at once, with `EXIT_STATUS`.

        A thread may be in a program that waits for a device of a process that is lost. Nothing ends such a wait, so no
        thread is waited for and no exit handler runs.
        """
        # The first thread that comes here ends the process; others would only repeat what follows from it.
        with self._losing:
            for connection in self._others.values():
                with contextlib.suppress(OSError):
                    connection.set_timeout(1)
                    connection.send("failed", reason, timeout_s=1)
            try:
                print(f"mamba-align: {reason}", file=sys.stderr, flush=True)
            finally:
                os._exit(EXIT_STATUS)

    def smallest(self, sizes: PoolSizes) -> PoolSizes:
        """Returns the sizes that fit in all processes. Each of them calls this."""
        mine = [sizes.state_blocks, sizes.kv_pages]
        if self.is_leader:
            offers = [mine, *(offer for (offer,) in self._all_next("sizes").values())]
            mine = [min(offer) for offer in zip(*offers, strict=True)]
            self.tell("sizes", mine)
        else:
            self.tell("sizes", mine)
            message = self._take()
            if message.name != "sizes":
                raise ProcessLostError("process 0 ended without an engine")
            (mine,) = message.values
        return replace(sizes, state_blocks=mine[0], kv_pages=mine[1])

    def _all_next(self, name: str) -> dict[int, list[Any]]:
        """Waits for a message of each other process, and returns what they say by their numbers."""
        found: dict[int, list[Any]] = {}
        while len(found) < len(self._others):
            number, message = self._messages.get()
            assert message.name == name
            found[number] = message.values
        return found

    def _take(self) -> Message:
        """Waits for the next message of process 0, in another process."""
        _, message = self._messages.get()
        if message.name == "end":
            self._has_ended = True
            if message.values:
                raise ProcessLostError(message.values[0])
        return message

    def _listen(self, number: int, connection: Connection) -> None:
        """Takes what a process says until it closes the connection."""
        try:
            while (message := connection.receive()).name != "failed":
                # After "end" the other process may go at any time.
                self._is_ending |= message.name == "end"
                self._messages.put((number, message))
                if message.name == "end" and message.values:
                    # Process 0 is on its way out, and waits for this process to leave JAX's runtime, too.
                    time.sleep(_LEAVE_S)
                    if not self._has_ended:
                        self.fail(message.values[0])
        except (OSError, ValueError) as error:
            if not self._is_ending:
                self._lose(number, error)
        else:
            if not self._is_ending:
                self.fail(message.values[0])
        connection.close()

    def _lose(self, number: int, error: BaseException) -> None:
        self.fail(f"process {number} is lost, and process {self.process_id} ends with it: {error}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends the other processes. If something was raised here, they say so and fail, too."""
        self._is_ending = True
        is_well = error is None or (isinstance(error, SystemExit) and not error.code)
        reason = [] if is_well else [f"process {self.process_id} failed: {kind and kind.__name__}: {error}"]
        for connection in self._others.values():
            with contextlib.suppress(OSError):
                if self.is_leader:
                    connection.send("end", *reason)
                elif reason:
                    connection.send("failed", *reason)
                connection.finish()


def _facts(worker: ModelWorker, digest_of_weights: bytes) -> dict[str, str]:
    """Returns what must be equal in all processes, so that they compile the same programs."""
    params = [(each.shape, str(each.dtype), str(getattr(each.sharding, "spec", None))) for each in worker.runner.params]
    parts = worker.model_config, params, worker.config, worker.align, worker.sizes, type(worker.runner.drafter)
    return {
        "versions": f"jax {jax.__version__}, jaxlib {jaxlib.__version__}",
        "device": jax.local_devices()[0].device_kind,
        "number of devices": str(jax.local_device_count()),
        "model": hashlib.sha256(repr(parts).encode()).hexdigest()[:16],
        "digest of the weights": digest_of_weights.hex()[:16],
    }


def _gather(host: str, num_processes: int) -> dict[int, Connection]:
    """Returns the connections of all other processes by their numbers, or raises a RuntimeError if one comes too late."""
    found: dict[int, Connection] = {}
    with _listener(host) as listener:
        token = secrets.token_bytes(16)
        _shared(listener.getsockname()[1], token)
        end = time.monotonic() + _MEET_S
        while len(found) < num_processes - 1:
            listener.settimeout(max(end - time.monotonic(), 0.01))
            try:
                connection = Connection(listener.accept()[0])
            except TimeoutError:
                for connection in found.values():
                    connection.close()
                missing = ", ".join(str(number) for number in range(1, num_processes) if number not in found)
                message = f"process 0 at {host} was not reached in {_MEET_S:g} s by the processes {missing}"
                raise RuntimeError(message) from None
            try:
                name, said, _ = connection.receive(FIRST_MESSAGE, _HELLO_S)
                number = said[1]
                if name != "hello" or not secrets.compare_digest(said[0], token.hex()) or number in found:
                    raise ValueError("a stranger")
            except (OSError, ValueError, TypeError, LookupError):
                connection.close()
                continue
            connection.set_timeout(None)
            found[number] = connection
    return found


def _join(host: str, process_id: int) -> Connection:
    """Connects to process 0."""
    port, token = _shared(0, bytes(16))
    connection = Connection(socket.create_connection((host, port), timeout=_MEET_S))
    connection.send("hello", token.hex(), process_id)
    connection.set_timeout(None)
    return connection


def _listener(host: str) -> socket.socket:
    """Listens at the host's address, or at all addresses if this machine has another one, as behind a translation."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError:
        return socket.create_server(("", 0))


def _shared(port: int, token: bytes) -> tuple[int, bytes]:
    """Returns the port and the secret of process 0 in every process. JAX's own channel carries them."""
    mine = np.frombuffer(port.to_bytes(2) + token, np.uint8)
    said = multihost_utils.broadcast_one_to_all(mine).tobytes()
    return int.from_bytes(said[:2]), said[2:]


@contextlib.contextmanager
def _patient() -> Iterator[None]:
    """Lets a first SIGINT or SIGTERM do nothing but say so, in the main thread. A second one does what it always does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in signals}

    def note(number: int, frame: Any) -> None:
        signal.signal(number, before[number])
        print("mamba-align: this process ends when process 0 does; a second signal ends all now", file=sys.stderr)

    try:
        for number in signals:
            signal.signal(number, note)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
