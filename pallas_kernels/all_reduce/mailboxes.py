"""Memory of every device of a mesh axis into which the kernels of the other devices write."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

SIDES = 2  # A device may be one call ahead of another one, so consecutive calls use different words.
WORD_BYTES = 8  # a float32 and the epoch of its call
_READ_AND_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE


class _Location(ctypes.Structure):
    """CUDA's CUmemLocation: the location of memory or of a processor. Type 1 is a device, by its ordinal `id`."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


def _driver() -> Any:
    """Return CUDA's driver library, or None if it is not installed."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def can_write_each_other(devices: Sequence[jax.Device]) -> bool:
    """Return whether `devices` are GPUs of this process that can write into each other's memory.

    It asks CUDA's driver, and starts JAX's backends.
    """
    if any(device.platform != "gpu" or device.process_index != jax.process_index() for device in devices):
        return False
    driver = _driver()
    if driver is None:
        return False
    can, ordinals = ctypes.c_int(), [device.local_hardware_id for device in devices]
    for one in ordinals:
        for other in ordinals:
            if one != other and (driver.cuDeviceCanAccessPeer(ctypes.byref(can), one, other) or not can.value):
                return False
    return True


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Mailboxes:
    """A mailbox for each device of a mesh axis.

    A mailbox has two sides for every device, which alternate from call to call. In a call, each device sends its values to
    all mailboxes, its own included, and then reads its own mailbox. Kernels write into mailboxes by address, and XLA does
    not know of it. Hence the arrays must live as long as programs that use them run, must never be donated, and must be zero
    before epoch 1.

    Attributes:
        memory: The mailboxes. int32 [devices, words]
        addresses: For each device, the addresses to which it writes in each device's mailbox, and last the address of its
            own mailbox: the lower and the upper half of each. int32 [devices, devices + 1, 2]
        capacity: The number of values that a side holds.
        axis: The mesh axis.
    """

    memory: jax.Array
    addresses: jax.Array
    capacity: int = field(metadata=dict(static=True))
    axis: str = field(metadata=dict(static=True))

    @classmethod
    def create(cls, mesh: Mesh, axis: str, capacity: int) -> "Mailboxes":
        """Allocate empty mailboxes, and wait for all devices.

        A device must not send before the other mailboxes are zero, nor while kernels still run there that used the memory
        for other arrays. The order of programs on one device does not order the programs of another one.

        Args:
            mesh: A mesh of one axis, all of whose devices belong to this process: see `can_write_each_other`.
            axis: The axis.
            capacity: The number of values that a side holds.

        Raises:
            ValueError: the mesh has other axes, or `capacity` is not positive or does not fit 32-bit offsets.
        """
        if mesh.axis_names != (axis,):
            raise ValueError(f"Mailboxes: mesh must have the axis {axis!r} alone, got {mesh.axis_names}")
        if not 0 < SIDES * capacity * WORD_BYTES < 2**31:
            limit = (2**31 - 1) // (SIDES * WORD_BYTES)
            raise ValueError(f"Mailboxes: capacity must be 1 to {limit}, got {capacity}")
        devices, of_device = mesh.size, NamedSharding(mesh, P(axis))
        words = devices * SIDES * capacity * WORD_BYTES // 4
        empty = jax.jit(lambda: jnp.zeros((devices, words), jnp.int32), out_shardings=of_device)
        memory = jax.block_until_ready(empty())
        shards = sorted(memory.addressable_shards, key=lambda shard: shard.index[0].start or 0)
        begins = [shard.data.unsafe_buffer_pointer() for shard in shards]
        own = np.arange(devices)[:, None] * SIDES * capacity * WORD_BYTES
        targets = np.asarray(begins, np.uint64) + own.astype(np.uint64)
        halves = np.concatenate([targets, np.asarray(begins, np.uint64)[:, None]], axis=1)[..., None].view(np.int32)
        return cls(memory=memory, addresses=jax.device_put(halves, of_device), capacity=capacity, axis=axis)

    def are_reachable(self) -> bool:
        """Return False if CUDA's driver says that a device may not write to one of the mailboxes, and True otherwise.

        The driver knows the access rights of memory that is mapped for each device separately, as XLA's allocator may do.
        Other memory is reachable if the devices are: see `can_write_each_other`. The method must not be called inside a
        jitted function. It returns False without a driver.
        """
        driver, flags = _driver(), ctypes.c_ulonglong()
        if driver is None:
            return False
        shards = self.memory.addressable_shards
        for shard in shards:
            begin = ctypes.c_ulonglong(shard.data.unsafe_buffer_pointer())
            for other in shards:
                where = _Location(1, other.device.local_hardware_id)
                is_known = driver.cuMemGetAccess(ctypes.byref(flags), ctypes.byref(where), begin) == 0
                if is_known and flags.value != _READ_AND_WRITE:
                    return False
        return True

    def partition(self) -> "Mailboxes":
        """Return the partition specs of the arrays, for `jax.shard_map`."""
        return Mailboxes(memory=P(self.axis), addresses=P(self.axis), capacity=self.capacity, axis=self.axis)  # type: ignore[arg-type]
