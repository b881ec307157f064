"""Reads and writes model directories of Hugging Face: config.json and safetensors files, one parameter at a time."""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import save_file

from mamba_align_jax._deprecated import renamed_keywords
from mamba_align_jax.layers.linear import Linear
from mamba_align_jax.layers.moe import shared_experts
from mamba_align_jax.models.causal_lm import CausalLM
from mamba_align_jax.models.config import ModelConfig

# Prefixes of tensors of vision towers, which are not part of the text model.
_IGNORED_PREFIXES = ("model.visual.",)
# Prefix of a draft head's tensors. Not every architecture supports its draft head.
_HEAD_PREFIX = "mtp."
# Fields that a configuration with a nested text model may hold outside of the nested part.
_SHARED_FIELDS = ("model_type", "dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings")


def read_config(path: str | Path) -> dict[str, Any]:
    """Reads the fields of the text model from config.json.

    If they are nested in `text_config`, fields beside it fill in what it lacks.

    Args:
        path: The model directory.

    Raises:
        ValueError: the directory has no config.json.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ValueError(f"model directory must hold a config.json, got {str(path)!r}")
    config = json.loads(file.read_text())
    if "text_config" not in config:
        return config
    return {name: config[name] for name in _SHARED_FIELDS if name in config} | config["text_config"]


@dataclass(frozen=True)
class Source:
    """One way to make a parameter from the tensors of a model directory.

    Attributes:
        names: Names of the tensors. Several parameters may be made from the same tensor.
        make: Makes the parameter from an iterator over the tensors in this order. It reads one at a time.
        split: Makes the tensors from the parameter and the sizes of its parts along the first axis, if no other parameter is
            made from them; else None.
    """

    names: tuple[str, ...]
    make: Callable[[Iterator[np.ndarray]], np.ndarray] = next
    split: Callable[[np.ndarray, Sequence[int]], list[np.ndarray]] | None = None


# Products of the same inputs that a model computes as one, by the name of the joined one: see `Linear`.
_JOINED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvzba": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
}


def tensor(name: str) -> Source:
    """Takes a tensor as it is."""
    return Source((name,), next, lambda array, _: [array])


def product(name: str) -> Source:
    """Transposes the weight of a dense product, which files hold as [out, in]."""
    return Source((name,), lambda parts: next(parts).T, lambda array, _: [array.T])


def taps(name: str) -> Source:
    """Takes a convolution's taps, which files hold as [channels, 1, width], to [width, channels]."""
    return Source((name,), lambda parts: next(parts)[:, 0].T, lambda array, _: [array.T[:, None]])


def joined(sources: Sequence[Source], axis: int = -1) -> Source:
    """Concatenates parameters along an axis."""
    names = tuple(name for source in sources for name in source.names)
    return Source(names, lambda parts: np.concatenate([source.make(parts) for source in sources], axis=axis))


def parts(names: Sequence[str]) -> Source:
    """Concatenates tensors along the first axis: the parts of a `Linear`."""
    both = joined([tensor(name) for name in names], axis=0)
    return Source(both.names, both.make, lambda array, sizes: np.split(array, np.cumsum(sizes)[:-1]))


def stacked(sources: Sequence[Source]) -> Source:
    """Stacks parameters of one shape along a new first axis."""
    names = tuple(name for source in sources for name in source.names)

    def make(parts: Iterator[np.ndarray]) -> np.ndarray:
        first = sources[0].make(parts)
        out = np.empty((len(sources), *first.shape), first.dtype)
        out[0] = first
        for place, source in enumerate(sources[1:], 1):
            out[place] = source.make(parts)
        return out

    return Source(names, make)


def mapped(source: Source, function: Callable[[np.ndarray], np.ndarray]) -> Source:
    """Applies `function` to a parameter."""
    return Source(source.names, lambda parts: function(source.make(parts)))


def named(place: str) -> Source:
    """Takes the tensors whose name is the parameter's place, with `weight` for `embedding`, or its parts' places."""
    if place.endswith(".embedding"):
        return tensor(place.removesuffix("embedding") + "weight")
    *path, module, leaf = place.split(".")
    if module in _JOINED:
        return parts([".".join([*path, part, leaf]) for part in _JOINED[module]])
    return taps(place) if place.endswith("conv1d.weight") else tensor(place)


