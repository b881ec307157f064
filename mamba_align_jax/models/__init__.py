"""The supported models, by the `model_type` of their Hugging Face configuration."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

from mamba_align_jax.models import (
    bailing_hybrid,
    bamba,
    falcon_h1,
    falcon_mamba,
    granitemoehybrid,
    jamba,
    kimi_linear,
    lfm2,
    mamba,
    mamba2,
    nemotron_h,
    olmo_hybrid,
    qwen3_5,
    qwen3_next,
    zamba2,
)
from mamba_align_jax.models.causal_lm import CausalLM
from mamba_align_jax.models.config import ModelConfig
from mamba_align_jax.models.config_files import end_tokens, read_config, read_generation_config, read_tokenizer_end
from mamba_align_jax.models.fields import wrong
from mamba_align_jax.models.quantised import read_quantisation
from mamba_align_jax.models.weights import (
    WeightsDtype,
    has_draft_head,
    read_outline,
    read_weights,
    stored_dtype,
)
from mamba_align_jax.models.weights import read_product as read_product
from pallas_kernels.quantized import ActivationDtype

# The module of each model type. It has `Config`, `Model` and `sources`, and perhaps `ignored`: see `read_weights`.
# Models for images and sound have the type of their text model, or that of the whole.
ARCHITECTURES: Mapping[str, ModuleType] = {
    "NemotronH_Nano_Omni_Reasoning_V3": nemotron_h,
    "NemotronH_Nano_VL_V2": nemotron_h,
    "bailing_hybrid": bailing_hybrid,
    "bamba": bamba,
    "falcon_h1": falcon_h1,
    "falcon_mamba": falcon_mamba,
    "granitemoehybrid": granitemoehybrid,
    "jamba": jamba,
    "kimi_linear": kimi_linear,
    "lfm2": lfm2,
    "lfm2_moe": lfm2,
    "mamba": mamba,
    "mamba2": mamba2,
    "nemotron_h": nemotron_h,
    "nemotron_h_omni": nemotron_h,
    "olmo_hybrid": olmo_hybrid,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5,
    "qwen3_5_moe_text": qwen3_5,
    "qwen3_5_text": qwen3_5,
    "qwen3_next": qwen3_next,
    "zamba2": zamba2,
}


def load_model(
    path: str | Path,
    dtype: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    check_values: bool = True,
    weights_dtype: WeightsDtype = "bfloat16",
    activation_dtype: ActivationDtype | None = None,
) -> CausalLM:
    """Loads a model from a directory with config.json and safetensors files. It needs neither torch nor transformers.

    If the files hold a draft head and the architecture supports it, the model has one. A field `mtp_num_hidden_layers`
    of 0 in config.json leaves it out. The model's end tokens are those of config.json, generation_config.json and the
    tokenizer.

    Args:
        path: The model directory.
        dtype: Dtype of the model: "float32", "bfloat16" or "float16". None keeps the dtype of config.json, or that of
            the weights if config.json has none.
        progress: Called after each parameter, with the number of parameters that are loaded and that of all parameters.
        check_values: Whether weights are refused that are NaN, infinite or too large for the model's dtype, and scales of
            quantised weights that are not positive.
        weights_dtype: How the weights of products lie in memory. "bfloat16" gives all of them the model's dtype, whichever
            it is. "file" keeps those that are FP8 in the files, with their scales, as a `QuantizedWeight`. "fp8" does so,
            and quantises others while it reads them, in blocks of 128 x 128, but for the head, routers, gates and small
            projections.
        activation_dtype: To what products round the inputs of quantised weights: "fp8", with a scale for each token and 128
            channels, or "bfloat16", which leaves them as they are. None does what the files say, and takes "bfloat16" if
            they say nothing. With "bfloat16" products round a quantised weight to the model's dtype, so `weights_dtype`
            "file" computes what "bfloat16" does, up to the order of sums.

    Raises:
        ValueError: the architecture, one of its options or the way in which the weights are quantised is not supported,
            a file is missing or broken, or a tensor is missing, unknown, has a wrong shape or holds values that are not
            finite. The file, the field or the tensor is named.
    """
    architecture, config = _configuration(path, dtype)
    dtypes = dict(weights_dtype=weights_dtype, activation_dtype=activation_dtype)
    return read_weights(path, architecture, config, progress, check_values=check_values, **dtypes)


def outline_model(path: str | Path, dtype: str | None = None, *, weights_dtype: WeightsDtype = "bfloat16") -> CausalLM:
    """Makes a model with shapes instead of weights, from a directory and dtypes as `load_model` takes them.

    It reads the headers of the weights' files, so it is quick and takes no memory for weights.

    Raises:
        ValueError: as `load_model` raises it, except for shapes and values of tensors, which are not looked at.
    """
    return read_outline(path, *_configuration(path, dtype), weights_dtype=weights_dtype)


def _configuration(path: str | Path, dtype: str | None) -> tuple[ModuleType, ModelConfig]:
    """Reads a model directory's architecture and configuration."""
    config = read_config(path)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise wrong("model_type", f"one of {sorted(ARCHITECTURES)}", f"{kind!r} in {str(path)!r}")
    read_quantisation(config)
    architecture = ARCHITECTURES[kind]
    # Some configurations do not name their head, and those of fine-tuned copies may name one that the files do not
    # hold.
    head = config.get("mtp_num_hidden_layers") if has_draft_head(path) else 0
    head = 1 if head is None else head
    ends = end_tokens(config, read_generation_config(path), read_tokenizer_end(path))
    fields = config | {"mtp_num_hidden_layers": head, "eos_token_id": ends}
    if not any(config.get(name) for name in ("dtype", "torch_dtype")):
        dtype = dtype or stored_dtype(path)
    return architecture, architecture.Config.from_dict(fields, dtype)
