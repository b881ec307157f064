"""Tensor parallelism: states, keys and weights split over the mesh axis "tensor", one program on every device.

A device has heads and the channels that belong to them, and runs the code of one device over its share: its states are
copied where they are, and the bookkeeping is the same everywhere. Only products that sum over what is split meet.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    """How many devices share a model.

    Raises:
        ValueError: the mesh has no axis "tensor".
    """
    if AXIS not in mesh.shape:
        raise ValueError(f"mesh must have an axis {AXIS!r}, got {tuple(mesh.shape)}")
    return mesh.shape[AXIS]


class Part(NamedTuple):
    """Columns of one kind side by side, as q in [q | k | v]: `heads` of `dim` each, and how often a head is repeated."""

    heads: int
    dim: int
    repeats: int = 1


def repeats(heads: int, devices: int) -> int:
    """How many copies of each key or value head make their number a multiple of `devices`; 1 where it is one."""
    return math.lcm(heads, devices) // heads


def columns(parts: Sequence[Part], devices: int) -> np.ndarray:
    """The order of columns in which an even cut gives every device its heads of each part: part by part, never flat.

    int32 [columns of all devices], indices into [part | part | ..].

    Raises:
        ValueError: the heads of a part are no multiple of the devices.
    """
    found, start = [], 0
    for heads, dim, copies in parts:
        if heads * copies % devices:
            raise ValueError(f"heads, or channels, must be a multiple of {devices} devices, got {heads * copies}")
        part = start + np.arange(heads * dim, dtype=np.int32).reshape(heads, dim).repeat(copies, axis=0)
        found.append(part.reshape(devices, -1))
        start += heads * dim
    return np.concatenate(found, axis=1).reshape(-1)


def _state(state: ConvState | RecurrentState) -> Any:
    if isinstance(state, ConvState):
        return P(None, None, None, AXIS) if state.layout == "SD" else P(None, None, AXIS)
    return P(None, None, AXIS) if state.shape[0] > 1 else P(None, None, None, AXIS)


def pool_partition(groups: Sequence[GroupSpec]) -> StatePool:
    """A PartitionSpec for each array: windows by channels, states by heads, or by channels where there is one head."""
    return StatePool(states=tuple(tuple(map(_state, group.states)) for group in groups))


def pool_sharding(groups: Sequence[GroupSpec], mesh: Mesh) -> StatePool:
    """`pool_partition` on a mesh, for `StatePool.create(sharding=)`. The groups are those of the whole model.

    A device's channels of a window are its channels of each part, so windows lie in the order of `columns`.

    Raises:
        ValueError: channels or heads are no multiple of the devices, or the mesh has no axis "tensor".
    """
    size = devices(mesh)
    for group in groups:
        for state in group.states:
            shape = state.block_shape(0)
            axis = _state(state).index(AXIS) - 2
            if shape[axis] % size:
                raise ValueError(
                    f"{group.name!r}: heads and channels must be a multiple of {size} devices, got {shape}"
                )
    return jax.tree.map(functools.partial(NamedSharding, mesh), pool_partition(groups), is_leaf=_is_spec)


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


@dataclass(frozen=True)
class Layout:
    """How a model's arrays lie on a mesh, as PartitionSpecs.

    Attributes:
        mesh: With an axis "tensor".
        params: Of the parameters, in the order of their tree's leaves.
        pool: Of the states.
        kv: Of keys and values.
    """

    mesh: Mesh
    params: tuple[P, ...]
    pool: StatePool
    kv: KVPages

    def run(self, function: Callable[..., Any], in_specs: tuple[Any, ...], out_specs: Any) -> Callable[..., Any]:
        """`function` on every device, over its shares of the arguments; what has P() must come to the same on all."""

        def run(*arguments: Any) -> Any:
            # XLA's compiler in JAX 0.11 crashes if arguments without elements, as pages without attention, are used.
            fresh = lambda x: x if x.size else jnp.zeros(x.shape, x.dtype)
            return function(*jax.tree.map(fresh, arguments))

        return jax.shard_map(run, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
