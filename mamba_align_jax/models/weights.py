"""Makes models from the tensors of a model directory, one parameter at a time, and writes such directories."""

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from mamba_align_jax._deprecated import renamed_keywords
from mamba_align_jax.layers.linear import Linear
from mamba_align_jax.layers.moe import shared_experts
from mamba_align_jax.models.causal_lm import CausalLM
from mamba_align_jax.models.config import ModelConfig
from mamba_align_jax.models.config_files import read_config as read_config
from mamba_align_jax.models.quantised import dequantised, read_quantisation
from mamba_align_jax.models.tensor_files import Tensor, stored_tensors

_LOG = logging.getLogger(__name__)
# Prefixes of tensors of towers for images and sound and of what joins them to the text model.
_IGNORED_PREFIXES = (
    "model.visual.",
    "audio_tower.",
    "embed_audio.",
    "mlp1.",
    "multi_modal_projector.",
    "sound_encoder.",
    "sound_projection.",
    "vision_final_layernorm.",
    "vision_model.",
)
# Names of tensors start otherwise where a model is part of a larger one, or was published by state-spaces.
_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.", ""),
    ("backbone.embedding.", "backbone.embeddings."),
)
# Prefix of a draft head's tensors. Not every architecture supports its draft head.
_HEAD_PREFIX = "mtp."
# By its name in safetensors files, the dtype of a model.
_DTYPES = MappingProxyType({"F32": "float32", "F16": "float16", "BF16": "bfloat16"})
# Ends of names of tensors that files may hold although a model computes them itself.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)


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


def find_tensors(path: str | Path) -> dict[str, Tensor]:
    """Finds the tensors of the text model in a model directory. It reads the headers of the files and no tensor.

    Returns:
        The tensors by name. Those of quantised weights yield what they mean.

    Raises:
        ValueError: a file is missing or broken, or the weights are quantised in a way that can't be loaded.
    """
    path = Path(path)
    quantisation = read_quantisation(read_config(path))
    found: dict[str, Any] = {}
    for name, stored in stored_tensors(path).items():
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
    tensors = stored_tensors(Path(path)).values()
    largest = max(tensors, key=lambda tensor: math.prod(tensor.shape), default=None)
    return _DTYPES.get(largest.kind) if largest else None


def _check_shapes(source: Source, tensors: Mapping[str, Tensor], variable: Any, sizes: Sequence[int] | None) -> None:
    """Checks the shapes of tensors of their own. `sizes` are those of a product's parts; None if it is no product."""
    if source.split is None:
        return
    # An empty array takes no memory until something is written to it.
    wanted = source.split(np.empty(variable.shape, np.bool_), sizes or variable.shape[:1])
    for name, part in zip(source.names, wanted, strict=True):
        if tensors[name].shape != part.shape:
            raise ValueError(f"tensor {name!r} must have shape {list(part.shape)}, got {list(tensors[name].shape)}")


def _read(source: Source, tensors: Mapping[str, Tensor], variable: Any, check_values: bool) -> jax.Array:
    try:
        array = source.make(tensors[name].read() for name in source.names)
    except (ValueError, IndexError):
        # The tensors' shapes do not fit together, unless one of them can't be read, which it says itself.
        for name in source.names:
            tensors[name].read()
        array = None
    if array is not None and array.shape == variable.shape:
        with np.errstate(over="ignore", invalid="ignore"):
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
        values = tensors[name].read()
        with np.errstate(over="ignore", invalid="ignore"):
            wrong = ~np.isfinite(values.astype(variable.dtype).astype(np.float32))
        if wrong.any():
            value = float(values[wrong][0])
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


@dataclass(frozen=True)
class _Plan:
    """How a model is made: its structure, its parameters' shapes, and the source of each."""

    graph: Any
    variables: dict[Any, Any]
    sources: dict[Any, Source]
    tensors: Mapping[str, Tensor]


def _plan(path: Path, architecture: ModuleType, config: ModelConfig, tensors: dict[str, Tensor]) -> _Plan:
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
        raise ValueError(f"tensor {min(missing)!r} is missing, {len(missing)} in all, in {str(path)!r}")
    if unknown:
        raise ValueError(f"tensor {min(unknown)!r} has no place in a model of type {config.model_type!r}")
    for place, source in found.items():
        _check_shapes(source, tensors, variables[place], sizes.get(place[:-1]))
    return _Plan(graph, variables, found, tensors)


@renamed_keywords(advance="progress")
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
            returns prefixes of tensors that are not loaded.
        config: The architecture's configuration.
        progress: Called after each parameter, with the number of parameters that are loaded and that of all parameters.
        check_values: Whether weights are refused that are not finite in the model's dtype.

    Raises:
        ValueError: a tensor is missing, unknown, has a wrong shape or holds values that are not finite, or a file is
            missing or broken. It is named.
    """
    tensors = find_tensors(path)
    config = _with_own_head(Path(path), architecture, config, tensors)
    plan = _plan(Path(path), architecture, config, tensors)
    loaded = []
    for place, source in plan.sources.items():
        variable = plan.variables[place]
        loaded.append((place, variable.replace(_read(source, plan.tensors, variable, check_values))))
        progress(len(loaded), len(plan.sources))
    return nnx.merge(plan.graph, nnx.from_flat_state(loaded))


def read_outline(path: str | Path, architecture: ModuleType, config: ModelConfig) -> CausalLM:
    """Makes an architecture's model with shapes instead of weights. It reads the headers of the files.

    A head beside tied embeddings counts as equal to them, because only its values can show that it is not.

    Args:
        path: The model directory.
        architecture: A module of `mamba_align_jax.models`, as for `read_weights`.
        config: The architecture's configuration.

    Raises:
        ValueError: a tensor is missing or unknown, one that makes a parameter alone has a wrong shape, or a file is
            missing or broken. It is named.
    """
    plan = _plan(Path(path), architecture, config, find_tensors(path))
    return nnx.merge(plan.graph, nnx.from_flat_state(list(plan.variables.items())))


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
