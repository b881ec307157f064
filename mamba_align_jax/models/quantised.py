"""Quantised weights: which kinds can be loaded, and how FP8 weights become floating point numbers while they are read.

An FP8 weight is stored with scales, by which its values are multiplied. A scale is for the whole tensor, for one output
channel, for one block of a matrix, or for one expert.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from mamba_align_jax.models.fields import wrong
from mamba_align_jax.models.tensor_files import FP8, StoredTensor, Tensor

# By `quant_method` or `quant_algo`, the names of kinds that can't be loaded, as their authors write them.
_OTHER_KINDS: Mapping[str, str] = MappingProxyType(
    {"awq": "AWQ", "gguf": "GGUF", "gptq": "GPTQ", "mxfp4": "MXFP4", "nvfp4": "NVFP4", "bitsandbytes": "bitsandbytes"}
)
# Scales of activations and of cached keys and values. Neither are quantised here.
_UNUSED = tuple(
    f"{joint}{name}_scale" for joint in "._" for name in ("activation", "input", "k", "kv", "output", "q", "v")
)


@dataclass(frozen=True)
class Quantisation:
    """How the FP8 weights of a model directory are scaled.

    Attributes:
        suffixes: What the name of a weight's scales may have after the name of the weight.
        blocks: Rows and columns of the blocks of a matrix that have one scale each. Weights may differ in them. () if
            all scales are for larger parts.
    """

    suffixes: tuple[str, ...]
    blocks: tuple[tuple[int, int], ...] = ()


def read_quantisation(config: Mapping[str, Any]) -> Quantisation | None:
    """Reads how FP8 weights are scaled from the fields of config.json; None if no weights are quantised.

    Raises:
        ValueError: the weights are quantised in a way that can't be loaded. It is named.
    """
    given = config.get("quantization_config")
    for fields in (config.get("quantization"), given):
        # MLX writes both, and no method.
        if isinstance(fields, dict) and "bits" in fields and not fields.get("quant_method"):
            raise _refusal("MLX", f"{fields['bits']} bits in groups of {fields.get('group_size')}")
    if given is None:
        return None
    if not isinstance(given, dict):
        raise wrong("quantization_config", "an object", repr(given))
    method = str(given.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in given else None)).lower()
    if method in ("fp8", "fbgemm_fp8"):
        # transformers calls scales "_scale_inv"; vLLM and FBGEMM call those that are not for blocks "_scale".
        return Quantisation(("_scale_inv", "_scale"), _blocks([given.get("weight_block_size")], "weight_block_size"))
    if method == "compressed-tensors":
        return _compressed_tensors(given)
    algorithm = str(given.get("quant_algo")).lower()
    if method == "modelopt" and algorithm == "fp8":
        return Quantisation(("_scale",))
    kind = method if method != "modelopt" else algorithm
    raise _refusal(_OTHER_KINDS.get(kind, kind), f"quant_method {given.get('quant_method')!r}")


def _refusal(kind: str, got: str) -> ValueError:
    return ValueError(
        f"config.json: quantization_config must be FP8 (quant_method 'fp8', 'compressed-tensors' or 'modelopt') to be "
        f"loaded, got {kind} ({got})"
    )


def _compressed_tensors(given: Mapping[str, Any]) -> Quantisation:
    """Reads a configuration of compressed-tensors. Its groups of layers may have scales for different parts."""
    groups = given.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise wrong("quantization_config", "have config_groups", repr(groups), must="must")
    if given.get("transform_config"):
        raise _refusal("compressed-tensors", "transform_config: weights that are transformed while the model runs")
    blocks = []
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        weights = weights if isinstance(weights, dict) else {}
        form = str(group.get("format") or given.get("format")) if isinstance(group, dict) else ""
        if weights.get("type") != "float" or weights.get("num_bits") != 8 or "pack" in form:
            kind = next((name for key, name in _OTHER_KINDS.items() if key in form), "compressed-tensors")
            raise _refusal(kind, f"format {form!r}, {weights.get('num_bits')} bits of type {weights.get('type')!r}")
        size = weights.get("group_size")
        blocks.append([1, size] if weights.get("strategy") == "group" else weights.get("block_structure"))
    return Quantisation(("_scale",), _blocks(blocks, "block_structure"))


def _blocks(given: list[Any], name: str) -> tuple[tuple[int, int], ...]:
    """Checks sizes of blocks, of which None is for scales that are not for blocks. Each size is returned once."""
    found: dict[tuple[int, int], None] = {}
    for block in given:
        if block is None:
            continue
        if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size >= 1 for size in block):
            raise wrong(f"quantization_config.{name}", "two positive integers", repr(block))
        found[block[0], block[1]] = None
    return tuple(found)


@dataclass(frozen=True)
class ScaledTensor:
    """An FP8 tensor with scales. It is read as float32.

    Attributes:
        weight: The FP8 values.
        scales: What they are multiplied by.
        blocks: As `Quantisation.blocks`.
    """

    weight: StoredTensor
    scales: StoredTensor
    blocks: tuple[tuple[int, int], ...]

    @property
    def name(self) -> str:
        """Its name in the files."""
        return self.weight.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.weight.shape

    def read(self) -> np.ndarray:
        """Reads the values and multiplies them by their scales. float32, in the weight's shape."""
        shape, scales = self.shape, _values(self.scales)
        stored = self.weight.read_raw()
        # A table of all 256 values is several times as fast as a conversion one by one.
        table = np.arange(256, dtype=np.uint8).view(stored.dtype).astype(np.float32)
        weight = table[stored.view(np.uint8)]
        if scales.size == 1:
            weight *= scales.reshape(())
        elif scales.shape in (shape[:-1], (*shape[:-1], 1)):  # One per output channel.
            weight *= scales.reshape(*shape[:-1], 1)
        elif scales.shape in (shape[:1], (*shape[:1], *(1,) * len(shape[1:]))):  # One per expert.
            weight *= scales.reshape(-1, *(1,) * len(shape[1:]))
        else:
            self._scale_blocks(weight, scales)
        return weight

    def _scale_blocks(self, weight: np.ndarray, scales: np.ndarray) -> None:
        fitting = [block for block in self.blocks if weight.ndim >= 2 and scales.shape == self._scales_shape(block)]
        if len(fitting) != 1:
            wanted = [list(self._scales_shape(block)) for block in self.blocks if weight.ndim >= 2]
            raise ValueError(
                f"tensor {self.scales.name!r} must have one scale for tensor {self.name!r}, one per channel, or one of "
                f"the shapes {wanted} for its blocks, got shape {list(scales.shape)} for {list(self.shape)}"
            )
        rows, columns = fitting[0]
        for number in range(scales.shape[-2]):
            each = np.repeat(scales[..., number, :], columns, axis=-1)[..., None, : self.shape[-1]]
            weight[..., number * rows : (number + 1) * rows, :] *= each

    def _scales_shape(self, block: tuple[int, int]) -> tuple[int, ...]:
        """Returns the shape of the scales of the weight's blocks, the last of which may be smaller."""
        counts = (math.ceil(size / step) for size, step in zip(self.shape[-2:], block, strict=True))
        return (*self.shape[:-2], *counts)


