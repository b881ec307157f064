"""config.json: the fields that every model has, and one way to read an architecture's own."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self


def require(config: Mapping[str, Any], **supported: tuple[Any, ...]) -> None:
    """Checks that options are left out (or null), or have one of their supported values.

    Raises:
        ValueError: names the option that asks for something else.
    """
    for name, values in supported.items():
        got = config.get(name)
        if got is not None and got not in values:
            raise ValueError(f"config.json: {name} must be one of {values}, got {got!r}")


def rotation(config: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """Fields of the rotation by position: of `rope_parameters`, or beside it as in older files, or as they are given here.

    Raises:
        ValueError: wavelengths are scaled.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    # "mrope" turns text as the default does.
    require(rope, rope_type=("default",), type=("default", "mrope"))
    return {name: rope.get(name, config.get(name, default)) for name, default in defaults.items()}


def layer_kinds(config: Mapping[str, Any], recurrent: str, attention: str) -> tuple[str, ...]:
    """The kind of each layer: as `layer_types` says, or `attention` at every `full_attention_interval`-th.

    Raises:
        ValueError: it names other kinds or another number of layers, or none with a state to keep.
    """
    layers, every = config.get("num_hidden_layers", 0), config.get("full_attention_interval", 4)
    kinds = config.get("layer_types") or [recurrent if (n + 1) % every else attention for n in range(layers)]
    if len(kinds) != layers or not set(kinds) <= {recurrent, attention}:
        raise ValueError(
            f"config.json: layer_types must name {layers} layers, each {recurrent!r} or {attention!r}, got {kinds}"
        )
    if recurrent not in kinds:
        raise ValueError(
            f"config.json: layer_types must have a {recurrent!r} layer: there is no state to keep otherwise"
        )
    return tuple(kinds)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The fields of config.json that every model has, by their published names. An architecture adds its own."""

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
        """An architecture's fields that config.json doesn't hold as they are, and its checks. `from_dict` calls it.

        Raises:
            ValueError: names the field that asks for what is not supported.
        """
        del config
        return {}

    @classmethod
    def from_dict(cls, config: dict[str, Any], dtype: str | None = None) -> Self:
        """Reads config.json's fields; `dtype` replaces the checkpoint's.

        Raises:
            ValueError: names the field that is missing or asks for what is not supported.
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
        """As config.json."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
