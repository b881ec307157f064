"""Chooses in which order of axes a model's windows and states lie in its pools."""

from flax import nnx

from mamba_align_jax import _values as values
from pallas_kernels import StateLayout, WindowLayout


def set_pool_layouts(model: nnx.Module, *, windows: WindowLayout = "SD", states: StateLayout = "VK") -> None:
    """Sets the layouts of the pools of all mixers of a model, for pools that another program shares or reads.

    Call it before `state_groups`, `shard_model` or an `Engine` reads the model. The tokens do not depend on it.

    Args:
        model: The model, which is changed.
        windows: "SD" for convolution windows [window, channels], or "DS" for [channels, window].
        states: "VK" for states of the gated delta rule [value_heads, value_dim, key_dim], or "KV" for [value_heads,
            key_dim, value_dim]. The states of Mamba have one layout only.

    Raises:
        ValueError: a layout is not known, or no mixer of the model has windows or states that can lie in it. The model
            is then unchanged.
    """
    wanted = {"window_layout": windows, "state_layout": states}
    values.choice("set_pool_layouts: windows", windows, ("SD", "DS"))
    values.choice("set_pool_layouts: states", states, ("VK", "KV"))
    modules = [module for _, module in nnx.iter_modules(model)]
    having = {name: [module for module in modules if hasattr(module, name)] for name in wanted}
    if windows != "SD" and not having["window_layout"]:
        raise ValueError(f"set_pool_layouts: windows must be 'SD' for a model without convolutions, got {windows!r}")
    if states != "VK" and not having["state_layout"]:
        raise ValueError(f"set_pool_layouts: states must be 'VK' for a model without delta rules, got {states!r}")
    for name, layout in wanted.items():
        for module in having[name]:
            setattr(module, name, layout)
