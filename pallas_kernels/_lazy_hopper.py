"""`hopper` as `hp`, and its `messages`, for files that are imported without Mosaic GPU: it is imported at the first use."""

import importlib
from typing import TYPE_CHECKING, Any


class _Lazy:
    """A module that is imported when one of its names is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


if TYPE_CHECKING:
    from pallas_kernels import hopper as hp
    from pallas_kernels.hopper import messages
else:
    hp, messages = _Lazy("pallas_kernels.hopper"), _Lazy("pallas_kernels.hopper.messages")
