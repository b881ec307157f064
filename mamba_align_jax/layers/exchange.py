"""How the devices of a split model add up what each of them has computed.

A step of few tokens spends more time on starting XLA's all-reduces than on their bytes. `Exchange` does them inside the
kernels that read the sums.
"""

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from mamba_align_jax.layers.chain import Chain
from pallas_kernels import Mailboxes, all_reduce, all_reduce_product_chain, all_reduce_rms_norm
from pallas_kernels.rms_norm.xla import sum_over_splits


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Partial:
    """Outputs of a layer of which each device has a summand: their total over splits and devices is meant.

    Attributes:
        sums: This device's summand. [splits, tokens, hidden]
        axis: The mesh axis of the devices.
    """

    sums: jax.Array
    axis: str = field(metadata=dict(static=True))

    def total(self) -> jax.Array:
        """Adds everything up by XLA's all-reduce; returns float32 [tokens, hidden]."""
        return jax.lax.psum(sum_over_splits(self.sums), self.axis)


# What a layer returns: outputs [tokens, hidden], sums [splits, tokens, hidden] whose total they are, a summand, or a chain
# that computes sums.
Outputs: TypeAlias = jax.Array | Partial | Chain


class Exchange:
    """Adds up the summands of all devices by kernels that write into each other's memory, within one program.

    It counts the epochs, so it must not be used outside the trace in which it was made.

    Attributes:
        epoch: The next epoch. int32 []
    """

    def __init__(self, mailboxes: Mailboxes, epoch: jax.Array) -> None:
        """Begins with `epoch`, which is 1 or what another program's exchange has left."""
        self._mailboxes, self.epoch = mailboxes, epoch

    def total(self, summand: Partial) -> jax.Array:
        """Adds up what all devices have; returns float32 [tokens, hidden]."""
        summed, self.epoch = all_reduce(summand.sums, self._mailboxes, self.epoch)
        return summed

    def add_rms_norm(
        self, x: jax.Array, summand: Partial, weight: jax.Array, **options: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Adds up what all devices have, adds it to `x` and normalises: see `all_reduce_rms_norm`."""
        value, normed, self.epoch = all_reduce_rms_norm(x, summand.sums, weight, self._mailboxes, self.epoch, **options)
        return value, normed

    def product_chain(self, x: jax.Array, steps: Any, residual: Any, **options: Any) -> tuple[Any, Any]:
        """Runs a chain whose norms add up what all devices have: see `all_reduce_product_chain`."""
        out, value, self.epoch = all_reduce_product_chain(x, steps, residual, self._mailboxes, self.epoch, **options)
        return out, value

    def gather(self, x: jax.Array) -> jax.Array:
        """Returns what each device has, float32 [devices, tokens, channels], of float32 [tokens, channels]."""
        axis, (tokens, channels) = self._mailboxes.axis, x.shape
        devices = jax.lax.axis_size(axis)
        is_own = jnp.arange(devices, dtype=jnp.int32)[:, None] == jax.lax.axis_index(axis)
        # Each place has one number and zeros, whose sum is that number.
        own = jnp.where(is_own, x[:, None], 0.0).reshape(1, tokens, devices * channels)
        return self.total(Partial(own, axis)).reshape(tokens, devices, channels).transpose(1, 0, 2)
