"""The state pools: one array per group and state, with the layers as the first axis."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mamba_align_jax import _values as values
from mamba_align_jax.align.config import AlignConfig, ConvState
from mamba_align_jax.errors import FieldError
from pallas_kernels import NULL_BLOCK


def _shapes(align: AlignConfig, num_blocks: int) -> list[list[jax.ShapeDtypeStruct]]:
    return [
        [
            jax.ShapeDtypeStruct(
                (group.num_layers, num_blocks, *state.block_shape(align.num_speculative_tokens)), jnp.dtype(state.dtype)
            )
            for state in group.states
        ]
        for group in align.groups
    ]


def _uncut(array: Any, kind: Any) -> tuple[Any, ...]:
    """Returns what a device's part of an array has in common with the whole array, of which it may have some channels."""
    length = array.shape[2 if kind.layout == "SD" else 3] if isinstance(kind, ConvState) and array.ndim == 4 else None
    return array.shape[0], array.ndim, jnp.dtype(array.dtype), length


def _ring_shapes(align: AlignConfig) -> list[list[jax.ShapeDtypeStruct]]:
    """Returns the arrays of each group's ring: none for a group without a ring, or unless the policy is "deferred"."""
    found = []
    for group in align.groups:
        arrays = group.ring.arrays(align.fold_length) if group.ring is not None and align.is_deferred else ()
        slots = group.num_layers, align.max_num_seqs
        found.append([jax.ShapeDtypeStruct((*slots, *shape), jnp.dtype(dtype)) for shape, dtype in arrays])
    return found


def _zeros(shapes: Sequence[Sequence[Any]], shardings: Sequence[Sequence[Any]]) -> tuple[tuple[jax.Array, ...], ...]:
    make = lambda shape, where: jnp.zeros(shape.shape, shape.dtype, device=where)
    return tuple(tuple(map(make, *group)) for group in zip(shapes, shardings, strict=True))


def _new_rings(name: str, align: AlignConfig, sharding: Any) -> tuple[tuple[jax.Array, ...], ...] | None:
    """Returns rings of zeros, or None unless the policy is "deferred"."""
    if not align.is_deferred:
        return None
    shapes = _ring_shapes(align)
    if not isinstance(sharding, StatePool):
        return _zeros(shapes, [[sharding] * len(group) for group in shapes])
    if sharding.rings is None:
        raise ValueError(f"{name} must have rings under policy 'deferred', as of pool_sharding")
    return _zeros(shapes, sharding.rings)


