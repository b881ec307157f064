"""Hugging Face directories in and out: config.json and safetensors files, one tensor at a time."""

import json
from collections.abc import Iterator
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
# Draft heads: a configuration may name one that the files lack, as fine-tuned copies do, or the other way round.
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


def has_draft_head(path: str | Path) -> bool:
    """Whether the directory's files hold `mtp.*` tensors."""
    return any(name.startswith(_HEAD_PREFIX) for name, _ in _tensors(Path(path)))


def _tensors(path: Path) -> Iterator[tuple[str, Any]]:
    """Every (name, slice) of the checkpoint; a slice is read when it is indexed."""
    index = path / "model.safetensors.index.json"
    names = (
        sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else ["model.safetensors"]
    )
    for name in names:
        if not (path / name).is_file():
            raise ValueError(f"model directory must hold {name}, got {str(path)!r}")
        with safe_open(path / name, framework="np") as file:
            for tensor in file.keys():  # noqa: SIM118 - no mapping
                yield tensor, file.get_slice(tensor)


def read_weights(path: str | Path, architecture: Any, config: Any) -> Any:
    """Builds the architecture's model with the directory's weights.

    Raises:
        ValueError: names the tensor that is missing, unknown or misshapen.
    """
    model = nnx.eval_shape(lambda: architecture.Model(config, nnx.Rngs(0)))
    graph, state = nnx.split(model)
    places = {architecture.tensor_name(place): (place, variable) for place, variable in nnx.to_flat_state(state)}
    ignored = _IGNORED_PREFIXES
    if not any(name.startswith(_HEAD_PREFIX) for name in places):
        ignored = (*ignored, _HEAD_PREFIX)
    loaded = {}
    for name, tensor in _tensors(Path(path)):
        name = name.replace("model.language_model.", "model.", 1)
        if name.startswith(ignored) or (config.tie_word_embeddings and name == "lm_head.weight"):
            continue
        if name not in places:
            raise ValueError(f"tensor {name!r} has no place in {config.model_type}")
        place, variable = places[name]
        array = architecture.from_checkpoint(name, tensor[:])
        if array.shape != variable.shape:
            wanted = architecture.to_checkpoint(name, np.empty(variable.shape, np.bool_)).shape
            raise ValueError(f"tensor {name!r} must have shape {list(wanted)}, got {list(tensor.get_shape())}")
        # Vectors (norms, decay rates) take part in float32 arithmetic only: no reason to round them.
        dtype = variable.dtype if array.ndim > 1 else jnp.float32
        loaded[place] = variable.replace(jnp.asarray(array, dtype))
    missing = sorted(name for name, (place, _) in places.items() if place not in loaded)
    if missing:
        raise ValueError(f"tensor {missing[0]!r} is missing, {len(missing)} in all, in {str(path)!r}")
    return nnx.merge(graph, nnx.from_flat_state(loaded.items()))


def save_checkpoint(model: Any, architecture: Any, path: str | Path) -> None:
    """Writes config.json and model.safetensors as Hugging Face lays them out."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(model.config.to_dict(), indent=2) + "\n")
    tensors = {}
    for place, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        name = architecture.tensor_name(place)
        tensors[name] = np.ascontiguousarray(
            architecture.to_checkpoint(name, np.asarray(jax.device_get(variable[...])))
        )
    save_file(tensors, path / "model.safetensors", metadata={"format": "np"})
    (path / "model.safetensors").chmod(0o644)  # safetensors makes it readable by its owner alone
