"""Exceptions of the package: ValueError says that an argument is wrong, these say what else can stop a request."""

from pallas_kernels.dispatch import UnsupportedError as UnsupportedError


class OutOfBlocksError(RuntimeError):
    """The pools can't hold what was asked for now; nothing was changed."""


class QueueFullError(RuntimeError):
    """As many requests wait as the engine lets wait; nothing was changed. Try again when some have begun."""