def _only_sharding(array: Any) -> Any:
    """Returns the sharding of an array on one device, and None for one of the host or one that is being traced."""
    if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array):
        return None
    name, wanted = "StatePool.from_arrays: sharding", "given under policy 'deferred' for states on several devices"
    values.require(len(array.devices()) == 1, name, wanted, None)
    return array.sharding


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StatePool:
    """The states of all blocks.

    Block 0 is NULL_BLOCK. Kernels that read it get a zero state, and kernels that write it do nothing. Its bytes have
    no meaning.

    Attributes:
        states: `states[g][s]` is [layers, blocks, *state shape] for state s of group g, in the order of
            `GroupSpec.states` and with the dtype of that state.
        rings: The entries of the slots under policy "deferred", None otherwise. `rings[g]` are the arrays of group g,
            [layers, slots, heads, places, ...], which `GroupSpec.ring` describes: keys, corrections and log decays of
            delta-rule layers, and x, B, step sizes and log decays of Mamba-2; () for a group without recurrent states.
    """

    states: tuple[tuple[jax.Array, ...], ...]
    rings: tuple[tuple[jax.Array, ...], ...] | None = None

    @classmethod
    def create(
        cls, align: AlignConfig, num_blocks: int, sharding: "jax.sharding.Sharding | StatePool | None" = None
    ) -> "StatePool":
        """Creates a pool of zeros.

        Args:
            align: How states are kept.
            num_blocks: Blocks in each group, NULL_BLOCK included.
            sharding: One sharding for all arrays, or one for each, as `sharding.pool_sharding` returns them.

        Raises:
            ValueError: `num_blocks` is too small for one request, or `sharding` has none for the rings of policy "deferred".
        """
        values.instance("StatePool.create: align", align, AlignConfig)
        values.instance("StatePool.create: sharding", sharding, jax.sharding.Sharding, StatePool, optional=True)
        name, least = "StatePool.create: num_blocks", 1 + align.blocks_per_request(max_chunk=0)
        num_blocks = values.integer(name, num_blocks)
        values.require(num_blocks >= least, name, f"at least {least} for one request", num_blocks)
        shapes = _shapes(align, num_blocks)
        each = sharding.states if isinstance(sharding, StatePool) else [[sharding] * len(group) for group in shapes]
        states = _zeros(shapes, each)
        return cls(states=states, rings=_new_rings("StatePool.create: sharding", align, sharding))

    @classmethod
    def from_arrays(
        cls,
        align: AlignConfig,
        states: Sequence[Sequence[jax.Array]],
        sharding: "jax.sharding.Sharding | StatePool | None" = None,
    ) -> "StatePool":
        """Makes a pool of the caller's own arrays. Rings are new ones.

        Args:
            align: How states are kept.
            states: The arrays, in the order of `align.groups` and their states.
            sharding: One sharding for all rings, or one for each, as `sharding.pool_sharding` returns them. None puts
                them on the device of the states.

        Raises:
            ValueError: An array does not have the shape or dtype that `align` gives it, or the states are on several
                devices, and `sharding` does not say where the rings of policy "deferred" are to be.
        """
        values.instance("StatePool.from_arrays: align", align, AlignConfig)
        values.instance("StatePool.from_arrays: sharding", sharding, jax.sharding.Sharding, StatePool, optional=True)
        name = "StatePool.from_arrays: states"
        states = [_arrays(name, group) for group in values.members(name, states)]
        got, wanted = list(map(len, states)), [len(group.states) for group in align.groups]
        values.require(got == wanted, name, f"have {wanted} arrays per group", got, "must")
        for number, (group, arrays) in enumerate(zip(align.groups, states, strict=True)):
            for wanted, array in zip(_shapes(align, arrays[0].shape[1])[number], arrays, strict=True):
                _check_array(f"StatePool.from_arrays: arrays of group {group.name!r}", array, wanted)
        if sharding is None and align.is_deferred:
            sharding = _only_sharding(states[0][0])
        rings = _new_rings("StatePool.from_arrays: sharding", align, sharding)
        return cls(states=tuple(map(tuple, states)), rings=rings)

    def check(self, align: AlignConfig) -> None:
        """Raises ValueError if the pool was made for another AlignConfig.

        One of several devices may have a part of the channels.
        """
        wanted = _shapes(align, 1)
        fits = list(map(len, self.states)) == list(map(len, wanted)) and all(
            _uncut(array, kind) == _uncut(other, kind)
            for group, arrays, others in zip(align.groups, self.states, wanted, strict=True)
            for kind, array, other in zip(group.states, arrays, others, strict=True)
        )
        show = lambda groups: [[_text(array) for array in group] for group in groups]
        if not fits:
            made = f"made for this AlignConfig, {show(wanted)} with any number of blocks"
            raise FieldError("StatePool: states", made, str(show(self.states)))
        if (self.rings is not None) != align.is_deferred:
            has = "no rings" if self.rings is None else "rings"
            raise ValueError(f"StatePool: rings must be those of policy {align.policy!r}, got a pool with {has}")

    @property
    def num_blocks(self) -> int:
        """The number of blocks in the smallest group, NULL_BLOCK included."""
        return min(group[0].shape[1] for group in self.states)

    def ring(self, group: int) -> tuple[jax.Array, ...]:
        """Returns the arrays of a group's ring; () if it has none."""
        return self.rings[group] if self.rings else ()

    def with_group(self, group: int, states: Sequence[jax.Array]) -> "StatePool":
        """Returns the pool with the arrays of one group replaced by `states`, which a kernel returned.

        The arrays of the group's ring may follow. Without them the ring stays as it is.

        Raises:
            ValueError: `states` does not have as many arrays as the group, or as the group and its ring.
        """
        group = self._group("with_group", group)
        states = _arrays("StatePool.with_group: states", states)
        number, ring = len(self.states[group]), self.ring(group)
        wanted = f"{number} or {number + len(ring)} arrays" if ring else f"{number} arrays"
        fits = len(states) in (number, number + len(ring))
        values.require(fits, f"StatePool.with_group: states of group {group}", wanted, len(states))
        put = lambda all_, own: (*all_[:group], tuple(own), *all_[group + 1 :])
        rings = put(self.rings, states[number:]) if self.rings and len(states) > number else self.rings
        return replace(self, states=put(self.states, states[:number]), rings=rings)

    def read_block(self, group: int, block: int) -> list[np.ndarray]:
        """Copies one block of a group to host memory. Waits for the device.

        It is meant for debugging and for a cache in host memory. `write_block` can put the result into any block.

        Returns:
            One array per state, [layers, *state shape].

        Raises:
            ValueError: There is no such group or block, or the block is NULL_BLOCK.
        """
        group, block = self._block("read_block", group, block)
        return jax.device_get(list(_take_block(self.states[group], jax.device_put(np.int32(block)))))

    def write_block(self, group: int, block: int, states: Sequence[np.ndarray]) -> "StatePool":
        """Returns the pool with one block of a group replaced by what `read_block` returned.

        The group's arrays are donated, so this pool must not be used afterwards. No step in flight may use the block.

        Raises:
            ValueError: There is no such group or block, or an array has a wrong shape or dtype. Then the pool is
                unchanged.
        """
        group, block = self._block("write_block", group, block)
        name, number = "StatePool.write_block: states", len(self.states[group])
        states = _arrays(name, states)
        values.require(len(states) == number, name, f"{number} arrays", len(states))
        for array, state in zip(self.states[group], states, strict=True):
            _check_array(name, state, jax.ShapeDtypeStruct((array.shape[0], *array.shape[2:]), array.dtype))
        written = _put_block(self.states[group], jnp.int32(block), tuple(map(jnp.asarray, states)))
        return self.with_group(group, written)

    def _group(self, function: str, group: int) -> int:
        name = f"StatePool.{function}: group"
        group = values.integer(name, group)
        values.require(0 <= group < len(self.states), name, f"in [0, {len(self.states)})", group)
        return group

    def _block(self, function: str, group: int, block: int) -> tuple[int, int]:
        name, group = f"StatePool.{function}: block", self._group(function, group)
        block, blocks = values.integer(name, block), self.states[group][0].shape[1]
        values.require(NULL_BLOCK < block < blocks, name, f"in [1, {blocks})", block)
        return group, block


def _text(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _check_array(name: str, array: Any, wanted: jax.ShapeDtypeStruct) -> None:
    if (array.shape, array.dtype) != (wanted.shape, wanted.dtype):
        raise FieldError(name, _text(wanted), _text(array))


def _arrays(name: str, given: Any) -> tuple[Any, ...]:
    """Checks a sequence of arrays of at least two axes, on the host or on the device."""
    wanted = "arrays [layers, blocks, ...] for each state of a group"
    found = values.members(name, given, wanted)
    other = [array for array in found if not (hasattr(array, "dtype") and getattr(array, "ndim", 0) > 1)]
    values.require(not other, name, wanted, other[:1] and other[0])
    return found


@jax.jit
def _take_block(arrays: tuple[jax.Array, ...], block: jax.Array) -> list[jax.Array]:
    return [array[:, block] for array in arrays]


@functools.partial(jax.jit, donate_argnums=0)
def _put_block(arrays: tuple[jax.Array, ...], block: jax.Array, states: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(array.at[:, block].set(state) for array, state in zip(arrays, states, strict=True))
