"""Tensor parallelism: states, keys and weights are split over the mesh axis "tensor".

Every device has some of the heads with their channels, and runs the code of a single device over its share. States
never move between devices, and the bookkeeping is the same on all of them. The devices communicate only where a
product, a norm or an embedding needs the channels of all.

Source: Shoeybi et al., "Megatron-LM" (2019), for the split of products by columns and then by rows.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mamba_align_jax.align.config import ConvState, GroupSpec, RecurrentState
from mamba_align_jax.align.pool import StatePool
from mamba_align_jax.kv import KVPages

AXIS = "tensor"


def devices(mesh: Mesh) -> int:
    """Returns the number of devices that share a model on the mesh.

    Raises:
        ValueError: `mesh` is no mesh, or has no axis "tensor".
    """
    axes = getattr(mesh, "shape", None)
    if not isinstance(axes, Mapping):
        raise ValueError(f"mesh must be a jax.sharding.Mesh, got {mesh!r:.200}")
    if AXIS not in axes:
        raise ValueError(f"mesh must have an axis {AXIS!r}, got {tuple(axes)}")
    return axes[AXIS]


class Part(NamedTuple):
    """One part of an array's columns, such as q in [q | k | v].

    Attributes:
        heads: Number of heads.
        dim: Number of columns of a head.
        repeats: How often each head is repeated, so that every device gets a whole number of heads.
    """

    heads: int
    dim: int
    repeats: int = 1


class Order(NamedTuple):
    """In which order the elements of an array lie along an axis that is divided among devices.

    Attributes:
        axis: The axis.
        places: For each element along it, its place on one device. Elements may be repeated. int [elements]
        size: The number of elements on one device.
    """

    axis: int
    places: np.ndarray
    size: int


def repeats(heads: int, devices: int) -> int:
    """Returns the smallest number of copies of each head that makes the number of heads a multiple of `devices`."""
    return math.lcm(heads, devices) // heads


def columns(parts: Sequence[Part], devices: int) -> np.ndarray:
    """Orders columns so that an even cut gives every device its heads of each part.

    For [q | k] and two devices, the order is [first half of q | first half of k | second half of q | second half of k].

    Returns:
        Indices into the columns of all parts, which lie side by side. int32 [columns of all devices]

    Raises:
        ValueError: the number of a part's heads is not a multiple of the number of devices.
    """
    found, start = [], 0
    for heads, dim, copies in parts:
        if heads * copies % devices:
            raise ValueError(f"heads or channels must be a multiple of {devices} devices, got {heads * copies}")
        part = start + np.arange(heads * dim, dtype=np.int32).reshape(heads, dim).repeat(copies, axis=0)
        found.append(part.reshape(devices, -1))
        start += heads * dim
    return np.concatenate(found, axis=1).reshape(-1)


def _state(state: ConvState | RecurrentState) -> Any:
    if isinstance(state, ConvState):
        return P(None, None, None, AXIS) if state.layout == "SD" else P(None, None, AXIS)
    if state.shape[0] > 1:
        return P(None, None, AXIS)
    # Layout "KV" swaps the last two axes, which are the only ones of some states.
    axis = 1 if state.layout == "VK" else 0 if len(state.shape) == 2 else 2
    return P(*[None] * (2 + axis), AXIS)


def pool_partition(groups: Sequence[GroupSpec], *, deferred: bool = False) -> StatePool:
    """Returns a PartitionSpec for each array: by channels for windows and for states of one head, else by heads.

    With `deferred` the policy is "deferred", under which a pool has rings: see `ring_partition`.
    """
    rings: Any = ring_partition(groups) if deferred else None
    return StatePool(states=tuple(tuple(map(_state, group.states)) for group in groups), rings=rings)


def ring_partition(groups: Sequence[GroupSpec]) -> tuple[tuple[P, ...], ...]:
    """Returns a PartitionSpec for each array [layers, slots, heads, ...] of `StatePool.rings`: by heads."""
    return tuple(
        (P(None, None, AXIS),) * len(group.ring.arrays(1)) if group.ring is not None else () for group in groups
    )


def pool_sharding(groups: Sequence[GroupSpec], mesh: Mesh, *, deferred: bool = False) -> StatePool:
    """Returns a sharding for each array, for `StatePool.create(sharding=)`. With `deferred` the pool has rings.

    The channels of windows are in the order that `columns` gives, because each device's channels lie side by side.

    Raises:
        ValueError: the number of heads or channels is not a multiple of the number of devices, or the mesh has no axis
            "tensor".
    """
    size = devices(mesh)
    for group in groups:
        # The number of heads of a ring does not depend on the length of a fold group.
        for shape, _ in group.ring.arrays(1) if deferred and group.ring is not None else ():
            if shape[0] % size:
                raise ValueError(f"{group.name!r}: heads of a ring must be a multiple of {size} devices, got {shape}")
        for state in group.states:
            shape = state.block_shape(0)
            axis = _state(state).index(AXIS) - 2
            if shape[axis] % size:
                raise ValueError(
                    f"{group.name!r}: heads and channels must be a multiple of {size} devices, got {shape}"
                )
    partition = pool_partition(groups, deferred=deferred)
    return jax.tree.map(functools.partial(NamedSharding, mesh), partition, is_leaf=lambda x: isinstance(x, P))


@dataclass(frozen=True)
class Layout:
    """How a model's arrays lie on a mesh, as PartitionSpecs.

    Attributes:
        mesh: The mesh, with an axis "tensor".
        params: One PartitionSpec per parameter, in the order of the leaves of their tree. Values and scales of a quantised
            weight are parameters of their own.
        pool: The PartitionSpecs of the states.
        kv: The PartitionSpecs of keys and values.
        ordered_params: For each parameter the order of its elements; None if it is that of one device.
        windows: For each group, the parts of the channels of its windows; () if they are in the order of one device.
        kv_heads: The parts of the heads of keys and values; () if they are in the order of one device.
    """

    mesh: Mesh
    params: tuple[P, ...]
    pool: StatePool
    kv: KVPages
    # The programs of steps don't depend on what follows.
    ordered_params: tuple[Order | None, ...] = field(default=(), compare=False)
    windows: tuple[tuple[Part, ...], ...] = field(default=(), compare=False)
    kv_heads: tuple[Part, ...] = field(default=(), compare=False)

    def run(self, function: Callable[..., Any], in_specs: tuple[Any, ...], out_specs: Any) -> Callable[..., Any]:
        """Returns a function that runs `function` on every device, over the device's shares of the arguments.

        There is a PartitionSpec for each array of the arguments and of the result. Where it is P(), all devices must
        compute the same.
        """

        def run(*arguments: Any) -> Any:
            # XLA's compiler in JAX 0.11 crashes if arguments without elements are used, such as pages without
            # attention.
            return function(*jax.tree.map(lambda x: x if x.size else jnp.zeros(x.shape, x.dtype), arguments))

        return jax.shard_map(run, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
