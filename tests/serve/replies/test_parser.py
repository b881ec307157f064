"""Replies are cut into their parts, which are the same however the text comes."""

import itertools
import json
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serve.replies.outputs import FUNCTIONS, OUTPUTS, Output

from mamba_align_jax.serve.replies.forms import REASONING_FORMS, TOOL_FORMS
from mamba_align_jax.serve.replies.parser import ReplyParser, begins_in_reasoning
from mamba_align_jax.serve.replies.parts import Call, Content, Reasoning, joined
from mamba_align_jax.serve.replies.unread import Tags, Unread


def parser_of(tools="", reasoning="", begun=False):
    return ReplyParser(REASONING_FORMS.get(reasoning), TOOL_FORMS.get(tools), FUNCTIONS, begins_in_reasoning=begun)


def parts_of(output, cuts=()):
    """The parts of a reply that comes in pieces."""
    parser = parser_of(output.tools, output.reasoning, output.begun)
    places = [0, *cuts, len(output.text)]
    parts = [part for start, end in itertools.pairwise(places) for part in parser.add(output.text[start:end])]
    return joined([*parts, *parser.end()])


@pytest.mark.parametrize("output", OUTPUTS, ids=[f"{each.tools}-{each.text[:40]!r}" for each in OUTPUTS])
def test_a_reply_has_the_parts_that_are_written_down_wherever_it_is_cut(output):
    assert parts_of(output) == output.parts
    size = len(output.text)
    for cut in range(1, size):
        assert parts_of(output, [cut]) == output.parts, cut
    assert parts_of(output, range(1, size)) == output.parts
    drawn = random.Random(output.text)
    for _ in range(8):
        cuts = sorted(drawn.sample(range(size + 1), min(2, size)))
        assert parts_of(output, cuts) == output.parts, cuts


def test_the_arguments_of_every_call_are_the_text_of_a_json_object():
    for output in OUTPUTS:
        for part in output.parts:
            assert not isinstance(part, Call) or isinstance(json.loads(part.arguments), dict)


def test_the_table_has_every_form():
    assert len(OUTPUTS) >= 100
    assert {output.tools for output in OUTPUTS} == {"", *TOOL_FORMS}
    assert {output.reasoning for output in OUTPUTS} == {"", *REASONING_FORMS}


# Pieces of which replies in each form are made, for replies that are nearly right.
PIECES = {
    "hermes": ["<tool_call>", "</tool_call>", '{"name": "now"', ', "arguments": ', "{}", "}", '"', "\\", "{", "["],
    "qwen3_xml": ["<tool_call>", "<function=now>", "<parameter=a>", "</parameter>", "</function>", "</tool_call>", "1"],
    "ling": ["<tool_call>now", "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>", "1"],
    "kimi": [
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>now:1", "{}", '"', "{"),
        *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ],
    "lfm2": ["<|tool_call_start|>", "<|tool_call_end|>", "[", "]", "now(", ")", "a=", "'", "1", ", "],
    "nemotron_json": ["<TOOLCALL>", "</TOOLCALL>", '{"name": "now"}', "[", "]", ", "],
}
PIECES["granite4"] = PIECES["hermes"]


@st.composite
def replies(draw):
    """A form and a reply of its pieces, some of them cut, with spaces and letters between."""
    form = draw(st.sampled_from(sorted(PIECES)))
    cut = st.builds(lambda piece, end: piece[:end], st.sampled_from(PIECES[form]), st.integers(1, 12))
    piece = st.sampled_from([*PIECES[form], " ", "\n", "a", "<think>", "</think>"]) | cut
    return form, draw(st.sampled_from(["", *REASONING_FORMS])), "".join(draw(st.lists(piece, max_size=12)))


@given(replies(), st.booleans(), st.lists(st.integers(0, 80), max_size=4))
@settings(deadline=None)
def test_any_reply_has_parts_that_are_the_same_wherever_it_is_cut(reply, begun, cuts):
    form, reasoning, text = reply

    def parts(pieces):
        parser = parser_of(form, reasoning, begun and bool(reasoning))
        found = [part for piece in pieces for part in parser.add(piece)]
        return joined([*found, *parser.end()])

    whole = parts([text])
    assert parts(text) == whole
    places = [0, *sorted(cuts), len(text)]
    assert parts(text[start:end] for start, end in itertools.pairwise(places)) == whole
    if not reasoning and not any(isinstance(part, Call) for part in whole):
        assert "".join(part.text for part in whole) == text


def test_what_is_settled_comes_at_once():
    parser = parser_of("hermes", "think", begun=True)
    assert parser.add("Why") == [Reasoning("Why")]
    assert parser.add("?\n</th") == [Reasoning("?")]
    assert parser.add("en\n</think>\nSo <") == [Reasoning("\n</then"), Content("So")]
    assert parser.add("b> a") == [Content(" <b> a")]
    assert parser.add("\n<tool_call>") == []
    assert parser.add('{"name": "now"}\n</tool_call') == []
    assert parser.add(">") == [Call("now", "{}")]
    assert parser.add("\n<tool_call>n") == [Content("<tool_call>n")]
    assert parser.end() == []


