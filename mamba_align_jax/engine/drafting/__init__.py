"""Draft tokens: the protocols of a drafter, and the drafters of this package."""

from mamba_align_jax._deprecated import renamed_names
from mamba_align_jax.engine.drafting.protocols import UNKNOWN, DeviceDrafter, Drafter, Sampled, SampledStep

__all__ = ["UNKNOWN", "DeviceDrafter", "Drafter", "Sampled", "SampledStep"]
__getattr__ = renamed_names(
    __name__, {"NGramDrafter": "mamba_align_jax.engine.drafting.prompt_lookup:PromptLookupDrafter"}
)
