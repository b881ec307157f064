"""Marks the code that changes an engine's bookkeeping, so that a change that was cut off is noticed."""

from types import TracebackType


class Changing:
    """A context for every change of the bookkeeping: `with changing:`.

    An exception, of whatever kind and from whatever instruction, leaves `is_torn` true, and so does an interrupt between the
    block's last instruction and its end. The end of a block says that all of the bookkeeping is whole. A block may
    therefore contain another one only as the last thing that it does.

    Attributes:
        is_torn: True in a block, and after one that was cut off.
    """

    __slots__ = ("is_torn",)

    def __init__(self) -> None:
        """Makes the context of bookkeeping that is whole."""
        self.is_torn = False

    def __enter__(self) -> None:
        self.is_torn = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.is_torn = False
