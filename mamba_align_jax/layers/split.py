"""Layers that are split over a mesh: the placement of their parameters, and products and norms over split channels."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mamba_align_jax.layers.exchange import Exchange, Partial
from mamba_align_jax.layers.linear import Linear
from mamba_align_jax.layers.norm import GatedGroupNorm, RMSNorm, spread
from mamba_align_jax.sharding import AXIS, Part, columns, devices


class SplitEmbed(nnx.Module):
    """Token embeddings. Each device holds those of a part of the vocabulary."""

    def __init__(self, embed: nnx.Embed) -> None:
        """Takes the parameter of `embed`, which is already placed."""
        self.embedding = embed.embedding

    def __call__(self, tokens: jax.Array, exchange: Exchange | None = None) -> jax.Array:
        """Embeds int32 [tokens] as [tokens, hidden]. Without `exchange`, XLA adds up what the devices have."""
        embedding = self.embedding[...]
        place = tokens - jax.lax.axis_index(AXIS).astype(tokens.dtype) * embedding.shape[0]
        own = (place >= 0) & (place < embedding.shape[0])
        summand = Partial(jnp.where(own[:, None], embedding[jnp.where(own, place, 0)], 0)[None], AXIS)
        # One device has a token's embedding and the others have zeros, so no sum is rounded.
        return (summand.total() if exchange is None else exchange.total(summand)).astype(embedding.dtype)


class SplitRMSNorm(nnx.Module):
    """Computes x / rms(x) * (offset + weight), where rms(x) is over the channels of all devices."""

    def __init__(self, norm: RMSNorm) -> None:
        """Takes the parameter of `norm`, which is already placed."""
        self.weight, self.epsilon, self.offset = norm.weight, norm.epsilon, norm.offset

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the last axis over all devices. Repeated heads do not change the mean of the squares."""
        y = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jax.lax.pmean(jnp.mean(y * y, axis=-1, keepdims=True), AXIS) + self.epsilon)
        return (y * scale * spread(self.offset + self.weight[...].astype(jnp.float32), y)).astype(x.dtype)


class SplitGroupNorm(GatedGroupNorm):
    """A `GatedGroupNorm` for repeated groups. A group's channels are spread over its `copies` copies."""

    def __init__(self, norm: GatedGroupNorm, groups: int, copies: int) -> None:
        """Takes the parameter of `norm`, which is already placed. `groups` is the number of groups of one device."""
        self.weight, self.epsilon, self.norm_before_gate = norm.weight, norm.epsilon, norm.norm_before_gate
        self.groups, self.copies = groups, copies

    def normalise(self, parts: jax.Array) -> jax.Array:
        """Divides float32 [tokens, groups, size] by the root mean square of a group and its copies."""
        mean = jnp.mean(parts * parts, axis=-1)
        everywhere = jax.lax.all_gather(mean, AXIS, axis=1, tiled=True)
        whole = jnp.mean(everywhere.reshape(mean.shape[0], -1, self.copies), axis=-1).repeat(self.copies, axis=1)
        own = jax.lax.dynamic_slice_in_dim(whole, jax.lax.axis_index(AXIS) * self.groups, self.groups, axis=1)
        return parts * jax.lax.rsqrt(own[..., None] + self.epsilon)


@dataclass
class Cut:
    """Places the parameters of a model on a mesh. A layer's `split` method calls it for each of its parameters.

    Attributes:
        mesh: The mesh, with an axis "tensor".
        placed: `id` of each variable that has been placed.
        ordered: For the `id` of each variable whose elements were put in another order or repeated, the axis, and what
            lay side by side along it before.
    """

    mesh: Mesh
    placed: set[int] = field(default_factory=set)
    ordered: dict[int, tuple[int, tuple[Part, ...]]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The number of devices that share the model."""
        return devices(self.mesh)

    def put(self, variable: nnx.Variable, axis: int | None = None, parts: Sequence[Part] = ()) -> None:
        """Places a parameter on the mesh. `variable` is changed in place.

        Args:
            variable: The parameter.
            axis: The axis that is divided among the devices; None copies the parameter to all devices.
            parts: What lies side by side along `axis`. Each device gets its heads of each part: see `sharding.columns`.

        Raises:
            ValueError: the number of a part's heads is not a multiple of the number of devices.
        """
        array = variable[...]
        if parts and axis is not None:
            order = columns(parts, self.size)
            if not np.array_equal(order, np.arange(array.shape[axis])):
                array = jnp.take(array, order, axis=axis)
                self.ordered[id(variable)] = axis, tuple(parts)
        sharding = NamedSharding(self.mesh, P() if axis is None else P(*[None] * axis, AXIS))
        if self.mesh.is_multi_process:
            # `device_put` would send every weight to all processes through the host, to compare it.
            placed = jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
        else:
            placed = jax.device_put(array, sharding)
        variable.set_value(placed)
        self.placed.add(id(variable))

    def out(self, linear: Linear, *parts: Part | tuple[Part, ...]) -> None:
        """Splits a product's outputs and its bias: for each of its parts the heads, or what lies side by side in it."""
        of_each = [part if isinstance(part[0], Part) else (part,) for part in parts]
        flat = [part for each in of_each for part in each]
        self.put(linear.weight, 0, flat)
        if linear.bias is not None:
            self.put(linear.bias, 0, flat)
        linear.parts = tuple(
            sum(part.heads * part.dim * part.repeats for part in each) // self.size for each in of_each
        )

    def into(self, linear: Linear, part: Part) -> None:
        """Splits a product's inputs. Its outputs are then summed over the devices, and the bias is added once."""
        self.put(linear.weight, 1, [part])
        linear.axis = AXIS


@runtime_checkable
class Splittable(Protocol):
    """A module whose parameters are divided among devices. The parameters of other modules are copied to every device."""

    def split(self, cut: Cut) -> None:
        """Places the parameters on the mesh, and makes the module's sizes those of one device's share.

        Raises:
            ValueError: the number of heads or channels is not a multiple of the number of devices.
        """
