"""Makes models from the tensors of a model directory, one parameter at a time, and writes such directories."""

import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from mamba_align_jax import _values as values
from mamba_align_jax.layers.linear import Linear
from mamba_align_jax.models.causal_lm import CausalLM
from mamba_align_jax.models.config import ModelConfig
from mamba_align_jax.models.config_files import MERGE_ADAPTER
from mamba_align_jax.models.config_files import read_config as read_config
from mamba_align_jax.models.quantised import dequantised, read_quantisation
from mamba_align_jax.models.sources import Source
from mamba_align_jax.models.tensor_files import INDEX, Tensor, stored_tensors, unlisted

_LOG = logging.getLogger(__name__)
# Towers for images and sound, and what joins them to the text model. Some files have them in `model`.
_TOWERS = (
    *("audio_tower", "embed_audio", "mlp1", "multi_modal_projector", "sound_encoder", "sound_projection"),
    *("vision_final_layernorm", "vision_model", "vision_tower", "visual"),
)
_IGNORED_PREFIXES = tuple(f"{outer}{tower}." for outer in ("", "model.") for tower in _TOWERS)
# Names of tensors start otherwise where a model is part of a larger one, or was published by state-spaces.
_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.", ""),
    ("backbone.embedding.", "backbone.embeddings."),
)
# Prefix of a draft head's tensors. Not every architecture supports its draft head.
_HEAD_PREFIX = "mtp."
# Prefix of the tensors of a PEFT adapter.
_ADAPTER_PREFIX = "base_model.model."
# By its name in safetensors files, the dtype of a model.
_DTYPES = MappingProxyType({"F32": "float32", "F16": "float16", "BF16": "bfloat16"})
# Ends of names of tensors that files may hold although a model computes them itself.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)


def find_tensors(path: str | Path) -> dict[str, Tensor]:
    """Finds the tensors of the text model in a model directory, by name. It reads the headers of the files alone.

    Those of quantised weights yield what they mean.

    Raises:
        ValueError: a file is missing or broken, or the weights are quantised in a way that can't be loaded.
    """
    values.instance("path", path, str, Path)
    path = Path(path)
    quantisation = read_quantisation(read_config(path))
    found: dict[str, Any] = {}
    for name, stored in stored_tensors(path).items():
        if name.startswith(_ADAPTER_PREFIX):
            raise ValueError(f"tensor {name!r} is of a PEFT adapter, which {MERGE_ADAPTER}")
        if name.startswith(_IGNORED_PREFIXES) or name.endswith(_IGNORED_SUFFIXES):
            continue
        theirs, ours = next((pair for pair in _PREFIXES if name.startswith(pair[0])), ("", ""))
        place = ours + name.removeprefix(theirs)
        if place in found:
            raise ValueError(
                f"tensors {found[place].name!r} and {name!r} must not both be in the files: they are the same"
            )
        found[place] = stored
    return dequantised(found, quantisation)


def has_draft_head(path: str | Path) -> bool:
    """Returns whether the files of the model directory `path` hold tensors of a draft head, `mtp.*`."""
    return any(name.startswith(_HEAD_PREFIX) for name in find_tensors(path))


def _sizes(model: CausalLM) -> dict[Any, tuple[int, ...]]:
    """Returns the sizes of the parts of each product, by the path of its module."""
    return {path: module.parts for path, module in nnx.iter_modules(model) if isinstance(module, Linear)}


def stored_dtype(path: str | Path) -> str | None:
    """Returns the dtype of the largest tensor in a model directory; None if no model can have it."""
    values.instance("path", path, str, Path)
    tensors = stored_tensors(Path(path)).values()
    largest = max(tensors, key=lambda tensor: math.prod(tensor.shape), default=None)
    return _DTYPES.get(largest.kind) if largest else None


def _check_shapes(source: Source, tensors: Mapping[str, Tensor], variable: Any, sizes: Sequence[int] | None) -> None:
    """Checks the shapes of tensors of their own. `sizes` are those of a product's parts; None if it is no product."""
    if source.split is None:
        return
    # A wrong configuration may ask for more than the memory, so all elements are the same one.
    wanted = source.split(np.broadcast_to(np.False_, variable.shape), sizes or variable.shape[:1])
    for name, part in zip(source.names, wanted, strict=True):
        if tensors[name].shape != part.shape:
            raise ValueError(f"tensor {name!r} must have shape {list(part.shape)}, got {list(tensors[name].shape)}")


