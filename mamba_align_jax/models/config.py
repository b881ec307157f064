"""Reads config.json: the fields that every model has, and checks that the architectures share."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self


def require(config: Mapping[str, Any], **supported: tuple[Any, ...]) -> None:
    """Checks that each option has one of its supported values, is null, or is left out.

    Args:
        config: The fields of config.json.
        **supported: The supported values of each option.

    Raises:
        ValueError: an option has another value. The option is named.
    """
    for name, values in supported.items():
        got = config.get(name)
        if got is not None and got not in values:
            raise ValueError(f"config.json: {name} must be one of {values}, got {got!r}")


def rotation(config: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """Reads the fields of the rotation by position.

    A field is taken from `rope_parameters`. Older files have it at the top level. If it is in neither place, it has its
    default.

    Args:
        config: The fields of config.json.
        **defaults: The default of each field.

    Raises:
        ValueError: the configuration scales the wavelengths, which is not supported.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    # For text, "mrope" is the same as the default.
    require(rope, rope_type=("default",), type=("default", "mrope"))
    return {name: rope.get(name, config.get(name, default)) for name, default in defaults.items()}


def layer_kinds(config: Mapping[str, Any], recurrent: str, attention: str) -> tuple[str, ...]:
    """Reads the kind of each layer from `layer_types`, or else from `full_attention_interval`.

    Args:
        config: The fields of config.json.
        recurrent: The name of recurrent layers.
        attention: The name of attention layers.

    Raises:
        ValueError: `layer_types` has other names or another length than `num_hidden_layers`, or no layer is recurrent.
    """
    layers, every = config.get("num_hidden_layers", 0), config.get("full_attention_interval", 4)
    kinds = config.get("layer_types") or [recurrent if (n + 1) % every else attention for n in range(layers)]
    if len(kinds) != layers or not set(kinds) <= {recurrent, attention}:
        raise ValueError(
            f"config.json: layer_types must name {layers} layers, each {recurrent!r} or {attention!r}, got {kinds}"
        )
    if recurrent not in kinds:
        raise ValueError(
            f"config.json: layer_types must have a {recurrent!r} layer, because only those keep states, got {kinds}"
        )
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
    eos_token_id: int | None = None
    dtype: str = "bfloat16"
    model_type: str = ""

    @classmethod
    def derive(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Checks an architecture's options and computes fields that config.json lacks. `from_dict` calls it.

        Args:
            config: The fields of config.json, with the model's dtype.

        Returns:
            Fields that replace or complete those of config.json.

        Raises:
            ValueError: a field has a value that is not supported. The field is named.
        """
        del config
        return {}

    @classmethod
    def from_dict(cls, config: dict[str, Any], dtype: str | None = None) -> Self:
        """Makes a configuration from the fields of config.json.

        Args:
            config: The fields. Unknown ones are ignored.
            dtype: Dtype of the model; None keeps the one in `config`.

        Raises:
            ValueError: a field is missing or has a value that is not supported. The field is named.
        """
        fields = config | {"dtype": dtype or config.get("dtype") or config.get("torch_dtype") or cls.dtype}
        require(fields, dtype=("float32", "bfloat16", "float16"))
        if isinstance(fields.get("eos_token_id"), list):
            fields["eos_token_id"] = fields["eos_token_id"][0]
        fields |= cls.derive(fields)
        known = cls.__dataclass_fields__
        given = {name: fields[name] for name in known if fields.get(name) is not None}
        missing = [name for name in known if name not in given and not hasattr(cls, name)]
        if missing:
            raise ValueError(f"config.json must have {missing[0]!r}")
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as config.json holds them."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
