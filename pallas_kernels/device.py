"""The properties of the GPU on which launch configurations depend: SMs and shared memory."""

import jax

HOPPER_SHARED_BYTES = 232_448  # also of Blackwell GPUs for data centres; an A100 has 166,912
HOPPER_SMS = 132  # of an H100 with SXM, an H200 and a GH200
LEAST_SHARED_BYTES = 101_376  # of GPUs for desktops and workstations, and of L4, L40S and A10


def shared_bytes() -> int:
    """Return the shared memory that a program of a kernel may have on JAX's default device, in bytes.

    Without a GPU it is a Hopper GPU's, for which kernels are then lowered. This may start JAX's backends.
    """
    return getattr(jax.devices()[0], "shared_memory_per_block_optin", HOPPER_SHARED_BYTES)


def has_little_shared_memory() -> bool:
    """Return whether a program may have less than 1.5 times `LEAST_SHARED_BYTES`."""
    return shared_bytes() < 1.5 * LEAST_SHARED_BYTES


def sm_count() -> int:
    """Return the number of SMs of JAX's default device.

    Without a GPU it is a Hopper GPU's, for which kernels are then lowered. This may start JAX's backends.
    """
    return getattr(jax.devices()[0], "core_count", HOPPER_SMS)
