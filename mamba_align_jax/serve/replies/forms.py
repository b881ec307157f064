"""The forms in which families of models write tool calls and reasoning, by their names."""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

from mamba_align_jax.serve.replies.json_calls import KIMI_CALL, KIMI_CALLS, read_hermes, read_kimi, read_nemotron
from mamba_align_jax.serve.replies.parts import Call
from mamba_align_jax.serve.replies.python_calls import read_lfm2
from mamba_align_jax.serve.replies.schemas import Schemas
from mamba_align_jax.serve.replies.unread import Unread
from mamba_align_jax.serve.replies.xml_calls import QWEN_CALL, QWEN_FUNCTION, read_ling, read_qwen


@dataclass(frozen=True)
class ToolForm:
    """A form of tool calls.

    Attributes:
        name: Its name.
        openings: The tags with which calls begin.
        read: Reads the calls behind an opening tag: a generator that takes the unread text, the tag, and the schemas
            of the functions' parameters. It yields None where it needs more text, and each call; it raises
            NotACall where the text is not a call.
        needs_special_tokens: The tags are special tokens in some of the form's tokenizers, so the text must be decoded with
            special tokens.
    """

    name: str
    openings: tuple[str, ...]
    read: Callable[[Unread, str, Schemas], Generator[Call | None, None, None]]
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


TOOL_FORMS: Mapping[str, ToolForm] = {
    form.name: form
    for form in (
        ToolForm("hermes", ("<tool_call>",), read_hermes),
        ToolForm("granite4", ("<tool_call>",), read_hermes),
        ToolForm("qwen3_xml", (QWEN_CALL, QWEN_FUNCTION), read_qwen, needs_special_tokens=False),
        ToolForm("ling", ("<tool_call>",), read_ling),
        ToolForm("kimi", (KIMI_CALLS, KIMI_CALL), read_kimi),
        ToolForm("lfm2", ("<|tool_call_start|>",), read_lfm2),
        ToolForm("nemotron_json", ("<TOOLCALL>",), read_nemotron, needs_special_tokens=False),
    )
}
REASONING_FORMS: Mapping[str, ReasoningForm] = {
    form.name: form
    for form in (
        ReasoningForm("think", "<think>", "</think>"),
        ReasoningForm("kimi", "<think>", "</think>", trims=False, ends_at_calls=True),
    )
}
# What a template has only if its family writes the form. The first that is found counts.
_SIGNS_OF_TOOL_FORMS = {
    "<|tool_calls_section_begin|>": "kimi",
    "<|tool_call_start|>": "lfm2",
    "List of tools: [": "lfm2",  # a template that takes calls within the content
    "<|tool_list_start|>": "lfm2",
    "<TOOLCALL>": "nemotron_json",
    "<arg_key>": "ling",
    "<function=": "qwen3_xml",
    "<|start_of_role|>": "granite4",
    "<tool_call>": "hermes",
}


def tool_form_of(template: str) -> str | None:
    """Choose the form of tool calls from the source of a chat template: its name, or None if it has none that is known."""
    return next((name for sign, name in _SIGNS_OF_TOOL_FORMS.items() if sign in template), None)


def reasoning_form_of(template: str) -> str | None:
    """Choose the form of reasoning from the source of a chat template: its name, or None if it has none that is known."""
    if "<think>" not in template and "</think>" not in template:
        return None
    return "kimi" if tool_form_of(template) == "kimi" else "think"
