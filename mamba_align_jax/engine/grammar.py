"""The description of a grammar, which a request's text must match."""

from dataclasses import dataclass

from mamba_align_jax import _values as values

GRAMMAR_KINDS = ("json_schema", "json_object", "regex", "lark")


@dataclass(frozen=True)
class Grammar:
    """What a request's generated text must match, from its first character to its last.

    Attributes:
        kind: "json_schema", "json_object" (any JSON object), "regex", or "lark" (llguidance's dialect of Lark). JSON is on
            one line, with at most one space between its parts.
        text: The schema, the expression, or the rules; empty for "json_object".
    """

    kind: str
    text: str = ""

    def __post_init__(self) -> None:
        values.choice("kind", self.kind, GRAMMAR_KINDS)
        values.text("text", self.text)
        has_text = self.kind != "json_object"
        values.require(bool(self.text) == has_text, "text", "not empty" if has_text else "empty", self.text)
