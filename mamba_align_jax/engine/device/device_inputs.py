"""What a step of a split model needs on its devices besides parameters and pools: the host's inputs, and mailboxes."""

from dataclasses import replace

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mamba_align_jax.engine.device.packed import Packed
from mamba_align_jax.sharding import AXIS, Layout
from pallas_kernels import Mailboxes, can_write_each_other

# The devices exchange sums of so many tokens by themselves. XLA does it for more.
EXCHANGED_TOKENS = 256


class DeviceInputs:
    """Sends a step's inputs to all devices, unless they have them: most decode steps differ in nothing.

    Sending takes longer than starting the step. One device gets its inputs with the call, and so do several processes, of
    which none can send to all devices.
    """

    def __init__(self, layout: Layout | None) -> None:
        """Begins with nothing sent. `layout` is how the model lies on several devices; None for one."""
        is_sent = layout is not None and not layout.mesh.is_multi_process
        self._everywhere = NamedSharding(layout.mesh, PartitionSpec()) if layout is not None and is_sent else None
        # The last inputs, on the host and on the devices.
        self._last: tuple[Packed, Packed] | None = None

    def send(self, inputs: Packed) -> Packed:
        """Returns what the step's program takes for packed inputs on the host."""
        if self._everywhere is None:
            return inputs
        if self._last is not None:
            host, sent = self._last
            if host.structure == inputs.structure and np.array_equal(host.words, inputs.words):
                return sent
        sent = replace(inputs, words=jax.device_put(inputs.words, self._everywhere))
        self._last = inputs, sent
        return sent


def new_mailboxes(layout: Layout | None, hidden_size: int) -> Mailboxes | None:
    """Makes empty mailboxes, as epoch 1 needs them, if the devices can write into each other's memory."""
    if layout is None or not hidden_size or layout.mesh.axis_names != (AXIS,):
        return None
    if not can_write_each_other(layout.mesh.devices.flatten().tolist()):
        return None
    mailboxes = Mailboxes.create(layout.mesh, AXIS, EXCHANGED_TOKENS * (-(-hidden_size // 8) * 8))
    return mailboxes if mailboxes.are_reachable() else None
