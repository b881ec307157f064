"""The forms in which families of models write tool calls and reasoning, by their names."""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

from mamba_align_jax.serve.replies.json_calls import read_hermes
from mamba_align_jax.serve.replies.parts import Call
from mamba_align_jax.serve.replies.unread import Unread

Functions = Mapping[str, Mapping]


@dataclass(frozen=True)
class ToolForm:
    """A form of tool calls.

    Attributes:
        name: Its name.
        openings: The tags with which calls begin.
        read: Reads the calls behind an opening tag: a generator that takes the unread text, the tag, and the schemas of the
            functions' parameters by the functions' names. It yields None where it needs more text, and each call; it raises
            NotACall where the text is not a call.
        needs_special_tokens: The tags are special tokens in some of the form's tokenizers, so the text must be decoded with
            special tokens.
    """

    name: str
    openings: tuple[str, ...]
    read: Callable[[Unread, str, Functions], Generator[Call | None, None, None]]
    needs_special_tokens: bool = True


@dataclass(frozen=True)
class ReasoningForm:
    """A form of reasoning: its tags.

    Attributes:
        name: Its name.
        opening, closing: The tags around it.
        trims: Line breaks at both ends of the reasoning and before the answer belong to the tags.
        ends_at_calls: A tool call ends the reasoning also without the closing tag.
        needs_special_tokens: The tags are special tokens in some of the form's tokenizers, so the text must be decoded with
            special tokens.
    """

    name: str
    opening: str
    closing: str
    trims: bool = True
    ends_at_calls: bool = False
    needs_special_tokens: bool = True


TOOL_FORMS: Mapping[str, ToolForm] = {form.name: form for form in (ToolForm("hermes", ("<tool_call>",), read_hermes),)}
REASONING_FORMS: Mapping[str, ReasoningForm] = {
    form.name: form for form in (ReasoningForm("think", "<think>", "</think>"),)
}


def tool_form_of(template: str) -> str | None:
    """Choose the form of tool calls from the source of a chat template: its name, or None if it has none that is known."""
    return "hermes" if "<tool_call>" in template else None


def reasoning_form_of(template: str) -> str | None:
    """Choose the form of reasoning from the source of a chat template: its name, or None if it has none that is known."""
    return "think" if "<think>" in template else None
