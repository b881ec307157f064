"""Quantised weights: which kinds can be loaded, and FP8 tensors with their scales, as they are or as what they mean.

An FP8 weight is stored with scales, by which its values are multiplied. A scale is for the whole tensor, for one output
channel, for one block of a matrix, or for one expert.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from mamba_align_jax.models.fields import wrong
from mamba_align_jax.models.tensor_files import FP8, StoredTensor, Tensor
from pallas_kernels.quantized import ActivationDtype, Part

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
        activation_dtype: What the file says of products' inputs: "fp8" if they are quantised too, else "bfloat16".
    """

    suffixes: tuple[str, ...]
    blocks: tuple[tuple[int, int], ...] = ()
    activation_dtype: ActivationDtype = "bfloat16"


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
        blocks = _blocks([given.get("weight_block_size")], "weight_block_size")
        has_scheme = given.get("activation_scheme") is not None or method == "fbgemm_fp8"
        return Quantisation(("_scale_inv", "_scale"), blocks, "fp8" if has_scheme else "bfloat16")
    if method == "compressed-tensors":
        return _compressed_tensors(given)
    algorithm = str(given.get("quant_algo")).lower()
    if method == "modelopt" and algorithm == "fp8":
        return Quantisation(("_scale",), activation_dtype="fp8")
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
    blocks, activations = [], set()
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        weights = weights if isinstance(weights, dict) else {}
        form = str(group.get("format") or given.get("format")) if isinstance(group, dict) else ""
        if weights.get("type") != "float" or weights.get("num_bits") != 8 or "pack" in form:
            kind = next((name for key, name in _OTHER_KINDS.items() if key in form), "compressed-tensors")
            raise _refusal(kind, f"format {form!r}, {weights.get('num_bits')} bits of type {weights.get('type')!r}")
        activations.add("fp8" if group.get("input_activations") else "bfloat16")
        size = weights.get("group_size")
        blocks.append([1, size] if weights.get("strategy") == "group" else weights.get("block_structure"))
    is_narrow = activations == {"fp8"}
    return Quantisation(("_scale",), _blocks(blocks, "block_structure"), "fp8" if is_narrow else "bfloat16")


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
    """An FP8 tensor with scales. It is read as float32, or as it is.

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
        return self.part().dequantize(np.float32).reshape(self.shape)

    def part(self) -> Part:
        """Reads the values and their scales as they are: a part of a `QuantizedWeight`, in arrays of NumPy.

        Raises:
            ValueError: the scales do not fit the values.
        """
        given = _values(self.scales)
        shape, block = self._layout()
        scales = np.broadcast_to(given.reshape(shape), self._part_scales(block))
        return Part(self.weight.read_raw().reshape(self._part_shape), np.ascontiguousarray(scales), block)

    def outline(self) -> Part:
        """Returns what `part` would, with shapes instead of arrays. It reads no values."""
        _, block = self._layout()
        values = jax.ShapeDtypeStruct(self._part_shape, FP8[self.weight.kind])
        return Part(values, jax.ShapeDtypeStruct(self._part_scales(block), np.float32), block)

    def check_scales(self) -> None:
        """Raises ValueError, which names the scales' tensor, unless all scales are positive and finite."""
        scales = _values(self.scales)
        wrong = ~((scales > 0) & np.isfinite(scales))
        if wrong.any():
            raise ValueError(
                f"tensor {self.scales.name!r} must hold positive finite scales, got {int(wrong.sum())} others, for "
                f"instance {float(scales[wrong][0]):g}; check_values=False loads them"
            )

    @property
    def _part_shape(self) -> tuple[int, ...]:
        """The weight's shape, with an axis of outputs before that of the inputs."""
        return self.shape if len(self.shape) >= 2 else (1, math.prod(self.shape))

    def _layout(self) -> tuple[tuple[int, ...], tuple[int, int]]:
        """Returns the scales' shape with all of the weight's axes, of which some may be 1, and the size of a block."""
        shape, scales = self._part_shape, self.scales.shape
        outputs, inputs = shape[-2:]
        fitting = [block for block in self.blocks if len(self.shape) >= 2 and scales == self._part_scales(block)]
        if len(fitting) == 1:
            return scales, fitting[0]
        if math.prod(scales) == 1:
            return (1,) * len(shape), (outputs, inputs)
        if scales in (shape[:-1], (*shape[:-1], 1)):  # One per output channel.
            return (*shape[:-1], 1), (1, inputs)
        if scales in (shape[:1], (*shape[:1], *(1,) * len(shape[1:]))):  # One per expert.
            return (shape[0], *(1,) * len(shape[1:])), (outputs, inputs)
        wanted = [list(self._part_scales(block)) for block in self.blocks if len(self.shape) >= 2]
        raise ValueError(
            f"tensor {self.scales.name!r} must have one scale for tensor {self.name!r}, one per channel, or one of "
            f"the shapes {wanted} for its blocks, got shape {list(scales)} for {list(self.shape)}"
        )

    def _part_scales(self, block: tuple[int, int]) -> tuple[int, ...]:
        """Returns the shape of the scales of the weight's blocks, the last of which may be smaller."""
        counts = (math.ceil(size / step) for size, step in zip(self._part_shape[-2:], block, strict=True))
        return (*self._part_shape[:-2], *counts)


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
