"""What a template writes for calls is read back, and the form is known from the template."""

import json
import re

import depth
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serve.replies.templates import TEMPLATES, rendered

from mamba_align_jax.serve.replies.forms import REASONING_FORMS, TOOL_FORMS, reasoning_form_of, tool_form_of
from mamba_align_jax.serve.replies.parser import ReplyParser
from mamba_align_jax.serve.replies.parts import Call, Content, Reasoning, joined

TAGS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<function=f>",
        "</function>",
        "<parameter=a>",
        "</parameter>",
        "<think>",
        "</think>",
    ),
    *("<arg_key>a</arg_key>", "<arg_value>", "</arg_value>", "<TOOLCALL>[", "]</TOOLCALL>", "]<|tool_call_end|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_start|>[", "f(a='", "', b=", "')]", '"}}', "\\", "\n", " ", "null"),
]
TEXTS = st.lists(st.sampled_from(TAGS) | st.text(max_size=3), max_size=6).map("".join)
NAMES = st.text("abZ_", min_size=1, max_size=3).flatmap(lambda name: st.sampled_from([name, f"{name}-9"]))
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
# Each type of parameter, with its values. One that may be a string and null can't be "null", "None" or the like.
TYPES = [
    ({"type": "string"}, TEXTS),
    ({"type": "string", "enum": ["1", "None"]}, st.sampled_from(["1", "None"])),
    ({"type": "integer"}, st.integers()),
    ({"type": "number"}, NUMBERS),
    ({"type": "boolean"}, st.booleans()),
    ({"type": ["boolean", "null"]}, st.booleans() | st.none()),
    (
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        st.none() | TEXTS.filter(lambda text: text.strip() not in ("null", "None")),
    ),
    ({"type": "array"}, st.lists(VALUES, max_size=3)),
    ({"$ref": "#/$defs/Inner"}, st.dictionaries(TEXTS, VALUES, max_size=3)),
    (
        {"oneOf": [{"type": "object"}, {"type": "array"}]},
        st.lists(VALUES, max_size=2) | st.dictionaries(NAMES, VALUES, max_size=2),
    ),
]
# What a value can't contain in a form: the end of a value with what may follow it.
INEXPRESSIBLE = {
    "qwen3_xml": re.compile(r"</parameter>[ \t\r\n]*(<parameter=|</function>[ \t\r\n]*</tool_call>)"),
    "ling": re.compile(r"</arg_value>[ \t\r\n]*(<arg_key>|</tool_call>)"),
    # A string's backslashes are escapes, too.
    "lfm2": re.compile(r"'\s*(,\s*[^\W\d][\w.-]*\s*=|\)\s*(,\s*[^\W\d][\w.-]*\s*\(|\]\s*\Z))|\]\s*<\|tool_call_end\|>"),
}


@st.composite
def functions(draw):
    """The schemas of a few functions, by their names, and calls of them."""
    schemas, calls = {}, []
    for name in draw(st.lists(NAMES, min_size=1, max_size=2, unique=True)):
        parameters = draw(st.dictionaries(NAMES, st.sampled_from(TYPES), max_size=4))
        properties = {key: schema for key, (schema, _) in parameters.items()}
        schemas[name] = {"type": "object", "properties": properties, "$defs": {"Inner": {"type": "object"}}}
        calls.append((name, {key: draw(values) for key, (_, values) in parameters.items()}))
    return schemas, calls


def can_be_written(form, value):
    """Whether a form can express an argument."""
    if form == "lfm2" and isinstance(value, str) and "\\" in value:
        return False
    written = [value] if isinstance(value, str) else [json.dumps(value, ensure_ascii=False), str(value)]
    return form not in INEXPRESSIBLE or not any(map(INEXPRESSIBLE[form].search, written))


@pytest.mark.parametrize("form", TOOL_FORMS)
def test_what_a_template_writes_for_calls_is_read_back(form):
    @given(functions(), st.sampled_from(["", "So."]), st.integers(0, 400))
    @settings(max_examples=depth.examples(20, 600), deadline=None)
    def check(made, content, cut):
        schemas, calls = made
        calls = [
            (name, {key: value for key, value in arguments.items() if can_be_written(form, value)})
            for name, arguments in calls
        ]
        text = rendered(form, calls, reasoning="Why?", content=content)
        has_reasoning = "</think>" in TEMPLATES[form]
        reasoning = REASONING_FORMS[reasoning_form_of(TEMPLATES[form])] if has_reasoning else None
        begun = form == "nemotron_json"
        parser = ReplyParser(reasoning, TOOL_FORMS[form], schemas, begins_in_reasoning=begun)
        parts = joined([*parser.add(text[:cut]), *parser.add(text[cut:]), *parser.end()])
        expected = [Reasoning("Why?")] * has_reasoning + [Content(content)] * bool(content)
        assert parts[: len(expected)] == expected
        found = parts[len(expected) :]
        assert all(isinstance(part, Call) for part in found)
        assert [(part.name, json.loads(part.arguments)) for part in found] == calls

    check()


@pytest.mark.parametrize("form", TEMPLATES)
def test_the_form_of_calls_is_known_from_the_template(form):
    assert TOOL_FORMS[tool_form_of(TEMPLATES[form])].read is TOOL_FORMS[form].read


@pytest.mark.parametrize(
    ("template", "form"),
    [
        # Templates that leave calls within the content name the tools alone.
        ("List of tools: [{{ tools }}]{{ content }}", "lfm2"),
        ("<|tool_list_start|>{{ tools }}<|tool_list_end|>{{ content }}", "lfm2"),
        ("{{ messages }}", None),
        ("<|open|>call{{ name }}<|sep|>", None),
    ],
)
def test_a_template_without_calls_may_show_the_form(template, form):
    assert tool_form_of(template) == form


def test_the_form_of_reasoning_is_known_from_the_template():
    found = {form: reasoning_form_of(template) for form, template in TEMPLATES.items()}
    assert found == {
        **{"hermes": None, "granite4": None, "qwen3_xml": "think", "ling": "think"},
        **{"kimi": "kimi", "lfm2": "think", "nemotron_json": "think"},
    }
