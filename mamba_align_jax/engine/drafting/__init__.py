"""Draft tokens: the protocols of a drafter, and the drafters of this package."""

from mamba_align_jax.engine.drafting.protocols import UNKNOWN, DeviceDrafter, Drafter, Sampled, SampledStep

__all__ = ["UNKNOWN", "DeviceDrafter", "Drafter", "Sampled", "SampledStep"]