def _values(scales: StoredTensor) -> np.ndarray:
    # Scales may be powers of two in eight bits, which are no weights, so that `read` refuses them.
    return (scales.read_raw() if scales.kind == "F8_E8M0" else scales.read()).astype(np.float32)


def dequantised(stored: Mapping[str, StoredTensor], quantisation: Quantisation | None) -> dict[str, Tensor]:
    """Joins a model directory's FP8 tensors with their scales. The scales are no tensors of their own any more.

    Raises:
        ValueError: an FP8 tensor has no scales, or nothing says how it is quantised. It is named.
    """
    if quantisation is None:
        name = next((name for name, part in stored.items() if part.kind in FP8), None)
        if name is not None:
            raise ValueError(f"tensor {name!r} must not be FP8 without a quantization_config in config.json")
        return dict(stored)
    found: dict[str, Tensor] = {name: part for name, part in stored.items() if not name.endswith(_UNUSED)}
    for name, part in stored.items():
        if part.kind in FP8:
            names = [name + suffix for suffix in quantisation.suffixes]
            scales = next((scales for scales in names if scales in stored), None)
            if scales is None:
                raise ValueError(f"tensor {names[0]!r}, the scales of FP8 tensor {name!r}, is missing")
            found[name] = ScaledTensor(part, stored[scales], quantisation.blocks)
            found.pop(scales, None)
    return found
