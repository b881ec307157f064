"""Model directories whose products are FP8, in every way that is loaded, and what they mean in float64."""

import json

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 24]}
PUBLISHED = BLOCKS | {"weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}


def compressed(strategy, form="float-quantized", **scheme):
    group = {
        "format": form,
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False} | scheme,
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def scales_of(value, part, block):
    """One scale for each `part` of a weight: "tensor", "expert", "channel" or "block"."""
    if part == "tensor":
        return np.full((), np.abs(value).max() / 448)
    if part == "expert":
        return np.abs(value).max((1, 2)) / 448 if value.ndim == 3 else np.full((), np.abs(value).max() / 448)
    if part == "channel":
        return np.abs(value).max(-1, keepdims=True) / 448
    rows, columns = block
    grid = [range(0, size, step) for size, step in zip(value.shape[-2:], block, strict=True)]
    parts = [[np.abs(value[..., r : r + rows, c : c + columns]).max((-2, -1)) for c in grid[1]] for r in grid[0]]
    return np.moveaxis(np.array(parts), (0, 1), (-2, -1)) / 448


def expanded(scales, value, block):
    """The scale of each entry of a weight, in float64."""
    scales = scales.astype(np.float64)
    if scales.ndim == 0 or (scales.shape[-1] == 1 and scales.shape[:-1] == value.shape[:-1]):
        return np.broadcast_to(scales, value.shape)
    if scales.ndim == 1:
        return np.broadcast_to(scales[:, None, None], value.shape)
    rows, columns = block
    out = np.empty(value.shape)
    for index in np.ndindex(value.shape):
        out[index] = scales[(*index[:-2], index[-2] // rows, index[-1] // columns)]
    return out


def quantise(tensors, part, suffix, block=(16, 24), dtype=ml_dtypes.float8_e4m3fn, scale_dtype=np.float32):
    """Returns the stored tensors and, in float64, what they mean. Products of the layers become FP8."""
    stored, meaning = {}, {}
    for name, value in tensors.items():
        is_product = "layers." in name and name.endswith(
            ("proj.weight", "proj_qkv.weight", "gate_up_proj", "down_proj")
        )
        if not is_product:
            stored[name] = value
            continue
        scales = np.asarray(scales_of(value, part, block))
        if scale_dtype == ml_dtypes.float8_e8m0fnu:
            scales = 2.0 ** np.ceil(np.log2(scales))
        scales = scales.astype(scale_dtype)
        whole = expanded(scales, value, block)
        stored[name] = np.clip(value / whole, -448, 448).astype(dtype)
        stored[name + suffix] = np.ascontiguousarray(scales)
        meaning[name] = stored[name].astype(np.float64) * whole
    assert meaning
    return stored, meaning


def write(path, stored, config, quantization):
    """Writes a model directory of these tensors."""
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    save_file(stored, path / "model.safetensors")
