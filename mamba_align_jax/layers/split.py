"""Layers that are split over a mesh: the placement of their parameters, and products and norms over split channels."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
from mamba_align_jax.sharding import AXIS, Order, Part, columns, devices
from pallas_kernels import quantized
from pallas_kernels.quantized import QuantizedWeight, scale_places


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
        parts: For the `id` of each variable whose elements were put in another order or repeated, what lay side by side
            along the axis before.
        orders: For the `id` of each such variable the order of each of its arrays: see `sharding.Layout`.
    """

    mesh: Mesh
    placed: set[int] = field(default_factory=set)
    parts: dict[int, tuple[Part, ...]] = field(default_factory=dict)
    orders: dict[int, list[Order | None]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The number of devices that share the model."""
        return devices(self.mesh)

    def put(self, variable: nnx.Variable, axis: int | None = None, parts: Sequence[Part] = ()) -> None:
        """Places a parameter on the mesh. `variable` is changed in place.

        Args:
            variable: The parameter.
            axis: The axis that is divided among the devices; None copies the parameter to all devices. Scales of a quantised
                weight are divided where its values are. A scale whose block is cut goes to all that have a piece of it.
            parts: What lies side by side along `axis`. Each device gets its heads of each part: see `sharding.columns`.

        Raises:
            ValueError: the number of a part's heads is not a multiple of the number of devices.
        """
        value = variable[...]
        if axis is None:
            placed, orders = jax.tree.map(self._copied, value), []
        elif isinstance(value, QuantizedWeight):
            placed, orders = self._divided_weight(value, axis - value.ndim, parts)
        else:
            order = columns(parts, self.size) if parts else np.arange(value.shape[axis])
            is_ordered = not np.array_equal(order, np.arange(value.shape[axis]))
            orders = [Order(axis, order, value.shape[axis]) if is_ordered else None]
            placed = self._divided(jnp.take(value, order, axis=axis) if is_ordered else value, axis)
        if any(orders):
            self.parts[id(variable)], self.orders[id(variable)] = tuple(parts), orders
        variable.set_value(placed)
        self.placed.add(id(variable))

    def _divided_weight(
        self, weight: QuantizedWeight, axis: int, parts: Sequence[Part]
    ) -> tuple[QuantizedWeight, list[Order | None]]:
        """Places a quantised weight, whose outputs (`axis` -2) or inputs (-1) are divided.

        Returns:
            The weight on the devices, and the order in which each of its arrays was taken.
        """
        placed, orders, left = [], [], list(parts)
        for part in weight.parts:
            length, own = part.values.shape[axis], list(parts)
            if axis == -2 and parts:
                # These heads are the outputs of this part. The outputs of the next part are cut by themselves.
                own = _taken(left, length)
            order = columns(own, self.size) if own else np.arange(length)
            new = part.take(order, axis, self.size)
            orders.append(_order(part.values, axis, order))
            if new.scales is None or part.block is None:
                placed.append(quantized.Part(self._divided(new.values, axis)))
                continue
            places, _ = scale_places(order, part.block[axis], self.size)
            orders.append(_order(part.scales, axis, places))
            is_shared = new.scales.shape[axis] == 1
            scales = self._copied(new.scales) if is_shared else self._divided(new.scales, axis)
            placed.append(quantized.Part(self._divided(new.values, axis), scales, new.block))
        return replace(weight, parts=tuple(placed)), orders

    def _copied(self, array: jax.Array) -> jax.Array:
        return self._placed(array, P())

    def _divided(self, array: jax.Array, axis: int) -> jax.Array:
        return self._placed(array, P(*[None] * (axis % array.ndim), AXIS))

    def _placed(self, array: jax.Array, spec: P) -> jax.Array:
        sharding = NamedSharding(self.mesh, spec)
        if self.mesh.is_multi_process:
            # `device_put` would send every weight to all processes through the host, to compare it.
            return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
        return jax.device_put(array, sharding)

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


def _taken(parts: list[Part], length: int) -> list[Part]:
    """Takes from the front of `parts` those whose heads are the next `length` columns. `parts` is changed.

    Raises:
        ValueError: a part begins before this column and ends after it.
    """
    found, wanted = [], length
    while parts and length > 0:
        found.append(parts.pop(0))
        length -= found[-1].heads * found[-1].dim
    if length:
        raise ValueError(f"a quantised part of {wanted} outputs must hold whole projections")
    return found


def _order(array: jax.Array, axis: int, places: np.ndarray) -> Order | None:
    """Returns the order of an array's elements that are taken from these places; None if nothing changes."""
    size = array.shape[axis]
    return None if np.array_equal(places, np.arange(size)) else Order(axis % array.ndim, places, size)


@runtime_checkable
class Splittable(Protocol):
    """A module whose parameters are divided among devices. The parameters of other modules are copied to every device."""

    def split(self, cut: Cut) -> None:
        """Places the parameters on the mesh, and makes the module's sizes those of one device's share.

        Raises:
            ValueError: the number of heads or channels is not a multiple of the number of devices.
        """