def _values(tensor: Tensor, dtype: Any) -> np.ndarray:
    """Reads a tensor's values in the dtype of a parameter, in which some may be infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        return tensor.read().astype(dtype, copy=False)


def _read(source: Source, tensors: Mapping[str, Tensor], variable: Any, check_values: bool) -> jax.Array:
    try:
        array = source.make(_values(tensors[name], variable.dtype) for name in source.names)
    except (ValueError, IndexError):
        # The tensors' shapes do not fit together, unless one of them can't be read, which it says itself.
        for name in source.names:
            tensors[name].read()
        array = None
    if array is not None and array.shape == variable.shape:
        loaded = jnp.asarray(array, variable.dtype)
        if check_values and not bool(jnp.isfinite(loaded).all()):
            raise _not_finite(source, tensors, variable)
        return loaded
    got = [list(tensors[name].shape) for name in source.names]
    raise ValueError(
        f"tensors {source.names[0]!r} to {source.names[-1]!r} must make an array of shape {list(variable.shape)}, "
        f"got {got}"
    )


def _not_finite(source: Source, tensors: Mapping[str, Tensor], variable: Any) -> ValueError:
    """Finds the tensor because of which a parameter is not finite."""
    for name in source.names:
        wrong = ~np.isfinite(_values(tensors[name], variable.dtype).astype(np.float32))
        if wrong.any():
            value = float(tensors[name].read()[wrong][0])
            return ValueError(
                f"tensor {name!r} must hold finite values of dtype {variable.dtype}, got {int(wrong.sum())} others, for "
                f"instance {value:g}; check_values=False loads them"
            )
    return ValueError(f"tensors {source.names[0]!r} to {source.names[-1]!r} must make finite values")


def _with_own_head(
    path: Path, architecture: ModuleType, config: ModelConfig, tensors: dict[str, Tensor]
) -> ModelConfig:
    """Unties the head of a configuration if the files hold another head than the embeddings. Warns of it."""
    head = tensors.get("lm_head.weight")
    names = (way.names[0] for way in architecture.sources("embed_tokens.embedding", config))
    embeddings = next((tensors[name] for name in names if name in tensors), None)
    if not config.tie_word_embeddings or head is None or embeddings is None:
        return config
    if head.shape == embeddings.shape and np.array_equal(head.read(), embeddings.read(), equal_nan=True):
        return config
    _LOG.warning(
        "%s: tie_word_embeddings is true, but lm_head.weight differs from the embeddings: it is used as the head", path
    )
    return replace(config, tie_word_embeddings=False)


def _adapted(architecture: ModuleType, config: ModelConfig, tensors: Mapping[str, Tensor]) -> ModelConfig:
    """Returns the configuration as the files' tensors ask for it, if the architecture has layouts that differ."""
    return architecture.adapted(config, tensors) if hasattr(architecture, "adapted") else config


@dataclass(frozen=True)
class _ModelPlan:
    """How a model is made: its structure, its parameters' shapes, and the source of each."""

    graph: Any
    variables: dict[Any, Any]
    sources: dict[Any, Source]
    tensors: Mapping[str, Tensor]


