"""Writes rules in llguidance's dialect of Lark, in which `%json` is a schema and `<tag>` a special token."""

import json
import re
from collections.abc import Collection, Mapping

from mamba_align_jax.engine.grammar import Grammar

# As in the engine's other grammars: any amount of whitespace would let a model write spaces for ever.
_JSON_OPTIONS = {"whitespace_pattern": " ?"}
# Any text, for `Rules.until` and for answers.
TEXT = "TEXT"


class Rules:
    """The rules of a grammar, as they are written."""

    def __init__(self, special_tokens: Collection[str]) -> None:
        """Begin a grammar.

        Args:
            special_tokens: Tags that are single tokens; others are written out.
        """
        self._special_tokens = frozenset(special_tokens)
        self._rules = [f"{TEXT}: /(?s:.*)/"]

    def add(self, body: str, options: str = "") -> str:
        """Add a rule. Returns its name."""
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def sequence(self, *items: str) -> str:
        """Return what stands for texts and tags in turn. Empty texts are left out."""
        return " ".join(item if item in self._special_tokens else literal(item) for item in items if item)

    def until(self, tag: str, text: str = TEXT) -> str:
        """Return what stands for text that ends with a tag, and has the tag nowhere else."""
        if tag in self._special_tokens:
            return f"{text} {tag}"
        return self.add(f"{text} {literal(tag)}", "[lazy]")

    def text_without(self, tag: str) -> str:
        """Return what stands for any text that doesn't begin with a tag."""
        others = "|".join(f"{re.escape(tag[:size])}([^{re.escape(tag[size])}].*)?" for size in range(len(tag)))
        self._rules.append(f"OTHER_{TEXT}: {_expression(f'(?s:{others})')}")
        return f"OTHER_{TEXT}"

    def grammar(self, start: str) -> Grammar:
        """Return the grammar that begins with `start`."""
        return Grammar("lark", "\n".join([f"start: {start}", *self._rules, ""]))


def literal(text: str) -> str:
    """Return what stands for a text."""
    return json.dumps(text, ensure_ascii=False)


def _expression(expression: str) -> str:
    """Return what stands for a regular expression."""
    slash = r"\/"
    return f"/{expression.replace('/', slash)}/"


def json_of(schema: object) -> str:
    """Return what stands for JSON of a schema. Anything that is no schema object allows any JSON."""
    held = schema if isinstance(schema, Mapping) else {}
    return f"%json {json.dumps({**held, 'x-guidance': _JSON_OPTIONS})}"


def nested(grammar: Grammar) -> str:
    """Return what stands for a grammar within another one."""
    if grammar.kind == "lark":
        return f"%lark {{\n{grammar.text}\n}}"
    if grammar.kind == "regex":
        return f"%lark {{\nstart: {_expression(grammar.text)}\n}}"
    return json_of(json.loads(grammar.text) if grammar.text else {"type": "object"})
