"""Runs the same commands on every process: the leader tells the others each command before it runs it itself."""

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np

from mamba_align_jax.engine.config import SamplingParams
from mamba_align_jax.engine.device.command_thread import CommandThread
from mamba_align_jax.engine.device.packed import Packed
from mamba_align_jax.engine.device.runner import StepRunner
from mamba_align_jax.engine.scheduling.buckets import Bucket
from mamba_align_jax.engine.scheduling.levels import Level
from mamba_align_jax.processes.connection import Message

R = TypeVar("R")
# The commands whose arguments are told as they are.
_PLAIN = (
    *("do_fold", "do_copy_states", "do_store_pages", "do_store_tokens", "do_make_sampler", "do_reset"),
    *("do_take_entries", "do_digest_weights"),
)
# The fields of `SamplingParams` that `StepRunner.do_store_request` reads.
_STORED = ("max_tokens", "min_tokens", "stop_token_ids", "logit_bias")


class Audience(Protocol):
    """Those that a leader's commands are told to."""

    def tell(self, name: str, *values: Any, words: np.ndarray = ...) -> None:
        """Sends a message to every follower."""
        ...

    def fail(self, reason: str) -> None:
        """Ends all processes."""
        ...


class LeadingRunner(StepRunner):
    """The runner of the process that leads.

    A thread tells and runs the commands, one after the other. An interrupt reaches the caller's thread alone, so a
    command that was told is always run. If a command raises, devices of other processes may wait for this one's, and
    all processes end.
    """

    def __init__(self, audience: Audience, *arguments: Any, **keywords: Any) -> None:
        """Makes a runner that tells its commands to `audience`. The other arguments are those of `StepRunner`."""
        self._audience, self._is_retired, self._telling = audience, False, CommandThread()
        super().__init__(*arguments, **keywords)

    def retire(self) -> None:
        """Lets no command run any more, because the followers run those of another engine."""
        self._is_retired = True

    def is_current_thread(self) -> bool:
        """See `StepRunner.is_current_thread`."""
        return self._telling.is_current()

    def is_intact(self) -> bool:
        """See `StepRunner.is_intact`. Commands that were told are run first."""
        return self._telling.run(super().is_intact)

    def compile(self, buckets: Sequence[Bucket]) -> Generator[None, None, None]:
        """See `StepRunner.compile`. All processes compile at the same time."""
        self._check()
        self._audience.tell("compile", *map(list, buckets))
        try:
            yield from super().compile(buckets)
        except Exception as error:
            self._audience.fail(f"process 0 failed in compile: {type(error).__name__}: {error}")
            raise

    def _check(self) -> None:
        if self._is_retired:
            raise RuntimeError("another engine has taken the place of this one: see Processes.lead")

    def run_command(self, command: Callable[..., R], *arguments: Any) -> R:
        """See `StepRunner.run_command`. The thread tells the command and then runs it."""
        self._check()
        return self._telling.run(self._tell_and_run, command, arguments)

    def _tell_and_run(self, command: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        name = command.__name__
        try:
            tell(self._audience, name, arguments)
            return command(*arguments)
        except BaseException as error:
            self._audience.fail(f"process 0 failed in {name}: {type(error).__name__}: {error}")
            raise


def tell(audience: Audience, name: str, arguments: tuple[Any, ...]) -> None:
    """Tells a command of a `StepRunner` in plain values, from which `Follower.obey` makes its arguments."""
    match arguments:
        case Bucket() as bucket, Packed() as inputs:
            audience.tell(name, list(bucket), words=np.asarray(inputs.words))
        case *others, np.ndarray() as words:
            audience.tell(name, *others, words=words)
        case *others, SamplingParams() as params:
            audience.tell(name, *others, {field: getattr(params, field) for field in _STORED})
        case _:
            audience.tell(name, *arguments)


class Follower:
    """Runs the commands that the leader tells."""

    def __init__(self, runner: StepRunner, has_ended: Callable[[], bool] = lambda: False) -> None:
        """Makes a follower over a runner of the same model and sizes as the leader's.

        `has_ended` tells whether the leader has ended, so that no more programs need to be compiled.
        """
        self._runner, self._has_ended = runner, has_ended
        # What each program's inputs look like.
        self._padding: dict[Bucket, Packed] = {}

    def obey(self, message: Message) -> None:
        """Runs one command.

        Raises:
            ValueError: The message is no command.
        """
        runner, values = self._runner, message.values
        match message.name:
            case "do_step":
                bucket = _bucket(values[0])
                runner.do_step(bucket, self._inputs(bucket, message.words))
            case "do_store_request":
                slot, prompt, generated, params = values
                runner.do_store_request(slot, prompt, generated, SamplingParams(**params))
            case "do_put_entries":
                kind, ids = values
                runner.do_put_entries(kind, ids, message.words)
            case name if name in _PLAIN:
                getattr(runner, name)(*values)
            case "compile":
                with contextlib.closing(runner.compile([*map(_bucket, values)])) as programs:
                    for _ in programs:
                        if self._has_ended():
                            break
            case name:
                raise ValueError(f"process 0 must send a command, got {name!r}")

    def _inputs(self, bucket: Bucket, words: Any) -> Packed:
        padding = self._padding.get(bucket)
        if padding is None:
            padding = self._runner.packer.packed(bucket, [None] * bucket.num_rows)
            self._padding[bucket] = padding
        if words.shape != padding.words.shape:
            raise ValueError(f"process 0 must send {padding.words.shape[0]} words for {bucket}, got {words.shape[0]}")
        return replace(padding, words=words)


def _bucket(values: Sequence[int]) -> Bucket:
    return Bucket(values[0], values[1], values[2], Level(values[3]))
