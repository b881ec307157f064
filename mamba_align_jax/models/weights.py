"""Hugging Face directories in and out: config.json and safetensors files, one parameter at a time."""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import save_file

# Vision towers of published checkpoints: not part of the text model.
_IGNORED_PREFIXES = ("model.visual.",)
# Draft heads: not every architecture's is known.
_HEAD_PREFIX = "mtp."
# What a configuration with a nested text model may hold outside of it.
_SHARED_FIELDS = ("model_type", "dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings")


def read_config(path: str | Path) -> dict[str, Any]:
    """The text model's configuration; its own fields count before those of a configuration around it."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ValueError(f"model directory must hold a config.json, got {str(path)!r}")
    config = json.loads(file.read_text())
    if "text_config" not in config:
        return config
    return {name: config[name] for name in _SHARED_FIELDS if name in config} | config["text_config"]


@dataclass(frozen=True)
class Source:
    """How a parameter is made from tensors of a checkpoint.

    Attributes:
        names: Of the tensors. Several parameters may be made from one.
        make: Makes the parameter from the tensors in this order; it draws one at a time.
        split: The inverse, for a parameter that is one tensor of its own.
    """

    names: tuple[str, ...]
    make: Callable[[Iterator[np.ndarray]], np.ndarray] = next
    split: Callable[[np.ndarray], np.ndarray] | None = None


def tensor(name: str) -> Source:
    """A tensor as it is."""
    return Source((name,), next, lambda array: array)


def product(name: str) -> Source:
    """A dense product's weight, published as [out, in]."""
    return Source((name,), lambda parts: next(parts).T, np.transpose)


def taps(name: str) -> Source:
    """A convolution's taps, published as [channels, 1, width]."""
    return Source((name,), lambda parts: next(parts)[:, 0].T, lambda array: array.T[:, None])


def joined(sources: Sequence[Source]) -> Source:
    """Parameters side by side, along the last axis."""
    names = tuple(name for source in sources for name in source.names)
    return Source(names, lambda parts: np.concatenate([source.make(parts) for source in sources], axis=-1))


def stacked(sources: Sequence[Source]) -> Source:
    """Parameters of one shape along a new first axis."""
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
    """What `function` makes of a parameter."""
    return Source(source.names, lambda parts: function(source.make(parts)))


def named(place: str) -> Source:
    """The tensor that has a parameter's own place as its name."""
    if place.endswith(".kernel"):
        return product(place.removesuffix("kernel") + "weight")
    if place.endswith(".embedding"):
        return tensor(place.removesuffix("embedding") + "weight")
    return taps(place) if place.endswith("conv1d.weight") else tensor(place)


def experts(
    place: str, number: int, up: Sequence[str] = ("gate_proj", "up_proj"), down: Sequence[str] = ("down_proj",)
) -> list[Source]:
    """The ways to make `up` or `down` of `layers.moe.Experts`: from a tensor of all experts, or from each expert's own.

    Args:
        place: The parameter's, "...experts.up" or "...experts.down".
        number: Of experts.
        up: Names of each expert's products that `up` joins.
        down: And `down`.
    """
    prefix, leaf = place.rsplit(".", 1)
    fused = mapped(tensor(f"{prefix}.{'gate_up' if leaf == 'up' else leaf}_proj"), lambda array: array.swapaxes(1, 2))
    one = lambda e: joined([product(f"{prefix}.{e}.{name}.weight") for name in (up if leaf == "up" else down)])
    return [stacked([one(e) for e in range(number)]), fused]


def _open(path: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """A slice by the name of each of the checkpoint's tensors; it is read when it is indexed."""
    index = path / "model.safetensors.index.json"
    files = (
        sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else ["model.safetensors"]
    )
    slices = {}
    for name in files:
        if not (path / name).is_file():
            raise ValueError(f"model directory must hold {name}, got {str(path)!r}")
        file = stack.enter_context(safe_open(path / name, framework="np"))
        for key in file.keys():  # noqa: SIM118 - no mapping
            if not key.startswith(_IGNORED_PREFIXES):
                slices[key.replace("model.language_model.", "model.", 1)] = file.get_slice(key)
    return slices


def has_draft_head(path: str | Path) -> bool:
    """Whether the directory's files hold `mtp.*` tensors."""
    with contextlib.ExitStack() as stack:
        return any(name.startswith(_HEAD_PREFIX) for name in _open(Path(path), stack))


def _read(source: Source, slices: dict[str, Any], variable: Any) -> jax.Array:
    try:
        array = source.make(slices[name][:] for name in source.names)
    except (ValueError, IndexError):  # parts that don't go together
        array = None
    if array is not None and array.shape == variable.shape:
        return jnp.asarray(array, variable.dtype)
    got = [list(slices[name].get_shape()) for name in source.names]
    if source.split:
        wanted = list(source.split(np.empty(variable.shape, np.bool_)).shape)
        raise ValueError(f"tensor {source.names[0]!r} must have shape {wanted}, got {got[0]}")
    raise ValueError(
        f"tensors {source.names[0]!r} to {source.names[-1]!r} must make an array of shape {list(variable.shape)}, got {got}"
    )


def read_weights(
    path: str | Path, architecture: Any, config: Any, advance: Callable[[int, int], None] = lambda done, total: None
) -> Any:
    """Builds the architecture's model with the directory's weights.

    Host memory holds one parameter at a time, and the tensors that it is made from.

    Args:
        path: The directory.
        architecture: Has `Model` and `sources`: the ways to make the parameter at a dotted place, of which the first is
            taken whose tensors are all there. It may have `ignored`: prefixes of tensors that are not the model's.
        config: Of the architecture.
        advance: Called with the number of parameters read and that of all, after each.

    Raises:
        ValueError: names the tensor that is missing, unknown or misshapen.
    """
    graph, state = nnx.split(nnx.eval_shape(lambda: architecture.Model(config, nnx.Rngs(0))))
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
            raise ValueError(f"tensor {min(unknown)!r} has no place in {config.model_type}")
        loaded = []
        for place, source in found.items():
            loaded.append((place, variables[place].replace(_read(source, slices, variables[place]))))
            advance(len(loaded), len(found))
    return nnx.merge(graph, nnx.from_flat_state(loaded))


def save_weights(model: Any, architecture: Any, path: str | Path) -> None:
    """Writes config.json and model.safetensors as Hugging Face lays them out.

    Raises:
        ValueError: a parameter is made from more than a tensor of its own.
    """
    path = Path(path)
    tensors = {}
    for place, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        name = ".".join(map(str, place))
        source = architecture.sources(name, model.config)[0]
        if source.split is None:
            raise ValueError(f"save_weights: {model.config.model_type} can't be saved: {name!r} is no tensor")
        tensors[source.names[0]] = np.ascontiguousarray(source.split(np.asarray(jax.device_get(variable[...]))))
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(model.config.to_dict(), indent=2) + "\n")
    save_file(tensors, path / "model.safetensors", metadata={"format": "np"})
    (path / "model.safetensors").chmod(0o644)  # safetensors makes it readable by its owner alone
