"""Which drafter an engine uses. No other module of the engine knows a concrete drafter."""

from typing import Any, NamedTuple

from mamba_align_jax import _values as values
from mamba_align_jax.engine.config import EngineConfig
from mamba_align_jax.engine.drafting.mtp import MTPDrafter
from mamba_align_jax.engine.drafting.prompt_lookup import PromptLookupDrafter
from mamba_align_jax.engine.drafting.prompt_lookup_device import DevicePromptLookup
from mamba_align_jax.engine.drafting.protocols import DeviceDrafter, Drafter
from mamba_align_jax.engine.model import ServedModel


class Drafters(NamedTuple):
    """The drafter of an engine: on the host, on the device, or neither if the engine doesn't speculate."""

    host: Drafter | None = None
    device: DeviceDrafter | None = None


def choose_drafter(
    config: EngineConfig, model: ServedModel, drafter: Drafter | DeviceDrafter | None = None
) -> Drafters:
    """Picks the drafter that a configuration asks for.

    Args:
        config: The engine's configuration.
        model: The engine's model.
        drafter: A drafter to use instead of this package's drafters. It is checked even if the engine doesn't
            speculate.

    Raises:
        ValueError: The model lacks the head that `config` asks for, the drafter is none, or it runs on the host although
            the configuration drafts on the device.
    """
    on_device = config.async_stepping or config.drafts_with_head
    if on_device and drafter is not None and not isinstance(drafter, DeviceDrafter):
        raise ValueError(
            "drafter must be None or a DeviceDrafter under async_stepping or speculation='mtp', "
            f"which draft on the device, got {values.shown(drafter)}"
        )
    wanted = "None, a DeviceDrafter, or a Drafter with the methods draft and forget"
    values.require(drafter is None or _is_drafter(drafter), "drafter", wanted, drafter)
    if config.drafts_with_head and getattr(model, "mtp", None) is None:
        raise ValueError("speculation='mtp' needs a model with an MTP head, got a model without mtp.* tensors")
    if config.num_speculative_tokens == 0:
        return Drafters()
    if isinstance(drafter, DeviceDrafter):
        return Drafters(device=drafter)
    if config.drafts_with_head:
        return Drafters(device=MTPDrafter())
    lookup = config.prompt_lookup_max, config.prompt_lookup_min
    if config.drafts_on_device:
        return Drafters(device=DevicePromptLookup(*lookup))
    return Drafters(host=PromptLookupDrafter(*lookup) if drafter is None else drafter)


def _is_drafter(value: Any) -> bool:
    methods = (getattr(value, name, None) for name in ("draft", "forget"))
    # A class has the methods too, but is no drafter.
    return (isinstance(value, DeviceDrafter) or all(map(callable, methods))) and not isinstance(value, type)
