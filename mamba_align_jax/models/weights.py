"""Makes models from the tensors of a model directory, one parameter at a time, and writes such directories."""

import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from mamba_align_jax import _values as values
from mamba_align_jax.layers.linear import Linear
from mamba_align_jax.layers.moe import Experts
from mamba_align_jax.models.arrange import UnlikeError
from mamba_align_jax.models.causal_lm import CausalLM
from mamba_align_jax.models.config import ModelConfig
from mamba_align_jax.models.config_files import MERGE_ADAPTER
from mamba_align_jax.models.config_files import read_config as read_config
from mamba_align_jax.models.quantised import ScaledTensor, dequantised, read_quantisation
from mamba_align_jax.models.sources import Source, parts
from mamba_align_jax.models.tensor_files import INDEX, Tensor, stored_tensors, unlisted
from pallas_kernels.quantized import ActivationDtype, Part, QuantizedWeight, quantize

# How weights lie in memory: "file" keeps those that are FP8 in the files, "bfloat16" makes all of them the model's dtype,
# and "fp8" quantises those that are not FP8 in the files while it reads them.
WeightsDtype: TypeAlias = Literal["file", "bfloat16", "fp8"]
WEIGHTS_DTYPES: tuple[str, ...] = ("file", "bfloat16", "fp8")
ACTIVATION_DTYPES: tuple[str, ...] = ("bfloat16", "fp8")
# Products that "fp8" leaves as they are, by the last name of their module, as published FP8 files do: the head, routers,
# gates, and what is small.
_NEVER_QUANTISED = frozenset(
    (
        *("lm_head", "gate", "router", "layer", "shared_expert_gate", "fc"),
        *("in_proj_a", "in_proj_b", "in_proj_ba", "a_proj", "b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"),
        *("x_proj", "dt_proj", "kv_b_proj"),
    )
)
_SAVED_SCALES = "_scale_inv"
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


def _products(model: CausalLM) -> set[Any]:
    """Returns the places of the parameters that may be quantised: the weights of products and of experts."""
    found: set[Any] = set()
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Linear | Experts):
            found |= {(*path, name) for name in (("weight",) if isinstance(module, Linear) else ("up", "down"))}
    return found


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


def _activation_dtype(path: str | Path, given: str | None) -> ActivationDtype:
    """Returns `activation_dtype` as it is given, or as the directory's files have it."""
    values.optional_choice("activation_dtype", given, ACTIVATION_DTYPES)
    quantisation = read_quantisation(read_config(path)) if given is None else None
    own: Any = given or ("bfloat16" if quantisation is None else quantisation.activation_dtype)
    return own


def _is_quantised_while_reading(name: str) -> bool:
    """Whether "fp8" quantises the tensor `name`, which is of a product."""
    module = name.removesuffix(".weight").rsplit(".", 1)[-1]
    return module not in _NEVER_QUANTISED and not module.isdecimal()  # adapters are numbered


def _kept(tensor: Tensor, dtype: Any, kind: str) -> np.ndarray | QuantizedWeight:
    """Reads a tensor of a product as `kind`, one of `WEIGHTS_DTYPES`, says. `dtype` is that of the product."""
    if kind != "bfloat16" and isinstance(tensor, ScaledTensor):
        return QuantizedWeight((tensor.part(),), np.dtype(dtype))
    if kind == "fp8" and _is_quantised_while_reading(tensor.name):
        return quantize(_values(tensor, np.float32), dtype=dtype)
    return _values(tensor, dtype)


def _made(source: Source, tensors: Mapping[str, Tensor], dtype: Any, kind: str) -> np.ndarray | QuantizedWeight:
    """Makes a parameter on the host. One whose tensors cannot stay as they are together has the dtype `dtype`."""
    try:
        return source.make(_kept(tensors[name], dtype, kind) for name in source.names)
    except UnlikeError as error:
        _LOG.warning("%s and others become %s: %s", source.names[0], dtype, error)
        return source.make(_values(tensors[name], dtype) for name in source.names)


_all_finite = jax.jit(lambda weight: jnp.isfinite(weight.dequantize()).all())


