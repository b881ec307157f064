"""Finds the tensors of a model directory: the headers of its safetensors files, and which file each tensor is in."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from mamba_align_jax.models.fields import read_object

INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
# A header is JSON, which a longer one would make slow to read. safetensors itself has this limit.
_MAX_HEADER_BYTES = 100_000_000
FP8: Mapping[str, Any] = MappingProxyType({"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2})
# By its name in safetensors files, the dtype of tensors that weights can be made from.
_FLOATS: Mapping[str, Any] = MappingProxyType(
    {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
)
# Dtypes of tensors that are found but never read as weights, except the scales of FP8 weights.
_OTHERS: Mapping[str, Any] = MappingProxyType(
    {
        **{f"{kind}{bits}": f"{kind.lower()}{bits // 8}" for kind in "UI" for bits in (8, 16, 32, 64)},
        "BOOL": np.bool_,
        "C64": np.complex64,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    }
)
_DTYPES = {**_FLOATS, **FP8, **_OTHERS}


class Tensor(Protocol):
    """A tensor whose values are read when they are needed."""

    @property
    def name(self) -> str:
        """Its name in the files."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    def read(self) -> np.ndarray:
        """Reads its values, which are floating point numbers."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file.

    Attributes:
        name: Its name in the file.
        file: The file.
        kind: Its dtype by the name that the file has for it, for instance "BF16".
        shape: Its shape.
        start: Index of its first byte in the file.
    """

    name: str
    file: Path
    kind: str
    shape: tuple[int, ...]
    start: int

    def read_raw(self) -> np.ndarray:
        """Reads the values in the dtype of the file.

        Raises:
            ValueError: the file has become shorter since its header was read.
        """
        dtype, size = np.dtype(_DTYPES[self.kind]), math.prod(self.shape)
        data = np.fromfile(self.file, np.uint8, size * dtype.itemsize, offset=self.start)
        if data.size != size * dtype.itemsize:
            raise ValueError(f"{self.file.name}: tensor {self.name!r} is cut off, in {str(self.file.parent)!r}")
        return data.view(dtype).reshape(self.shape)

    def read(self) -> np.ndarray:
        """Reads the values.

        Raises:
            ValueError: they are no floating point numbers, or they are FP8, which means nothing without scales.
        """
        if self.kind not in _FLOATS:
            raise ValueError(
                f"{self.file.name}: tensor {self.name!r} must have a dtype of {sorted(_FLOATS)}, got {self.kind}"
            )
        return self.read_raw()


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Reads the headers of a model directory's safetensors files, and returns its tensors by name. It reads no tensor.

    With an index, each tensor comes from the file that the index names, and tensors that the index leaves out are left
    out.

    Raises:
        ValueError: a file is missing or is not what it should be. It is named.
    """
    if not (path / INDEX).is_file():
        if (path / INDEX).is_symlink():
            raise ValueError(f"{INDEX} must be a file, got a link to nothing, in {str(path)!r}")
        return _single(path)
    places = read_object(path / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise ValueError(
            f"{INDEX}: weight_map must be an object that names the file of each tensor, got "
            f"{type(places).__name__}, in {str(path)!r}"
        )
    headers = {}
    for place in sorted(set(places.values())):
        if Path(place).name != place or place in ("", ".."):
            raise ValueError(f"{INDEX}: weight_map must name files of the same directory, got {place!r}")
        if not (path / place).is_file():
            raise ValueError(f"model directory must hold {place}, which {INDEX} names, got {str(path)!r}")
        headers[place] = _header(path / place)
    for name, place in places.items():
        if name not in headers[place]:
            raise ValueError(f"{INDEX}: weight_map must name the file that holds {name!r}, got {place!r}")
    return {name: headers[place][name] for name, place in places.items()}


def unlisted(path: Path) -> str:
    """Names the safetensors files that the index leaves out, for an error of tensors that are missing; "" if none is."""
    if not (path / INDEX).is_file():
        return ""
    named = set(read_object(path / INDEX)["weight_map"].values())
    files = sorted(file.name for file in path.glob("*.safetensors") if file.name not in named)
    return f"; {INDEX} names no tensor of {', '.join(files)}, which is there" if files else ""


def _single(path: Path) -> dict[str, StoredTensor]:
    if (path / _SINGLE).is_file():
        return _header(path / _SINGLE)
    directory = f"model directory must hold {_SINGLE} or {INDEX}, got {str(path)!r}"
    if any(path.glob("pytorch_model*.bin")):
        raise ValueError(
            f"{directory} with pytorch_model.bin, which is a pickle and may run code; convert it where torch is: "
            "safetensors.torch.save_file(torch.load('pytorch_model.bin', weights_only=True), 'model.safetensors')"
        )
    if any(path.glob("*.gguf")):
        raise ValueError(f"{directory} with a GGUF file, which can't be loaded")
    shards = sorted(file.name for file in path.glob("*-of-*.safetensors"))
    if shards:
        raise ValueError(
            f"{directory} with {len(shards)} shards ({shards[0]}) and without the index that says which tensors they hold"
        )
    raise ValueError(directory)


def _header(file: Path) -> dict[str, StoredTensor]:
    def fail(wanted: str) -> ValueError:
        return ValueError(f"{file.name} must be a safetensors file, got {wanted}, in {str(file.parent)!r}")

    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if start == b"version ":
            raise fail("a git-lfs pointer; `git lfs pull` fetches the file itself")
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise fail(f"{size} bytes that are empty, cut off or something else")
        text = stream.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise fail("a header that is no JSON object") from error
    if not isinstance(header, dict):
        raise fail("a header that is no JSON object")
    header.pop("__metadata__", None)
    try:
        entries = {name: _entry(name, file, 8 + length, entry) for name, entry in header.items()}
    except TypeError as error:
        raise fail(str(error)) from error
    end = 8 + length
    for _, (stored, stop) in sorted(entries.items(), key=lambda item: (item[1][0].start, item[1][1])):
        if stored.start != end:
            raise fail(f"tensor {stored.name!r} at byte {stored.start} instead of {end}")
        end = stop
    if end != size:
        raise fail(f"{size} bytes instead of the {end} that its header says: it is cut off or too long")
    return {name: stored for name, (stored, _) in entries.items()}


def _entry(name: str, file: Path, data: int, entry: Any) -> tuple[StoredTensor, int]:
    """Returns the tensor that one entry of a header describes, and the index of the byte after its last.

    Raises:
        TypeError: The entry describes no tensor.
    """

    def is_sizes(value: Any) -> bool:
        return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**60 for size in value)

    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    kind: Any = fields.get("dtype")
    shape: Any = fields.get("shape")
    offsets: Any = fields.get("data_offsets")
    if not is_sizes(shape) or not is_sizes(offsets) or len(offsets) != 2 or not isinstance(kind, str):
        raise TypeError(f"tensor {name!r} without a dtype, a shape or data_offsets")
    if kind not in _DTYPES:
        raise TypeError(f"tensor {name!r} of dtype {kind}, which can't be read")
    wanted = math.prod(shape) * np.dtype(_DTYPES[kind]).itemsize
    if offsets[1] - offsets[0] != wanted:
        raise TypeError(f"tensor {name!r} in {offsets[1] - offsets[0]} bytes instead of {wanted}")
    return StoredTensor(name, file, kind, tuple(shape), data + offsets[0]), data + offsets[1]
