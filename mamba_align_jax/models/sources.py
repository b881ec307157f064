"""How parameters are made from the tensors of a model directory: a `Source` for each way to make one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from mamba_align_jax.layers.moe import shared_experts
from mamba_align_jax.models import arrange
from pallas_kernels.quantized import concatenate


@dataclass(frozen=True)
class Source:
    """One way to make a parameter from the tensors of a model directory.

    Attributes:
        names: Names of the tensors. Several parameters may be made from the same tensor.
        make: Makes the parameter from an iterator over the tensors in this order. It reads one at a time. They have the
            parameter's dtype, or are quantised weights for products in it. If their shapes do not fit together, it raises a
            ValueError, and if they are quantised in ways that do not, an `arrange.UnlikeError`.
        split: Makes the tensors from the parameter and the sizes of its parts along the first axis, if no other parameter is
            made from them; else None.
    """

    names: tuple[str, ...]
    make: Callable[[Iterator[Any]], Any] = next
    split: Callable[[np.ndarray, Sequence[int]], list[np.ndarray]] | None = None


# Products of the same inputs that a model computes as one, by the name of the joined one: see `Linear`.
_JOINED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvzba": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
}


def tensor(name: str) -> Source:
    """Takes a tensor as it is."""
    return Source((name,), next, lambda array, _: [array])


def taps(name: str) -> Source:
    """Takes a convolution's taps, which files hold as [channels, 1, width], to [width, channels]."""
    return Source((name,), lambda parts: np.squeeze(next(parts), axis=1).T, lambda array, _: [array.T[:, None]])


def joined(sources: Sequence[Source], axis: int = -1) -> Source:
    """Concatenates parameters along an axis. Quantised ones can only be joined along axis 0."""
    names = tuple(name for source in sources for name in source.names)
    together = arrange.below if axis == 0 else lambda arrays: np.concatenate(arrays, axis=axis)
    return Source(names, lambda parts: together([source.make(parts) for source in sources]))


def parts(names: Sequence[str], own_sizes: Callable[[Sequence[int]], Sequence[int]] = lambda sizes: sizes) -> Source:
    """Concatenates tensors along the first axis: the parts of a `Linear`.

    If some of the parts are several tensors, `own_sizes` makes the tensors' sizes from those of the parts.
    """
    both = joined([tensor(name) for name in names], axis=0)
    return Source(both.names, both.make, lambda array, sizes: np.split(array, np.cumsum(own_sizes(sizes))[:-1]))


def equal_parts(names: Sequence[str]) -> Source:
    """Concatenates tensors of one shape along the first axis."""

    def make(parts: Iterator[Any]) -> Any:
        first, *others = (next(parts) for _ in names)
        if any(other.shape != first.shape for other in others):
            raise ValueError(f"{names} must have one shape")
        return arrange.below([first, *others])

    return Source(tuple(names), make)


def stacked(sources: Sequence[Source]) -> Source:
    """Stacks parameters of one shape along a new first axis."""
    names = tuple(name for source in sources for name in source.names)
    return Source(names, lambda parts: arrange.stack(lambda place: sources[place].make(parts), len(sources)))


def ordered(source: Source, order: np.ndarray) -> Source:
    """Puts the outputs of a product's weight into another order, which names each of them once."""
    return Source(source.names, lambda parts: arrange.ordered(source.make(parts), order))


def mapped(source: Source, function: Callable[[np.ndarray], np.ndarray]) -> Source:
    """Applies `function` to a parameter that is no product's weight."""
    return Source(source.names, lambda parts: function(source.make(parts)))


def in_model(place: str, renamed: Mapping[str, str] = MappingProxyType({})) -> str:
    """Returns the name that most files have for a parameter: all but the head are in `model`. `renamed` differ there."""
    return place if place.startswith("lm_head") else f"model.{renamed.get(place, place)}"


def named(place: str) -> Source:
    """Takes the tensors whose name is the parameter's place, with `weight` for `embedding`, or its parts' places."""
    if place.endswith(".embedding"):
        return tensor(place.removesuffix("embedding") + "weight")
    *path, module, leaf = place.split(".")
    if module in _JOINED:
        return parts([".".join([*path, part, leaf]) for part in _JOINED[module]])
    return taps(place) if place.endswith("conv1d.weight") else tensor(place)


def _with_shared(routed: Source, names: tuple[str, ...], is_up: bool, shared_size: int) -> Source:
    """Appends a shared expert, cut into experts of their size, to the experts that `routed` makes.

    `names` are the tensors of the shared expert's products: those that `up` joins, or that of `down`.
    """

    def make(parts: Iterator[Any]) -> Any:
        own, axis = routed.make(parts), -2 if is_up else -1
        size = own.shape[axis] // len(names)
        each = [next(parts) for _ in names]
        if any(tensor.shape[axis] != shared_size for tensor in each):
            raise ValueError(f"{names} must have {shared_size} channels")
        cut = [arrange.pieces(tensor, axis, shared_experts(shared_size, size), size) for tensor in each]
        return arrange.appended([own, concatenate(cut)])

    return Source((*routed.names, *names), make)


def experts(
    place: str,
    number: int,
    up: Sequence[str] = ("gate_proj", "up_proj"),
    down: Sequence[str] = ("down_proj",),
    shared: str | None = None,
    shared_size: int = 0,
) -> list[Source]:
    """Lists the ways to make `up` or `down` of `layers.moe.Experts`: from tensors per expert, or from one tensor.

    Args:
        place: The parameter's place, "...experts.up" or "...experts.down".
        number: Number of experts.
        up: Names of an expert's products that `up` joins.
        down: Names of an expert's products that `down` joins.
        shared: Name of a shared expert beside "experts", which is appended: see `layers.moe.shared_experts`. None if there
            is none.
        shared_size: Intermediate channels of the shared expert, if there is one.
    """
    prefix, leaf = place.rsplit(".", 1)
    names = up if leaf == "up" else down
    fused = tensor(f"{prefix}.{'gate_up' if leaf == 'up' else leaf}_proj")
    each = [equal_parts([f"{prefix}.{expert}.{name}.weight" for name in names]) for expert in range(number)]
    if shared is None:
        return [stacked(each), fused]
    beside = tuple(f"{prefix.removesuffix('experts')}{shared}.{name}.weight" for name in names)
    return [_with_shared(way, beside, leaf == "up", shared_size) for way in (stacked(each), fused)]
