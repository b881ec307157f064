"""Reads config.json: the fields that every model has, and checks that the architectures share."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar, Self

from mamba_align_jax.layers.rotation import ROPE_TYPES, attention_factor
from mamba_align_jax.models.config_files import end_tokens
from mamba_align_jax.models.field_rules import check_together
from mamba_align_jax.models.fields import SCALING_TYPES, check_field, check_given, refuse_step_limits
from mamba_align_jax.models.fields import agree as agree
from mamba_align_jax.models.fields import require as require
from mamba_align_jax.models.fields import wrong as wrong

# The fields that a stretched rotation must have, by its kind.
_WANTED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor",),
    "yarn": ("factor",),
}


def rotation(config: Mapping[str, Any], *, scaled: bool = True, **defaults: Any) -> dict[str, Any]:
    """Reads the fields of the rotation by position. `defaults` has the default of each field.

    A field is taken from `rope_scaling`, or else from `rope_parameters`. Older files have it at the top level. If the
    architecture supports rotations that are stretched (`scaled`), the result has `rope_scaling`, which is what
    `make_rotation` takes, and `max_position_embeddings` if the rotation changes it.

    Raises:
        ValueError: the kind of rotation is not supported, or lacks a field. It is named.
    """
    rope = _rope(config)
    # For text, "mrope" is the same as the default.
    kinds = ROPE_TYPES if scaled else ROPE_TYPES[:1]
    require(rope, rope_type=kinds, type=(*kinds, "mrope"))
    if scaled and "partial_rotary_factor" not in defaults:
        require({**config, **rope}, partial_rotary_factor=(1,))
    fields = {name: rope.get(name, config.get(name, default)) for name, default in defaults.items()}
    if not scaled:
        return fields
    kind = rope.get("rope_type") or rope.get("type") or "default"
    given = {name: value for name, value in rope.items() if name in SCALING_TYPES and value is not None}
    for name, value in given.items():
        check_field(name, value, SCALING_TYPES[name])
    longest = config.get("max_position_embeddings") or ModelConfig.max_position_embeddings
    if kind in ("llama3", "longrope", "yarn"):
        original = config.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
        given["original_max_position_embeddings"] = original or longest
        if kind == "longrope":
            given.setdefault("factor", longest / given["original_max_position_embeddings"])
    missing = next((name for name in _WANTED.get(kind, ()) if name not in given), None)
    if missing:
        raise ValueError(f"config.json: a rotation of rope_type {kind!r} must have {missing!r}")
    if kind == "llama3" and given["low_freq_factor"] >= given["high_freq_factor"]:
        raise wrong("low_freq_factor", "below high_freq_factor", "")
    if min(given.get("short_factor") or [1]) <= 0:
        raise wrong("short_factor", "positive numbers", given["short_factor"])
    given["rope_type"] = kind
    if kind in ("longrope", "yarn"):
        given.setdefault("attention_factor", attention_factor(given))
    if kind == "longrope":
        # Longer sequences have other factors, from their first token on. Cached keys have one rotation.
        fields["max_position_embeddings"] = min(longest, given["original_max_position_embeddings"])
    elif kind == "yarn":
        reach = int(given["factor"] * given["original_max_position_embeddings"])
        fields["max_position_embeddings"] = max(longest, reach)
    return fields | {"rope_scaling": None if kind in ("default", "mrope", "dynamic") else given}


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Joins `rope_parameters` and `rope_scaling`. Whoever adds the latter to a file means its kind of rotation."""
    own, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if scaling:
        own = {name: value for name, value in own.items() if name not in ("rope_type", "type")}
    return {**own, **scaling}


def layer_kinds(config: Mapping[str, Any], recurrent: str, attention: str) -> tuple[str, ...]:
    """Reads each layer's kind, `recurrent` or `attention`, from `layer_types` or `full_attention_interval`.

    Raises:
        ValueError: `layer_types` has other names or another length than `num_hidden_layers`, or no layer is recurrent.
    """
    layers, every = config.get("num_hidden_layers", 0), config.get("full_attention_interval", 4)
    kinds = config.get("layer_types") or [recurrent if (n + 1) % every else attention for n in range(layers)]
    if len(kinds) != layers or not set(kinds) <= {recurrent, attention}:
        wanted = f"name num_hidden_layers = {layers} layers, each {recurrent!r} or {attention!r}"
        raise wrong("layer_types", wanted, kinds, must="must")
    if recurrent not in kinds:
        wanted = f"have a {recurrent!r} layer, because only those keep states"
        raise wrong("layer_types", wanted, kinds, must="must")
    return tuple(kinds)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The fields of config.json that every model has, under their published names. Architectures add their own."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    eos_token_id: int | tuple[int, ...] | None = None
    dtype: str = "bfloat16"
    model_type: str = ""

    # Other names under which configurations have some of the fields.
    other_names: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def __post_init__(self) -> None:
        """Checks every field and how they fit together. A ValueError names the field."""
        for field in fields(self):
            check_field(field.name, getattr(self, field.name), field.type, may_be_zero=field.default == 0)
        check_together(self)

    @classmethod
    def derive(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Checks an architecture's options, and returns fields that replace or complete those of config.json.

        `config` has the fields of config.json, with the model's dtype. `from_dict` calls it.

        Raises:
            ValueError: a field has a value that is not supported. The field is named.
        """
        return {}

    @classmethod
    def from_dict(cls, config: dict[str, Any], dtype: str | None = None) -> Self:
        """Makes a configuration from the fields of config.json, and perhaps another dtype. Unknown fields are ignored.

        Raises:
            ValueError: a field is missing or has a value that is not supported. The field is named.
        """
        given = config | {"dtype": dtype or config.get("dtype") or config.get("torch_dtype") or cls.dtype}
        require(given, dtype=("float32", "bfloat16", "float16"))
        check_given(given, cls)
        refuse_step_limits(given)
        require(given, add_cross_attention=(False,), is_encoder_decoder=(False,), use_sliding_window=(False,))
        if given.get("use_sliding_window") is None:  # If it is false, the window has a size and no use.
            require(given, sliding_window=())
        for theirs, ours in cls.other_names.items():
            if given.get(theirs) is not None:
                agree(given, **{ours: given[theirs]})
                given[ours] = given[theirs]
        given["eos_token_id"] = end_tokens(given)
        try:
            given |= cls.derive(given)
        except (ArithmeticError, AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"config.json: the fields of {cls.model_type!r} don't fit together: {error!r}") from error
        known = [field.name for field in fields(cls)]
        missing = [name for name in known if given.get(name) is None and not hasattr(cls, name)]
        if missing:
            raise ValueError(f"config.json must have {missing[0]!r}")
        given = {name: given[name] for name in known if given.get(name) is not None}
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as config.json holds them."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
