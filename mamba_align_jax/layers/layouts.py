"""Chooses in which order of axes a model's windows and states lie in its pools."""

from collections.abc import Mapping
from typing import Any, TypeVar, get_args

import jax
from flax import nnx

from mamba_align_jax import _values as values
from pallas_kernels import StateLayout, WindowLayout

M = TypeVar("M")
WINDOW_LAYOUTS, STATE_LAYOUTS = get_args(WindowLayout), get_args(StateLayout)
# For each attribute of mixers, its default, and the layers without which a model has no other.
_DEFAULTS = {"window_layout": ("SD", "convolutions"), "state_layout": ("VK", "delta rules")}


def set_pool_layouts(model: nnx.Module, *, windows: WindowLayout = "SD", states: StateLayout = "VK") -> None:
    """Sets the layouts of the pools of all mixers of a model, for pools that another program shares or reads.

    Call it before `state_groups`, `shard_model` or an `Engine` reads the model. The tokens do not depend on it. For one
    engine only, set `EngineConfig.window_layout` and `state_layout` instead, which leave the model as it is.

    Args:
        model: The model, which is changed.
        windows: "SD" for convolution windows [window, channels], or "DS" for [channels, window].
        states: "VK" for states of the gated delta rule [value_heads, value_dim, key_dim], or "KV" for [value_heads,
            key_dim, value_dim]. The states of Mamba have one layout only.

    Raises:
        ValueError: a layout is not known, or no mixer of the model has windows or states that can lie in it. The model
            is then unchanged.
    """
    values.choice("set_pool_layouts: windows", windows, WINDOW_LAYOUTS)
    values.choice("set_pool_layouts: states", states, STATE_LAYOUTS)
    layouts = {"window_layout": windows, "state_layout": states}
    names = {"window_layout": "set_pool_layouts: windows must be", "state_layout": "set_pool_layouts: states must be"}
    _check(model, layouts, names)
    _set(model, layouts)


def with_pool_layouts(model: M, window_layout: str | None = None, state_layout: str | None = None) -> M:
    """Returns a model whose windows and states lie in its pools in the given layouts.

    `window_layout` and `state_layout` are `windows` and `states` of `set_pool_layouts`; None keeps what the model says.
    `model` is not changed.

    Returns:
        The model itself if it has these layouts, and otherwise a new one that shares the arrays of its parameters.

    Raises:
        ValueError: a layout is not known, or no mixer of the model has windows or states that can lie in it.
    """
    values.optional_choice("window_layout", window_layout, WINDOW_LAYOUTS)
    values.optional_choice("state_layout", state_layout, STATE_LAYOUTS)
    given = {"window_layout": window_layout, "state_layout": state_layout}
    layouts = {name: layout for name, layout in given.items() if layout is not None}
    if not layouts:
        return model
    _check(model, layouts, {name: f"{name} must be None or" for name in layouts})
    if all(getattr(module, name) == layout for name, layout in layouts.items() for module in _having(model, name)):
        return model
    graph, state = nnx.split(model)
    # The variables of `state` are the model's own, so the copy gets new ones.
    copy = nnx.merge(graph, jax.tree.map(lambda array: array, state))
    _set(copy, layouts)
    return copy


def _having(model: Any, name: str) -> list[Any]:
    """Returns the modules that have a layout of this name."""
    return [module for _, module in nnx.iter_modules(model) if hasattr(module, name)]


def _check(model: Any, layouts: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Refuses a layout that is not the default if no module has it. `wanted` begins the errors."""
    for name, layout in layouts.items():
        default, needed = _DEFAULTS[name]
        if layout != default and not _having(model, name):
            raise ValueError(f"{wanted[name]} {default!r} for a model without {needed}, got {layout!r}")


def _set(model: Any, layouts: Mapping[str, str]) -> None:
    for name, layout in layouts.items():
        for module in _having(model, name):
            setattr(module, name, layout)
