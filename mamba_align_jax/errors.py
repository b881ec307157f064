"""Exceptions of the package. A wrong argument raises a ValueError; these are the other reasons why a request can't run."""

from pallas_kernels.dispatch import UnsupportedError as UnsupportedError


class OutOfBlocksError(RuntimeError):
    """The pools have too few free blocks for what was asked. Nothing has changed."""


class QueueFullError(RuntimeError):
    """As many requests wait as the engine allows. Nothing has changed; try again after some have started to run."""


class EngineDeadError(RuntimeError):
    """The thread that steps the engine has ended, because of an error, which is the cause of this one, or by a shutdown."""


class ProcessLostError(RuntimeError):
    """The process that leads an engine over several processes has failed, so this process, which follows it, can't go on."""


class GrammarError(RuntimeError):
    """A request's grammar has grown beyond llguidance's limits, or no token may follow. Only that request ends."""


class PanicError(RuntimeError):
    """Other code, such as a tokenizer in Rust, has raised what is no Exception. That is the cause of this error."""
