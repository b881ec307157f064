"""What the schemas of functions say about arguments that a model wrote as plain text."""

from collections.abc import Iterator, Mapping

from mamba_align_jax.serve.replies.json_text import decoded, encoded

# Jinja writes these values like Python does, so that is how models have learnt to write them.
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}

_KINDS = {
    **{"NoneType": "null", "bool": "boolean", "int": "number", "float": "number"},
    **{"str": "string", "list": "array", "dict": "object"},
}


class Schemas:
    """The schemas of functions' parameters."""

    def __init__(self, functions: Mapping[str, object]) -> None:
        """Take the JSON schemas of the functions' parameters (objects), by the functions' names."""
        self._functions = functions
        self._types: dict[tuple[str, str], frozenset[str]] = {}

    def argument(self, function: str, parameter: str, text: str) -> str:
        """Return the JSON of an argument that was written as plain text.

        - A parameter that can only be a string is that text.
        - A parameter that can be a string and others is JSON if the text is JSON of one of the other types, else the text.
        - Any other parameter, also one that the function doesn't have, is JSON if the text is JSON, else the text.

        `True`, `False` and `None` are JSON here, as Jinja writes them.
        """
        types = self._types_of(function, parameter)
        if types == {"string"}:
            return encoded(text)
        written = text.strip()
        written = _PYTHON_NAMES.get(written, written)
        try:
            kind = _kind(decoded(written))
        except (ValueError, RecursionError):
            return encoded(text)
        return encoded(text) if "string" in types and kind not in types - {"string"} else written

    def _types_of(self, function: str, parameter: str) -> frozenset[str]:
        """Return the types that a parameter may have; empty if the schema doesn't say."""
        key = function, parameter
        if key not in self._types:
            root = self._functions.get(function)
            properties = root.get("properties") if isinstance(root, Mapping) else None
            schema = properties.get(parameter) if isinstance(properties, Mapping) else None
            self._types[key] = frozenset(types_in(schema, root))
        return self._types[key]


def _kind(value: object) -> str:
    """Return JSON schema's name of a decoded value's type. Integers are numbers."""
    return _KINDS[type(value).__name__]


def types_in(parameter: object, root: object) -> Iterator[str]:
    """Return the types that a schema names, also in alternatives, references within `root`, and by allowed values."""
    pending, seen = [parameter], set()
    while pending:
        schema = pending.pop()
        if not isinstance(schema, Mapping):
            continue
        named = schema.get("type")
        for name in named if isinstance(named, list) else [named]:
            if isinstance(name, str):
                yield "number" if name == "integer" else name
        yield from map(_kind, listed_values(schema))
        for keyword in ("anyOf", "oneOf", "allOf"):
            pending += _listed(schema, keyword)
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            pending.append(_resolved(reference, root))


def listed_values(schema: object) -> list:
    """Return the values that a schema lists; none if it lists none."""
    if not isinstance(schema, Mapping):
        return []
    return [schema["const"]] if "const" in schema else _listed(schema, "enum")


def _listed(schema: Mapping, keyword: str) -> list:
    found = schema.get(keyword)
    return found if isinstance(found, list) else []


def _resolved(reference: str, root: object) -> object:
    """Return what a reference such as "#/$defs/Place" points to in `root`, or None."""
    found = root
    for name in reference.removeprefix("#/").split("/"):
        name = name.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