def _check_layers(config: ModelConfig, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Checks that the files have as many layers as the configuration, because making far too many takes minutes."""
    found = [re.search(r"(?:^|\.)layers\.(\d+)\.", name) for name in tensors if not name.startswith(_HEAD_PREFIX)]
    layers = 1 + max((int(match[1]) for match in found if match), default=-1)
    if config.num_hidden_layers > layers:
        raise ValueError(
            f"config.json: num_hidden_layers must be at most the number of layers in the files, {layers}, got "
            f"{config.num_hidden_layers}{unlisted(path)}"
        )


def _plan(path: Path, architecture: ModuleType, config: ModelConfig, tensors: dict[str, Tensor]) -> _ModelPlan:
    _check_layers(config, tensors, path)
    model = nnx.eval_shape(lambda: architecture.Model(config, nnx.Rngs(0)))
    sizes = _sizes(model)
    graph, state = nnx.split(model)
    variables = dict(nnx.to_flat_state(state))
    ignored: tuple[str, ...] = () if any(place[0] == "mtp" for place in variables) else (_HEAD_PREFIX,)
    ignored += ("lm_head.weight",) if config.tie_word_embeddings else ()
    ignored += tuple(architecture.ignored(config)) if hasattr(architecture, "ignored") else ()
    tensors = {name: part for name, part in tensors.items() if not name.startswith(ignored)}
    found, missing = {}, []
    for place in variables:
        ways = architecture.sources(".".join(map(str, place)), config)
        source = next((way for way in ways if all(name in tensors for name in way.names)), None)
        if source is None:
            missing.append(next(name for name in ways[0].names if name not in tensors))
        else:
            found[place] = source
    unknown = tensors.keys() - {name for source in found.values() for name in source.names}
    if missing:
        raise ValueError(f"tensor {min(missing)!r} is missing, {len(missing)} in all, in {str(path)!r}{unlisted(path)}")
    if unknown:
        raise ValueError(f"tensor {min(unknown)!r} has no place in a model of type {config.model_type!r}")
    for place, source in found.items():
        _check_shapes(source, tensors, variables[place], sizes.get(place[:-1]))
    return _ModelPlan(graph, variables, found, tensors)


def read_weights(
    path: str | Path,
    architecture: ModuleType,
    config: ModelConfig,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    check_values: bool = True,
) -> CausalLM:
    """Makes an architecture's model with the weights of a model directory.

    Host memory holds one parameter at a time, and the tensors from which it is made.

    Args:
        path: The model directory.
        architecture: A module of `mamba_align_jax.models`. It has `Model(config, rngs)` and `sources(place, config)`,
            which lists the ways (`Source`) to make the parameter at `place`, the dotted path of its attribute in the
            model. The first way whose tensors are all in the files is taken. It may have `ignored(config)`, which
            returns prefixes of tensors that are not loaded, and `adapted(config, names)`, which returns the configuration
            that fits the tensors of these names.
        config: The architecture's configuration.
        progress: Called after each parameter, with the number of parameters that are loaded and that of all parameters.
        check_values: Whether weights are refused that are not finite in the model's dtype.

    Raises:
        ValueError: a tensor is missing, unknown, has a wrong shape or holds values that are not finite, or a file is
            missing or broken. It is named.
    """
    tensors = find_tensors(path)
    config = _with_own_head(Path(path), architecture, _adapted(architecture, config, tensors), tensors)
    plan = _plan(Path(path), architecture, config, tensors)
    loaded = []
    for place, source in plan.sources.items():
        variable = plan.variables[place]
        loaded.append((place, variable.replace(_read(source, plan.tensors, variable, check_values))))
        progress(len(loaded), len(plan.sources))
    return nnx.merge(plan.graph, nnx.from_flat_state(loaded))


def read_outline(path: str | Path, architecture: ModuleType, config: ModelConfig) -> CausalLM:
    """Makes an architecture's model with shapes instead of weights, from the headers of the files: see `read_weights`.

    A head beside tied embeddings counts as equal to them, because only its values can show that it is not.

    Raises:
        ValueError: a tensor is missing or unknown, one that makes a parameter alone has a wrong shape, or a file is
            missing or broken. It is named.
    """
    tensors = find_tensors(path)
    plan = _plan(Path(path), architecture, _adapted(architecture, config, tensors), tensors)
    return nnx.merge(plan.graph, nnx.from_flat_state(list(plan.variables.items())))


def save_weights(model: CausalLM, architecture: ModuleType, path: str | Path) -> None:
    """Writes a model directory of Hugging Face: config.json and model.safetensors. It is created if it does not exist.

    Raises:
        ValueError: a parameter of the model is not made from tensors of its own, or is split over devices; or the
            directory has an index of weights in other files, which would be loaded instead. Nothing is written.
    """
    path = Path(path)
    if (path / INDEX).exists():
        raise ValueError(f"save_weights: path must be a directory without {INDEX}, got {str(path)!r}")
    sizes, tensors = _sizes(model), {}
    for place, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        name = ".".join(map(str, place))
        source = architecture.sources(name, model.config)[0]
        if source.split is None:
            raise ValueError(
                f"save_weights: every parameter must have tensors of its own, but {name!r} of "
                f"{model.config.model_type!r} has none"
            )
        if not variable[...].is_fully_replicated:
            raise ValueError(f"save_weights: model must not be split over devices, but {name!r} is")
        array = np.asarray(jax.device_get(variable[...]))
        arrays = source.split(array, sizes.get(place[:-1], array.shape[:1]))
        tensors |= {tensor: np.ascontiguousarray(part) for tensor, part in zip(source.names, arrays, strict=True)}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(model.config.to_dict(), indent=2) + "\n")
    save_file(tensors, path / "model.safetensors", metadata={"format": "np"})
    (path / "model.safetensors").chmod(0o644)  # safetensors lets only the owner read it.