def _read(
    source: Source, tensors: Mapping[str, Tensor], variable: Any, check_values: bool, kind: str
) -> jax.Array | QuantizedWeight:
    try:
        made = _made(source, tensors, variable.dtype, kind)
    except (ValueError, IndexError):
        # The tensors' shapes do not fit together, unless one of them can't be read, which it says itself.
        for name in source.names:
            tensors[name].read()
        made = None
    if check_values:
        for name in source.names:
            tensor = tensors[name]
            if isinstance(tensor, ScaledTensor):
                tensor.check_scales()
    if made is not None and made.shape == variable.shape:
        is_quantised = isinstance(made, QuantizedWeight)
        loaded = jax.tree.map(jnp.asarray, made) if is_quantised else jnp.asarray(made, variable.dtype)
        if check_values and not bool(_all_finite(loaded) if is_quantised else jnp.isfinite(loaded).all()):
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
    products: set[Any]

    def kind(self, place: Any, weights_dtype: str) -> str:
        """Returns how the parameter at `place` is kept: as `weights_dtype` says, or in its own dtype if it is no product."""
        return weights_dtype if place in self.products else "bfloat16"


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
    return _ModelPlan(graph, variables, found, tensors, _products(model))


def read_weights(
    path: str | Path,
    architecture: ModuleType,
    config: ModelConfig,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    check_values: bool = True,
    weights_dtype: str = "bfloat16",
    activation_dtype: str | None = None,
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
        check_values: Whether weights are refused that are not finite in the model's dtype, and scales that are not positive.
        weights_dtype: See `load_model`.
        activation_dtype: See `load_model`.

    Raises:
        ValueError: a tensor is missing, unknown, has a wrong shape or holds values that are not finite, or a file is
            missing or broken. It is named.
    """
    values.choice("weights_dtype", weights_dtype, WEIGHTS_DTYPES)
    activations = _activation_dtype(path, activation_dtype)
    tensors = find_tensors(path)
    config = _with_own_head(Path(path), architecture, _adapted(architecture, config, tensors), tensors)
    plan = _plan(Path(path), architecture, config, tensors)
    loaded = []
    for place, source in plan.sources.items():
        variable = plan.variables[place]
        kind = plan.kind(place, weights_dtype)
        value = _with_activations(_read(source, plan.tensors, variable, check_values, kind), activations)
        loaded.append((place, variable.replace(value)))
        progress(len(loaded), len(plan.sources))
    return nnx.merge(plan.graph, nnx.from_flat_state(loaded))


def _with_activations(value: Any, activation_dtype: ActivationDtype) -> Any:
    """Says to what products round the inputs of a weight, if it is quantised."""
    is_quantised = isinstance(value, QuantizedWeight)
    return replace(value, activation_dtype=activation_dtype) if is_quantised else value


def _outline(source: Source, tensors: Mapping[str, Tensor], dtype: Any, kind: str) -> Any:
    """Returns what `_made` would, with shapes instead of arrays. It reads no values."""

    def kept(tensor: Tensor) -> Any:
        if kind != "bfloat16" and isinstance(tensor, ScaledTensor):
            return QuantizedWeight((tensor.outline(),), np.dtype(dtype))
        return jax.ShapeDtypeStruct(tensor.shape, dtype)

    def make(given: Sequence[Any]) -> Any:
        is_changed = [kind == "fp8" and _is_quantised_while_reading(name) for name in source.names]
        pairs = zip(given, is_changed, strict=True)
        return source.make(
            quantize(each) if changed and not isinstance(each, QuantizedWeight) else each for each, changed in pairs
        )

    given = [kept(tensors[name]) for name in source.names]
    try:
        return jax.eval_shape(make, given)
    except UnlikeError:
        return None


def read_product(
    path: str | Path,
    names: Sequence[str],
    dtype: str,
    *,
    weights_dtype: str = "file",
    activation_dtype: str | None = None,
) -> jax.Array | QuantizedWeight:
    """Reads the weight of one product from a model directory, for a model that is not of this library.

    Args:
        path: The model directory, of any architecture.
        names: Names of tensors [outputs, inputs], without a prefix such as `language_model.`: see `find_tensors`. They lie
            one below the other in the result.
        dtype: The dtype of the product: "float32", "bfloat16" or "float16".
        weights_dtype: See `load_model`.
        activation_dtype: See `load_model`.

    Returns:
        The weight [outputs of all, inputs] on the default device, for `pallas_kernels.linear`: a `QuantizedWeight` if some
        of it is quantised.

    Raises:
        ValueError: a tensor is missing, has another number of inputs, or holds values that are not finite or scales that are
            not positive, or a file is missing or broken. It is named.
    """
    values.choice("weights_dtype", weights_dtype, WEIGHTS_DTYPES)
    values.choice("dtype", dtype, tuple(_DTYPES.values()))
    tensors = find_tensors(path)
    is_list = isinstance(names, Sequence) and not isinstance(names, str) and len(names) > 0
    values.require(is_list, "names", "a list of names of tensors", names)
    missing = [name for name in names if name not in tensors]
    if missing:
        raise ValueError(f"tensor {missing[0]!r} is missing, in {str(path)!r}")
    shapes = [tensors[name].shape for name in names]
    outputs = sum(shape[0] for shape in shapes)
    wanted = jax.ShapeDtypeStruct((outputs, *shapes[0][1:]), dtype)
    read = _read(parts(names), tensors, wanted, True, weights_dtype)
    return _with_activations(read, _activation_dtype(path, activation_dtype))


def read_outline(
    path: str | Path, architecture: ModuleType, config: ModelConfig, *, weights_dtype: str = "bfloat16"
) -> CausalLM:
    """Makes an architecture's model with shapes instead of weights, from the headers of the files: see `read_weights`.

    A head beside tied embeddings counts as equal to them, because only its values can show that it is not.

    Raises:
        ValueError: a tensor is missing or unknown, one that makes a parameter alone has a wrong shape, or a file is
            missing or broken. It is named.
    """
    tensors = find_tensors(path)
    values.choice("weights_dtype", weights_dtype, WEIGHTS_DTYPES)
    activations = _activation_dtype(path, None)
    plan = _plan(Path(path), architecture, _adapted(architecture, config, tensors), tensors)
    shapes = []
    for place, variable in plan.variables.items():
        kind, source = plan.kind(place, weights_dtype), plan.sources[place]
        made = None
        if kind == "fp8" or any(isinstance(plan.tensors[name], ScaledTensor) for name in source.names):
            made = _outline(source, plan.tensors, variable.dtype, kind) if kind != "bfloat16" else None
        is_quantised = isinstance(made, QuantizedWeight) and made.shape == variable.shape
        shapes.append((place, variable.replace(_with_activations(made, activations)) if is_quantised else variable))
    return nnx.merge(plan.graph, nnx.from_flat_state(shapes))


def _quantisation_fields(blocks: set[tuple[int, int] | None], plain: Sequence[str]) -> dict[str, Any]:
    """Returns the field of config.json that says how weights are quantised.

    Args:
        blocks: The sizes of their blocks; None is a scale per channel or per tensor, which the shape of the scales tells.
        plain: The modules whose weights are not quantised.

    Raises:
        ValueError: there are several sizes of blocks.
    """
    sizes = sorted(block for block in blocks if block is not None)
    if len(sizes) > 1:
        raise ValueError(f"save_weights: quantised weights must have blocks of one size, got {sizes}")
    fields = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic")
    return {
        "quantization_config": fields
        | {"weight_block_size": list(sizes[0]) if sizes else None, "modules_to_not_convert": list(plain)}
    }


def save_weights(model: CausalLM, architecture: ModuleType, path: str | Path) -> None:
    """Writes a model directory of Hugging Face: config.json and model.safetensors. It is created if it does not exist.

    Quantised weights are written as they are, with their scales, as published FP8 files hold them. The files say that inputs
    are quantised too (`activation_scheme`), because other loaders know no other kind.

    Raises:
        ValueError: a parameter of the model is not made from tensors of its own, or is split over devices; quantised weights
            have several sizes of blocks; or the directory has an index of weights in other files, which would be loaded
            instead. Nothing is written.
    """
    path = Path(path)
    if (path / INDEX).exists():
        raise ValueError(f"save_weights: path must be a directory without {INDEX}, got {str(path)!r}")
    sizes, tensors, blocks, plain = _sizes(model), {}, set(), []
    for place, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        name = ".".join(map(str, place))
        source = architecture.sources(name, model.config)[0]
        if source.split is None:
            raise ValueError(
                f"save_weights: every parameter must have tensors of its own, but {name!r} of "
                f"{model.config.model_type!r} has none"
            )
        value = variable[...]
        if not all(leaf.is_fully_replicated for leaf in jax.tree.leaves(value)):
            raise ValueError(f"save_weights: model must not be split over devices, but {name!r} is")
        value = jax.tree.map(np.asarray, jax.device_get(value))
        if isinstance(value, QuantizedWeight):
            pairs = zip(source.names, value.parts, strict=True)
        else:
            arrays = source.split(value, sizes.get(place[:-1], value.shape[:1]))
            pairs = zip(source.names, map(Part, arrays), strict=True)
        for tensor, part in pairs:
            tensors[tensor] = np.ascontiguousarray(part.values)
            if part.scales is None:
                plain += [tensor.removesuffix(".weight")] * tensor.endswith(".weight")
                continue
            tensors[tensor + _SAVED_SCALES] = np.ascontiguousarray(part.scales)
            blocks |= {part.block} if part.scales.size > 1 and part.block != (1, part.values.shape[1]) else {None}
    fields = model.config.to_dict() | (_quantisation_fields(blocks, plain) if blocks else {})
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    save_file(tensors, path / "model.safetensors", metadata={"format": "np"})
    (path / "model.safetensors").chmod(0o644)  # safetensors lets only the owner read it.
