"""The supported models, by the `model_type` of their Hugging Face configuration."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

from mamba_align_jax._deprecated import renamed_keywords
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
from mamba_align_jax.models.causal_lm import CausalLM
from mamba_align_jax.models.weights import has_draft_head, read_config, read_weights

# The module of each model type. It has `Config`, `Model` and `sources`, and perhaps `ignored`: see `read_weights`.
ARCHITECTURES: Mapping[str, ModuleType] = {
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


@renamed_keywords(advance="progress")
def load_model(
    path: str | Path, dtype: str | None = None, progress: Callable[[int, int], None] = lambda done, total: None
) -> CausalLM:
    """Loads a model from a directory with config.json and safetensors files. It needs neither torch nor transformers.

    If the files hold a draft head and the architecture supports it, the model has one. A field `mtp_num_hidden_layers`
    of 0 in config.json leaves it out.

    Args:
        path: The model directory.
        dtype: Dtype of the model: "float32", "bfloat16" or "float16". None keeps the dtype of config.json.
        progress: Called after each parameter, with the number of parameters that are loaded and that of all parameters.

    Raises:
        ValueError: the architecture or one of its options is not supported, a file or a tensor is missing, or a tensor
            is unknown or has a wrong shape.
    """
    config = read_config(path)
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(f"model_type must be one of {sorted(ARCHITECTURES)}, got {kind!r} in {path}")
    architecture = ARCHITECTURES[kind]
    # Some configurations do not name their head, and those of fine-tuned copies may name one that the files do not
    # hold.
    head = {"mtp_num_hidden_layers": config.get("mtp_num_hidden_layers", 1) if has_draft_head(path) else 0}
    return read_weights(path, architecture, architecture.Config.from_dict(config | head, dtype), progress)