def _with_shared(routed: Source, names: tuple[str, ...], is_up: bool) -> Source:
    """Appends a shared expert to the experts that `routed` makes, cut into experts of their size.

    Args:
        routed: Makes `up` or `down` of the experts that are not shared.
        names: The tensors of the shared expert's products: those that `up` joins, or that of `down`.
        is_up: Whether it is `up`.
    """

    def make(parts: Iterator[np.ndarray]) -> np.ndarray:
        own = routed.make(parts)
        size = own.shape[1] // len(names) if is_up else own.shape[2]
        joined = []
        for _ in names:
            tensor = next(parts) if is_up else next(parts).T  # [channels, hidden]
            pieces = np.zeros((shared_experts(len(tensor), size), size, tensor.shape[1]), own.dtype)
            pieces.reshape(-1, tensor.shape[1])[: len(tensor)] = tensor
            joined.append(pieces)
        shared = np.concatenate(joined, axis=1)
        return np.concatenate([own, shared if is_up else shared.swapaxes(1, 2)])

    return Source((*routed.names, *names), make)


def experts(
    place: str,
    number: int,
    up: Sequence[str] = ("gate_proj", "up_proj"),
    down: Sequence[str] = ("down_proj",),
    shared: str | None = None,
) -> list[Source]:
    """Lists the ways to make `up` or `down` of `layers.moe.Experts`: from tensors per expert, or from one tensor.

    Args:
        place: The parameter's place, "...experts.up" or "...experts.down".
        number: Number of experts.
        up: Names of an expert's products that `up` joins.
        down: Names of an expert's products that `down` joins.
        shared: Name of a shared expert beside "experts", which is appended: see `layers.moe.shared_experts`. None if there
            is none.
    """
    prefix, leaf = place.rsplit(".", 1)
    names = up if leaf == "up" else down
    fused = tensor(f"{prefix}.{'gate_up' if leaf == 'up' else leaf}_proj")
    each = [joined([tensor(f"{prefix}.{expert}.{name}.weight") for name in names], axis=0) for expert in range(number)]
    if shared is None:
        return [stacked(each), fused]
    beside = tuple(f"{prefix.removesuffix('experts')}{shared}.{name}.weight" for name in names)
    return [_with_shared(way, beside, leaf == "up") for way in (stacked(each), fused)]


