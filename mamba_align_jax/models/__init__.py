"""Models by the `model_type` of their Hugging Face configuration."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mamba_align_jax.models import bailing_hybrid, kimi_linear, olmo_hybrid, qwen3_5, qwen3_next
from mamba_align_jax.models.checkpoint import read_config, read_weights

# Modules with `Config`, `Model` and `sources`.
_ARCHITECTURES = {
    "bailing_hybrid": bailing_hybrid,
    "kimi_linear": kimi_linear,
    "olmo_hybrid": olmo_hybrid,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5,
    "qwen3_5_moe_text": qwen3_5,
    "qwen3_5_text": qwen3_5,
    "qwen3_next": qwen3_next,
}


def load_model(
    path: str | Path, dtype: str | None = None, advance: Callable[[int, int], None] = lambda done, total: None
) -> Any:
    """Loads a directory with config.json and safetensors files, without torch or transformers.

    Args:
        path: The directory.
        dtype: "float32", "bfloat16" or "float16"; None keeps the checkpoint's.
        advance: Called with the number of parameters read and that of all, after each.

    Raises:
        ValueError: the architecture or an option of it is unsupported, or a file or tensor is missing, or a tensor is
            unknown or misshapen.
    """
    config = read_config(path)
    kind = config.get("model_type")
    if kind not in _ARCHITECTURES:
        raise ValueError(f"model_type must be one of {sorted(_ARCHITECTURES)}, got {kind!r} in {path}")
    architecture = _ARCHITECTURES[kind]
    return read_weights(path, architecture, architecture.Config.from_dict(config, dtype), advance)