@pytest.mark.parametrize(
    ("output", "end"),
    [
        (Output("", "think", "<think>\nWhy?\n</think>\n\nSo.", []), len("<think>\nWhy?\n</think>")),
        (Output("", "think", "Why?</think>So.", [], begun=True), len("Why?</think>")),
        (Output("", "think", "Why?</th", [], begun=True), len("Why?</th")),
        (Output("", "think", " So.", []), 0),
        (Output("", "", "<think>Why?</think>So.", []), 0),
        (Output("kimi", "kimi", "<think>Why?<|tool_call_begin|>now", []), len("<think>Why?")),
    ],
)
def test_the_end_of_the_reasoning_is_known_once_it_has_come(output, end):
    for cut in range(len(output.text) + 1):
        parser = parser_of(output.tools, output.reasoning, output.begun)
        parser.add(output.text[:cut])
        assert parser.reasoning_end in (None, end)
        parser.add(output.text[cut:])
        parser.end()
        assert parser.reasoning_end == end


def test_an_ended_reply_has_nothing_more():
    parser = parser_of("hermes")
    assert parser.add("a <") == [Content("a")]
    assert parser.end() == [Content(" <")]
    assert parser.end() == []


@pytest.mark.parametrize(
    ("prompt", "begins"),
    [
        ("<assistant><think>", True),
        ("<assistant>\n<think>\n", True),
        ("<assistant><think>\n\n</think>\n\n", False),
        ("What does <think> mean?<assistant>", False),
        ("", False),
    ],
)
def test_a_prompt_that_ends_with_the_opening_tag_has_begun_the_reasoning(prompt, begins):
    assert begins_in_reasoning(prompt, REASONING_FORMS["think"]) == begins
    assert not begins_in_reasoning(prompt, None)


# Replies that make a parser look again and again at the same text, if it can.
HOSTILE = [
    ("hermes", "", "<tool_call>"),
    ("hermes", "", '<tool_call>{"'),
    ("hermes", '<tool_call>{"name": "', "a"),
    ("hermes", "<tool_call>", '{"a":'),
    ("hermes", "a", " "),
    ("qwen3_xml", "<tool_call><function=look><parameter=place>", "</parameter></function>"),
    ("qwen3_xml", "<tool_call><function=look>", "<parameter=days>1</parameter>"),
    ("ling", "<tool_call>look<arg_key>place</arg_key><arg_value>", "</arg_value>"),
    ("kimi", "", "<|tool_call_begin|>f:0<|tool_call_argument_begin|>{"),
    ("lfm2", "<|tool_call_start|>[f(a='", "', b "),
    ("lfm2", "<|tool_call_start|>[f(a='", " <|tool_call_end|>"),
    ("nemotron_json", "<TOOLCALL>[", '{"name":"f"},'),
]


@pytest.mark.parametrize(("form", "beginning", "repeated"), HOSTILE)
def test_the_work_grows_with_the_length_of_a_hostile_reply_alone(form, beginning, repeated):
    """Eight times the text takes about eight times as long. If each character were looked at again, it would be 64 times."""

    def seconds(size):
        parser, text = parser_of(form), (beginning + repeated * (size // len(repeated)))[:size]
        start = time.process_time()
        for at in range(0, size, 4):
            parser.add(text[at : at + 4])
        parser.end()
        return time.process_time() - start

    short = min(seconds(5_000) for _ in range(3))
    assert min(seconds(40_000) for _ in range(2)) < 24 * short


def test_text_that_is_read_is_not_kept():
    unread, tags, sizes = Unread(), Tags("<tool_call>"), []
    for _ in range(100):
        unread.add("some text <to")
        sizes.append(len(unread.text))
        assert unread.take_until(tags)[1] == ""
    assert max(sizes) <= len("<tosome text <to")


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", f'<tool_call>{{"name": "now", "arguments": {{"a": {DEEP}}}}}</tool_call>'),
        ("kimi", f'<|tool_call_begin|>now:0<|tool_call_argument_begin|>{{"a": {DEEP}}}<|tool_call_end|>'),
        ("lfm2", f"<|tool_call_start|>[now(a={DEEP})]<|tool_call_end|>"),
        ("nemotron_json", f"<TOOLCALL>{DEEP}</TOOLCALL>"),
    ],
)
def test_values_that_are_nested_too_deeply_are_no_calls(form, text):
    parser = parser_of(form)
    assert joined([*parser.add(text), *parser.end()]) == [Content(text)]


def test_a_deeply_nested_value_between_tags_is_text():
    parts = parser_of("qwen3_xml").add(f"<function=look><parameter=days>{DEEP}</parameter></function>")
    assert parts == [Call("look", json.dumps({"days": DEEP}))]