def _open(path: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Returns a lazy slice for each tensor's name. Indexing it reads the tensor."""
    index = path / "model.safetensors.index.json"
    files = (
        sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else ["model.safetensors"]
    )
    slices = {}
    for name in files:
        if not (path / name).is_file():
            raise ValueError(f"model directory must hold {name}, got {str(path)!r}")
        file = stack.enter_context(safe_open(path / name, framework="np"))
        for key in file.keys():  # noqa: SIM118 - the file is not a mapping
            if not key.startswith(_IGNORED_PREFIXES):
                slices[key.replace("model.language_model.", "model.", 1)] = file.get_slice(key)
    return slices


def has_draft_head(path: str | Path) -> bool:
    """Returns whether the files of the model directory `path` hold tensors of a draft head, `mtp.*`."""
    with contextlib.ExitStack() as stack:
        return any(name.startswith(_HEAD_PREFIX) for name in _open(Path(path), stack))


def _sizes(model: CausalLM) -> dict[Any, tuple[int, ...]]:
    """Returns the sizes of the parts of each product, by the path of its module."""
    return {path: module.parts for path, module in nnx.iter_modules(model) if isinstance(module, Linear)}


def _read(source: Source, slices: dict[str, Any], variable: Any, sizes: Sequence[int] | None) -> jax.Array:
    """Makes a parameter. `sizes` are those of its parts along the first axis; None if it is no product."""
    got = [list(slices[name].get_shape()) for name in source.names]
    if source.split:
        empty = np.empty(variable.shape, np.bool_)
        wanted = [list(part.shape) for part in source.split(empty, sizes or variable.shape[:1])]
        for name, shape, found in zip(source.names, wanted, got, strict=True):
            if shape != found:
                raise ValueError(f"tensor {name!r} must have shape {shape}, got {found}")
    try:
        array = source.make(slices[name][:] for name in source.names)
    except (ValueError, IndexError):  # The tensors' shapes do not fit together.
        array = None
    if array is not None and array.shape == variable.shape:
        return jnp.asarray(array, variable.dtype)
    raise ValueError(
        f"tensors {source.names[0]!r} to {source.names[-1]!r} must make an array of shape {list(variable.shape)}, "
        f"got {got}"
    )


@renamed_keywords(advance="progress")
def read_weights(
    path: str | Path,
    architecture: ModuleType,
    config: ModelConfig,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> CausalLM:
    """Makes an architecture's model with the weights of a model directory.

    Host memory holds one parameter at a time, and the tensors from which it is made.

    Args:
        path: The model directory.
        architecture: A module of `mamba_align_jax.models`. It has `Model(config, rngs)` and `sources(place, config)`,
            which lists the ways (`Source`) to make the parameter at `place`, the dotted path of its attribute in the
            model. The first way whose tensors are all in the files is taken. It may have `ignored(config)`, which
            returns prefixes of tensors that are not loaded.
        config: The architecture's configuration.
        progress: Called after each parameter, with the number of parameters that are loaded and that of all parameters.

    Raises:
        ValueError: a tensor is missing, unknown or has a wrong shape, or a file is missing. It is named.
    """
    model = nnx.eval_shape(lambda: architecture.Model(config, nnx.Rngs(0)))
    sizes = _sizes(model)
    graph, state = nnx.split(model)
    variables = dict(nnx.to_flat_state(state))
    with contextlib.ExitStack() as stack:
        slices = _open(Path(path), stack)
        if config.tie_word_embeddings:
            slices.pop("lm_head.weight", None)
        if not any(place[0] == "mtp" for place in variables):
            slices = {name: found for name, found in slices.items() if not name.startswith(_HEAD_PREFIX)}
        if hasattr(architecture, "ignored"):
            ignored = architecture.ignored(config)
            slices = {name: part for name, part in slices.items() if not name.startswith(ignored)}
        found, missing = {}, []
        for place in variables:
            ways = architecture.sources(".".join(map(str, place)), config)
            source = next((way for way in ways if all(name in slices for name in way.names)), None)
            if source is None:
                missing.append(next(name for name in ways[0].names if name not in slices))
            else:
                found[place] = source
        unknown = slices.keys() - {name for source in found.values() for name in source.names}
        if missing:
            raise ValueError(f"tensor {min(missing)!r} is missing, {len(missing)} in all, in {str(path)!r}")
        if unknown:
            raise ValueError(f"tensor {min(unknown)!r} has no place in a model of type {config.model_type!r}")
        loaded = []
        for place, source in found.items():
            value = _read(source, slices, variables[place], sizes.get(place[:-1]))
            loaded.append((place, variables[place].replace(value)))
            progress(len(loaded), len(found))
    return nnx.merge(graph, nnx.from_flat_state(loaded))


def save_weights(model: CausalLM, architecture: ModuleType, path: str | Path) -> None:
    """Writes a model directory of Hugging Face: config.json and model.safetensors.

    Args:
        model: The model.
        architecture: Its module of `mamba_align_jax.models`.
        path: The directory. It is created if it does not exist.

    Raises:
        ValueError: a parameter of the model is not made from tensors of its own.
    """
    path = Path(path)
    sizes, tensors = _sizes(model), {}
    for place, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        name = ".".join(map(str, place))
        source = architecture.sources(name, model.config)[0]
        if source.split is None:
            raise ValueError(
                f"save_weights: every parameter must have tensors of its own, but {name!r} of "
                f"{model.config.model_type!r} has none"
            )
        array = np.asarray(jax.device_get(variable[...]))
        arrays = source.split(array, sizes.get(place[:-1], array.shape[:1]))
        tensors |= {tensor: np.ascontiguousarray(part) for tensor, part in zip(source.names, arrays, strict=True)}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(model.config.to_dict(), indent=2) + "\n")
    save_file(tensors, path / "model.safetensors", metadata={"format": "np"})
    (path / "model.safetensors").chmod(0o644)  # safetensors lets only the owner read it.
