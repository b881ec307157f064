"""Models by the `model_type` of their Hugging Face configuration."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mamba_align_jax.models import (
    bailing_hybrid,
    falcon_h1,
    falcon_mamba,
    granitemoehybrid,
    jamba,
    kimi_linear,
    mamba,
    mamba2,
    nemotron_h,
    olmo_hybrid,
    qwen3_5,
    qwen3_next,
)
from mamba_align_jax.models.weights import has_draft_head, read_config, read_weights

# Modules with `Config`, `Model` and `sources`.
ARCHITECTURES = {
    "bailing_hybrid": bailing_hybrid,
    "falcon_h1": falcon_h1,
    "falcon_mamba": falcon_mamba,
    "granitemoehybrid": granitemoehybrid,
    "jamba": jamba,
    "kimi_linear": kimi_linear,
    "mamba": mamba,
    "mamba2": mamba2,
    "nemotron_h": nemotron_h,
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

    Where the files hold a draft head that the architecture knows, the model has one, unless config.json says 0 layers.

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
    if kind not in ARCHITECTURES:
        raise ValueError(f"model_type must be one of {sorted(ARCHITECTURES)}, got {kind!r} in {path}")
    architecture = ARCHITECTURES[kind]
    # Not every configuration names its head, and fine-tuned copies name one that their files have lost.
    head = {"mtp_num_hidden_layers": config.get("mtp_num_hidden_layers", 1) if has_draft_head(path) else 0}
    return read_weights(path, architecture, architecture.Config.from_dict(config | head, dtype), advance)
