"""Exceptions of the package. A wrong argument raises a ValueError; the others are the reasons why a request can't run."""


class FieldError(ValueError):
    """An argument of a function, or a field of a configuration, has a value that it can't have.

    Its text is "<owner>: <field> must be <wanted>, got <got>".

    Attributes:
        owner: The function or the class that has the field; empty where the field's name alone says which one it is.
        field: The field's name.
        wanted: What it must be; with its verb where that is another one, as "divide block_size = 64".
        got: What came, as text; empty if the text need not say it.
    """

    def __init__(self, name: str, wanted: str, got: str = "", must: str = "must be") -> None:
        """Makes an error.

        Args:
            name: The field, after its owner if that is to be named, as "KVSpec: dtype".
            wanted: What it must be.
            got: What came, as text.
            must: What stands between the name and what is wanted.
        """
        super().__init__(f"{name} {must} {wanted}" + (f", got {got}" if got else ""))
        self._made_of = name, wanted, got, must
        self.owner, _, self.field = name.rpartition(": ")
        self.wanted, self.got = wanted, got

    def __reduce__(self) -> tuple[type["FieldError"], tuple[str, str, str, str]]:
        """Says how to make an equal error in another process."""
        return FieldError, self._made_of

    def renamed(self, name: str) -> "FieldError":
        """Returns this error about a field of another name, from which the value was passed on."""
        return FieldError(name, *self._made_of[1:])


class OutOfBlocksError(RuntimeError):
    """The pools have too few free blocks for what was asked. Nothing has changed."""


class QueueFullError(RuntimeError):
    """As many requests wait as the engine allows, or allows one tenant. Nothing has changed; try again after some ran."""


class EngineDeadError(RuntimeError):
    """The thread that steps the engine has ended, because of an error, which is the cause of this one, or by a shutdown."""


class ProcessLostError(RuntimeError):
    """The process that leads an engine over several processes has failed, so this process, which follows it, can't go on."""


class WorkerLostError(RuntimeError):
    """The process that renders chats or checks grammars was ended or stopped from outside, and so was its successor.

    The caller's input is not to blame: try again.
    """


class GrammarError(RuntimeError):
    """A request's grammar has grown beyond llguidance's limits, or no token may follow. Only that request ends."""


class PanicError(RuntimeError):
    """Other code, such as a tokenizer in Rust, has raised what is no Exception. That is the cause of this error."""
